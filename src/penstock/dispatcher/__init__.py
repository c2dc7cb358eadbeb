"""The control plane: events in, fenced tasks out, with all of its state in Postgres.

Being built. Here today: `dag`, what a pipeline's YAML says, as pure code; `database`, a Postgres of
our own or any other, its connections and its migrations; `sql`, the schema and every query;
`deployment`, how a DAG becomes the one that runs, and generations; `routing`, how events become
tasks; and `tasks`, the life of a task from queued to settled, fenced by attempt and lease token.
To come: the relay, backpressure, the reaper as a service, sources, backfills, the API.
"""
