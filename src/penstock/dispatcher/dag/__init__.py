"""DAGs: what a pipeline's YAML says, checked as a whole, compared and hashed. No database, no I/O.

| module | owns |
|---|---|
| `parsing` | the way in: `parse`, a text to a `Dag`, or to a `DagError` with all that is wrong |
| `model` | what comes out: `Dag`, `Job`, inputs, outputs, sources, and every default |
| `nodes`, `sections` | YAML within bounds; reading fields, and noting problems with their lines |
| `jobs`, `edges`, `sources` | which fields there are, and how each becomes a value |
| `names`, `units`, `filters`, `cron` | the small languages inside of fields |
| `files` | queries that stand in files beside the DAG |
| `checks`, `runtimes` | the rules between fields and jobs, and what a registry of runtimes tells |
| `graph` | `Graph`: order, upstream and downstream, cycles |
| `canonical`, `diffing` | the form that is stored, its hashes, and what an edit rebuilds |
| `show` | a DAG as a tree, and as YAML |

docs/dag.md is the reference of the YAML.
"""
