"""Migrations on a real database: from every earlier version, once, and never back."""

from __future__ import annotations

import asyncio

import psycopg
import pytest

from penstock.dispatcher.database import migrations as module
from penstock.dispatcher.database.migrations import Migration, migrate, migrations
from penstock.dispatcher.database.pool import query
from penstock.kernel.errors import DatabaseUnavailable, MigrationRefused
from tests.integration.dispatcher.world import Worlds

SCHEMA = """
    SELECT table_name, column_name, data_type, is_nullable FROM information_schema.columns
    WHERE table_schema = 'public'
    UNION ALL SELECT tablename, indexname, indexdef, '' FROM pg_indexes WHERE schemaname = 'public'
    UNION ALL SELECT proname, '', prosrc, '' FROM pg_proc
    WHERE pronamespace = 'public'::regnamespace
    ORDER BY 1, 2, 3
"""


def read(dsn: str, statement: str) -> list[tuple[object, ...]]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        return connection.execute(statement.encode()).fetchall()


@pytest.mark.parametrize("version", range(len(migrations()) + 1))
def test_every_earlier_version_is_brought_forward(worlds: Worlds, version: int) -> None:
    async def check() -> None:
        dsn, whole = await worlds.empty(), await worlds.empty()
        await migrate(whole)
        await migrate(dsn, migrations()[:version])
        assert await migrate(dsn) == migrations()[version:]
        assert await migrate(dsn) == ()
        assert read(dsn, SCHEMA) == read(whole, SCHEMA)

    asyncio.run(check())


def test_what_was_called_coalesce_is_called_merge_updates(worlds: Worlds) -> None:
    async def check() -> None:
        dsn = await worlds.empty()
        await migrate(dsn, migrations()[:3])
        bodies = ('{"coalesce": true, "x": 1}', '{"x": 2}', '{"coalesce": false}')
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(b"INSERT INTO job (name) VALUES ('j')")
            for body in bodies:
                connection.execute(
                    b"INSERT INTO job_definition (job_id, hash, body, runtime, operator, priority,"
                    b" update_mode, max_attempts, timeout_ms, heartbeat_ms, retry_first_ms,"
                    b" retry_max_ms, retry_backoff) VALUES"
                    b" (1, %s, %s, 'process', 'o', 'normal', 'replace', 1, 1, 1, 1, 1, 1)",
                    [body, body],
                )
        await migrate(dsn)
        found = read(dsn, "SELECT body FROM job_definition ORDER BY id")
        assert found == [({"merge_updates": True, "x": 1},), ({"x": 2},), ({},)]

    asyncio.run(check())


def test_readers_are_told_of_what_was_published_before(worlds: Worlds) -> None:
    async def check() -> None:
        dsn = await worlds.empty()
        await migrate(dsn, migrations()[:3])
        with psycopg.connect(dsn, autocommit=True) as connection:
            for name, location in (("files", "s3://b/x"), ("ranges", "range:0-1"), ("none", "")):
                connection.execute(b"INSERT INTO dataset (name) VALUES (%s)", [name])
                connection.execute(
                    b"INSERT INTO generation SELECT id, gen_random_uuid(), 'current', 'x'"
                    b" FROM dataset WHERE name = %s",
                    [name],
                )
                if location:
                    connection.execute(
                        b"INSERT INTO publication (dataset_id, generation, partition_key, mode,"
                        b" task_id, attempt, location) SELECT dataset_id, version, 'p', 'replace',"
                        b" 1, 1, %s FROM generation JOIN dataset ON dataset.id = dataset_id"
                        b" WHERE name = %s",
                        [location, name],
                    )
        await migrate(dsn)
        words = "SELECT split_part(target, '/', 1), body ? 'generation' FROM outbox ORDER BY 1, 2"
        assert read(dsn, words) == [
            ("files", False),
            ("files", True),
            ("none", False),
            ("ranges", False),
        ]
        assert read(dsn, "SELECT DISTINCT revision FROM dataset") == [(1,)]

    asyncio.run(check())


def test_what_appends_and_is_being_built_is_built_of_every_event(worlds: Worlds) -> None:
    """Earlier releases took the latest event of each partition for enough."""

    async def check() -> None:
        dsn = await worlds.empty()
        await migrate(dsn, migrations()[:9])
        with psycopg.connect(dsn, autocommit=True) as connection:
            for mode, state in (("append", "done"), ("append", "cancelled"), ("replace", "done")):
                connection.execute(
                    b"WITH named AS (INSERT INTO job (name) VALUES (%(name)s) RETURNING id),"
                    b" written AS (INSERT INTO dataset (name, job_id)"
                    b" SELECT %(name)s, id FROM named RETURNING id),"
                    b" built AS (INSERT INTO generation (dataset_id, version, state, lineage)"
                    b" SELECT id, gen_random_uuid(), 'building', 'x' FROM written"
                    b" RETURNING version),"
                    b" defined AS (INSERT INTO job_definition (job_id, hash, body, runtime,"
                    b" operator, priority, update_mode, max_attempts, timeout_ms, heartbeat_ms,"
                    b" retry_first_ms, retry_max_ms, retry_backoff)"
                    b" SELECT id, 'x', '{}', 'process', 'o', 'normal', %(mode)s, 1, 1, 1, 1, 1, 1"
                    b" FROM named RETURNING id)"
                    b" INSERT INTO backfill (definition_id, generation, plan, partitions, position,"
                    b" concurrency_max, state, walked, counted) SELECT id, version,"
                    b' \'{"kind": "rebuild", "upto": 7}\', 2, 2, 1, %(state)s, 7, 7'
                    b" FROM defined, built",
                    {"name": f"{mode} {state}", "mode": mode, "state": state},
                )
        await migrate(dsn)
        found = read(dsn, "SELECT state, walked, counted, partitions FROM backfill ORDER BY id")
        assert found == [("running", 0, 0, 0), ("cancelled", 7, 7, 2), ("done", 7, 7, 2)]

    asyncio.run(check())


def test_many_at_once_apply_each_step_once(worlds: Worlds) -> None:
    async def check() -> None:
        dsn = await worlds.empty()
        answers = await asyncio.gather(*(migrate(dsn) for _ in range(6)))
        assert sorted(map(len, answers)) == [0, 0, 0, 0, 0, len(migrations())]
        assert read(dsn, "SELECT count(*) FROM migration") == [(len(migrations()),)]

    asyncio.run(check())


def test_a_step_that_fails_leaves_nothing(worlds: Worlds) -> None:
    async def check() -> None:
        dsn = await worlds.empty()
        first = "CREATE TABLE one (n integer)"
        broken = "CREATE TABLE two (n integer); SELECT 1 / 0"
        steps = migrations({"0001_one.sql": first, "0002_two.sql": broken})
        with pytest.raises(MigrationRefused, match="0002_two failed and was rolled back"):
            await migrate(dsn, steps)
        assert read(dsn, "SELECT to_regclass('one') IS NULL, to_regclass('two') IS NULL") == [
            (False, True)
        ]
        repaired = migrations({"0001_one.sql": first, "0002_two.sql": "SELECT 1"})
        assert [step.number for step in await migrate(dsn, repaired)] == [2]

    asyncio.run(check())


def test_a_changed_file_and_a_newer_database_are_refused(worlds: Worlds) -> None:
    async def check() -> None:
        dsn = await worlds.empty()
        steps = migrations({"0001_one.sql": "SELECT 1", "0002_two.sql": "SELECT 2"})
        await migrate(dsn, steps)
        with pytest.raises(MigrationRefused, match="is not the one that was applied"):
            await migrate(dsn, migrations({"0001_one.sql": "SELECT 3"}))
        with pytest.raises(MigrationRefused, match="at migration 2"):
            await migrate(dsn, steps[:1])
        # The lock was given back.
        assert await migrate(dsn, steps) == ()

    asyncio.run(check())


def test_a_server_that_is_not_there(worlds: Worlds) -> None:
    async def check() -> None:
        with pytest.raises(DatabaseUnavailable, match="does not answer") as caught:
            await migrate("host=/nowhere/at/all dbname=x")
        assert caught.value.hint
        with pytest.raises(DatabaseUnavailable):
            await migrate(worlds.dsn_of("no_such_database"))

    asyncio.run(check())


async def _end_who_waits(connection: psycopg.AsyncConnection) -> None:
    ended = 0
    while not ended:
        found = await connection.execute(
            b"SELECT count(*) FILTER (WHERE pg_terminate_backend(pid)) FROM pg_locks"
            b" JOIN pg_database ON oid = database AND datname = current_database()"
            b" WHERE locktype = 'advisory' AND NOT granted"
        )
        (ended,) = await found.fetchone() or (0,)


def test_a_postgres_that_goes_away_meanwhile_is_one_that_does_not_answer(worlds: Worlds) -> None:
    async def check() -> None:
        dsn = await worlds.empty()
        await migrate(dsn)
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as other:
            await other.execute(query("take_migration_lock"))
            said, _ = await asyncio.gather(
                migrate(dsn), _end_who_waits(other), return_exceptions=True
            )
        assert isinstance(said, DatabaseUnavailable)
        assert "does not answer" in said.message

    asyncio.run(check())


def test_who_starts_beside_a_postgres_that_starts_again_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A few times, and then it says what is wrong."""
    answers: list[BaseException | None] = [DatabaseUnavailable("It is away.")] * 2 + [None]

    async def migrated(_dsn: str) -> tuple[Migration, ...]:
        answer = answers.pop(0)
        if answer is not None:
            raise answer
        return ()

    monkeypatch.setattr(module, "migrate", migrated)
    monkeypatch.setattr(module, "_PAUSES_SECONDS", (0.0, 0.0))
    asyncio.run(module.migrate_patiently("postgresql://nowhere"))
    assert answers == []
    answers += [DatabaseUnavailable("It is away.")] * 3
    with pytest.raises(DatabaseUnavailable, match="away"):
        asyncio.run(module.migrate_patiently("postgresql://nowhere"))
    assert answers == []
    # One that recovers has no socket yet, or says so, and is waited for longer.
    monkeypatch.setattr(module, "_RECOVERY_PAUSES_SECONDS", (0.0, 0.0))
    answers += [DatabaseUnavailable("its.socket failed: No such file or directory")] * 2
    answers += [DatabaseUnavailable("FATAL:  the database system is starting up")] * 2 + [None]
    asyncio.run(module.migrate_patiently("postgresql://nowhere"))
    assert answers == []
