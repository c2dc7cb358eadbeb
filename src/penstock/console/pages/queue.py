"""The pages of a queue of the bucket: the overview, and its limits, schedules and batches.

The overview shows what waits and for how long, the shards and their holders, what ended, and
dead letters, with plots. All of it comes from one snapshot of the bucket, shared by all
viewers, which begins every five seconds at most (`penstock.dispatcher.bucket_queues`). So it
needs no database, and does not change between two snapshots. What figures are based on is said
beside them.

Limits, schedules and batches have a page each: one read for all viewers, every `_SECONDS` at
most. Of batches the last `_BATCHES_MAX` of each kind are shown, and of each `_READS_MAX` packs
are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from penstock.console.charts import AxisLabel, Plot, ShardMap, runs_of, shard_map, stacked_bars
from penstock.console.pages.base import (
    ActionResult,
    ConsolePage,
    FormAction,
    PageNotFound,
    PageRequest,
)
from penstock.console.pages.queue_base import (
    NO_STORE,
    QueueParts,
    money,
    path,
    queues_of,
    read,
    task_path,
    value_of,
    way,
)
from penstock.console.renderer import length, number
from penstock.dispatcher import bucket_queues
from penstock.dispatcher.bucket_queues import (
    REPLAYS_MAX,
    SNAPSHOT_REQUESTS_MAX,
    SNAPSHOT_SECONDS,
    SNAPSHOT_SECONDS_MAX,
    QueueInspector,
    QueueSnapshot,
)
from penstock.dispatcher.wakeups.bucket import QUEUE_NAME
from penstock.kernel.errors import InvalidInput, PenstockError, QueueNotFound
from penstock.kernel.units import in_units
from penstock.queue.batch_marks import BatchView
from penstock.queue.client import Queue
from penstock.queue.control import HeldType
from penstock.queue.inspection.activity import OUTCOMES, DeadLetter, MinuteCounts
from penstock.queue.inspection.stats import AgeStats, ListedWorker, TypeStats
from penstock.queue.limits import LimitView
from penstock.queue.metrics import meter_of
from penstock.queue.schedules import ScheduleView
from penstock.queue.shards.registry import OwnerRole


def ages_plot(ages: Sequence[AgeStats]) -> Plot:
    """What is ready and what is in progress, by how long ago it was submitted or due."""
    names = [_age_name(ages, place) for place in range(len(ages))]
    places = [
        (name, {"waiting": float(each.ready), "running": float(each.in_progress)})
        for name, each in zip(names, ages, strict=True)
    ]
    said = [
        f"{name}: {number(each.ready)} waiting and {number(each.in_progress)} in progress"
        for name, each in zip(names, ages, strict=True)
        if each.ready or each.in_progress
    ]
    told = f"By age. {'; '.join(said) or 'No tasks are waiting or running'}."
    drawn = stacked_bars(places, told=told, series=("waiting", "running"))
    # They are few: each has its name.
    width = (drawn.width - drawn.left) / len(names)
    marks = [AxisLabel(drawn.left + (at + 0.5) * width, name) for at, name in enumerate(names)]
    return replace(drawn, marks=marks)


def ended_plot(minutes: Sequence[MinuteCounts]) -> Plot:
    """What has settled, minute by minute."""
    places = [
        (_ago(minutes, place), {what: float(count) for what, count in each.outcomes})
        for place, each in enumerate(minutes)
    ]
    sums = {
        name: sum(count for each in minutes for what, count in each.outcomes if what == name)
        for name in OUTCOMES
    }
    shown = tuple(name for name in OUTCOMES if sums[name]) or OUTCOMES[:1]
    said = ", ".join(f"{number(sums[name])} {name}" for name in shown if sums[name])
    told = f"Settled in the last hour: {said}."
    if not said:
        told = "No task was settled in the last hour."
    return stacked_bars(places, told=told, series=shown)


def starts_plot(minutes: Sequence[MinuteCounts], *, told: str) -> Plot:
    """How long those had waited that started, minute by minute."""
    places = [
        (
            _ago(minutes, place),
            {"half": each.median_seconds, "most": each.most_seconds - each.median_seconds},
        )
        for place, each in enumerate(minutes)
    ]
    drawn = stacked_bars(places, told=told, series=("half", "most"))
    said = {label: _waited(label, each) for (label, _), each in zip(places, minutes, strict=True)}
    bars = [replace(bar, told=said[bar.told.partition(": ")[0]]) for bar in drawn.bars]
    return replace(drawn, bars=bars)


def _waited(label: str, each: MinuteCounts) -> str:
    median, most = length(each.median_seconds), length(each.most_seconds)
    return f"{label}: {number(each.starts)} started, p50 {median}, p95 {most}"


def _ago(minutes: Sequence[MinuteCounts], place: int) -> str:
    ago = len(minutes) - 1 - place
    return f"{ago} min ago" if ago else "now"


def _age_name(ages: Sequence[AgeStats], place: int) -> str:
    below = ages[place].below_seconds
    if below is None:
        return f"over {length(ages[place - 1].below_seconds)}"
    return f"< {length(below)}"


_DAY_SECONDS: Final = 86_400.0
_TABS_MAX: Final = 30
_TYPES_MAX: Final = 50
_WORKERS_MAX: Final = 100
_LETTERS_MAX: Final = 50


@dataclass(frozen=True, slots=True)
class _Type:
    """A type of tasks, and what holds for it."""

    name: str
    said: TypeStats
    held: HeldType | None


@dataclass(frozen=True, slots=True)
class _Worker:
    """A worker, and its part of the map."""

    said: ListedWorker
    letter: str
    colour: int
    runs: str


async def _load(parts: QueueParts, asked: PageRequest) -> Mapping[str, Any] | PageNotFound:
    wanted = asked.query.get("name", "")
    nothing = {
        "look": None,
        "name": wanted or parts.first_queue,
        "tabs": (),
        "tabs_more": 0,
        "way": (),
        "has_pipeline": parts.has_pipeline,
        "root": parts.root,
    }
    if parts.queues is None:
        return {**nothing, "trouble": NO_STORE}
    try:
        look = await _looked(parts.queues, wanted, first=parts.first_queue)
    except (QueueNotFound, InvalidInput) as error:
        return PageNotFound(error.message, error.hint)
    except PenstockError as error:
        return {**nothing, "trouble": error.message}
    except TimeoutError:
        why = f"The store timed out after {SNAPSHOT_SECONDS_MAX:.0f} seconds."
        return {**nothing, "trouble": why}
    if look is None:
        return {**nothing, "trouble": ""}
    whole = {**nothing, **_shown(look), **_spent(parts, look)}
    if not parts.has_pipeline:
        # To itself it is a queue as any other.
        whole |= {"is_wake_ups": False, "thing": "task", "things": "Tasks"}
    return whole


async def _looked(queues: QueueInspector, wanted: str, *, first: str) -> QueueSnapshot | None:
    """A look at the queue that is asked for, or at the first that there is; None if none is."""
    try:
        return await queues.look(wanted or first)
    except QueueNotFound:
        if wanted:
            raise
    names = await queues.names()
    return await queues.look(names[0]) if names else None


def _shown(look: QueueSnapshot) -> dict[str, Any]:
    stats, lately = look.stats, look.lately
    present = [each for each in stats.workers if each.of == stats.shards]
    owned = {each.name: each.shards for each in present if each.shards}
    drawn = shard_map(owned, look.depths)
    held = {each.type: each for each in stats.held}
    letters = lately.letters[:_LETTERS_MAX]
    open_letters = sum(each.name not in lately.replayed for each in lately.letters)
    return {
        "look": look,
        "name": stats.queue,
        "trouble": look.trouble,
        "tabs": [(each, path("/queue", name=each)) for each in look.names[:_TABS_MAX]],
        "tabs_more": max(0, len(look.names) - _TABS_MAX),
        "way": way(stats.queue, "overview"),
        "is_wake_ups": stats.queue == QUEUE_NAME,
        "thing": "wake-up" if stats.queue == QUEUE_NAME else "task",
        "things": "Wake-ups" if stats.queue == QUEUE_NAME else "Tasks",
        "types": _types(look, held)[:_TYPES_MAX],
        "types_more": max(0, len(_types(look, held)) - _TYPES_MAX),
        "held": held.get(None),
        "sums": {
            name: sum(getattr(each, name) for each in stats.types)
            for name in ("ready", "delayed", "in_progress")
        },
        "more": "" if look.is_whole else "+",
        "oldest_at": min(
            (each.oldest_ready_at for each in stats.types if each.oldest_ready_at), default=None
        ),
        "ages": ages_plot(stats.ages),
        "ended": ended_plot(lately.minutes),
        "starts": starts_plot(lately.minutes, told=_starts_told(look)),
        "starts_told": _starts_told(look),
        "map": drawn,
        "free": runs_of(stats.unowned),
        "workers": _workers(stats.workers[:_WORKERS_MAX], drawn),
        "workers_more": max(0, len(stats.workers) - _WORKERS_MAX),
        "others": sum(each.of != stats.shards for each in stats.workers),
        "wanted": sorted({kind for each in stats.workers for kind in each.help_wanted}),
        "letters": letters,
        "letters_more": len(lately.letters) - len(letters),
        "open_letters": open_letters,
        "replays_max": REPLAYS_MAX,
    }


def _types(look: QueueSnapshot, held: Mapping[str | None, HeldType]) -> list[_Type]:
    known = {each.type: each for each in look.stats.types}
    names = sorted({*known, *(name for name in held if name is not None)})
    return [_Type(name, known.get(name) or TypeStats(name), held.get(name)) for name in names]


def _workers(seen: tuple[ListedWorker, ...], drawn: ShardMap) -> list[_Worker]:
    holders = {each.name: each for each in drawn.holders}
    return [
        _Worker(
            said=each,
            letter=holders[each.name].letter if each.name in holders else "",
            colour=holders[each.name].colour if each.name in holders else 0,
            runs=runs_of(each.shards),
        )
        for each in seen
    ]


def _starts_told(look: QueueSnapshot) -> str:
    lately = look.lately
    if not lately.starts:
        return "No first attempt started in the last hour."
    started = number(lately.starts)
    median, most = length(lately.median_seconds), length(lately.most_seconds)
    return f"{started} started in the last hour: p50 {median}, p95 {most}."


def _spent(parts: QueueParts, look: QueueSnapshot) -> dict[str, Any]:
    """What a task costs, what workers cost, what a look costs, and what this process measures."""
    meter = meter_of(parts.store) if parts.store is not None else None
    measured = (
        [
            (each, meter.requests(label=each), money(meter.dollars(label=each)))
            for each in meter.labels()
        ]
        if meter is not None
        else []
    )
    a_task, standing = look.a_task, look.standing
    return {
        # Anything but a bucket costs nothing.
        "is_free": not parts.root.startswith("s3://"),
        "a_task": a_task,
        "a_million": money(a_task.dollars_per_million) if a_task is not None else "",
        "a_task_dollars": money(a_task.dollars) if a_task is not None else "",
        "owners": sum(each.role == OwnerRole.OWNER for each in look.stats.workers),
        "standing": standing,
        "idle_month": money(standing.idle_dollars_per_month),
        "busy_month": money(standing.busy_dollars_per_month),
        "look_dollars": money(look.cost.dollars),
        "day_dollars": money(look.cost.dollars * _DAY_SECONDS / SNAPSHOT_SECONDS),
        "bounds": {
            "every": SNAPSHOT_SECONDS,
            "seconds": SNAPSHOT_SECONDS_MAX,
            "requests": SNAPSHOT_REQUESTS_MAX,
        },
        "measured": measured,
        "measured_dollars": money(meter.dollars()) if meter is not None else "",
    }


def _what(asked: PageRequest) -> tuple[str, str | None, str]:
    """The queue and the type that a form is about, and both in words."""
    name, kind = asked.query.get("name", ""), asked.query.get("type", "").strip() or None
    words = f"The type {kind} of the queue {name}" if kind else f"The queue {name}"
    return name, kind, words


async def _pause(parts: QueueParts, asked: PageRequest, to: str) -> ActionResult:
    name, kind, words = _what(asked)
    reason = asked.query.get("reason", "").strip()
    await bucket_queues.pause(queues_of(parts), name, type=kind, reason=reason)
    return ActionResult(f"{words} is paused: workers notice within 10 seconds.", to)


async def _drain(parts: QueueParts, asked: PageRequest, to: str) -> ActionResult:
    name, kind, words = _what(asked)
    await bucket_queues.drain(queues_of(parts), name, type=kind)
    return ActionResult(f"{words} is draining: submits are refused within 30 seconds.", to)


async def _resume(parts: QueueParts, asked: PageRequest, to: str) -> ActionResult:
    name, kind, words = _what(asked)
    await bucket_queues.resume(queues_of(parts), name, type=kind)
    return ActionResult(f"{words} is resumed.", to)


async def _replay(parts: QueueParts, asked: PageRequest, to: str) -> ActionResult:
    """One dead letter, or those that the last look has shown and nobody has replayed."""
    queues, name, one = queues_of(parts), asked.query.get("name", ""), asked.query.get("id", "")
    ids = [one] if one else [each.id for each in await _open_letters(queues, name)]
    if not ids:
        return ActionResult("All dead letters were replayed already.", to)
    found = await bucket_queues.replay(queues, name, ids[:REPLAYS_MAX])
    if found.problems:
        count = f"{number(len(found.problems))} of {number(found.replayed + len(found.problems))}"
        why = found.problems[0]
        return ActionResult(why if one else f"{count} were not replayed. {why}", to, is_well=False)
    told = "1 task is" if found.replayed == 1 else f"{number(found.replayed)} tasks are"
    return ActionResult(f"{told} submitted again.", to)


async def _open_letters(queues: QueueInspector, name: str) -> list[DeadLetter]:
    lately = (await queues.look(name)).lately
    return [each for each in lately.letters if each.name not in lately.replayed]


_LIVE: Final = (
    *("state", "levers", "figures", "plots", "kinds"),
    *("map", "workers", "letters", "costs"),
)
PAGE: Final = ConsolePage("/queue", "queue", _load, live=_LIVE, query=("name",))
HOME: Final = ConsolePage("/", "queue", _load, live=_LIVE, query=("name",))
"""The same as the first page of a console that has queues alone."""
ACTIONS: Final = (
    FormAction("/queue/pause", _pause, fields=("name", "type", "reason")),
    FormAction("/queue/drain", _drain, fields=("name", "type")),
    FormAction("/queue/resume", _resume, fields=("name", "type")),
    FormAction("/queue/replay", _replay, fields=("name", "id")),
)


_SECONDS: Final = 10.0
_SHOWN_MAX: Final = 200
_BATCHES_MAX: Final = 20
_READS_MAX: Final = 10


async def _load_limits(parts: QueueParts, asked: PageRequest) -> Mapping[str, Any] | PageNotFound:
    async def make(queue: Queue) -> tuple[LimitView, ...]:
        return await queue.limits.list()

    def show(found: tuple[LimitView, ...]) -> Mapping[str, Any]:
        return {"limits": found[:_SHOWN_MAX], "more": max(0, len(found) - _SHOWN_MAX)}

    said = await read(parts, asked, "", make, here="limits", seconds=_SECONDS, show=show)
    return said if isinstance(said, PageNotFound) else {"limits": (), "more": 0, **said}


async def _load_schedules(
    parts: QueueParts, asked: PageRequest
) -> Mapping[str, Any] | PageNotFound:
    async def make(queue: Queue) -> tuple[ScheduleView, ...]:
        return await queue.schedules.list()

    def show(found: tuple[ScheduleView, ...]) -> Mapping[str, Any]:
        shown = [(each, value_of(each.input)) for each in found[:_SHOWN_MAX]]
        return {"schedules": shown, "more": max(0, len(found) - _SHOWN_MAX)}

    said = await read(parts, asked, "", make, here="schedules", seconds=_SECONDS, show=show)
    return said if isinstance(said, PageNotFound) else {"schedules": (), "more": 0, **said}


async def _load_batches(parts: QueueParts, asked: PageRequest) -> Mapping[str, Any] | PageNotFound:
    async def make(queue: Queue) -> tuple[BatchView, ...]:
        return await queue.batches.list(limit=_BATCHES_MAX, reads_max=_READS_MAX)

    def show(found: tuple[BatchView, ...]) -> Mapping[str, Any]:
        return {"batches": found}

    said = await read(parts, asked, "", make, here="batches", seconds=_SECONDS, show=show)
    return said if isinstance(said, PageNotFound) else {"batches": (), "most": _BATCHES_MAX, **said}


async def _set_limit(parts: QueueParts, asked: PageRequest, to: str) -> ActionResult:
    said = {name: value.strip() for name, value in asked.query.items()}
    concurrency, burst = _figure(said, "concurrency", int), _figure(said, "burst", int)
    rate, seconds = _figure(said, "rate", float), _seconds(said, "per_seconds")
    key = said.get("key", "")
    await bucket_queues.set_limit(
        queues_of(parts),
        said.get("name", ""),
        key,
        concurrency=concurrency,
        rate=rate,
        per_seconds=1.0 if seconds is None else seconds,
        burst=burst,
    )
    return ActionResult(f"The limit {key} is set: workers notice within 20 seconds.", to)


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


def _seconds(said: Mapping[str, str], name: str) -> float | None:
    """What somebody has typed as a length of time: a number of seconds, or a duration."""
    if not said.get(name):
        return None
    try:
        return in_units(said[name])
    except ValueError as error:
        field = name.removesuffix("_seconds").replace("_", " ")
        raise InvalidInput(f"The length of time {field!r}, {said[name][:40]!r}, {error}.") from None


async def _remove_limit(parts: QueueParts, asked: PageRequest, to: str) -> ActionResult:
    key = asked.query.get("key", "")
    was_there = await bucket_queues.remove_limit(queues_of(parts), asked.query.get("name", ""), key)
    if not was_there:
        return ActionResult(f"There is no limit {key}.", to, is_well=False)
    return ActionResult(f"The limit {key} is removed: its tasks run without one.", to)


async def _steer_schedule(parts: QueueParts, asked: PageRequest, to: str) -> ActionResult:
    name, schedule = asked.query.get("name", ""), asked.query.get("schedule", "")
    verb = asked.path["verb"]
    task = await bucket_queues.steer_schedule(queues_of(parts), name, schedule, verb)
    if task:
        to = task_path(name, task)
        return ActionResult(f"The schedule {schedule} has submitted this task.", to)
    done = {"pause": "is paused", "resume": "is resumed", "remove": "is removed"}[verb]
    return ActionResult(f"The schedule {schedule} {done}.", to)


RULE_PAGES: Final = (
    ConsolePage(
        "/queue/limits",
        "queue_limits",
        _load_limits,
        live=("state", "list"),
        section="queue",
        query=("name",),
    ),
    ConsolePage(
        "/queue/schedules",
        "queue_schedules",
        _load_schedules,
        live=("state", "list"),
        section="queue",
        query=("name",),
    ),
    ConsolePage(
        "/queue/batches",
        "queue_batches",
        _load_batches,
        live=("state", "list"),
        section="queue",
        query=("name",),
    ),
)
_LIMIT_FIELDS: Final = ("name", "key", "concurrency", "rate", "per_seconds", "burst")
RULE_ACTIONS: Final = (
    FormAction("/queue/limits/set", _set_limit, fields=_LIMIT_FIELDS),
    FormAction("/queue/limits/remove", _remove_limit, fields=("name", "key")),
    FormAction("/queue/schedules/{verb}", _steer_schedule, fields=("name", "schedule")),
)
