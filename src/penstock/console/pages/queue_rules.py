"""What holds for a queue beside its tasks: limits, schedules, batches. A page of each.

Each is one reading for all who watch, every `_SECONDS` at the most. Of batches the last
`_BATCHES_MAX` of each kind are shown, and of each of them `_READS_MAX` packs are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from penstock.console.pages.base import Action, Asked, Done, Missing, Page
from penstock.console.pages.queue_base import QueueParts, queues_of, read, task_path, value_of
from penstock.dispatcher.queues import steering
from penstock.kernel.errors import InvalidInput
from penstock.queue.batches.documents import BatchView
from penstock.queue.client import Queue
from penstock.queue.limits.api import Limit
from penstock.queue.schedules.document import ScheduleView

_SECONDS: Final = 10.0
_SHOWN_MAX: Final = 200
_BATCHES_MAX: Final = 20
_READS_MAX: Final = 10


async def _load_limits(parts: QueueParts, asked: Asked) -> Mapping[str, Any] | Missing:
    async def make(queue: Queue) -> tuple[Limit, ...]:
        return await queue.limits.list()

    def show(found: tuple[Limit, ...]) -> Mapping[str, Any]:
        return {"limits": found[:_SHOWN_MAX], "more": max(0, len(found) - _SHOWN_MAX)}

    said = await read(parts, asked, "", make, here="limits", seconds=_SECONDS, show=show)
    return said if isinstance(said, Missing) else {"limits": (), "more": 0, **said}


async def _load_schedules(parts: QueueParts, asked: Asked) -> Mapping[str, Any] | Missing:
    async def make(queue: Queue) -> tuple[ScheduleView, ...]:
        return await queue.schedules.list()

    def show(found: tuple[ScheduleView, ...]) -> Mapping[str, Any]:
        shown = [(each, value_of(each.input)) for each in found[:_SHOWN_MAX]]
        return {"schedules": shown, "more": max(0, len(found) - _SHOWN_MAX)}

    said = await read(parts, asked, "", make, here="schedules", seconds=_SECONDS, show=show)
    return said if isinstance(said, Missing) else {"schedules": (), "more": 0, **said}


async def _load_batches(parts: QueueParts, asked: Asked) -> Mapping[str, Any] | Missing:
    async def make(queue: Queue) -> tuple[BatchView, ...]:
        return await queue.batches.list(limit=_BATCHES_MAX, reads_max=_READS_MAX)

    def show(found: tuple[BatchView, ...]) -> Mapping[str, Any]:
        return {"batches": found}

    said = await read(parts, asked, "", make, here="batches", seconds=_SECONDS, show=show)
    return said if isinstance(said, Missing) else {"batches": (), "most": _BATCHES_MAX, **said}


async def _set_limit(parts: QueueParts, asked: Asked, to: str) -> Done:
    said = {name: value.strip() for name, value in asked.query.items()}
    concurrency, burst = _figure(said, "concurrency", int), _figure(said, "burst", int)
    rate, seconds = _figure(said, "rate", float), _figure(said, "per_seconds", float)
    key = said.get("key", "")
    await steering.set_limit(
        queues_of(parts),
        said.get("name", ""),
        key,
        concurrency=concurrency,
        rate=rate,
        per_seconds=1.0 if seconds is None else seconds,
        burst=burst,
    )
    return Done(f"The limit {key} is set: workers hear of it within 20 seconds.", to)


def _figure(said: Mapping[str, str], name: str, kind: type[Any]) -> Any:
    """What somebody has typed as a number; None if nothing was."""
    if not said.get(name):
        return None
    try:
        return kind(said[name])
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        field = name.replace("_", " ")
        raise InvalidInput(f"The {field} is {what}, not {said[name][:40]!r}.") from None


async def _remove_limit(parts: QueueParts, asked: Asked, to: str) -> Done:
    key = asked.query.get("key", "")
    was_there = await steering.remove_limit(queues_of(parts), asked.query.get("name", ""), key)
    if not was_there:
        return Done(f"There is no limit {key}.", to, is_well=False)
    return Done(f"The limit {key} is removed: its tasks run without one.", to)


async def _steer_schedule(parts: QueueParts, asked: Asked, to: str) -> Done:
    name, schedule = asked.query.get("name", ""), asked.query.get("schedule", "")
    verb = asked.path["verb"]
    task = await steering.steer_schedule(queues_of(parts), name, schedule, verb)
    if task:
        to = task_path(name, task)
        return Done(f"The schedule {schedule} has submitted this task.", to)
    done = {"pause": "is paused", "resume": "is resumed", "remove": "is removed"}[verb]
    return Done(f"The schedule {schedule} {done}.", to)


PAGES: Final = (
    Page(
        "/queue/limits",
        "queue_limits",
        _load_limits,
        live=("state", "list"),
        section="queue",
        query=("name",),
    ),
    Page(
        "/queue/schedules",
        "queue_schedules",
        _load_schedules,
        live=("state", "list"),
        section="queue",
        query=("name",),
    ),
    Page(
        "/queue/batches",
        "queue_batches",
        _load_batches,
        live=("state", "list"),
        section="queue",
        query=("name",),
    ),
)
_LIMIT_FIELDS: Final = ("name", "key", "concurrency", "rate", "per_seconds", "burst")
ACTIONS: Final = (
    Action("/queue/limits/set", _set_limit, fields=_LIMIT_FIELDS),
    Action("/queue/limits/remove", _remove_limit, fields=("name", "key")),
    Action("/queue/schedules/{verb}", _steer_schedule, fields=("name", "schedule")),
)
