"""What executes a task: `base` says what a runtime is, `registry` which ones there are.

| module | runtime |
|---|---|
| `process` | a user's Python function, in a child process |
| `function` | `lambda`: a handler with Lambda's signature, in a child or at AWS (`deployed`) |
| `spark` | jobs on Apache Spark, in a host process beside the worker |

The first two run children: `children` keeps them warm, `offspring` is one of them as its runtime
sees it, `guard` ends what a killed runtime leaves behind, and `frames` is what is said over the
socket. In the child, `child` hears the runtime, `calling` calls the user's code, and `task` is what
that code is given. The package `spark` has its own map.

Third parties add runtimes by the entry point group `penstock.runtimes`, and named functions for
`process` by `penstock.operators`.
"""

from __future__ import annotations

from typing import Final

DEFAULT_QUEUE: Final = "default"
"""Where tasks wait of which nothing else is said."""
