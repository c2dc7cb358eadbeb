"""Dispatchers tell each other by notifications of Postgres, and find what was not told."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psycopg
import pytest
from psycopg.rows import DictRow

from penstock.dispatcher.announcer import Announcer
from penstock.dispatcher.dag.model import Priority
from penstock.dispatcher.database.local_server import LocalPostgres
from penstock.dispatcher.database.migrations import migrate
from penstock.dispatcher.database.pool import Connection, Database, query
from penstock.dispatcher.tasks.completion import no_route
from penstock.dispatcher.tasks.lifecycle import Tasks
from penstock.dispatcher.wakeups import notifications as module
from penstock.dispatcher.wakeups.base import TaskCounts, WakeUpChannel
from penstock.dispatcher.wakeups.long_poll import Broker
from penstock.dispatcher.wakeups.notifications import ECHO_SECONDS, Notifications
from penstock.kernel.clock import SystemClock
from penstock.kernel.errors import DatabaseUnavailable
from tests.integration.dispatcher.test_local_postgres import postmaster_of
from tests.integration.dispatcher.world import Play, World
from tests.integration.test_s3_local import needs_proc

OPERATOR = WakeUpChannel("operator", Priority.NORMAL)
OTHER = WakeUpChannel("other", Priority.BULK)
NOWHERE = "host=127.0.0.1 port=1 connect_timeout=1"


async def _is_in_recovery(connection: Connection) -> list[DictRow]:
    found = await connection.execute(b"SELECT pg_is_in_recovery() AS is_in_recovery")
    return await found.fetchall()


async def _write(connection: Connection) -> None:
    await connection.execute(b"UPDATE reaper SET ran_at = ran_at")


class _Ear:
    """What one dispatcher hears."""

    def __init__(self, world: World, *, dsn: str = "", echo_seconds: float = 20.0) -> None:
        self.heard: list[WakeUpChannel] = []
        self.tasks_of: dict[WakeUpChannel, int] = {}
        self.news = asyncio.Event()
        self.notifications = Notifications(
            dsn or world.dsn,
            world.database,
            heard=self._hear,
            has_waiters=lambda: True,
            echo_seconds=echo_seconds,
        )

    def _hear(self, tasks_of: TaskCounts) -> None:
        self.heard += tasks_of
        self.tasks_of |= tasks_of
        self.news.set()

    async def until(self, channels: Iterable[WakeUpChannel]) -> None:
        """Return when all of these were heard, within a minute."""
        wanted = set(channels)
        async with asyncio.timeout(60):
            while not wanted <= set(self.heard):
                self.news.clear()
                await self.news.wait()

    async def until_listening(self) -> None:
        async with asyncio.timeout(60):
            while not self.notifications.is_listening:
                await SystemClock().sleep(0.01)


def test_what_one_sends_all_others_hear_however_much_it_is(play: Play) -> None:
    async def story(world: World) -> None:
        one, two = _Ear(world), _Ear(world)
        async with one.notifications, two.notifications:
            await one.until_listening()
            await two.until_listening()
            many = [WakeUpChannel(f"operator-{n:04}", Priority.NORMAL) for n in range(2000)]
            await one.notifications.publish(Counter([*many, OTHER]))
            await two.until([*many, OTHER])
            await two.notifications.publish(Counter([OPERATOR]))
            await one.until([OPERATOR])
            assert one.heard == [OPERATOR]
            assert all(two.tasks_of[each] == 1 for each in many)
            await one.notifications.publish({OPERATOR: 700, OTHER: 3})
            await two.until([OPERATOR])
            assert (two.tasks_of[OPERATOR], two.tasks_of[OTHER]) == (700, 3)

    play(story)


def test_however_many_operators_have_work_there_are_fifty_notifications_a_second(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    @dataclass
    class Moving:
        now: float = 0.0

        def monotonic(self) -> float:
            return self.now

        def wall(self) -> float:
            return self.now

        async def sleep(self, seconds: float) -> None:
            self.now += seconds

    async def story(world: World) -> None:
        sent: list[float] = []
        database = Database(world.dsn, connections_max=2)
        fetch = database.fetch

        async def fetched(name: str, asked: Mapping[str, object] | None = None) -> list[DictRow]:
            assert name == "notify_wakeups"
            sent.append(clock.now)
            return await fetch(name, asked)

        monkeypatch.setattr(database, "fetch", fetched)
        clock, ear = Moving(), _Ear(world)
        sender = Notifications(
            world.dsn, database, heard=print, has_waiters=lambda: False, clock=clock
        )
        async with database, ear.notifications:
            await ear.until_listening()
            for turn in range(20):
                channels = [WakeUpChannel(f"{turn}-{n}", Priority.NORMAL) for n in range(30)]
                await asyncio.gather(*(sender.publish({each: 1}) for each in channels))
                await ear.until(channels)
        assert len(sent) == 20
        assert sent[-1] >= (len(sent) - 1) / 50

    play(story)


def test_releases_that_do_not_count_tasks_and_those_that_do_understand_each_other(
    play: Play,
) -> None:
    class Before(msgspec.Struct, array_like=True):
        by: str
        channels: list[tuple[str, Priority]] = []

    async def story(world: World) -> None:
        ear = _Ear(world)
        told: list[tuple[str, Priority]] = []
        async with (
            ear.notifications,
            await psycopg.AsyncConnection.connect(world.dsn, autocommit=True) as listening,
        ):
            await ear.until_listening()
            await listening.execute(query("listen_for_wakeups"))
            before = msgspec.json.encode(Before("before", [("operator", Priority.NORMAL)]))
            await world.database.fetch("notify_wakeups", {"payloads": [before.decode()]})
            await ear.until([OPERATOR])
            assert ear.tasks_of == {OPERATOR: 1}
            await ear.notifications.publish({OTHER: 9})
            async with asyncio.timeout(60):
                async for each in listening.notifies():
                    told += msgspec.json.decode(each.payload, type=Before).channels
                    if ("other", Priority.BULK) in told:
                        break
        assert told == [("operator", Priority.NORMAL), ("other", Priority.BULK)]

    play(story)


def test_what_was_missed_while_a_connection_was_lost_is_looked_for(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job()
        ear = _Ear(world)
        async with ear.notifications:
            await ear.until_listening()
            # Nobody is told of it: only a look finds it.
            await job.make("one", "two", "three")
            await world.rows(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND query LIKE 'LISTEN%'"
            )
            await ear.until([OPERATOR])
            assert ear.tasks_of == {OPERATOR: 3}

    play(story)


def test_what_a_notification_has_lost_is_looked_for_within_half_a_minute(play: Play) -> None:
    assert ECHO_SECONDS <= 25.0

    async def story(world: World) -> None:
        job = await world.job()
        ear = _Ear(world, echo_seconds=0.2)
        async with ear.notifications:
            await ear.until_listening()
            await job.make("one")
            await ear.until([OPERATOR])
            assert ear.notifications.is_listening

    play(story)


def test_behind_a_pooler_work_is_looked_for_every_second_and_that_is_said(
    play: Play, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # A pooler gives the connection to others, which is as if it did not listen.
    deaf = {"listen_for_wakeups": b"SELECT 1"}
    monkeypatch.setattr(module, "query", lambda name: deaf.get(name) or query(name))

    async def story(world: World) -> None:
        job = await world.job()
        ear = _Ear(world, echo_seconds=0.2)
        async with ear.notifications:
            await ear.until_listening()
            await job.make("one")
            await ear.until([OPERATOR])
        assert "notifications do not arrive" in caplog.text

    play(story)


@needs_proc
def test_who_waits_hears_of_work_from_before_a_crash_of_postgres_within_half_a_minute(
    tmp_path: Path, postgres: LocalPostgres
) -> None:
    async def story() -> None:
        async with AsyncExitStack() as stack:
            folder = tmp_path / "postgres"
            server = LocalPostgres(folder, settings={"fsync": "off"}, grace_seconds=5)
            await stack.enter_async_context(server)
            await migrate(server.dsn)
            database = Database(server.dsn, connections_max=5)
            await stack.enter_async_context(database)
            world = World(server.dsn, database, Tasks(database, route=no_route))
            broker = await stack.enter_async_context(Broker())
            notifications = Notifications(
                server.dsn, database, heard=broker.send, has_waiters=lambda: broker.waiters > 0
            )
            await stack.enter_async_context(notifications)
            group = await stack.enter_async_context(asyncio.TaskGroup())
            waits = [
                group.create_task(broker.wait(f"{number}", ["operator"], seconds=300))
                for number in range(50)
            ]
            async with asyncio.timeout(60):
                while not notifications.is_listening:
                    await SystemClock().sleep(0.01)
            # Committed, and nobody was told before the server died.
            await (await world.job()).make("one", "two", "three")
            os.kill(postmaster_of(folder), signal.SIGKILL)
            async with asyncio.timeout(60):
                while server.running:
                    await SystemClock().sleep(0.01)
            await server.stop()
            await server.start()
            async with asyncio.timeout(30):
                while sum(each.done() for each in waits) < 3:
                    await SystemClock().sleep(0.01)
            assert sum(each.done() for each in waits) == 3
            broker.interrupt()

    asyncio.run(story())


@needs_proc
def test_who_waits_hears_again_within_half_a_minute_of_a_fail_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        async with AsyncExitStack() as stack:
            folder = tmp_path / "postgres"
            server = LocalPostgres(folder, settings={"fsync": "off"}, grace_seconds=5)
            await stack.enter_async_context(server)
            await migrate(server.dsn)
            one, two = (Database(server.dsn, connections_max=5) for _ in range(2))
            broker = await stack.enter_async_context(Broker())
            sender = Notifications(server.dsn, one, heard=print, has_waiters=lambda: True)
            hearer = Notifications(server.dsn, two, heard=broker.send, has_waiters=lambda: True)
            announcer = Announcer(here=lambda tasks_of: Counter(), elsewhere=sender.publish)
            for service in (one, two, sender, hearer, announcer):
                await stack.enter_async_context(service)
            # A server in recovery, as the one that is about to become the new primary.
            await server.stop()
            data = (folder / "data").stat()
            standby = folder / "data" / "standby.signal"
            standby.touch()
            os.chown(standby, data.st_uid, data.st_gid)
            await server.start()
            (found,) = await one.transact(_is_in_recovery)
            assert found["is_in_recovery"]
            announcer.announce({("other", "normal"): 1})
            async with asyncio.timeout(60):
                while "failed to notify other dispatchers" not in caplog.text:
                    await SystemClock().sleep(0.01)
            with pytest.raises(DatabaseUnavailable, match="read-only"):
                await one.transact(_write)
            async with await psycopg.AsyncConnection.connect(server.dsn) as connection:
                await connection.execute(b"SELECT pg_promote()")
            async with asyncio.timeout(30):
                while not hearer.is_listening:
                    await SystemClock().sleep(0.01)
                announcer.announce({("operator", "normal"): 1})
                assert await broker.wait("listener", ["operator"], seconds=30)
                await one.transact(_write)

    asyncio.run(story())


def test_work_is_looked_for_while_the_server_cannot_be_listened_to(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job()
        ear = _Ear(world, dsn=NOWHERE)
        async with ear.notifications:
            await job.make("one")
            await ear.until([OPERATOR])
            # Not only once: whoever was told may have died.
            ear.heard.clear()
            await ear.until([OPERATOR])
            assert not ear.notifications.is_listening

    play(story)


def test_a_database_that_is_away_is_waited_for(play: Play) -> None:
    async def story(world: World) -> None:
        ear = _Ear(world)
        nowhere = Notifications(
            NOWHERE,
            Database(world.dsn, connections_max=10),
            heard=lambda _: None,
            has_waiters=lambda: False,
        )
        async with ear.notifications, nowhere:
            await ear.until_listening()
            assert not nowhere.is_listening

    play(story)
