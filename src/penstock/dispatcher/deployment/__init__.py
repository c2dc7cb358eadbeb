"""Which DAG is in force: `moves` has the operations, `intents` reads what a change comes to, `plan`
decides, `writing` writes a version."""
