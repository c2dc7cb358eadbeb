"""A queue of the bucket: what waits and for how long, who holds which shard, what ended, what died.

All of it comes from one look at the bucket, which is shared by all who watch and begins every five
seconds at the most (`penstock.dispatcher.queues.looks`). So this page asks no database, and between
two looks it stays as it is. What figures are based on is said beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from penstock.console.drawing.shards import ShardMap, runs_of, shard_map
from penstock.console.pages.base import Action, Asked, Done, Missing, Page
from penstock.console.pages.queue_base import NO_STORE, QueueParts, money, path, queues_of, way
from penstock.console.pages.queue_plots import ages_plot, ended_plot, starts_plot
from penstock.console.rendering import length, number
from penstock.dispatcher.queues import steering
from penstock.dispatcher.queues.looks import (
    LOOK_SECONDS,
    REQUESTS_MAX,
    SECONDS_MAX,
    Look,
    Queues,
)
from penstock.dispatcher.queues.steering import REPLAYS_MAX
from penstock.dispatcher.wakeups.bucket import QUEUE_NAME
from penstock.kernel.errors import InvalidInput, PenstockError, QueueNotFound
from penstock.queue.control import Held
from penstock.queue.inspection.ended import DeadLetter
from penstock.queue.inspection.figures import TypeStats, WorkerSeen
from penstock.queue.metrics import meter_of
from penstock.queue.owning.registry import Role

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
    held: Held | None


@dataclass(frozen=True, slots=True)
class _Worker:
    """A worker, and its part of the map."""

    said: WorkerSeen
    letter: str
    colour: int
    runs: str


async def _load(parts: QueueParts, asked: Asked) -> Mapping[str, Any] | Missing:
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
        return Missing(error.message, error.hint)
    except PenstockError as error:
        return {**nothing, "trouble": error.message}
    except TimeoutError:
        why = f"The store has not answered a look within {SECONDS_MAX:.0f} seconds."
        return {**nothing, "trouble": why}
    if look is None:
        return {**nothing, "trouble": ""}
    whole = {**nothing, **_shown(look), **_spent(parts, look)}
    if not parts.has_pipeline:
        # To itself it is a queue as any other.
        whole |= {"is_wake_ups": False, "thing": "task", "things": "Tasks"}
    return whole


async def _looked(queues: Queues, wanted: str, *, first: str) -> Look | None:
    """A look at the queue that is asked for, or at the first that there is; None if none is."""
    try:
        return await queues.look(wanted or first)
    except QueueNotFound:
        if wanted:
            raise
    names = await queues.names()
    return await queues.look(names[0]) if names else None


def _shown(look: Look) -> dict[str, Any]:
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


def _types(look: Look, held: Mapping[str | None, Held]) -> list[_Type]:
    known = {each.type: each for each in look.stats.types}
    names = sorted({*known, *(name for name in held if name is not None)})
    return [_Type(name, known.get(name) or TypeStats(name), held.get(name)) for name in names]


def _workers(seen: tuple[WorkerSeen, ...], drawn: ShardMap) -> list[_Worker]:
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


def _starts_told(look: Look) -> str:
    lately = look.lately
    if not lately.starts:
        return "No first attempt has started in the last hour, as far as is known."
    started = number(lately.starts)
    median, most = length(lately.median_seconds), length(lately.most_seconds)
    return f"{started} started in the last hour: half within {median}, 19 of 20 within {most}."


def _spent(parts: QueueParts, look: Look) -> dict[str, Any]:
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
        "owners": sum(each.role == Role.OWNER for each in look.stats.workers),
        "standing": standing,
        "idle_month": money(standing.idle_dollars_per_month),
        "busy_month": money(standing.busy_dollars_per_month),
        "look_dollars": money(look.cost.dollars),
        "day_dollars": money(look.cost.dollars * _DAY_SECONDS / LOOK_SECONDS),
        "bounds": {"every": LOOK_SECONDS, "seconds": SECONDS_MAX, "requests": REQUESTS_MAX},
        "measured": measured,
        "measured_dollars": money(meter.dollars()) if meter is not None else "",
    }


def _what(asked: Asked) -> tuple[str, str | None, str]:
    """The queue and the type that a form is about, and both in words."""
    name, kind = asked.query.get("name", ""), asked.query.get("type", "").strip() or None
    words = f"The type {kind} of the queue {name}" if kind else f"The queue {name}"
    return name, kind, words


async def _pause(parts: QueueParts, asked: Asked, to: str) -> Done:
    name, kind, words = _what(asked)
    reason = asked.query.get("reason", "").strip()
    await steering.pause(queues_of(parts), name, type=kind, reason=reason)
    return Done(f"{words} is paused: workers hear of it within 10 seconds.", to)


async def _drain(parts: QueueParts, asked: Asked, to: str) -> Done:
    name, kind, words = _what(asked)
    await steering.drain(queues_of(parts), name, type=kind)
    return Done(f"{words} is drained: within 30 seconds it takes no more tasks.", to)


async def _resume(parts: QueueParts, asked: Asked, to: str) -> Done:
    name, kind, words = _what(asked)
    await steering.resume(queues_of(parts), name, type=kind)
    return Done(f"{words} is resumed.", to)


async def _replay(parts: QueueParts, asked: Asked, to: str) -> Done:
    """One dead letter, or those that the last look has shown and nobody has replayed."""
    queues, name, one = queues_of(parts), asked.query.get("name", ""), asked.query.get("id", "")
    ids = [one] if one else [each.id for each in await _open_letters(queues, name)]
    if not ids:
        return Done("There is no dead letter that was not replayed.", to)
    found = await steering.replay(queues, name, ids[:REPLAYS_MAX])
    if found.problems:
        count = f"{number(len(found.problems))} of {number(found.replayed + len(found.problems))}"
        why = found.problems[0]
        return Done(why if one else f"{count} were not replayed. {why}", to, is_well=False)
    told = "1 task is" if found.replayed == 1 else f"{number(found.replayed)} tasks are"
    return Done(f"{told} submitted again.", to)


async def _open_letters(queues: Queues, name: str) -> list[DeadLetter]:
    lately = (await queues.look(name)).lately
    return [each for each in lately.letters if each.name not in lately.replayed]


_LIVE: Final = (
    *("state", "levers", "figures", "plots", "kinds"),
    *("map", "workers", "letters", "costs"),
)
PAGE: Final = Page("/queue", "queue", _load, live=_LIVE, query=("name",))
HOME: Final = Page("/", "queue", _load, live=_LIVE, query=("name",))
"""The same as the first page of a console that has queues alone."""
ACTIONS: Final = (
    Action("/queue/pause", _pause, fields=("name", "type", "reason")),
    Action("/queue/drain", _drain, fields=("name", "type")),
    Action("/queue/resume", _resume, fields=("name", "type")),
    Action("/queue/replay", _replay, fields=("name", "id")),
)
