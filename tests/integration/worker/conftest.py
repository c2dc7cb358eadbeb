"""A database for each test of the worker, on the database's own time."""

from __future__ import annotations

import asyncio
import itertools

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from penstock.dispatcher.database.local_server import LocalPostgres
from penstock.dispatcher.database.migrations import migrate

_numbers = itertools.count(1)


@pytest.fixture
def dsn(postgres: LocalPostgres) -> str:
    """An empty database with the schema."""
    name = f"worker_{next(_numbers)}"

    async def make() -> str:
        server = make_conninfo(postgres.dsn, dbname="postgres")
        async with await psycopg.AsyncConnection.connect(server, autocommit=True) as connection:
            await connection.execute(f"CREATE DATABASE {name}".encode())
        made = make_conninfo(postgres.dsn, dbname=name)
        await migrate(made)
        return made

    return asyncio.run(make())
