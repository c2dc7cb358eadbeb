"""Injects what networks and stores do, from a seeded plan.

| fault | what happens | what the caller sees |
|---|---|---|
| latency | the request takes longer | nothing |
| throttled | 503 Slow Down, nothing is done | `Throttled` |
| failed | 500 from the store, done or not | `OutcomeUnknown`; `Unavailable` for a read |
| lost request | it never arrives | the same |
| late request | a write is carried out, but only after a while | the same, at once |
| lost answer | it is carried out, or refused | the same |
| duplicate | a write is carried out, and once more after a while | the answer to the first |
| racy delete | a conditional delete is checked, and removes later what is there then | success |

What happens to a request is drawn from the plan's own randomness when it is made, all at once. So
the same seed and the same requests in the same order meet the same faults, however long they
take; with a virtual loop a whole run is a function of its seeds. Late requests and duplicates
that are still on their way are dropped by `close`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from penstock.kernel.entropy import Entropy
from penstock.kernel.errors import (
    NotFound,
    OutcomeUnknown,
    StoreError,
    Throttled,
    Unavailable,
    VersionConflict,
)
from penstock.store.base import Answer, ObjectStore, StoreOperation, Version, Wrapper


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """How likely each fault is, for each request. All are off unless told."""

    latency_seconds_max: float = 0.0
    throttled: float = 0.0
    failed: float = 0.0
    lost_request: float = 0.0
    late_request: float = 0.0
    lost_answer: float = 0.0
    duplicate: float = 0.0
    late_seconds_max: float = 30.0
    """By how much a late request, and a duplicate, come later."""
    racy_delete_seconds_max: float = 0.0
    """Up to so long after its check a conditional delete is carried out; 0 is at once, atomically.
    That is how some servers are (`penstock.store.tombstoned`), and always, not now and then."""


@dataclass(frozen=True, slots=True)
class _Fate:
    """What happens to one request: one fault at the most, and perhaps a duplicate besides."""

    latency_seconds: float
    fault: str
    arrives: bool
    duplicated: bool
    late_seconds: float


class FaultyStore(Wrapper):
    """An `ObjectStore` that misbehaves as a plan says. Set `plan` to change it on the way.

    `injected` counts the faults that were met, by the names that the table above has for them.
    """

    def __init__(self, inner: ObjectStore, plan: FaultPlan, *, entropy: Entropy) -> None:
        super().__init__(inner)
        self.plan = plan
        self._entropy = entropy
        self._late: set[asyncio.Task[None]] = set()
        self.injected: Counter[str] = Counter()

    async def request(
        self, operation: StoreOperation, key: str, ask: Callable[[], Awaitable[Answer]]
    ) -> Answer:
        writes = operation.writes
        fate = self._fate(writes=writes)
        if fate.latency_seconds:
            await self.clock.machine.sleep(fate.latency_seconds)
        if fate.fault:
            self.injected[fate.fault] += 1
        if fate.fault == "throttled":
            raise Throttled("The store asked to slow down (injected).", key=key)
        if fate.fault == "late request":
            self._deliver(ask, after_seconds=fate.late_seconds)
        if not fate.arrives:
            raise _lost(writes=writes, what="request", key=key)
        try:
            answer = await self._carry_out(ask, fate)
        except StoreError:
            # A refusal is an answer, and is lost like any other.
            if not fate.fault:
                raise
        else:
            if not fate.fault:
                return answer
        raise _lost(writes=writes, what="answer", key=key)

    def _fate(self, *, writes: bool) -> _Fate:
        plan = self.plan
        faults = [
            fault
            for fault, likelihood in (
                ("throttled", plan.throttled),
                ("lost request", plan.lost_request),
                ("failed", plan.failed),
                ("late request", plan.late_request if writes else 0.0),
                ("lost answer", plan.lost_answer),
            )
            if self._happens(likelihood)
        ]
        fault = faults[0] if faults else ""
        done = fault in ("", "lost answer") or (fault == "failed" and self._happens(0.5))
        return _Fate(
            latency_seconds=self._up_to(plan.latency_seconds_max),
            fault=fault,
            arrives=done,
            duplicated=writes and self._happens(plan.duplicate),
            late_seconds=self._up_to(plan.late_seconds_max),
        )

    def _happens(self, likelihood: float) -> bool:
        return likelihood > 0 and self._entropy.random() < likelihood

    def _up_to(self, seconds: float) -> float:
        return self._entropy.uniform(0, seconds) if seconds > 0 else 0.0

    async def _carry_out(self, request: Callable[[], Awaitable[Answer]], fate: _Fate) -> Answer:
        try:
            return await request()
        finally:
            # Only now: a duplicate that came first would take the answer of the other.
            if fate.duplicated:
                self.injected["duplicate"] += 1
                self._deliver(request, after_seconds=fate.late_seconds)

    def _deliver(self, request: Callable[[], Awaitable[object]], *, after_seconds: float) -> None:
        async def deliver() -> None:
            await self.clock.machine.sleep(after_seconds)
            try:
                await request()
            except StoreError:
                return  # Nobody waits for this answer.

        late = asyncio.get_running_loop().create_task(deliver())
        self._late.add(late)
        late.add_done_callback(self._late.discard)

    async def close(self) -> None:
        for late in list(self._late):
            late.cancel()
        await asyncio.gather(*self._late, return_exceptions=True)
        await self.inner.close()

    async def delete(self, key: str, *, version: Version | None = None) -> None:
        gap_seconds = self._up_to(self.plan.racy_delete_seconds_max) if version else 0.0

        async def request() -> None:
            if not gap_seconds or version is None:
                await self.inner.delete(key, version=version)
                return
            await self._check(key, version)
            await self.clock.machine.sleep(gap_seconds)
            await self.inner.delete(key)

        await self.request(StoreOperation.DELETE, key, request)

    async def _check(self, key: str, version: Version) -> None:
        try:
            found = await self.inner.head(key)
        except NotFound:
            found = None
        if found is None or found.version != version:
            raise VersionConflict(f"The object {key!r} is not there in the version named.", key=key)


def _lost(*, writes: bool, what: str, key: str) -> StoreError:
    kind: type[StoreError] = OutcomeUnknown if writes else Unavailable
    return kind(f"The {what} was lost (injected).", key=key)
