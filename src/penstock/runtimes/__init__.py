"""What executes a task: `base` says what a runtime is, `registry` which ones there are.

| module | runtime |
|---|---|
| `process` | a user's Python function, in a warm child process |
| `thread` | users' functions side by side in one child process, `thread_host` |
| `function` | `lambda`: a handler with Lambda's signature, in a child or at AWS (`deployed`) |
| `spark` | jobs on Apache Spark, in a host process beside the worker |

| module | owns |
|---|---|
| `process` | also the pool of warm children, their settings and environment |
| `child_process` | one child: started, or forked by a `fork_server` that has imported the code |
| `frames` | the protocol between a runtime and its child |
| `child` | the child's side: takes tasks over the socket |
| `user_code` | finds, loads, calls and interrupts users' functions |
| `task` | what a user's function is given |
| `secrets` | token, credentials and secrets of an attempt, and their redaction |
| `output_collector` | uploads what functions made, and writes its manifest |
| `log_router` | what tasks print, in processes that run many of them |
| `resource_limits` | `memory` and `cpu` of a job; control groups |
| `guard` | kills what a killed runtime has left behind |
| `uid_pool`, `privileges` | users for untrusted work, and how a process becomes one |

The package `spark` has its own map. Third parties add runtimes by the entry point group
`penstock.runtimes`, and named functions for `process` by `penstock.operators`.
"""

from __future__ import annotations

from typing import Final

DEFAULT_QUEUE: Final = "default"
"""Where tasks wait of which nothing else is said."""
LOCAL_SPARK: Final = "local[*]"
"""Where Spark runs of which nothing else is said."""
