"""What people do with a queue of the bucket: pause, drain and resume it, replay dead letters.

Each is what the queue itself offers (`penstock.queue.client`), and may be repeated: to pause what
is paused changes nothing, and to replay twice is to replay once. After each, the next look is a new
one. Two who steer at the same time lose nothing; a crash leaves it done or not done.

A pause is a swap of one object, a replay some GETs and two puts. At most `REPLAYS_MAX` tasks are
replayed in one call, `_AT_ONCE` at a time; those that cannot be replayed are told, and keep nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from penstock.dispatcher.queues.looks import Queues
from penstock.kernel.errors import InvalidInput, PenstockError

REPLAYS_MAX: Final = 100
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
