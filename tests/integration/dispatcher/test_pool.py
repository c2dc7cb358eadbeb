"""Connections: broken ones, deadlocks, and values that Postgres cannot hold."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource

import psycopg
import pytest

from penstock.dispatcher.database import pool
from penstock.dispatcher.database.pool import Connection, Database
from penstock.dispatcher.tasks.model import Fence
from penstock.kernel.clock import SystemClock
from penstock.kernel.errors import DatabaseUnavailable, InvalidInput
from tests.integration.dispatcher.world import Play, World, Worlds


def test_the_victim_of_a_deadlock_is_run_again(play: Play) -> None:
    async def story(world: World) -> None:
        first, second = (await world.job(name)).id, (await world.job(f"{name}2")).id
        runs = 0
        both_hold_one = asyncio.Barrier(2)

        async def work(connection: Connection, ids: tuple[int, int]) -> None:
            nonlocal runs
            runs += 1
            lock = (
                b"UPDATE job SET max_concurrency = coalesce(max_concurrency, 0) + 1 WHERE id = %s"
            )
            await connection.execute(lock, [ids[0]])
            if runs <= 2:
                await both_hold_one.wait()
            await connection.execute(lock, [ids[1]])

        await asyncio.gather(
            world.database.transact(lambda connection: work(connection, (first, second))),
            world.database.transact(lambda connection: work(connection, (second, first))),
        )
        assert runs >= 3
        rows = await world.rows("SELECT max_concurrency FROM job")
        assert [row["max_concurrency"] for row in rows] == [2, 2]

    name = "job"
    play(story)


def test_values_that_cannot_be_stored_are_the_callers(play: Play) -> None:
    async def story(world: World) -> None:
        for fence in (Fence(1, 1, "nul\x00"), Fence(1, 1, "half \ud800"), Fence(2**80, 1, "x")):
            with pytest.raises(InvalidInput, match="cannot hold"):
                await world.tasks.heartbeat([fence])

    play(story)


def test_a_connection_that_broke_is_replaced(worlds: Worlds) -> None:
    async def check() -> None:
        async with Database(await worlds.empty(), connections_max=10) as database:

            async def pid(connection: psycopg.AsyncConnection[dict[str, object]]) -> object:
                row = await (await connection.execute(b"SELECT pg_backend_pid() AS n")).fetchone()
                return row and row["n"]

            async def die(connection: psycopg.AsyncConnection[dict[str, object]]) -> None:
                await connection.execute(b"SELECT pg_terminate_backend(pg_backend_pid())")

            first = await database.transact(pid)
            with pytest.raises(DatabaseUnavailable):
                await database.transact(die)
            assert await database.transact(pid) != first

    asyncio.run(check())


def test_connections_that_a_burst_has_opened_are_closed_again(
    worlds: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "_UNUSED_SECONDS_MAX", 0.1)

    async def check() -> None:
        dsn = await worlds.empty()
        async with Database(dsn, connections_max=10, application="burst") as database:
            all_there = asyncio.Barrier(10)

            async def busy(connection: Connection) -> None:
                await connection.execute(b"SELECT 1")
                await all_there.wait()

            await asyncio.gather(*(database.transact(busy) for _ in range(10)))
            assert await _connections(database) == 10
            async with asyncio.timeout(60):
                while await _connections(database) > 3:
                    await SystemClock().sleep(0.05)

    asyncio.run(check())


async def _connections(database: Database) -> int:
    async def count(connection: Connection) -> int:
        found = await connection.execute(
            b"SELECT count(*) AS n FROM pg_stat_activity WHERE application_name = 'burst'"
        )
        row = await found.fetchone()
        assert row is not None
        return int(row["n"])

    return await database.transact(count)


def test_connections_are_used_however_many_files_are_open(worlds: Worlds) -> None:
    async def check() -> None:
        with contextlib.ExitStack() as stack:
            for _ in range(1_100):
                stack.callback(os.close, os.dup(0))
            async with (
                Database(await worlds.empty(), connections_max=10) as database,
                asyncio.timeout(60),
            ):
                await database.transact(lambda connection: connection.execute(b"SELECT 1"))

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4_096)), hard))
    try:
        asyncio.run(check())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
