"""The control plane: events in, fenced tasks out, with all of its state in Postgres.

Being built. Here today: `dag`, what a pipeline's YAML says, as pure code without a database.
"""
