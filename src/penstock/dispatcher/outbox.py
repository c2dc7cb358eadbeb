"""The transactional outbox: the relay, its steering by people, and the reconciler.

A row is written by the transaction that wants the side effect; from then on it is the relay's.

| a row is | means | moved by |
|---|---|---|
| due | nobody has it in hand | `turn` lends it to itself: `due_at` moves past the loan's end |
| lent | one relay is carrying it out | that relay: sent → deleted; failed → due again, after a |
| | | pause that grows with its tries, or parked; the end of the loan → due |
| parked | it failed too often | `Outbox.retry`; an equal row that is sent takes it away |

Rows are taken (`SKIP LOCKED`), carried out, and recorded one by one: three short transactions,
with none around the side effect, so nothing slow holds a lock, a connection or another row.

- Rows that say the same (kind, target and body) become one when they are taken.
- Rows of one target are carried out together, one delivery at a time in a relay. A turn waits
  for
  the deliveries that it began, but not for long: one that hangs is left to itself until its time is
  over, and meanwhile only its own target's rows wait.
- A target of which nothing could be carried out is left alone for a while that grows.
- A kind that this relay has no carrier for is left to other dispatchers, which may be newer.
  What
  none has taken for a minute is parked, visibly (FENCE-16).

A crash loses nothing: what was lent and not recorded comes again when the loan is over, and may be
carried out twice. Every `OutboxCarrier` must allow for that (FENCE-15). The relay runs in a loop
that commits of this process kick; commits of others, and what is due later, are found by the
poller.

`Outbox` shows parked rows and retries them. `Reconciler` repeats lost wake-ups: what could be
claimed and has waited too long is announced again, at most once in that time for an operator and
priority, however many dispatchers look. A parked projection is tried again every few minutes. A
turn of it is one short transaction.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, NamedTuple, Protocol

from penstock.dispatcher.database.pool import Connection, Database, query
from penstock.dispatcher.tasks.rows import storable, wake
from penstock.dispatcher.wakeups.base import TASKS_COUNTED_MAX
from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.service import Service
from penstock.protocol.steering import OutboxAnswer, OutboxRow


class OutboxKind(StrEnum):
    """The kinds of rows that there are today."""

    WAKE = "wake"
    """An operator has work: the body says `operator` and `priority`; the relay adds `tasks`, how
    many can be claimed when it is sent."""
    INVOKE = "invoke"
    """A function is to be invoked for the task `task_id` of the body."""
    PROJECT = "project"
    """What has moved of the `dataset` of the body, in its `generation` if there is one, is to be
    written for readers without Postgres."""


@dataclass(frozen=True, slots=True)
class OutboxEntry:
    """One side effect that is due. Rows of one target may be carried out together."""

    id: int
    kind: str
    target: str
    body: Mapping[str, Any]
    tries: int
    """How often it could not be carried out."""


class OutboxCarrier(Protocol):
    """Carries out side effects of one kind."""

    async def carry(self, rows: Sequence[OutboxEntry]) -> Mapping[int, str]:
        """Carry out rows of one target; returns why, by id, for those that could not be.

        An error that it raises is that of all rows. It is interrupted if it takes too long. It may
        be asked again for what it has done: a crash, or an answer that is late, forgets that.
        """
        ...


_log = logging.getLogger(__name__)

LOOK_SECONDS_MAX: Final = 30.0
"""How long it goes without a look if nobody kicks it."""
ROWS_MAX: Final = 500
ORPHAN_SECONDS: Final = 60.0
_PATIENCE_SECONDS: Final = 0.1
_LENT_SECONDS_MORE: Final = 20.0
_ERROR_CHARACTERS_MAX: Final = 1000
_REST_SECONDS_MAX: Final = 15.0
_FORGOTTEN_SECONDS: Final = 300.0
_STOP_SECONDS_MAX: Final = 5.0

Target = tuple[str, str]
"""Kind and target."""


@dataclass(frozen=True, slots=True)
class RelayLimits:
    """How hard the relay tries."""

    carry_seconds_max: float = 20.0
    """How long a carrier may take for the rows that it was given."""
    tries_max: int = 12
    """After so many failures a row is parked: with these pauses, after about six minutes."""
    first_ms: int = 500
    max_ms: int = 60_000
    pace_seconds: float = 0.025
    """How long after a turn that found something the next begins, at least: what is committed
    meanwhile goes together."""


@dataclass(frozen=True, slots=True)
class _Delivery:
    rows: Sequence[OutboxEntry]
    work: asyncio.Task[Mapping[int, str]]


@dataclass(frozen=True, slots=True)
class _Rest:
    failures: int
    ends_at: float


@dataclass(frozen=True, slots=True)
class _Taken:
    rows: Sequence[OutboxEntry]
    found: int
    next_seconds: float | None


class Relay(Service):
    """One dispatcher's relay. `stop` ends the deliveries that a turn has left to themselves."""

    def __init__(
        self,
        database: Database,
        *,
        carriers: Mapping[str, OutboxCarrier],
        limits: RelayLimits | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._database = database
        self._carriers = dict(carriers)
        self._limits = limits or RelayLimits()
        self._clock = clock or SystemClock()
        self._deliveries: dict[Target, _Delivery] = {}
        self._resting: dict[Target, _Rest] = {}
        self._not_before = -math.inf

    async def start(self) -> None:
        """Nothing to do: a `Loop` runs `turn`."""

    async def stop(self) -> None:
        """Let deliveries end, for a moment; what is not recorded then comes again."""
        if not self._deliveries:
            return
        works = [each.work for each in self._deliveries.values()]
        _, late = await asyncio.wait(works, timeout=_STOP_SECONDS_MAX)
        for work in late:
            work.cancel()
        if late:
            await asyncio.wait(late, timeout=_STOP_SECONDS_MAX)
        self._deliveries = {
            target: each
            for target, each in self._deliveries.items()
            if each.work.done() and not each.work.cancelled()
        }
        await self._record()

    async def turn(self) -> float:
        """Take what is due and carry it out; returns when the next turn is worth it."""
        early_seconds = self._not_before - self._clock.monotonic()
        if early_seconds > 0:
            await self._clock.sleep(early_seconds)
        await self._record()
        taken = await self._take()
        begun = self._begin(taken.rows)
        if begun:
            self._not_before = self._clock.monotonic() + self._limits.pace_seconds
            await asyncio.wait(begun, timeout=_PATIENCE_SECONDS)
            await self._record()
        if taken.found >= ROWS_MAX:
            return 0.0
        now = self._clock.monotonic()
        rests = [each.ends_at - now for each in self._resting.values()]
        waits = [LOOK_SECONDS_MAX, *(seconds for seconds in rests if seconds > 0)]
        if taken.next_seconds is not None:
            waits.append(taken.next_seconds)
        if self._deliveries:
            waits.append(_PATIENCE_SECONDS)
        return max(0.0, min(waits))

    async def _take(self) -> _Taken:
        now = self._clock.monotonic()
        self._resting = {
            target: each
            for target, each in self._resting.items()
            if each.ends_at > now - _FORGOTTEN_SECONDS
        }
        resting = [target for target, each in self._resting.items() if each.ends_at > now]
        asked = {
            "kinds": list(self._carriers),
            "left_alone": [" ".join(each) for each in (*self._deliveries, *resting)],
            "limit": ROWS_MAX,
            "lent_seconds": self._limits.carry_seconds_max + _LENT_SECONDS_MORE,
            "orphan_seconds": ORPHAN_SECONDS,
        }

        async def work(connection: Connection) -> tuple[_Taken, list[dict[str, Any]]]:
            found = await connection.execute(query("take_outbox"), asked)
            rows = await found.fetchall()
            await _count_tasks(connection, rows)
            ahead = await (await connection.execute(query("look_ahead"), asked)).fetchone()
            assert ahead is not None, "it always has one row"
            orphans: list[dict[str, Any]] = []
            if ahead["has_orphans"]:
                found = await connection.execute(query("park_orphans"), asked)
                orphans = await found.fetchall()
            count = rows[0]["found"] if rows else 0
            return _Taken([_row(row) for row in rows], count, ahead["next_seconds"]), orphans

        taken, orphans = await self._database.transact(work)
        _log_parked(orphans)
        return taken

    def _begin(self, rows: Iterable[OutboxEntry]) -> list[asyncio.Task[Mapping[int, str]]]:
        targets: dict[Target, list[OutboxEntry]] = {}
        for row in sorted(rows, key=lambda row: row.id):
            targets.setdefault((row.kind, row.target), []).append(row)
        loop = asyncio.get_running_loop()
        for target, some in targets.items():
            name = f"deliver {' '.join(target)}"
            work = loop.create_task(self._deliver(self._carriers[target[0]], some), name=name)
            self._deliveries[target] = _Delivery(some, work)
        return [self._deliveries[target].work for target in targets]

    async def _deliver(
        self, carrier: OutboxCarrier, rows: Sequence[OutboxEntry]
    ) -> Mapping[int, str]:
        """Why, for those that were not carried out. Raises nothing but its own cancellation."""
        seconds = self._limits.carry_seconds_max
        try:
            async with asyncio.timeout(seconds):
                return await carrier.carry(rows)
        except TimeoutError as error:
            why = str(error) or f"The delivery timed out after {seconds:g} s."
        except Exception as error:  # noqa: BLE001 - whatever it is, only these rows have failed
            why = str(error) or type(error).__name__
        return {row.id: why for row in rows}

    async def _record(self) -> None:
        """Write down what became of deliveries that have ended. If that fails, the next turn does.

        A delivery counts as under way until then, so that its target waits.
        """
        ended = {target: each for target, each in self._deliveries.items() if each.work.done()}
        if not ended:
            return
        failed: dict[int, str] = {}
        for each in ended.values():
            failed |= {row.id: why for row in each.rows if (why := each.work.result().get(row.id))}
        sent = [row.id for each in ended.values() for row in each.rows if row.id not in failed]
        if sent:
            await self._database.fetch("record_sent", {"rows": sent})
        if failed:
            parked = await self._database.transact(
                lambda connection: _failed(connection, failed, self._limits)
            )
            _log_parked(parked)
        for target, each in ended.items():
            del self._deliveries[target]
            self._mind(target, [failed.get(row.id, "") for row in each.rows])

    def _mind(self, target: Target, outcomes: Sequence[str]) -> None:
        """Leave a target alone for a while if nothing of it could be carried out."""
        before = self._resting.pop(target, None)
        if not all(outcomes):
            if before is not None:
                _log.info("delivery of %s to %s recovered", *target)
            return
        failures = before.failures + 1 if before else 1
        if before is None:
            _log.warning("delivery of %s to %s failed; retrying: %s", *target, outcomes[0])
        pause_ms = min(self._limits.first_ms * 2.0 ** min(failures - 1, 20), self._limits.max_ms)
        seconds = min(pause_ms / 1000, _REST_SECONDS_MAX)
        self._resting[target] = _Rest(failures, self._clock.monotonic() + seconds)


async def _count_tasks(connection: Connection, rows: Iterable[dict[str, Any]]) -> None:
    """Add to the bodies of wake-ups how many tasks there are now, if there are any."""
    wakes = [row["body"] for row in rows if row["kind"] == OutboxKind.WAKE]
    if not wakes:
        return
    operators = sorted({body["operator"] for body in wakes})
    asked = {"operators": operators, "tasks_max": TASKS_COUNTED_MAX}
    found = await connection.execute(query("claimable_tasks"), asked)
    counts = {(row["operator"], row["priority"]): row["tasks"] for row in await found.fetchall()}
    for body in wakes:
        body["tasks"] = counts.get((body["operator"], body["priority"]), 1)


async def _failed(
    connection: Connection, failed: Mapping[int, str], limits: RelayLimits
) -> list[dict[str, Any]]:
    """Write failures down; returns the rows that are parked now."""
    asked = {
        "rows": list(failed),
        "errors": [storable(why)[:_ERROR_CHARACTERS_MAX] for why in failed.values()],
        "tries_max": limits.tries_max,
        "first_ms": limits.first_ms,
        "max_ms": limits.max_ms,
    }
    found = await connection.execute(query("record_failed"), asked)
    parked = [row for row in await found.fetchall() if row["is_parked"]]
    if parked:
        older = {"rows": [row["id"] for row in parked]}
        await connection.execute(query("drop_older_parked"), older)
    return parked


def _row(row: Mapping[str, Any]) -> OutboxEntry:
    return OutboxEntry(row["id"], row["kind"], row["target"], row["body"], row["tries"])


def _log_parked(rows: Iterable[Mapping[str, Any]]) -> None:
    for row in rows:
        _log.error(
            "parked outbox entry %d: delivery of %s to %s failed: %s",
            row["id"],
            row["kind"],
            row["target"],
            row["last_error"],
        )


SHOWN_MAX: Final = 1000


class OutboxCounts(NamedTuple):
    """How many rows there are."""

    pending: int
    parked: int


class Outbox:
    """The outbox, for the API and metrics."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def parked(self) -> OutboxAnswer:
        """What could not be carried out, the oldest first."""

        async def work(connection: Connection) -> OutboxAnswer:
            found = await connection.execute(query("parked_outbox"), {"limit": SHOWN_MAX})
            return OutboxAnswer(parked=[OutboxRow(**row) for row in await found.fetchall()])

        return await self._database.transact(work)

    async def retry(self, ids: Sequence[int]) -> int:
        """Have these tried again, as if they were new; returns how many of them were parked."""

        async def work(connection: Connection) -> int:
            found = await connection.execute(query("retry_outbox"), {"rows": list(ids)})
            return len(await found.fetchall())

        return await self._database.transact(work)

    async def counts(self) -> OutboxCounts:
        """How many rows wait or are in hand, and how many are parked."""

        async def work(connection: Connection) -> OutboxCounts:
            row = await (await connection.execute(query("count_outbox"))).fetchone()
            assert row is not None, "a count is always there"
            return OutboxCounts(row["pending"], row["parked"])

        return await self._database.transact(work)


LOOK_SECONDS: Final = 10.0
"""How often to look while anything waits: three times in the time that a task may wait."""
PARKED_SECONDS: Final = 300.0
"""How long a projection that was parked is left alone."""


class Reconciler:
    """Wakes operators whose tasks wait too long."""

    def __init__(self, database: Database, *, waited_seconds: float = 30.0) -> None:
        self._database = database
        self._waited_seconds = waited_seconds

    async def turn(self) -> None:
        """Look once."""

        async def work(connection: Connection) -> list[str]:
            woken = await wake(connection, "reconcile", waited_seconds=self._waited_seconds)
            targets = [f"{row['operator']}/{row['priority']}" for row in woken]
            await connection.execute(query("drop_parked_invocations"))
            await connection.execute(query("retry_projections"), {"parked_seconds": PARKED_SECONDS})
            return targets

        targets = await self._database.transact(work)
        if targets:
            what = "tasks of %s have waited for %g s: woken again"
            _log.info(what, ", ".join(targets), self._waited_seconds)
