"""What executes a task: `base` says what a runtime is, `registry` which ones there are.

| module | runtime |
|---|---|
| `process` | a user's Python function, in a child process |
| `function` | `lambda`: a handler with Lambda's signature, in a child process or at AWS |

Third parties add runtimes by the entry point group `penstock.runtimes`.
"""
