"""The control plane: events in, fenced tasks out, with all of its state in Postgres.

Being built. Here today: `dag`, what a pipeline's YAML says, as pure code; `database`, a Postgres of
our own or any other, its connections and its migrations; `sql`, the schema and every query; and
`tasks`, the life of a task from queued to settled, fenced by attempt and lease token. To come:
events and routing, the relay, backpressure, the API.
"""
