"""What people do with a queue of the bucket: pause, drain and resume it, replay and cancel tasks.

And its limits and schedules are set, paused and removed. Each is what the queue itself offers
(`penstock.queue.client`), and may be repeated: to pause what is paused changes nothing, and to
replay twice is to replay once. Only a schedule that is run twice submits two tasks. After each, the
next look is a new one. Two who steer at the same time lose nothing; a crash leaves it done or not
done.

A pause is a swap of one object, a replay some GETs and two puts. At most `REPLAYS_MAX` tasks are
replayed in one call, `_AT_ONCE` at a time; those that cannot be replayed are told, and keep nobody.
At most `CANCELS_MAX` are cancelled, with two to four requests for those that share a pack.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from penstock.dispatcher.queues.looks import Queues
from penstock.kernel.errors import InvalidInput, PenstockError

REPLAYS_MAX: Final = 100
CANCELS_MAX: Final = 200
_AT_ONCE: Final = 8


@dataclass(frozen=True, slots=True)
class Replays:
    """What became of some dead letters."""

    replayed: int
    problems: tuple[str, ...]
    """A sentence for each that was not."""


async def pause(queues: Queues, name: str, *, type: str | None, reason: str) -> None:
    """Start nothing more, of a type or at all, until it is resumed."""
    await (await queues.opened(name)).pause(type, reason)
    queues.forget(name)


async def drain(queues: Queues, name: str, *, type: str | None) -> None:
    """Take no more submits, of a type or at all, until it is resumed."""
    await (await queues.opened(name)).drain(type)
    queues.forget(name)


async def resume(queues: Queues, name: str, *, type: str | None) -> None:
    """Lift pause and drain from a type, or from the queue as a whole."""
    await (await queues.opened(name)).resume(type)
    queues.forget(name)


async def replay(queues: Queues, name: str, ids: Sequence[str]) -> Replays:
    """Submit the inputs of dead letters again, as new tasks."""
    if not 0 < len(ids) <= REPLAYS_MAX:
        raise InvalidInput(f"1 to {REPLAYS_MAX} tasks are replayed at a time, not {len(ids)}.")
    queue = await queues.opened(name)
    hands = asyncio.Semaphore(_AT_ONCE)

    async def one(id: str) -> str:
        async with hands:
            try:
                await queue.replay(id)
            except PenstockError as error:
                return error.message
        return ""

    said = await asyncio.gather(*map(one, dict.fromkeys(ids)))
    queues.forget(name)
    problems = tuple(filter(None, said))
    return Replays(len(said) - len(problems), problems)


async def cancel(queues: Queues, name: str, id: str, *, reason: str) -> str:
    """Cancel a task, or ask it to stop if it runs; returns its status then."""
    view = await (await queues.opened(name)).cancel(id, reason)
    queues.forget(name)
    return "asked to stop" if view.cancel_asked and not view.is_settled else view.status


async def cancel_many(
    queues: Queues, name: str, *, type: str | None, tag: str, reason: str
) -> tuple[int, bool]:
    """Cancel what has not ended of a type or with a tag; how many, and whether that was all."""
    queue = await queues.opened(name)
    found = await queue.cancel_many(
        type=type, tags=[tag] if tag else None, reason=reason, limit=CANCELS_MAX
    )
    queues.forget(name)
    return len(found), found.is_whole


async def set_limit(
    queues: Queues,
    name: str,
    key: str,
    *,
    concurrency: int | None,
    rate: float | None,
    per_seconds: float,
    burst: int | None,
) -> None:
    """Define a limit, or change it."""
    queue = await queues.opened(name)
    await queue.limits.set(
        key, concurrency=concurrency, rate=rate, per_seconds=per_seconds, burst=burst
    )
    queues.forget(name)


async def remove_limit(queues: Queues, name: str, key: str) -> bool:
    """Let the tasks of a key run without a limit; whether there was one."""
    removed = await (await queues.opened(name)).limits.remove(key)
    queues.forget(name)
    return removed


async def steer_schedule(queues: Queues, name: str, schedule: str, verb: str) -> str:
    """Pause, resume, run or remove a schedule; returns the id of the task if it is run."""
    schedules = (await queues.opened(name)).schedules
    task = ""
    match verb:
        case "pause":
            await schedules.pause(schedule)
        case "resume":
            await schedules.resume(schedule)
        case "run":
            task = await schedules.run(schedule)
        case "remove":
            await schedules.remove(schedule)
        case _:
            raise InvalidInput(f"A schedule is paused, resumed, run or removed, not {verb[:40]!r}.")
    queues.forget(name)
    return task
