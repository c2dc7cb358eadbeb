"""Jobs on Apache Spark: the runtime `spark`, its host process, and the engine in it.

| where | modules |
|---|---|
| in the worker, without PySpark | `runtime`, `host_process` |
| what a job and a runtime may say | `job_config`, `settings` |
| between worker, host and engine | `frames`, `engine_protocol` |
| in the host | `host`, `run_executor` |
| sessions of Spark | `classic` or `connect`; `java`, `isolation`, `internals`, `class_archiver` |
| what a run does | `engine`: `input_reader`, `operators`, `expectations`, `output_writer` |
| | `merger` for upserts, `rewriter` for maintenance, `partition_keys`, `result_size`, `columns` |
| how Spark reaches data | `access` |
| why a task failed | `errors` |

The only package that imports PySpark. A dispatcher judges jobs by `runtime` and `job_config`,
which do not.
"""

from __future__ import annotations
