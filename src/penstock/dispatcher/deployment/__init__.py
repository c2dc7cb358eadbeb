"""Which DAG is in force: `moves` has the operations, `plan` decides, `writing` writes a version."""
