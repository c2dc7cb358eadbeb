"""A database that is empty for every test, with jobs in it, and a clock that the test moves.

A `World` is a database that was migrated once and is emptied for each test. Its time stands still
until the test moves it: every transaction is given the offset from the database's clock. Rows that
other parts of the dispatcher will write (jobs, datasets, limits) are written here with plain SQL.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from psycopg.rows import dict_row

from penstock.dispatcher.database.local_server import LocalPostgres
from penstock.dispatcher.database.migrations import migrate
from penstock.dispatcher.database.pool import Answer, Connection, Database
from penstock.dispatcher.tasks.completion import Route, no_route
from penstock.dispatcher.tasks.lifecycle import Tasks
from penstock.dispatcher.tasks.model import (
    ClaimedTask,
    Completion,
    Failure,
    Fence,
    NewTask,
    TaskOutput,
)

DATABASE = "worlds"
EMPTYING = """
    DO $$
    DECLARE
        every text[] := ARRAY(
            SELECT quote_ident(tablename) FROM pg_tables
            WHERE schemaname = 'public' AND tablename NOT IN ('migration', 'reaper'));
        name text;
        is_used boolean;
    BEGIN
        UPDATE reaper SET ran_at = '-infinity', quiet_until = '-infinity';
        -- A table that is large, or of which Postgres has statistics, is made anew.
        IF (SELECT bool_or(reltuples >= 0 OR pg_relation_size(oid) > 262144)
            FROM pg_class WHERE oid = ANY (every::regclass[]))
        THEN
            EXECUTE 'TRUNCATE ' || array_to_string(every, ', ') || ' RESTART IDENTITY';
            RETURN;
        END IF;
        -- Where little is, to delete it costs a third of that.
        SET LOCAL session_replication_role = replica;
        FOREACH name IN ARRAY every LOOP
            EXECUTE 'SELECT EXISTS (SELECT FROM ' || name || ')' INTO is_used;
            IF is_used THEN
                EXECUTE 'DELETE FROM ' || name;
            END IF;
        END LOOP;
        FOR name IN
            SELECT quote_ident(sequencename) FROM pg_sequences
            WHERE schemaname = 'public' AND last_value IS NOT NULL
        LOOP
            EXECUTE 'ALTER SEQUENCE ' || name || ' RESTART';
        END LOOP;
    END $$
"""


@dataclass
class World:
    """One database and what the tests do with it."""

    dsn: str
    database: Database
    tasks: Tasks
    offset_seconds: list[float] = field(default_factory=lambda: [0.0])
    announced: list[str] | None = None
    """What was announced after commits; None where rows of the outbox announce everything."""

    def announce(self) -> None:
        """From now on, what may begin at once is announced after its commit, and not by rows."""
        self.announced = []
        self.database.announce = self._hear

    def _hear(self, woken: Mapping[tuple[str, str], int], *, is_kept: bool) -> None:
        assert self.announced is not None, "it was asked for"
        assert all(tasks >= 1 for tasks in woken.values())
        self.announced += ["/".join(each) for each in woken]

    def later(self, seconds: float) -> None:
        """Let time pass."""
        self.offset_seconds[0] += seconds

    async def rows(self, statement: str, *values: object) -> list[dict[str, Any]]:
        async def work(connection: Connection) -> list[dict[str, Any]]:
            found = await connection.execute(statement.encode(), values or None)
            has_rows = statement.lstrip().startswith("SELECT") or "RETURNING" in statement
            return await found.fetchall() if has_rows else []

        return await self.database.transact(work)

    async def value(self, statement: str, *values: object) -> Any:
        (row,) = await self.rows(statement, *values)
        (value,) = row.values()
        return value

    async def job(self, name: str = "job", **columns: object) -> Job:
        """A job with one definition, one output and a current generation."""
        limit = columns.pop("max_concurrency", None)
        job_id = await self.value(
            "INSERT INTO job (name, max_concurrency) VALUES (%s, %s) RETURNING id", name, limit
        )
        definition = {
            "job_id": job_id,
            "hash": name,
            "body": "{}",
            "runtime": "process",
            "operator": "operator",
            "priority": "normal",
            "update_mode": "replace",
            "max_attempts": 3,
            "timeout_ms": 60_000,
            "heartbeat_ms": 10_000,
            "retry_first_ms": 1_000,
            "retry_max_ms": 8_000,
            "retry_backoff": 2.0,
            **columns,
        }
        names, marks = ", ".join(definition), ", ".join("%s" for _ in definition)
        definition_id = await self.value(
            f"INSERT INTO job_definition ({names}) VALUES ({marks}) RETURNING id",
            *definition.values(),
        )
        dataset = await self.value(
            "INSERT INTO dataset (name, job_id) VALUES (%s, %s) RETURNING id::text", name, job_id
        )
        generation = await self.value(
            "INSERT INTO generation (dataset_id, version, state, lineage)"
            " VALUES (%s, gen_random_uuid(), 'current', 'x') RETURNING version::text",
            dataset,
        )
        return Job(self, job_id, definition_id, dataset, generation, str(definition["operator"]))

    async def wakes(self) -> list[str]:
        """The targets of the wake-ups that are due, which are taken away."""
        rows = await self.rows(
            "DELETE FROM outbox WHERE kind = 'wake' AND due_at <= penstock_now()"
            " RETURNING target, due_at > created_at AS was_later"
        )
        announced: list[str] = []
        if self.announced is not None:
            assert all(row["was_later"] for row in rows), "it could begin at once, and had a row"
            announced, self.announced = self.announced, []
        return sorted([*(row["target"] for row in rows), *announced])

    @contextlib.asynccontextmanager
    async def unfinished(self, *, is_kept: bool = True) -> AsyncIterator[Tasks]:
        """Somebody else, all of whose calls are one transaction that ends with the block."""
        async with self.database.transaction() as connection:
            yield Tasks(_OneTransaction(self.dsn, connection))
            if not is_kept:
                raise psycopg.Rollback

    async def until_waiting(self, count: int = 1) -> None:
        """Return when so many connections of this database wait for a lock."""
        async with await psycopg.AsyncConnection.connect(self.dsn, autocommit=True) as watcher:
            for _ in range(10_000):
                found = await watcher.execute(
                    b"SELECT count(*) FROM pg_stat_activity"
                    b" WHERE datname = current_database() AND wait_event_type = 'Lock'"
                )
                (waiting,) = await found.fetchone() or (0,)
                if waiting >= count:
                    return
        pytest.fail("nobody waits")


class _OneTransaction(Database):
    def __init__(self, dsn: str, connection: Connection) -> None:
        super().__init__(dsn, connections_max=1)
        self._connection = connection

    async def transact(self, work: Callable[[Connection], Awaitable[Answer]]) -> Answer:
        return await work(self._connection)


@dataclass(frozen=True)
class Job:
    """A job of a world."""

    world: World
    id: int
    definition_id: int
    dataset: str
    generation: str
    operator: str

    def new(self, key: str, **fields: Any) -> NewTask:
        return NewTask(
            definition_id=self.definition_id,
            generation=self.generation,
            dedupe_key=key,
            **{"payload": {"key": key}, **fields},
        )

    async def make(self, *keys: str) -> list[int]:
        """Tasks with these keys; their wake-ups are taken away."""
        made = await self.world.tasks.create([self.new(key) for key in keys])
        await self.world.wakes()
        ids = [each for each in made if each is not None]
        assert len(ids) == len(keys)
        return ids

    async def claimed(self, key: str = "one", *, worker: str = "worker") -> ClaimedTask:
        """A task of this job that was just claimed."""
        (task_id,) = await self.make(key)
        found = await self.world.tasks.claim(task_id, worker=worker)
        assert isinstance(found, ClaimedTask)
        return found

    def output(
        self, partition: str | None = "p", location: str = "s3://b/x", **fields: Any
    ) -> TaskOutput:
        return TaskOutput(
            dataset=self.dataset, location=location, partition_key=partition, **fields
        )


def done(fence: Fence, *outputs: TaskOutput) -> list[Completion]:
    return [Completion(fence, outputs)]


def failed(fence: Fence, reason: str = "broken", *, is_retried: bool = True) -> list[Failure]:
    return [Failure(fence, reason, is_retried)]


class Worlds:
    """Makes worlds, one after the other."""

    def __init__(self, server: LocalPostgres) -> None:
        self._server = server
        self._count = 0
        asyncio.run(self._make_database())

    @contextlib.asynccontextmanager
    async def world(self, *, route: Route = no_route, dsn: str = "") -> AsyncIterator[World]:
        """An empty one, or one with what a database of `empty` was given."""
        if not dsn:
            dsn = self.dsn_of(DATABASE)
            async with await psycopg.AsyncConnection.connect(dsn) as connection:
                await connection.execute(EMPTYING.encode())
        offset = [0.0]

        async def began(connection: Connection) -> None:
            # Time stands still but for the test, however slow the machine is.
            await connection.execute(
                b"SELECT set_config('penstock.offset', (timestamptz '2030-01-01 00:00:00+00'"
                b" + %s * interval '1 second' - now())::text, true)",
                [offset[0]],
            )

        async with Database(dsn, connections_max=20, began=began) as database:
            yield World(dsn, database, Tasks(database, route=route), offset)

    def dsn_of(self, name: str) -> str:
        return make_conninfo(self._server.dsn, dbname=name)

    async def empty(self) -> str:
        """A database without a schema."""
        self._count += 1
        await self._command(f"CREATE DATABASE empty_{self._count} STRATEGY file_copy")
        return self.dsn_of(f"empty_{self._count}")

    async def _make_database(self) -> None:
        await self._command(f"CREATE DATABASE {DATABASE}")
        await migrate(self.dsn_of(DATABASE))

    async def _command(self, statement: str) -> None:
        async with await psycopg.AsyncConnection.connect(
            self.dsn_of("postgres"), autocommit=True, row_factory=dict_row
        ) as connection:
            await connection.execute(statement.encode())


Story = Callable[[World], Coroutine[Any, Any, None]]
Play = Callable[[Story], None]
either_way = pytest.mark.parametrize("play", ["rows", "announced"], indirect=True)
"""For tests of who hears of work: by rows of the outbox, and after the commit (FENCE-14)."""
