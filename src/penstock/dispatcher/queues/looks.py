"""Looks at the queues of the bucket, for all who watch together.

A look is what `penstock.queue.inspection` shows of one queue at one moment: what waits, who works,
what ended lately, dead letters. It costs requests, which somebody pays; so there is one cache for
all who ask, and these bounds:

- A look begins `LOOK_SECONDS` after the one before it began, of whichever queue; only a queue that
  nothing is known of may be looked at after `FIRST_SECONDS`. There is one look at a time.
- It takes `SECONDS_MAX` and `REQUESTS_MAX` at the most. Of each folder `SURVEY_PAGES` pages are
  listed; after a look that took too long one page, for `SHORT_SECONDS`.
- `QUEUES_MAX` queues are remembered, those that were asked for last; `NAMES_MAX` are named.

Who asks while a look is under way, or before the next may begin, gets the last one at once. Who
asks first waits for it. A look that fails leaves the last one and says why (`trouble`); a queue
that is gone is forgotten. If who waits goes away, the look ends with it, and the next who asks
begins another. Nothing is written, and a crash loses the cache.

`Queues` is used by one event loop. Steering is in `penstock.dispatcher.queues.steering`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Final

from penstock.dispatcher.queues.bounded import BoundedStore
from penstock.kernel.entropy import Entropy
from penstock.kernel.errors import PenstockError, QueueNotFound
from penstock.queue.access import Access
from penstock.queue.client import Queue
from penstock.queue.config import QueueConfig
from penstock.queue.inspection.costs import StandingCost, TaskCost, standing_cost, task_cost
from penstock.queue.inspection.figures import Remembered, Stats, stats
from penstock.queue.inspection.lately import Lately, Seen
from penstock.queue.inspection.survey import Survey, surveyed
from penstock.queue.layout import queue_names
from penstock.queue.owning.registry import Role
from penstock.queue.owning.shards import shard_of
from penstock.store.base import ObjectStore
from penstock.store.metered import Kind, labelled

LOOK_SECONDS: Final = 5.0
FIRST_SECONDS: Final = 1.0
SECONDS_MAX: Final = 3.0
REQUESTS_MAX: Final = 300
SURVEY_PAGES: Final = 5
SHORT_SECONDS: Final = 300.0
QUEUES_MAX: Final = 8
NAMES_MAX: Final = 100
_NOTES_MAX: Final = 20


@dataclass(frozen=True, slots=True)
class LookCost:
    """What one look took, measured."""

    lists: int
    gets: int
    dollars: float
    seconds: float

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
    began_at: float = float("-inf")
    short_until: float = float("-inf")


class Queues:
    """The queues of one bucket, as people see them."""

    def __init__(self, store: ObjectStore, *, entropy: Entropy) -> None:
        self._store = store
        self._entropy = entropy
        self._clock = store.clock.machine
        self._watched: dict[str, _Watched] = {}
        self._began_at = float("-inf")
        self._looking = asyncio.Lock()

    async def look(self, name: str) -> Look:
        """The queue of this name, as it was a few seconds ago.

        Raises `QueueNotFound`, `InvalidInput` for what is no name, and what the store says if
        nothing was seen yet.
        """
        watched = self._watched.get(name)
        if watched is not None and watched.look is not None:
            is_due = self._clock.monotonic() >= self._began_at + LOOK_SECONDS
            if not is_due or self._looking.locked():
                return watched.look
        async with self._looking:
            watched = self._watched.pop(name, None) or _Watched()
            try:
                look = await self._looked(name, watched)
            except QueueNotFound:
                raise
            except PenstockError as error:
                look = self._last(name, watched, error)
            self._keep(name, watched)
            watched.look = look
            return look

    def forget(self, name: str) -> None:
        """The next who asks looks: this process has just changed it."""
        if name in self._watched:
            self._watched[name].began_at = float("-inf")
            self._began_at = min(self._began_at, self._clock.monotonic() - LOOK_SECONDS)

    async def names(self) -> tuple[str, ...]:
        """The queues that there are, in order: a LIST, at the most."""
        return await queue_names(self._store, names_max=NAMES_MAX)

    async def opened(self, name: str) -> Queue:
        """A queue that is there, to do something with. Raises `QueueNotFound`."""
        queue = Queue("", name=name, create=False)
        await queue.attach(self._store, self._entropy)
        return queue

    def _keep(self, name: str, watched: _Watched) -> None:
        """Remember it as the one that was asked for last."""
        self._watched[name] = watched
        while len(self._watched) > QUEUES_MAX:
            del self._watched[next(iter(self._watched))]

    def _last(self, name: str, watched: _Watched, error: PenstockError) -> Look:
        if watched.look is None:
            raise error
        return replace(watched.look, trouble=error.message)

    async def _looked(self, name: str, watched: _Watched) -> Look:
        """Look, if it may be by now; otherwise the last look."""
        pace = FIRST_SECONDS if watched.look is None else LOOK_SECONDS
        wait = self._began_at + pace - self._clock.monotonic()
        if wait > 0 and watched.look is not None:
            return watched.look
        if wait > 0:
            await self._clock.sleep(wait)
        self._began_at = watched.began_at = self._clock.monotonic()
        store = BoundedStore(self._store, requests_max=REQUESTS_MAX)
        is_short = self._began_at < watched.short_until
        try:
            async with asyncio.timeout(SECONDS_MAX):
                with labelled("inspect"):
                    return await self._look(store, name, watched, pages=1 if is_short else None)
        except TimeoutError:
            watched.short_until = self._clock.monotonic() + SHORT_SECONDS
            raise PenstockError(
                f"A look took longer than {SECONDS_MAX:.0f} seconds, and was given up.",
                hint="The store is slow, or the queue is long: it is tried again with less.",
            ) from None

    async def _look(
        self, store: BoundedStore, name: str, watched: _Watched, *, pages: int | None
    ) -> Look:
        names = await queue_names(store, names_max=NAMES_MAX)
        queue = Queue("", name=name, create=False)
        await queue.attach(store, self._entropy)
        access = queue.access
        survey = await surveyed(access, pages_max=pages or SURVEY_PAGES)
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
            standing=standing_cost(
                owners=sum(each.role == Role.OWNER for each in figures.workers)
            ),
            notes=tuple(dict.fromkeys((*figures.notes, *lately.notes)))[:_NOTES_MAX],
            cost=self._cost(store),
        )

    def _cost(self, store: BoundedStore) -> LookCost:
        meter = store.meter
        lists = meter.requests(kind=Kind.LIST)
        return LookCost(
            lists=lists,
            gets=meter.requests() - lists,
            dollars=meter.dollars(),
            seconds=self._clock.monotonic() - self._began_at,
        )


def _depths(survey: Survey, *, shards: int) -> tuple[int, ...]:
    depths = [0] * shards
    for at, (pack, _) in survey.pairs.items():
        if pack is not None:
            depths[shard_of(at.slot, shards=shards)] += at.count
    return tuple(depths)


__all__ = ["Access", "Look", "LookCost", "Queues"]
