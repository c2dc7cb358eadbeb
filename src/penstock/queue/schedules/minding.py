"""The chore that submits the ticks of schedules: exactly one task a tick, whoever does it.

Any number of schedulers may do this at the same time, stall anywhere, and die anywhere. For a tick
that is due a scheduler

1. notes the store's time, reads the cell, and picks the first tick that is due by then;
2. submits the task with a key made of the schedule's name, the birth of its definition and the
   tick, as a submit of the moment that was noted before the cell was read;
3. moves the cursor from where it was read to the tick, by a swap, and writes the moment of the
   choice beside it as `moved_ms`.

| dies | leaves |
|---|---|
| before 2 | nothing; the next scheduler submits |
| inside 2 | perhaps a pointer, perhaps the pack; the next submit of the same key makes up for it |
| between 2 and 3 | a tick that is submitted and not done with: submitted again, the same task |
| after 3 | nothing to do |

**Why a tick cannot be submitted twice.** Let a submit of the tick T have succeeded at the moment u,
and let another scheduler, who read the cell at r and saw a cursor before T, submit T again. The
first task's key stays taken until `KEPT_SECONDS` after its end, so until u + `KEPT_SECONDS` at
least, and its tombstone for W after that.

- Its put meets the first pack: refused.
- It meets the tombstone: a pack of a submit before the key's end is a duplicate, and is deleted
  (R6). It is one, if r < u + `KEPT_SECONDS`.
- The tombstone is gone, so it is later than u + `KEPT_SECONDS` + W: as a submit of the moment r
  it is void (R2), if r < u + `KEPT_SECONDS`.

So r < u + `KEPT_SECONDS` is all that is needed. It holds for everybody who was stalled between
reading and submitting. It could fail only for who reads so late and still sees the old cursor,
because the first died before it moved it, and nobody came for a day. Nobody submits T before
max(T, `moved_ms`), with the cell as it was read: not before T is due, and whoever has picked T
instead of the tick that the cursor is at now has made the choice later than `moved_ms`, for who
chooses later never picks an earlier tick (`ticks`), whichever of the former cursors he saw. So if
r < max(T, `moved_ms`) + `KEPT_SECONDS` there is nothing to fear. Otherwise the scheduler first
asks whether there is a task of that key, in the queue or in the archive, and if there is one only
moves the cursor. If it has found none, a submit of another can only come after r.

What is beyond this: that all schedulers are away for longer than the archive keeps its records,
and that the last of them died between 2 and 3.

A tick that cannot be submitted, because the store is away or the queue is drained, stays due and
is tried again; what is late then, `catch_up` decides.

**What it costs.** A tick: a GET, two puts for its task, one for the cursor. While nothing is due: a
GET of the bell in 30 s, a LIST in `LISTED_SECONDS`, and a GET for each schedule that has changed:
five cents a month, whatever the number of schedules. A tick is submitted within a second or so of
its time, if its schedule is known: it is after `HEARD_SECONDS`, or, if the one who wrote it died
before the bell, after `LISTED_SECONDS`. After the death of the worker that minds the schedules
another takes over within 90 s.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import msgspec

from penstock.kernel.cron import is_time_zone
from penstock.kernel.errors import (
    PenstockError,
    StoreError,
    TaskNotFound,
    UnreadableObject,
)
from penstock.queue.access import Access
from penstock.queue.bell import HEARD_SECONDS, Bell
from penstock.queue.control import Door
from penstock.queue.places import keyed_pack
from penstock.queue.reading import Reader
from penstock.queue.running.saying import Saying
from penstock.queue.running.upkeep import Chore
from penstock.queue.schedules.document import Schedule, options_of
from penstock.queue.schedules.ticks import due_ticks
from penstock.queue.submission import Submitter
from penstock.store.base import Version, pages
from penstock.store.cell import Cell
from penstock.store.metered import labelled

KEPT_SECONDS: Final = 86_400
"""How long the key of a tick stays taken after its task is settled."""
LISTED_SECONDS: Final = 900.0
TICKS_A_TURN: Final = 100
"""After so many ticks of one schedule the others have their turn."""
SCHEDULES_MAX: Final = 5_000
_SOON_SECONDS: Final = 0.05
_AGAIN_SECONDS: Final = 30.0


@dataclass(slots=True)
class _Minded:
    """A schedule that this scheduler knows of."""

    cell: Cell[Schedule]
    version: Version
    """As the last list showed it."""
    next_ms: int | None = 0
    """When it is to be looked at: its next tick, as far as is known; None for never."""


class ScheduleChore(Chore):
    """Submits what is due."""

    name = "the schedules"

    def __init__(self, access: Access, bell: Bell) -> None:
        self._access = access
        self._bell = bell
        self._clock = access.store.clock.machine
        self._say = Saying(self._clock)
        self._door = Door(access)
        self._known: dict[str, _Minded] = {}
        self._heard: Version | None = None
        self._list_at = float("-inf")

    async def turn(self) -> float:
        with labelled("schedules"):
            await self._learn()
            for name, minded in tuple(self._known.items()):
                if minded.next_ms is not None and minded.next_ms <= await self._now_ms():
                    minded.next_ms = await self._mind(name, minded)
        return await self._seconds_to_next()

    async def _seconds_to_next(self) -> float:
        times = [each.next_ms for each in self._known.values() if each.next_ms is not None]
        to_next = min(times) / 1000 - self._access.now().earliest if times else HEARD_SECONDS
        return max(_SOON_SECONDS, min(HEARD_SECONDS, to_next))

    async def _learn(self) -> None:
        """List the schedules, if the bell has rung or it was long ago."""
        rung = await self._bell.version()
        if rung == self._heard and self._clock.monotonic() < self._list_at:
            return
        access, found = self._access, dict[str, _Minded]()
        async for page in pages(access.store, access.layout.schedules):
            for entry in page.entries:
                name = access.layout.read_schedule(entry.key)
                if name is None:
                    self._say(f"an object that is not ours is left alone: {entry.key}")
                    continue
                known = self._known.get(name)
                if known is None or known.version != entry.version:
                    cell = Cell(access.store, entry.key, Schedule, entropy=access.entropy)
                    known = _Minded(known.cell if known else cell, entry.version)
                found[name] = known
            if len(found) >= SCHEDULES_MAX:
                self._say(f"there are more than {SCHEDULES_MAX} schedules: not all are minded")
                break
        self._known, self._heard = found, rung
        self._list_at = self._clock.monotonic() + LISTED_SECONDS

    async def _mind(self, name: str, minded: _Minded) -> int | None:
        """Submit what is due of a schedule; returns when it is to be looked at again."""
        try:
            return await self._submit_due(name, minded.cell)
        except (StoreError, UnreadableObject, ValueError, OverflowError) as error:
            # Also a cron line of a later release: one must not hold up the others.
            self._say(f"the schedule {name!r} cannot be minded, trying again: {error}")
        except PenstockError as error:
            # The queue takes no tasks now, say.
            self._say(f"a task of the schedule {name!r} is refused, trying again: {error}")
        return await self._now_ms() + int(_AGAIN_SECONDS * 1000)

    async def _submit_due(self, name: str, cell: Cell[Schedule]) -> int | None:
        chosen_ms = read_ms = await self._now_ms()
        schedule = await cell.read()
        if schedule is None or schedule.paused:
            return None
        if not is_time_zone(schedule.time_zone):
            self._say(
                f"the schedule {name!r} waits: this machine knows no time zone"
                f" {schedule.time_zone!r}; install tzdata"
            )
            return read_ms + int(LISTED_SECONDS * 1000)
        ticks = due_ticks(
            schedule.cron,
            time_zone=schedule.time_zone,
            cursor_ms=schedule.cursor_ms,
            now_ms=chosen_ms,
            catch_up=schedule.catch_up,
        )
        for tick_ms in ticks[:TICKS_A_TURN]:
            task = await self._submit(name, schedule, tick_ms, read_ms)
            after = await self._move(cell, schedule, tick_ms, chosen_ms, task)
            if after is None or after.born != schedule.born or after.paused:
                break
            # A new reading, for the submit of the next tick rests on it.
            read_ms = await self._now_ms()
            present = await cell.read()
            if present is None or present.born != schedule.born or present.cursor_ms != tick_ms:
                return read_ms
            schedule = present
        if len(ticks) > TICKS_A_TURN:
            return read_ms
        last = cell.last.state if cell.last else None
        return None if last is None or last.paused else _next_ms(last, read_ms)

    async def _submit(self, name: str, schedule: Schedule, tick_ms: int, read_ms: int) -> str:
        """Submit the task of a tick, once; returns its id."""
        key = f"schedule {name} {schedule.born} {tick_ms}"
        at = keyed_pack(type=schedule.type, key=key)
        is_late = read_ms >= max(tick_ms, schedule.moved_ms) + KEPT_SECONDS * 1000
        if is_late and await self._was_submitted(key, schedule):
            return at.task(0)
        await self._door.check(schedule.type)
        access = self._access
        return await Submitter(access.store, access.layout, access.entropy).submit_keyed(
            schedule.type,
            schedule.part("input"),
            options_of(name, schedule, key=key, tick=_iso(tick_ms)),
            key_seconds=KEPT_SECONDS,
            submitted_ms=read_ms,
        )

    async def _was_submitted(self, key: str, schedule: Schedule) -> bool:
        """Whether there is a task of this key, or a record of one."""
        at = keyed_pack(type=schedule.type, key=key)
        try:
            await Reader(self._access).view(at, 0)
        except TaskNotFound:
            return False
        return True

    async def _move(
        self, cell: Cell[Schedule], schedule: Schedule, tick_ms: int, chosen_ms: int, task: str
    ) -> Schedule | None:
        def change(present: Schedule | None) -> Schedule | None:
            if present is None or present.born != schedule.born:
                return present
            if present.cursor_ms != schedule.cursor_ms:
                return present  # Another has moved it; if not so far, the tick comes up again.
            return msgspec.structs.replace(
                present,
                cursor_ms=tick_ms,
                moved_ms=max(present.moved_ms, chosen_ms),
                last_tick_ms=tick_ms,
                last_task=task,
            )

        return await cell.update(change)

    async def _now_ms(self) -> int:
        return int((await self._access.store.now()).earliest * 1000)


def _next_ms(schedule: Schedule, now_ms: int) -> int | None:
    """The next tick after this moment; those before it are done with, or left out."""
    after = msgspec.structs.replace(schedule, cursor_ms=max(schedule.cursor_ms, now_ms))
    return after.next_tick_ms()


def _iso(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, tz=UTC).isoformat().replace("+00:00", "Z")
