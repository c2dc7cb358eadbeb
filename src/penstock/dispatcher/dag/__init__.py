"""DAGs: what a pipeline's YAML says, checked as a whole, compared and hashed. No database, no I/O.

| module | owns |
|---|---|
| `parser` | `parse`: a text to a `Dag` or a `DagError`; the fields of jobs and sources |
| `edges` | the fields of inputs and outputs: datasets, and who reads them |
| `model` | `Dag`, `Job`, every default, names, `Graph`, the protocol of runtimes |
| `checks` | the rules between fields and jobs |
| `yaml_reader` | YAML within bounds; reading fields, and noting problems with their lines |
| `filters`, `secrets` | small languages inside of fields; durations: `kernel.units` |
| `files` | queries in files beside the DAG; users' functions that a DAG names |
| `canonical` | the stored form, its hashes, what an edit rebuilds, and how a DAG is shown |

docs/dag.md is the reference of the YAML.
"""

from __future__ import annotations
