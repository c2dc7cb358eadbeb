"""What is stored of a schedule, what users are shown of it, and how its tasks are submitted.

One cell a schedule, `schedules/{name}.json`: the definition, which `api` writes, and the cursor,
which `minding` moves. Times are the store's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import msgspec

from penstock.kernel.wire import Stamped
from penstock.queue.options import Options
from penstock.queue.schedules.ticks import CatchUp, next_tick

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


def options_of(name: str, schedule: Schedule, *, key: str | None = None, tick: str = "") -> Options:
    """How a task of a schedule is submitted; its tags tell the schedule, and the tick."""
    tags = {**schedule.tags, SCHEDULE_TAG: name, **({TICK_TAG: tick} if tick else {})}
    return Options(
        key=key,
        priority=schedule.priority,
        limit=schedule.limit,
        expires=schedule.expires,
        tags=tags,
    )
