"""Every order in which a few clients of one bucket can run, and every fault they can meet.

There is no event loop: coroutines are stepped one request at a time, and each decision (who goes
next, what happens to a request) is taken in every possible way, one run for each combination.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from penstock.kernel.errors import OutcomeUnknown, StoreError, Unavailable
from penstock.store.base import NO_METADATA, REPLACE, Head, Object, PutMode, Version, Wrapper
from penstock.store.memory import MemoryBucket, MemoryStore

Answer = TypeVar("Answer")


class Choices:
    """The decisions of one run: those of a former run up to a point, then always the first."""

    def __init__(self, prefix: list[int]) -> None:
        self._prefix = prefix
        self.taken: list[tuple[int, int]] = []

    def choose(self, count: int) -> int:
        place = len(self.taken)
        choice = self._prefix[place] if place < len(self._prefix) else 0
        self.taken.append((choice, count))
        return choice


def explore(run: Callable[[Choices], None], *, runs_max: int = 200_000) -> int:
    """Call `run` once for every way to choose, and return how many there are."""
    prefix: list[int] = []
    for runs in range(1, runs_max + 1):
        choices = Choices(prefix)
        try:
            run(choices)
        except BaseException as error:
            error.add_note(f"The choices were {[choice for choice, _ in choices.taken]}.")
            raise
        taken = choices.taken
        while taken and taken[-1][0] == taken[-1][1] - 1:
            taken.pop()
        if not taken:
            return runs
        prefix = [choice for choice, _ in taken]
        prefix[-1] += 1
    raise AssertionError(f"There are more than {runs_max} ways.")


class Turn:
    """Awaiting it lets the others run."""

    def __await__(self) -> Generator[None, None, None]:
        yield


class Frozen:
    """A clock that stands still: what is tried here does not depend on time."""

    def monotonic(self) -> float:
        return 0.0

    def wall(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        return


@dataclass
class Field:
    """One bucket, the clients that are at work on it, and every body that was ever in it."""

    choices: Choices
    faults_left: int
    bucket: MemoryBucket = field(default_factory=lambda: MemoryBucket(Frozen()))
    applied: list[bytes] = field(default_factory=list)
    _running: list[Coroutine[Any, Any, None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        write = self.bucket.write

        def noted(key: str, body: bytes, metadata: Mapping[str, str]) -> Version:
            self.applied.append(body)
            return write(key, body, metadata)

        self.bucket.write = noted  # type: ignore[method-assign] # so that nothing escapes

    def direct(self) -> MemoryStore:
        """A client that meets no faults and waits for nobody."""

        async def at_once() -> None:
            return

        return MemoryStore(self.bucket, clock=Frozen(), delay=at_once)

    def client(self) -> FaultyClient:
        return FaultyClient(self)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin some work, up to its first request: nobody can see what it does before."""
        work.send(None)
        self._running.append(work)

    def run(self) -> None:
        """Run everything to its end, late requests included."""
        while self._running:
            work = self._running[self.choices.choose(len(self._running))]
            try:
                work.send(None)
            except StopIteration:
                self._running.remove(work)


class FaultyClient(Wrapper):
    """One client. Each of its requests is a turn, and may meet a fault."""

    def __init__(self, on: Field) -> None:
        super().__init__(on.direct())
        self._field = on
        self.unknown = 0

    def _fault(self, *kinds: str) -> str:
        if not self._field.faults_left:
            return ""
        fault = ("", *kinds)[self._field.choices.choose(len(kinds) + 1)]
        self._field.faults_left -= bool(fault)
        return fault

    async def get(self, key: str, *, unless: Version | None = None) -> Object | None:
        await Turn()
        if self._fault("lost"):
            raise Unavailable("lost", key=key)
        return await self.inner.get(key, unless=unless)

    async def head(self, key: str) -> Head:
        await Turn()
        if self._fault("lost"):
            raise Unavailable("lost", key=key)
        return await self.inner.head(key)

    async def put(
        self,
        key: str,
        body: bytes,
        mode: PutMode = REPLACE,
        *,
        metadata: Mapping[str, str] = NO_METADATA,
    ) -> Version:
        await Turn()
        return await self._write(lambda: self.inner.put(key, body, mode, metadata=metadata))

    async def delete(self, key: str, *, version: Version | None = None) -> None:
        await Turn()
        await self._write(lambda: self.inner.delete(key, version=version))

    async def _write(self, request: Callable[[], Awaitable[Answer]]) -> Answer:
        match self._fault("lost request", "lost answer", "late", "duplicate"):
            case "lost request":
                pass
            case "lost answer":
                await _ignoring_refusals(request)
            case "late":
                self._field.start(_later(request))
            case fault:
                if fault == "duplicate":
                    self._field.start(_later(request))
                return await request()
        self.unknown += 1
        raise OutcomeUnknown("lost")


async def _later(request: Callable[[], Awaitable[object]]) -> None:
    await Turn()
    await _ignoring_refusals(request)


async def _ignoring_refusals(request: Callable[[], Awaitable[object]]) -> None:
    try:
        await request()
    except StoreError:
        return
