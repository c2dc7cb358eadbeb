"""Looks at the queues of the bucket, for all who watch together.

A look is what `penstock.queue.inspection` shows of one queue at one moment: what waits, who works,
what ended lately, dead letters. It costs requests, which somebody pays; so there is one cache for
all who ask, and these bounds:

- A look begins `LOOK_SECONDS` after the one before it began, of whichever queue; where several are
  watched they take turns. Only a queue that nothing is known of is looked at when it is first asked
  for, one in `FIRST_SECONDS`. There is one look at a time.
- It takes `SECONDS_MAX` and `REQUESTS_MAX` at the most. Of each folder `SURVEY_PAGES` pages are
  listed; after a look that took too long one page, for `SHORT_SECONDS`.
- `QUEUES_MAX` queues are remembered, those that were asked for last; `NAMES_MAX` are named.

Who asks while a look is under way, or before the next may begin, gets the last one at once. Who
asks first waits for it. A look that fails leaves the last one and says why (`trouble`); a queue
that is gone is forgotten. If who waits goes away, the look ends with it, and the next who asks
begins another. Nothing is written, and a crash loses the cache. What pages show beside a look is
read by `penstock.dispatcher.queues.reads`, with bounds of its own.

`Queues` is used by one event loop. Steering is in `penstock.dispatcher.queues.steering`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Final

from penstock.dispatcher.queues.bounded import BoundedStore
from penstock.dispatcher.queues.reads import Answer, Found, SharedReads
from penstock.kernel.entropy import Entropy
from penstock.kernel.errors import PenstockError, QueueNotFound
from penstock.queue.client import Queue
from penstock.queue.config import QueueConfig, queue_names
from penstock.queue.inspection.costs import StandingCost, TaskCost, standing_cost, task_cost
from penstock.queue.inspection.figures import Remembered, Stats, stats
from penstock.queue.inspection.lately import Lately, Seen
from penstock.queue.inspection.survey import Survey, surveyed
from penstock.queue.owning.registry import Role
from penstock.queue.owning.shards import shard_of
from penstock.queue.places import check_name
from penstock.store.base import ObjectStore
from penstock.store.metered import Kind, Meter, labelled

LOOK_SECONDS: Final = 5.0
FIRST_SECONDS: Final = 1.0
SECONDS_MAX: Final = 3.0
REQUESTS_MAX: Final = 400
SURVEY_PAGES: Final = 5
SHORT_SECONDS: Final = 300.0
QUEUES_MAX: Final = 8
NAMES_MAX: Final = 100
_NOTES_MAX: Final = 20
_ASKS_SECONDS: Final = 3.0
"""Who watches a queue asks at least that often."""
_NEVER: Final = float("-inf")


@dataclass(frozen=True, slots=True)
class LookCost:
    """What one look took, measured."""

    lists: int = 0
    gets: int = 0
    dollars: float = 0.0
    seconds: float = 0.0

    @property
    def requests(self) -> int:
        """All of them."""
        return self.lists + self.gets


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What a look has shown."""

    names: tuple[str, ...]
    """The queues that are in the bucket."""
    stats: Stats
    lately: Seen
    depths: tuple[int, ...]
    """How many tasks of each shard have not settled."""
    is_whole: bool
    """Whether all objects were looked at; otherwise there are more tasks than are counted."""
    config: QueueConfig
    a_task: TaskCost | None
    standing: StandingCost
    notes: tuple[str, ...]
    cost: LookCost
    trouble: str = ""
    """Why there is no newer one, if one was tried."""


@dataclass(slots=True)
class _Watched:
    """What is known of one queue."""

    lately: Lately = field(default_factory=Lately)
    known: Remembered = field(default_factory=Remembered)
    look: Look | None = None
    began_at: float = _NEVER
    """When the last look at it began."""
    asked_at: float = _NEVER
    short_until: float = _NEVER


class Queues:
    """The queues of one bucket, as people see them."""

    def __init__(self, store: ObjectStore, *, entropy: Entropy) -> None:
        self._store = store
        self._entropy = entropy
        self._clock = store.clock.machine
        self._watched: dict[str, _Watched] = {}
        self._began_at = _NEVER
        self._first_at = _NEVER
        self._looking = asyncio.Lock()
        self._names: tuple[str, ...] = ()
        self._named_at = _NEVER
        self._reads = SharedReads(store)

    async def look(self, name: str) -> Look:
        """The queue of this name, as it was a few seconds ago.

        Raises `QueueNotFound`, `InvalidInput` for what is no name, and what the store says if
        nothing was seen yet.
        """
        check_name(name, what="queue")
        watched = self._watched.get(name)
        if watched is not None:
            watched.asked_at = self._clock.monotonic()
            if watched.look is not None and (self._looking.locked() or not self._is_due(watched)):
                return watched.look
        async with self._looking:
            watched = self._watched.get(name) or _Watched()
            if watched.look is not None and not self._is_due(watched):
                return watched.look
            if watched.look is None:
                await self._wait()
            return await self._renewed(name, watched)

    def forget(self, name: str) -> None:
        """The next who asks looks: this process has just changed something."""
        self._reads.forget(name)
        if name in self._watched:
            self._watched[name].began_at = _NEVER
            self._began_at = _NEVER

    async def names(self) -> tuple[str, ...]:
        """The queues that there are, in order, as they were a few seconds ago: a LIST."""
        async with self._looking:
            if self._clock.monotonic() >= self._named_at + LOOK_SECONDS:
                self._named_at = self._clock.monotonic()
                async with asyncio.timeout(SECONDS_MAX):
                    with labelled("inspect"):
                        self._names = await queue_names(self._store, names_max=NAMES_MAX)
            return self._names

    async def opened(self, name: str) -> Queue:
        """A queue that is there, to do something with. Raises `QueueNotFound`."""
        return await _opened(self._store, name, self._entropy)

    async def read(
        self,
        name: str,
        what: Hashable,
        make: Callable[[Queue], Awaitable[Found]],
        *,
        seconds: float = LOOK_SECONDS,
    ) -> Answer[Found]:
        """What is read of a queue for a page, shared by all who ask for the same `what`."""
        check_name(name, what="queue")

        async def made(store: ObjectStore) -> Found:
            return await make(await _opened(store, name, self._entropy))

        return await self._reads.read((name, what), made, seconds=seconds)

    def _is_due(self, watched: _Watched) -> bool:
        """Whether it may be looked at now: time has passed, and no other waits for longer."""
        now = self._clock.monotonic()
        return now >= self._began_at + LOOK_SECONDS and not any(
            other.began_at < watched.began_at and now - other.asked_at < _ASKS_SECONDS
            for other in self._watched.values()
        )

    async def _wait(self) -> None:
        """Let some time pass before a queue is looked at that nothing is known of."""
        wait = self._first_at + FIRST_SECONDS - self._clock.monotonic()
        if wait > 0:
            await self._clock.sleep(wait)
        self._first_at = self._clock.monotonic()

    async def _renewed(self, name: str, watched: _Watched) -> Look:
        began_at = watched.asked_at = self._clock.monotonic()
        if name in self._watched:
            # Also for a look that nobody waits for to the end.
            self._keep(name, watched, began_at)
        try:
            watched.look = await self._looked(name, watched)
        except QueueNotFound:
            self._watched.pop(name, None)
            raise
        except (PenstockError, TimeoutError) as error:
            if isinstance(error, TimeoutError):
                watched.short_until = self._clock.monotonic() + SHORT_SECONDS
            self._keep(name, watched, began_at)
            if watched.look is None:
                raise
            watched.look = replace(watched.look, trouble=_sentence(error))
        else:
            self._keep(name, watched, began_at)
        return watched.look

    def _keep(self, name: str, watched: _Watched, began_at: float) -> None:
        """Remember it as the one that was looked at last."""
        self._began_at = watched.began_at = began_at
        self._watched.pop(name, None)
        self._watched[name] = watched
        while len(self._watched) > QUEUES_MAX:
            del self._watched[next(iter(self._watched))]

    async def _looked(self, name: str, watched: _Watched) -> Look:
        store = BoundedStore(self._store, requests_max=REQUESTS_MAX)
        began_at = self._clock.monotonic()
        is_short = began_at < watched.short_until
        async with asyncio.timeout(SECONDS_MAX):
            with labelled("inspect"):
                look = await self._look(store, name, watched, pages=1 if is_short else SURVEY_PAGES)
        return replace(look, cost=_cost_of(store.meter, seconds=self._clock.monotonic() - began_at))

    async def _look(self, store: BoundedStore, name: str, watched: _Watched, *, pages: int) -> Look:
        access = (await _opened(store, name, self._entropy)).access
        names = await queue_names(store, names_max=NAMES_MAX)
        survey = await surveyed(access, pages_max=pages)
        figures = await stats(access, survey=survey, known=watched.known)
        lately = await watched.lately.look(access, survey)
        return Look(
            names=names if name in names else (*names, name),
            stats=figures,
            lately=lately,
            depths=_depths(survey, shards=figures.shards),
            is_whole=survey.is_whole,
            config=access.config,
            a_task=task_cost(puts=lately.puts, gets=lately.gets, tasks=lately.tasks_read),
            standing=standing_cost(owners=sum(each.role == Role.OWNER for each in figures.workers)),
            notes=tuple(dict.fromkeys((*figures.notes, *lately.notes)))[:_NOTES_MAX],
            cost=LookCost(),
        )


async def _opened(store: ObjectStore, name: str, entropy: Entropy) -> Queue:
    queue = Queue("", name=name, create=False)
    await queue.attach(store, entropy)
    return queue


def _cost_of(meter: Meter, *, seconds: float) -> LookCost:
    lists = meter.requests(kind=Kind.LIST)
    gets = meter.requests() - lists
    return LookCost(lists=lists, gets=gets, dollars=meter.dollars(), seconds=seconds)


def _sentence(error: PenstockError | TimeoutError) -> str:
    if isinstance(error, PenstockError):
        return error.message
    return f"The store has not answered all of a look within {SECONDS_MAX:.0f} seconds."


def _depths(survey: Survey, *, shards: int) -> tuple[int, ...]:
    depths = [0] * shards
    for at, (pack, _) in survey.pairs.items():
        if pack is not None:
            depths[shard_of(at.slot, shards=shards)] += at.count
    return tuple(depths)
