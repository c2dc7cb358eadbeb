"""The schedules of a queue as users see them: add, list, pause, resume, remove, run.

    await queue.schedules.add(
        "nightly", cron="0 3 * * *", time_zone="Europe/Paris", type="report", input={"of": "day"}
    )

- A definition has a random `born`, which is part of the keys of its ticks. To add the same
  definition again changes nothing; another one under the same name is refused or, with `replace`,
  is a new schedule: its first tick is the first after that moment.
- While a schedule is paused its ticks pass; after `resume` it goes on with the next one.
- To remove it is to delete the cell. A scheduler that has read it just before may submit one tick
  more.

Every change is one read and one conditional write, after which the bell is rung: two puts and a
GET. A crash before the bell leaves the change, which is noticed at the next list of `minding`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from penstock.kernel.entropy import new_id
from penstock.kernel.errors import ScheduleNotFound
from penstock.kernel.wire import decode
from penstock.kernel.words import listed, nearest
from penstock.queue.access import Access
from penstock.queue.bell import ring
from penstock.queue.inputs import held_input
from penstock.queue.options import Options
from penstock.queue.places import TaskId, check_name
from penstock.queue.schedules.checking import (
    check_catch_up,
    check_cron,
    check_tags,
    check_time_zone,
    taken,
)
from penstock.queue.schedules.document import Schedule, ScheduleView, options_of, view_of
from penstock.queue.schemas import check_inputs
from penstock.queue.submission import Submitter
from penstock.store.base import find, pages
from penstock.store.cell import Cell
from penstock.store.metered import labelled

SCHEDULES_MAX: Final = 5_000
"""So many are listed."""


class Schedules:
    """The schedules of one queue."""

    def __init__(self, access: Access) -> None:
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
        options = Options(
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
            await ring(self._access)
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
            await ring(self._access)

    async def run(self, name: str) -> TaskId:
        """Submit its task now, besides its ticks; returns the task's id."""
        schedule = await self._read(name)
        access = self._access
        (task,) = await Submitter(access.store, access.layout, access.entropy).submit_many(
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
            await ring(self._access)
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
