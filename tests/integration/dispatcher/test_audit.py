"""The audit on a real Postgres: counted within a minute, bounded, and never in the way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from penstock.dispatcher.capabilities.audit import MINUTE_MAX, NOTES_MAX, WRITTEN_MAX, AuditLog
from penstock.dispatcher.database.pool import Answer, Connection, Database
from penstock.dispatcher.retention import PASS_SECONDS
from penstock.kernel.clock import SystemClock
from penstock.kernel.errors import DatabaseUnavailable
from tests.integration.dispatcher.test_retention import whole_pass
from tests.integration.dispatcher.world import Play, World

REFUSED: dict[str, Any] = {
    "what": "POST /v1/task/credentials",
    "outcome": "refused",
    "task_id": 7,
    "attempt": 2,
    "caller": "task:7:2",
    "address": "10.0.0.1",
    "reason": "expired",
}


class Clock(SystemClock):
    ahead_seconds = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead_seconds


class Away(Database):
    """A database that answers when it is told to."""

    def __init__(self, real: Database) -> None:
        self._real = real
        self.is_away = True
        self.asked = 0

    async def transact(self, work: Callable[[Connection], Any]) -> Answer:
        self.asked += 1
        if self.is_away:
            raise DatabaseUnavailable("Postgres does not answer.")
        return await self._real.transact(work)


async def rows(world: World) -> list[dict[str, Any]]:
    return await world.rows("SELECT * FROM audit ORDER BY id")


def test_the_same_within_a_minute_is_counted(play: Play) -> None:
    async def story(world: World) -> None:
        one, two = AuditLog(world.database), AuditLog(world.database)
        for _ in range(3):
            one.note(**REFUSED, detail={"read": ["s3://b/x/"]})
        assert await one.turn() is None
        world.later(30)
        two.note(**REFUSED)
        await two.turn()
        (row,) = await rows(world)
        assert row["times"] == 4
        assert (row["last_at"] - row["first_at"]).total_seconds() == 30
        assert row["detail"] == {"read": ["s3://b/x/"]}
        for name, value in REFUSED.items():
            assert row[name] == value
        # The next minute, another attempt, another reason: each is news.
        one.note(**{**REFUSED, "attempt": 3})
        one.note(**{**REFUSED, "reason": "former attempt"})
        one.note(what="POST /v1/keys/rotate", outcome="allowed")
        one.note(what="POST /v1/keys/rotate", outcome="allowed")
        await one.turn()
        world.later(30)
        one.note(**REFUSED)
        await one.turn()
        assert [each["times"] for each in await rows(world)] == [4, 2, 1, 1, 1]
        assert await one.turn() is None

    play(story)


def test_two_that_write_the_same_at_once_lose_nothing(play: Play) -> None:
    async def story(world: World) -> None:
        both = [AuditLog(world.database) for _ in range(2)]
        for round_ in range(20):
            for audit in both:
                for task in range(10) if round_ % 2 else reversed(range(10)):
                    audit.note(**{**REFUSED, "task_id": task})
            await asyncio.gather(*(audit.turn() for audit in both))
        assert [row["times"] for row in await rows(world)] == [40] * 10

    play(story)


def test_a_database_that_is_away_costs_the_caller_nothing(play: Play) -> None:
    async def story(world: World) -> None:
        database = Away(world.database)
        audit = AuditLog(database)
        audit.note(**REFUSED)
        assert database.asked == 0
        for _ in range(3):
            with pytest.raises(DatabaseUnavailable):
                await audit.turn()
        audit.note(**REFUSED, detail={"later": 1})
        database.is_away = False
        await audit.turn()
        (row,) = await rows(world)
        assert (row["times"], row["detail"]) == (2, {"later": 1})

    play(story)


def test_what_is_too_much_is_dropped_and_counted(play: Play) -> None:
    async def story(world: World) -> None:
        clock = Clock()
        database = Away(world.database)
        audit = AuditLog(database, clock=clock)
        for number in range(MINUTE_MAX + 10):
            audit.note(**{**REFUSED, "task_id": number})
        # What is known is counted all the same.
        audit.note(**{**REFUSED, "task_id": 0})
        for _ in range(20):
            clock.ahead_seconds += 60
            for number in range(MINUTE_MAX):
                audit.note(**{**REFUSED, "address": f"{clock.ahead_seconds} {number}"})
        database.is_away = False
        turns = 1
        while await audit.turn() == 0.0:
            turns += 1
        assert turns <= NOTES_MAX // WRITTEN_MAX + 1
        written = await rows(world)
        (dropped,) = [row for row in written if row["reason"] == "notes were dropped"]
        assert len(written) == NOTES_MAX + 1
        assert sum(row["times"] for row in written) == MINUTE_MAX + 11 + 20 * MINUTE_MAX
        assert dropped["times"] == 10 + 20 * MINUTE_MAX + MINUTE_MAX - NOTES_MAX

    play(story)


@pytest.mark.parametrize(
    "strange",
    [
        {"caller": "\x00\ud800" + "x" * 5000},
        {"reason": "y" * 5000},
        {"task_id": 2**80, "attempt": -1},
        {"outcome": "nonsense"},
        {"detail": {"a": "\x00", "b": float("nan")}},
        {"detail": {"a": object()}},
        {"detail": {"a": "z" * 100_000}},
    ],
)
def test_strange_words_cannot_stop_the_audit(play: Play, strange: dict[str, Any]) -> None:
    async def story(world: World) -> None:
        audit = AuditLog(world.database)
        audit.note(**{**REFUSED, **strange})
        audit.note(**REFUSED)
        await audit.turn()
        found = await rows(world)
        assert sum(row["times"] for row in found) == 2
        assert all(len(json.dumps(row, default=str)) < 15_000 for row in found)

    play(story)


def test_stopping_writes_what_waits(play: Play) -> None:
    async def story(world: World) -> None:
        async with AuditLog(world.database) as audit:
            for number in range(WRITTEN_MAX + 1):
                audit.note(**{**REFUSED, "task_id": number})
        assert len(await rows(world)) == WRITTEN_MAX + 1
        # And ends if it cannot.
        async with AuditLog(Away(world.database)) as audit:
            audit.note(**REFUSED)

    play(story)


def test_pages_of_the_audit(play: Play) -> None:
    async def story(world: World) -> None:
        audit = AuditLog(world.database)
        for task in (1, 2, 1, 2, 1):
            world.later(60)
            audit.note(**{**REFUSED, "task_id": task})
            audit.note(**{**REFUSED, "task_id": task, "outcome": "allowed"})
            await audit.turn()
        first = await audit.listed(task_id=1, outcome="refused", limit=2)
        assert len(first.notes) == 2
        rest = await audit.listed(task_id=1, outcome="refused", limit=2, before=first.before)
        assert [each.task_id for each in (*first.notes, *rest.notes)] == [1, 1, 1]
        assert rest.before is None
        ids = [each.id for each in (await audit.listed()).notes]
        assert ids == sorted(ids, reverse=True)
        assert len(ids) == 10

    play(story)


def test_old_notes_are_removed(play: Play) -> None:
    async def story(world: World) -> None:
        audit = AuditLog(world.database)
        for number in range(5):
            audit.note(**{**REFUSED, "task_id": number})
        await audit.turn()
        world.later(20 * 86_400)
        audit.note(**{**REFUSED, "task_id": 9})
        await audit.turn()
        await whole_pass(world, rows_max=2)
        assert len(await rows(world)) == 6
        world.later(11 * 86_400 - PASS_SECONDS)
        await whole_pass(world, rows_max=2)
        assert [row["task_id"] for row in await rows(world)] == [9]

    play(story)
