"""The control plane: events in, fenced tasks out, with all of its state in Postgres.

Stateless: any number of dispatchers run every part at once, and killing any of them at any point
loses nothing and doubles nothing. What may happen once is decided in the database. The table of
packages is in docs/architecture.md; docs/pipeline.md is for users.
"""
