"""Schedules: tasks that are submitted at the times of a cron expression, exactly one a tick.

    await queue.schedules.add(
        "nightly", cron="0 3 * * *", time_zone="Europe/Paris", type="report", input={"of": "day"}
    )

One cell a schedule, `schedules/{name}.json`: the definition, which users write (`Schedules`),
and the cursor, which the `Scheduler` moves. Times are the store's.

- A definition has a random `born`, which is part of the keys of its ticks. To add the same
  definition again changes nothing; another one under the same name is refused or, with `replace`,
  is a new schedule: its first tick is the first after that moment.
- While a schedule is paused its ticks pass; after `resume` it goes on with the next one.
- To remove it is to delete the cell. A scheduler that has read it just before may submit one
  tick
  more.
- What would be refused at a tick is refused here, while somebody reads the error.

Every change is one read and one conditional write, after which the change signal is rung: two
puts and a GET. A crash before the ring leaves the change, which the next list notices.

**Ticks.** A tick is a time that the cron expression names in the schedule's time zone. Ticks up
to and including the cursor are done. `catch_up` decides about missed ones:

| catch_up | what is submitted |
|---|---|
| `skip` | ticks that are at most `GRACE_SECONDS` late, oldest first; older ones are left out |
| `one` | the last tick that is due, for all before it too |
| `all` | every tick, oldest first, the last `CATCH_UP_MAX` of them |

A later look picks the same tick or a later one: the argument below rests on that.

**The scheduler.** Any number may run at once, stall anywhere, and die anywhere. For a due tick
it

1. notes the store's time, reads the cell, and picks the first tick that is due by then;
2. submits the task with a key made of the schedule's name, the birth of its definition and the
   tick, as a submit of the moment that was noted before the cell was read;
3. moves the cursor from where it was read to the tick, by a swap, and writes the moment of the
   choice beside it as `moved_ms`.

| a crash | leaves |
|---|---|
| before 2 | nothing; the next scheduler submits |
| inside 2 | perhaps a pointer, perhaps the pack; the next submit of the same key completes it |
| between 2 and 3 | a submitted tick beyond the cursor: submitted again, the same task |
| after 3 | nothing to do |

**Why a tick cannot be submitted twice.** Let a submit of the tick T have succeeded at the
moment u, and let another scheduler, who read the cell at r and saw a cursor before T, submit T
again. The first task's key stays taken until `KEPT_SECONDS` after its end, so until u +
`KEPT_SECONDS` at least, and its tombstone for W after that.

- Its put meets the first pack: refused.
- It meets the tombstone: a pack of a submit before the key's end is a duplicate, and is deleted
  (QUEUE-6). It is one, if r < u + `KEPT_SECONDS`.
- The tombstone is gone, so it is later than u + `KEPT_SECONDS` + W: as a submit of the moment r
  it is void (QUEUE-2), if r < u + `KEPT_SECONDS`.

So r < u + `KEPT_SECONDS` is all that is needed (QUEUE-21). It holds for every scheduler that
stalled between reading and submitting. It could fail only for one that reads so late and still sees
the old cursor, because the first died before it moved it, and none came for a day. Nobody submits T
before max(T, `moved_ms`), with the cell as it was read: not before T is due, and whoever has picked
T instead of the tick of the present cursor has made the choice later than `moved_ms`, for a later
choice never picks an earlier tick, whichever of the former cursors it saw. So if r < max(T,
`moved_ms`) + `KEPT_SECONDS` a second submit is impossible. Otherwise the scheduler first looks for
a task of that key, in the queue or in the archive, and if there is one only moves the cursor. If it
has found none, a submit of another can only come after r.

Not covered: that all schedulers are away for longer than the archive keeps its records, and that
the last of them died between 2 and 3.

A tick that cannot be submitted, because the store is unavailable or the queue is drained, stays
due and is retried; `catch_up` decides what is too late then.

**Cost.** A tick: a GET, two puts for its task, one for the cursor. While nothing is due: a GET
of the change signal in 30 s, a LIST in `LISTED_SECONDS`, and a GET for each schedule that has
changed: five cents a month, whatever the number of schedules. A tick is submitted within a
second or so of its time, if its schedule is known: after `HEARD_SECONDS`, or, if its writer
died before the ring, after `LISTED_SECONDS`. After the death of the scheduling worker another
takes over within 90 s.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, ClassVar, Final

import msgspec

from penstock.kernel.cron import is_time_zone, next_after, parse_cron, previous_before, time_zones
from penstock.kernel.document_format import Stamped, decode
from penstock.kernel.entropy import new_id
from penstock.kernel.errors import (
    InvalidInput,
    PenstockError,
    ScheduleNotFound,
    StoreError,
    TaskNotFound,
    UnreadableObject,
)
from penstock.kernel.text import listed, nearest, shown
from penstock.queue.context import LogLimiter, QueueContext
from penstock.queue.control import SubmitGuard
from penstock.queue.doorbell import HEARD_SECONDS, ChangeSignal
from penstock.queue.ids import TaskId, check_name, keyed_pack
from penstock.queue.maintenance import MaintenanceTask
from penstock.queue.submit_options import TAGS_MAX, SubmitOptions, check_inputs, held_input
from penstock.queue.submitter import Submitter
from penstock.queue.task_reader import QueueTaskReader
from penstock.store.base import Version, find, pages
from penstock.store.cell import Cell
from penstock.store.metered import labelled

GRACE_SECONDS: Final = 300
"""So late a tick still counts as in time: the takeover from a scheduler that died is shorter."""
CATCH_UP_MAX: Final = 1000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)


class CatchUp(StrEnum):
    """What becomes of ticks for which nobody was there."""

    SKIP = "skip"
    ONE = "one"
    ALL = "all"


def due_ticks(
    cron: str, *, time_zone: str, cursor_ms: int, now_ms: int, catch_up: CatchUp
) -> tuple[int, ...]:
    """The ticks to submit, oldest first, in milliseconds since the epoch."""
    most = 1 if catch_up is CatchUp.ONE else CATCH_UP_MAX
    late_ms = now_ms - GRACE_SECONDS * 1000 - 1
    after_ms = max(cursor_ms, late_ms) if catch_up is CatchUp.SKIP else cursor_ms
    found: list[int] = []
    before = _time(now_ms) + _MILLISECOND
    while len(found) < most:
        tick = previous_before(parse_cron(cron), before, time_zone=time_zone)
        if tick is None or milliseconds(tick) <= after_ms:
            break
        found.append(milliseconds(tick))
        before = tick
    return tuple(reversed(found))


def next_tick(cron: str, *, time_zone: str, after_ms: int) -> int | None:
    """The first tick after a moment; None only at the end of the calendar."""
    tick = next_after(parse_cron(cron), _time(after_ms), time_zone=time_zone)
    return None if tick is None else milliseconds(tick)


def _time(ms: int) -> datetime:
    return _EPOCH + ms * _MILLISECOND


def milliseconds(time: datetime) -> int:
    """A time in milliseconds since the epoch."""
    return (time - _EPOCH) // _MILLISECOND


SCHEDULE_TAG: Final = "schedule"
TICK_TAG: Final = "tick"
"""The tags that a task gets: the name of its schedule, and the time that it was submitted for."""

_DEFINITION: Final = (
    "cron",
    "time_zone",
    "type",
    "input",
    "catch_up",
    "priority",
    "limit",
    "expires",
    "tags",
)


class Schedule(Stamped, frozen=True, kw_only=True):
    """The cell of a schedule. Times are in milliseconds."""

    kind: ClassVar[str] = "schedule"

    born: str
    """Drawn when the definition was written: another definition is another schedule."""
    created_ms: int
    cron: str
    time_zone: str
    type: str
    input: msgspec.Raw
    catch_up: CatchUp
    priority: int = 0
    limit: str = ""
    expires: float | None = None
    tags: dict[str, str] = msgspec.field(default_factory=dict)
    paused: bool = False
    cursor_ms: int
    """Ticks up to this moment are done with."""
    moved_ms: int
    """Nobody has submitted a tick that is later than the cursor before this moment."""
    last_tick_ms: int = 0
    last_task: str = ""
    """The task of the last tick that was submitted."""

    def part(self, name: str) -> Any:
        """A part of the definition, as users give it."""
        value = getattr(self, name)
        return json.loads(bytes(value)) if name == "input" else value

    def differences(self, other: Schedule) -> list[str]:
        """Which parts of the two definitions are not the same."""
        return [name for name in _DEFINITION if self.part(name) != other.part(name)]

    def next_tick_ms(self) -> int | None:
        """The first tick that is not done with."""
        return next_tick(self.cron, time_zone=self.time_zone, after_ms=self.cursor_ms)


@dataclass(frozen=True, slots=True)
class ScheduleView:
    """A schedule as it was a moment ago. Times are in seconds since the epoch."""

    name: str
    cron: str
    time_zone: str
    type: str
    input: Any
    catch_up: str
    priority: int
    limit: str
    expires: float | None
    """Seconds after which a task that has not begun never will."""
    tags: Mapping[str, str]
    is_paused: bool
    created_at: float
    next_at: float | None
    """The next tick; None while it is paused."""
    last_at: float | None
    """The last tick that was submitted, and its task."""
    last_task: str


def view_of(name: str, schedule: Schedule) -> ScheduleView:
    """What users are shown of a schedule."""
    next_ms = None if schedule.paused else schedule.next_tick_ms()
    return ScheduleView(
        name=name,
        cron=schedule.cron,
        time_zone=schedule.time_zone,
        type=schedule.type,
        input=schedule.part("input"),
        catch_up=str(schedule.catch_up),
        priority=schedule.priority,
        limit=schedule.limit,
        expires=schedule.expires,
        tags=schedule.tags,
        is_paused=schedule.paused,
        created_at=schedule.created_ms / 1000,
        next_at=None if next_ms is None else next_ms / 1000,
        last_at=schedule.last_tick_ms / 1000 if schedule.last_tick_ms else None,
        last_task=schedule.last_task,
    )


def options_of(
    name: str, schedule: Schedule, *, key: str | None = None, tick: str = ""
) -> SubmitOptions:
    """How a task of a schedule is submitted; its tags tell the schedule, and the tick."""
    tags = {**schedule.tags, SCHEDULE_TAG: name, **({TICK_TAG: tick} if tick else {})}
    return SubmitOptions(
        key=key,
        priority=schedule.priority,
        limit=schedule.limit,
        expires=schedule.expires,
        tags=tags,
    )


_OWN_TAGS: Final = (SCHEDULE_TAG, TICK_TAG)
REPLACE: Final = "replace=True"
"""How one says in Python that a schedule replaces another; the command line has its own word."""


def check_cron(text: str) -> str:
    """The expression as it is stored, or `InvalidInput`."""
    try:
        return parse_cron(text).expression
    except ValueError as error:
        raise InvalidInput(
            f"The cron line {shown(text)} {error}.",
            hint="For example: '0 3 * * *' is every day at three, '*/5 * * * *' every 5 minutes.",
        ) from error


def check_time_zone(name: str) -> str:
    """The name of a time zone, or `InvalidInput`."""
    if not is_time_zone(name):
        by_small = {each.lower(): each for each in time_zones()}
        like = by_small.get(nearest(name, by_small), "")
        hint = f"Did you mean {like!r}?" if like else "For example: 'Europe/Paris', or 'UTC'."
        raise InvalidInput(f"{shown(name)} is not a time zone.", hint=hint)
    return name


def check_catch_up(text: str) -> CatchUp:
    """What to do about missed ticks, or `InvalidInput`."""
    try:
        return CatchUp(text)
    except ValueError as error:
        raise InvalidInput(
            f"{shown(str(text))} is not a catch-up policy.",
            hint="'skip' leaves missed ticks out, 'one' submits the last, 'all' every one.",
        ) from error


def check_tags(tags: Mapping[str, str]) -> dict[str, str]:
    """The tags, unless they are in the way of those that a schedule gives its tasks."""
    for name in _OWN_TAGS:
        if name in tags:
            raise InvalidInput(
                f"The tag {name!r} is set by the schedule itself.",
                hint="Choose another name.",
            )
    if len(tags) > TAGS_MAX - len(_OWN_TAGS):
        raise InvalidInput(
            f"A schedule has at most {TAGS_MAX - len(_OWN_TAGS)} tags, not {len(tags)}."
        )
    return dict(tags)


def taken(name: str, present: Schedule, new: Schedule, differences: Sequence[str]) -> InvalidInput:
    """The error for a second definition of one name."""
    told = listed(
        f"its {each} is {_word(present, each)} and not {_word(new, each)}" for each in differences
    )
    return InvalidInput(
        f"There is a different schedule {name!r}: {told}.",
        hint=f"Choose another name, or replace it: {REPLACE}.",
    )


def _word(schedule: Schedule, part: str) -> str:
    return shown(value) if isinstance(value := schedule.part(part), str) else f"{value!r:.60}"


SCHEDULES_MAX: Final = 5_000
"""So many are listed."""


class Schedules:
    """The schedules of one queue."""

    def __init__(self, access: QueueContext) -> None:
        self._access = access

    async def add(
        self,
        name: str,
        *,
        cron: str,
        type: str,
        input: object = None,
        time_zone: str = "UTC",
        catch_up: str = "skip",
        priority: int = 0,
        limit: str = "",
        expires: float | None = None,
        tags: Mapping[str, str] | None = None,
        replace: bool = False,
    ) -> ScheduleView:
        """Submit a task of this type at each time of a cron expression, from now on.

        What becomes of ticks for which no worker was there, `catch_up` says: "skip" leaves them
        out, "one" submits the last of them, "all" submits every one. If there is a schedule of
        this name with another definition, it is an error, unless `replace` is true.
        """
        cell = self._cell(name)
        options = SubmitOptions(
            priority=priority, limit=limit, expires=expires, tags=check_tags(tags or {})
        )
        now_ms = await self._after_ms()
        new = Schedule(
            born=new_id(self._access.entropy, characters=12),
            created_ms=now_ms,
            cron=check_cron(cron),
            time_zone=check_time_zone(time_zone),
            type=check_name(type, what="type"),
            input=self._held(type, input),
            catch_up=check_catch_up(catch_up),
            priority=options.priority,
            limit=options.limit,
            expires=options.expires,
            tags=dict(options.tags),
            cursor_ms=now_ms,
            moved_ms=now_ms,
        )

        def change(present: Schedule | None) -> Schedule | None:
            if present is None:
                return new
            differences = present.differences(new)
            if differences and not replace:
                raise taken(name, present, new, differences)
            after = msgspec.structs.replace(new, paused=present.paused)
            return after if differences else present

        with labelled("schedules"):
            written = await cell.update(change)
            await self._access.ring_bell()
        assert written is not None, "it was written, or was there"
        return view_of(name, written)

    def _held(self, type: str, input: object) -> msgspec.Raw:
        """An input as it is kept, if it fits the schema of its type."""
        what = "The input of the schedule"
        held = held_input(input, what=what)
        check_inputs(self._access.config.schemas, [(type, what, held)])
        return held

    async def get(self, name: str) -> ScheduleView:
        """A schedule. Raises `ScheduleNotFound`."""
        return view_of(name, await self._read(name))

    async def list(self) -> tuple[ScheduleView, ...]:
        """All schedules, by name: a LIST for every 1,000, and a GET for each."""
        views = []
        with labelled("schedules"):
            for name in await self._names():
                where = self._access.layout.schedule(name)
                found = await find(self._access.store, where)
                if found is not None:
                    views.append(view_of(name, decode(Schedule, found.body, where=where)))
        return tuple(views)

    async def pause(self, name: str) -> ScheduleView:
        """Let its ticks pass until `resume`. Raises `ScheduleNotFound`."""
        return await self._change(name, lambda found: msgspec.structs.replace(found, paused=True))

    async def resume(self, name: str) -> ScheduleView:
        """Go on with the first tick after this moment. Raises `ScheduleNotFound`."""
        now_ms = await self._after_ms()

        def resumed(found: Schedule) -> Schedule:
            if not found.paused:
                return found
            cursor_ms = max(found.cursor_ms, now_ms)
            return msgspec.structs.replace(found, paused=False, cursor_ms=cursor_ms)

        return await self._change(name, resumed)

    async def remove(self, name: str) -> None:
        """Remove it; what it has submitted stays. Raises `ScheduleNotFound`."""
        await self._read(name)
        with labelled("schedules"):
            # Whatever version it is in: a tick in between must not keep it.
            await self._access.store.delete(self._access.layout.schedule(name))
            await self._access.ring_bell()

    async def run(self, name: str) -> TaskId:
        """Submit its task now, besides its ticks; returns the task's id."""
        schedule = await self._read(name)
        access = self._access
        (task,) = await Submitter.of(access).submit_many(
            schedule.type, [schedule.part("input")], options_of(name, schedule)
        )
        return task

    async def _change(self, name: str, change: Callable[[Schedule], Schedule]) -> ScheduleView:
        def changed(present: Schedule | None) -> Schedule | None:
            after = change(present) if present is not None else None
            return present if after == present else after

        with labelled("schedules"):
            written = await self._cell(name).update(changed)
            if written is None:
                raise await self._not_found(name)
            await self._access.ring_bell()
        return view_of(name, written)

    async def _read(self, name: str) -> Schedule:
        with labelled("schedules"):
            found = await self._cell(name).read()
            if found is None:
                raise await self._not_found(name)
        return found

    def _cell(self, name: str) -> Cell[Schedule]:
        access = self._access
        return Cell(access.store, access.layout.schedule(name), Schedule, entropy=access.entropy)

    async def _after_ms(self) -> int:
        """A moment that has surely come when this was asked for."""
        return int((await self._access.store.now()).latest * 1000)

    async def _names(self) -> tuple[str, ...]:
        layout = self._access.layout
        names: tuple[str, ...] = ()
        async for page in pages(self._access.store, layout.schedules):
            read = (layout.read_schedule(entry.key) for entry in page.entries)
            names += tuple(name for name in read if name is not None)
            if len(names) >= SCHEDULES_MAX:
                break
        return names[:SCHEDULES_MAX]

    async def _not_found(self, name: str) -> ScheduleNotFound:
        names = await self._names()
        like = nearest(name, names)
        known = (
            f"There are: {listed(names)}."
            if names
            else "The queue has no schedules yet; 'penstock queue schedule add' adds one."
        )
        return ScheduleNotFound(
            f"There is no schedule {name!r} in the queue {self._access.layout.queue!r}.",
            hint=f"Did you mean {like!r}?" if like else known,
        )


KEPT_SECONDS: Final = 86_400
"""How long the key of a tick stays taken after its task is settled."""
LISTED_SECONDS: Final = 900.0
TICKS_A_TURN: Final = 100
"""After so many ticks of one schedule the others have their turn."""
_SOON_SECONDS: Final = 0.05
_AGAIN_SECONDS: Final = 30.0


@dataclass(slots=True)
class _Tracked:
    """A schedule that this scheduler knows of."""

    cell: Cell[Schedule]
    version: Version
    """As the last list showed it."""
    next_ms: int | None = 0
    """When it is to be looked at: its next tick, as far as is known; None for never."""


class Scheduler(MaintenanceTask):
    """Submits what is due."""

    name = "the schedules"

    def __init__(self, access: QueueContext, bell: ChangeSignal) -> None:
        self._access = access
        self._bell = bell
        self._clock = access.store.clock.machine
        self._warn = LogLimiter(self._clock)
        self._guard = SubmitGuard(access)
        self._known: dict[str, _Tracked] = {}
        self._read_version: Version | None = None
        self._list_at = float("-inf")

    async def turn(self) -> float:
        with labelled("schedules"):
            await self._learn()
            for name, tracked in tuple(self._known.items()):
                if tracked.next_ms is not None and tracked.next_ms <= await self._now_ms():
                    tracked.next_ms = await self._process(name, tracked)
        return await self._seconds_to_next()

    async def _seconds_to_next(self) -> float:
        times = [each.next_ms for each in self._known.values() if each.next_ms is not None]
        to_next = min(times) / 1000 - self._access.now().earliest if times else HEARD_SECONDS
        return max(_SOON_SECONDS, min(HEARD_SECONDS, to_next))

    async def _learn(self) -> None:
        """List the schedules, if the bell has rung or it was long ago."""
        rung = await self._bell.version()
        if rung == self._read_version and self._clock.monotonic() < self._list_at:
            return
        access, found = self._access, dict[str, _Tracked]()
        async for page in pages(access.store, access.layout.schedules):
            for entry in page.entries:
                name = access.layout.read_schedule(entry.key)
                if name is None:
                    self._warn(f"skipped an object that is not of this queue: {entry.key}")
                    continue
                known = self._known.get(name)
                if known is None or known.version != entry.version:
                    cell = Cell(access.store, entry.key, Schedule, entropy=access.entropy)
                    known = _Tracked(known.cell if known else cell, entry.version)
                found[name] = known
            if len(found) >= SCHEDULES_MAX:
                self._warn(f"there are more than {SCHEDULES_MAX} schedules: not all are processed")
                break
        self._known, self._read_version = found, rung
        self._list_at = self._clock.monotonic() + LISTED_SECONDS

    async def _process(self, name: str, tracked: _Tracked) -> int | None:
        """Submit what is due of a schedule; returns when it is to be looked at again."""
        try:
            return await self._submit_due(name, tracked.cell)
        except (StoreError, UnreadableObject, ValueError, OverflowError) as error:
            # Also a cron line of a later release: one must not hold up the others.
            self._warn(f"failed to process the schedule {name!r}, retrying: {error}")
        except PenstockError as error:
            # The queue takes no tasks now, say.
            self._warn(f"failed to submit a task of the schedule {name!r}, retrying: {error}")
        return await self._now_ms() + int(_AGAIN_SECONDS * 1000)

    async def _submit_due(self, name: str, cell: Cell[Schedule]) -> int | None:
        chosen_ms = read_ms = await self._now_ms()
        schedule = await cell.read()
        if schedule is None or schedule.paused:
            return None
        if not is_time_zone(schedule.time_zone):
            self._warn(
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
        await self._guard.check(schedule.type)
        access = self._access
        return await Submitter.of(access).submit_keyed(
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
            await QueueTaskReader(self._access).view(at, 0)
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
