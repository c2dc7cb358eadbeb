"""Injects what networks and stores do, from a seeded plan.

| fault | what happens | what the caller sees |
|---|---|---|
| latency | the request takes longer | nothing |
| throttled | 503 Slow Down, nothing is done | `Throttled` |
| failed | 500 from the store, done or not | `OutcomeUnknown`; `Unavailable` for a read |
| lost request | it never arrives | the same |
| lost answer | it is carried out | the same |
| duplicate | it is carried out, and once more after a while | the answer to the first |

Which request meets which fault is decided by the plan's own randomness, in the order in which
requests are made: with a virtual loop a run is a function of its seeds. Duplicates that are
still on their way are carried out, or dropped, by `close`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from penstock.kernel.entropy import Entropy
from penstock.kernel.errors import OutcomeUnknown, StoreError, Throttled, Unavailable
from penstock.store.base import (
    NO_METADATA,
    PAGE_KEYS_MAX,
    REPLACE,
    Delimiter,
    Head,
    Object,
    ObjectStore,
    Page,
    PutMode,
    Version,
    Wrapper,
)
from penstock.store.time import TimeSample

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """How likely each fault is, for each request. All are off unless told."""

    latency_seconds_max: float = 0.0
    throttled: float = 0.0
    failed: float = 0.0
    lost_request: float = 0.0
    lost_answer: float = 0.0
    duplicate: float = 0.0
    duplicate_delay_seconds_max: float = 30.0


class FaultyStore(Wrapper):
    """An `ObjectStore` that misbehaves as a plan says. Set `plan` to change it on the way."""

    def __init__(self, inner: ObjectStore, plan: FaultPlan, *, entropy: Entropy) -> None:
        super().__init__(inner)
        self.plan = plan
        self._entropy = entropy
        self._late: set[asyncio.Task[None]] = set()
        self.injected: Counter[str] = Counter()

    async def _meet(
        self, request: Callable[[], Awaitable[Answer]], *, key: str = "", writes: bool = False
    ) -> Answer:
        plan = self.plan
        if plan.latency_seconds_max:
            await self.clock.machine.sleep(self._entropy.uniform(0, plan.latency_seconds_max))
        if self._happens(plan.throttled, "throttled"):
            raise Throttled("The store asked to slow down (injected).", key=key)
        failed = self._happens(plan.failed, "failed")
        if self._happens(plan.lost_request, "lost request") or (failed and self._happens(0.5)):
            raise _lost(writes=writes, what="request", key=key)
        if writes and self._happens(plan.duplicate, "duplicate"):
            self._deliver_late(request)
        answer_is_lost = self._happens(plan.lost_answer, "lost answer")
        try:
            answer = await request()
        except StoreError:
            # A refusal is an answer, and is lost like any other.
            if failed or answer_is_lost:
                raise _lost(writes=writes, what="answer", key=key) from None
            raise
        if failed or answer_is_lost:
            raise _lost(writes=writes, what="answer", key=key)
        return answer

    def _happens(self, likelihood: float, fault: str = "") -> bool:
        happens = likelihood > 0 and self._entropy.random() < likelihood
        if happens and fault:
            self.injected[fault] += 1
        return happens

    def _deliver_late(self, request: Callable[[], Awaitable[object]]) -> None:
        delay = self._entropy.uniform(0, self.plan.duplicate_delay_seconds_max)

        async def deliver() -> None:
            await self.clock.machine.sleep(delay)
            try:
                await request()
            except StoreError:
                return  # Nobody waits for the answer to a duplicate.

        late = asyncio.get_running_loop().create_task(deliver())
        self._late.add(late)
        late.add_done_callback(self._late.discard)

    async def close(self) -> None:
        for late in list(self._late):
            late.cancel()
        await asyncio.gather(*self._late, return_exceptions=True)
        await self.inner.close()

    async def get(self, key: str, *, unless: Version | None = None) -> Object | None:
        return await self._meet(lambda: self.inner.get(key, unless=unless), key=key)

    async def head(self, key: str) -> Head:
        return await self._meet(lambda: self.inner.head(key), key=key)

    async def put(
        self,
        key: str,
        body: bytes,
        mode: PutMode = REPLACE,
        *,
        metadata: Mapping[str, str] = NO_METADATA,
    ) -> Version:
        return await self._meet(
            lambda: self.inner.put(key, body, mode, metadata=metadata), key=key, writes=True
        )

    async def touch(
        self, key: str, *, version: Version, metadata: Mapping[str, str] = NO_METADATA
    ) -> Version:
        return await self._meet(
            lambda: self.inner.touch(key, version=version, metadata=metadata),
            key=key,
            writes=True,
        )

    async def delete(self, key: str, *, version: Version | None = None) -> None:
        await self._meet(lambda: self.inner.delete(key, version=version), key=key, writes=True)

    async def list(
        self,
        prefix: str = "",
        *,
        start_after: str = "",
        delimiter: Delimiter = "",
        limit: int = PAGE_KEYS_MAX,
        cursor: str | None = None,
    ) -> Page:
        return await self._meet(
            lambda: self.inner.list(
                prefix, start_after=start_after, delimiter=delimiter, limit=limit, cursor=cursor
            )
        )

    async def sample(self) -> TimeSample:
        return await self._meet(self.inner.sample)


def _lost(*, writes: bool, what: str, key: str) -> StoreError:
    kind: type[StoreError] = OutcomeUnknown if writes else Unavailable
    return kind(f"The {what} was lost (injected).", key=key)
