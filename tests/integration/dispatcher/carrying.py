"""Carriers that do as a test says, and a clock that a test moves."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.dispatcher.outbox import OutboxCarrier, OutboxEntry, Relay, RelayLimits
from penstock.dispatcher.wakeups.base import TaskCounts, WakeUpChannel, WakeUpSender
from tests.integration.dispatcher.world import World

LIMITS = RelayLimits(carry_seconds_max=20, tries_max=3, first_ms=1000, max_ms=8000, pace_seconds=0)


@dataclass
class Still:
    """A clock that stands still until it is moved; sleeping is the loop's."""

    now: float = 0.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("nothing here sleeps")


@dataclass
class Script:
    """A carrier: what it carried, what it refuses, by target or body's `n`, and what hangs."""

    carried: list[OutboxEntry] = field(default_factory=list)
    calls: int = 0
    refused: dict[object, str] = field(default_factory=dict)
    raises: Exception | None = None
    hanging: set[str] = field(default_factory=set)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)

    async def carry(self, rows: Sequence[OutboxEntry]) -> Mapping[int, str]:
        self.calls += 1
        assert len({row.target for row in rows}) == 1
        if rows[0].target in self.hanging:
            await self.go_on.wait()
        if self.raises is not None:
            raise self.raises
        failed = {
            row.id: why
            for row in rows
            if (why := self.refused.get(row.target) or self.refused.get(row.body.get("n")))
        }
        self.carried += [row for row in rows if row.id not in failed]
        return failed

    @property
    def said(self) -> list[str]:
        """What was carried, by target and `n`, sorted."""
        return sorted(f"{row.target} {row.body.get('n', '')}".strip() for row in self.carried)


class Words(WakeUpSender):
    """A sender that remembers, and refuses some."""

    def __init__(self, refused: Mapping[WakeUpChannel, str] | None = None) -> None:
        self.sent: list[WakeUpChannel] = []
        self.tasks_of: dict[WakeUpChannel, int] = {}
        """How many tasks there were when a channel was sent last."""
        self.refused = dict(refused or {})

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def send(self, tasks_of: TaskCounts) -> Mapping[WakeUpChannel, str]:
        self.sent += sorted(each for each in tasks_of if each not in self.refused)
        self.tasks_of |= tasks_of
        return {each: self.refused[each] for each in tasks_of if each in self.refused}


@dataclass
class Post:
    """A world's outbox and one relay of it."""

    world: World
    carrier: OutboxCarrier
    clock: Still = field(default_factory=Still)
    limits: RelayLimits = LIMITS

    def __post_init__(self) -> None:
        self.relay = self.another()

    def another(self) -> Relay:
        carriers = {"say": self.carrier}
        return Relay(self.world.database, carriers=carriers, limits=self.limits, clock=self.clock)

    def later(self, seconds: float) -> None:
        """Let time pass, for the database and this machine."""
        self.world.later(seconds)
        self.clock.now += seconds

    async def put(
        self, target: str, *numbers: int, kind: str = "say", in_seconds: float = 0
    ) -> None:
        """Rows for a target, whose bodies differ if the numbers do."""
        for number in numbers:
            await self.world.rows(
                "INSERT INTO outbox (kind, target, body, due_at) VALUES (%s, %s,"
                " jsonb_build_object('n', %s::int), penstock_now() + %s * interval '1 second')",
                *(kind, target, number, in_seconds),
            )

    async def left(self) -> list[str]:
        rows = await self.world.rows(
            "SELECT target, body ->> 'n' AS n FROM outbox ORDER BY target, 2, id"
        )
        return [f"{row['target']} {row['n']}" for row in rows]
