"""What pages read of a queue beside its look: tasks, limits, schedules, batches.

Whoever asks for the same thing shares one answer. It is read again when it is older than the page
says, by the first who asks then; others get the last one meanwhile. The bounds:

- One read at a time, and what nobody has asked for yet `FIRST_SECONDS` after the one before.
- A read takes `SECONDS_MAX` and `REQUESTS_MAX` at the most. After one that made many requests
  nothing is read again until they are fewer than `REQUESTS_A_SECOND`, over the time since.
- `ANSWERS_MAX` answers are remembered, those that were asked for last.

A read that fails leaves the last answer and says why (`trouble`); where there is none it raises.
Nothing is written, and a crash loses the answers. Used by one event loop, through `Queues`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, TypeVar, cast

from penstock.dispatcher.queues.bounded import BoundedStore
from penstock.kernel.errors import PenstockError, QueueNotFound, TaskNotFound
from penstock.store.base import ObjectStore
from penstock.store.metered import labelled

FIRST_SECONDS: Final = 0.5
SECONDS_MAX: Final = 5.0
REQUESTS_MAX: Final = 500
REQUESTS_A_SECOND: Final = 20.0
ANSWERS_MAX: Final = 64
_NEVER: Final = float("-inf")

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Answer(Generic[Found]):
    """What was read, when by the store's clock, and what it took."""

    found: Found
    at: float
    requests: int
    dollars: float
    trouble: str = ""
    """Why there is no newer one, if one was tried."""


class SharedReads:
    """The answers, by what they are of. The first part of a key is the name of the queue."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._clock = store.clock.machine
        self._answers: dict[tuple[str, Hashable], tuple[float, Answer[Any]]] = {}
        self._reading = asyncio.Lock()
        self._first_at = _NEVER
        self._paced_until = _NEVER

    async def read(
        self,
        key: tuple[str, Hashable],
        make: Callable[[ObjectStore], Awaitable[Found]],
        *,
        seconds: float,
    ) -> Answer[Found]:
        """What `make` reads, at most about `seconds` old while somebody asks."""
        known = self._answers.get(key)
        if known is not None and (self._reading.locked() or not self._is_due(known[0], seconds)):
            return cast("Answer[Found]", known[1])
        async with self._reading:
            known = self._answers.get(key)
            if known is not None and not self._is_due(known[0], seconds):
                return cast("Answer[Found]", known[1])
            if known is None:
                await self._wait()
            return await self._renewed(key, make, known[1] if known else None)

    def forget(self, queue: str) -> None:
        """The next who asks reads: this process has just changed something of this queue."""
        self._paced_until = _NEVER
        for key, (_, answer) in self._answers.items():
            if key[0] == queue:
                self._answers[key] = (_NEVER, answer)

    def _is_due(self, began_at: float, seconds: float) -> bool:
        now = self._clock.monotonic()
        return now >= began_at + seconds and now >= self._paced_until

    async def _wait(self) -> None:
        wait = self._first_at + FIRST_SECONDS - self._clock.monotonic()
        if wait > 0:
            await self._clock.sleep(wait)
        self._first_at = self._clock.monotonic()

    async def _renewed(
        self,
        key: tuple[str, Hashable],
        make: Callable[[ObjectStore], Awaitable[Found]],
        last: Answer[Found] | None,
    ) -> Answer[Found]:
        store = BoundedStore(self._store, requests_max=REQUESTS_MAX)
        began_at = self._clock.monotonic()
        try:
            async with asyncio.timeout(SECONDS_MAX):
                with labelled("inspect"):
                    found = await make(store)
                    at = (await store.now()).middle
            requests = store.meter.requests()
            answer = Answer(found, at, requests, store.meter.dollars())
        except (QueueNotFound, TaskNotFound):
            self._answers.pop(key, None)
            raise
        except (PenstockError, TimeoutError) as error:
            if last is None:
                raise
            answer = replace(last, trouble=_sentence(error))
        finally:
            self._paced_until = began_at + store.meter.requests() / REQUESTS_A_SECOND
        self._answers.pop(key, None)
        self._answers[key] = (began_at, answer)
        while len(self._answers) > ANSWERS_MAX:
            del self._answers[next(iter(self._answers))]
        return answer


def _sentence(error: PenstockError | TimeoutError) -> str:
    if isinstance(error, PenstockError):
        return error.message
    return f"The store has not answered all of it within {SECONDS_MAX:.0f} seconds."
