"""Jobs on Apache Spark: the runtime `spark`, its host process, and the engine in it.

| where | modules |
|---|---|
| in the worker, without PySpark | `runtime`, `bundles`, `pools`, `hosts`, `hosting`, `places` |
| what it is told | `settings`, `profiles` |
| between them | `frames` |
| in the host | `host`, `slots`, `runs`, `ticking`, `printing`, `metrics` |
| what it has of Spark | `sessions`: `classic` or `connect`; `conf`, `java` |
| for quicker starts | `archive`, `archiving` |
| what runs there | `engine`, by `telling`; its operators, how it reads, checks and writes |

The only package that imports PySpark. A dispatcher judges jobs by `runtime` and `configs`, which
do not.
"""
