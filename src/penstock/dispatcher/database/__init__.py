"""The dispatcher's way to Postgres: a server of its own, connections, migrations, named queries."""
