"""The queues of the dispatcher's bucket, for people: inspect them, and control them.

`QueueInspector` answers all who watch from one cache. A snapshot is what
`penstock.queue.inspection` shows of one queue: what waits, who works, what ended lately, dead
letters. Bounds:

- A snapshot begins `SNAPSHOT_SECONDS` after the one before, of whichever queue; watched queues
  take
  turns. Only an unknown queue is looked at when it is first asked for, one in
  `SNAPSHOT_FIRST_SECONDS`. There is one snapshot at a time.
- It takes `SNAPSHOT_SECONDS_MAX` and `SNAPSHOT_REQUESTS_MAX` at most (`BoundedStore` refuses the
  rest). Of each folder `SURVEY_PAGES` pages are listed; after a slow one one page, for
  `SHORT_SECONDS`. `QUEUES_MAX` queues are remembered; `NAMES_MAX` are named.

`SharedReads` is what pages read besides: tasks, limits, schedules, batches. Whoever asks for
the same shares one answer, which is read again when it is older than the page says. One read at
a time, the first of something `READ_FIRST_SECONDS` after the one before; each takes
`READ_SECONDS_MAX` and `READ_REQUESTS_MAX` at most, all together `REQUESTS_A_SECOND`.
`ANSWERS_MAX` answers are remembered.

A look that fails leaves the last answer and says why (`trouble`). A caller that leaves ends its
look. Nothing is written, and a crash loses the caches. Used by one event loop.

`pause`, `drain`, `resume`, `replay`, `cancel` and the limits and schedules are what the queue
itself offers (`penstock.queue.client`), and may be repeated; only a schedule that is run twice
submits two tasks. A pause is a swap of one object, a replay some GETs and two puts. At most
`REPLAYS_MAX` are replayed and `CANCELS_MAX` cancelled in a call. After each, the next snapshot
is a new one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Generic, TypeVar, cast

from penstock.kernel.entropy import Entropy
from penstock.kernel.errors import (
    InvalidInput,
    PenstockError,
    QueueNotFound,
    TaskNotFound,
    Throttled,
)
from penstock.queue.client import Queue
from penstock.queue.config import QueueConfig, queue_names
from penstock.queue.ids import check_name
from penstock.queue.inspection.activity import (
    ActivityReader,
    RecentActivity,
    TaskCost,
    WorkerCost,
    standing_cost,
    task_cost,
)
from penstock.queue.inspection.stats import KnownRegistrations, Stats, stats
from penstock.queue.shards.allocation import shard_of
from penstock.queue.shards.registry import OwnerRole
from penstock.queue.survey import Survey, surveyed
from penstock.store.base import Answer, ObjectStore, StoreOperation
from penstock.store.metered import Kind, Meter, MeteredStore, labelled


class BoundedStore(MeteredStore):
    """An `ObjectStore` that counts its requests, and refuses those beyond a bound."""

    def __init__(self, inner: ObjectStore, *, requests_max: int) -> None:
        super().__init__(inner, Meter())
        self._requests_max = requests_max
        self._sent = 0

    async def request(
        self, operation: StoreOperation, key: str, ask: Callable[[], Awaitable[Answer]]
    ) -> Answer:
        if self._sent >= self._requests_max:
            raise Throttled(f"A look makes at most {self._requests_max} requests.")
        self._sent += 1
        return await super().request(operation, key, ask)


READ_FIRST_SECONDS: Final = 0.5
READ_SECONDS_MAX: Final = 5.0
READ_REQUESTS_MAX: Final = 500
REQUESTS_A_SECOND: Final = 20.0
ANSWERS_MAX: Final = 64
_NEVER: Final = float("-inf")

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class SharedAnswer(Generic[Found]):
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
        self._answers: dict[tuple[str, Hashable], tuple[float, SharedAnswer[Any]]] = {}
        self._reading = asyncio.Lock()
        self._first_at = _NEVER
        self._paced_until = _NEVER

    async def read(
        self,
        key: tuple[str, Hashable],
        make: Callable[[ObjectStore], Awaitable[Found]],
        *,
        seconds: float,
    ) -> SharedAnswer[Found]:
        """What `make` reads, at most about `seconds` old while somebody asks."""
        known = self._answers.get(key)
        if known is not None and (self._reading.locked() or not self._is_due(known[0], seconds)):
            return cast("SharedAnswer[Found]", known[1])
        async with self._reading:
            known = self._answers.get(key)
            if known is not None and not self._is_due(known[0], seconds):
                return cast("SharedAnswer[Found]", known[1])
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
        wait = self._first_at + READ_FIRST_SECONDS - self._clock.monotonic()
        if wait > 0:
            await self._clock.sleep(wait)
        self._first_at = self._clock.monotonic()

    async def _renewed(
        self,
        key: tuple[str, Hashable],
        make: Callable[[ObjectStore], Awaitable[Found]],
        last: SharedAnswer[Found] | None,
    ) -> SharedAnswer[Found]:
        store = BoundedStore(self._store, requests_max=READ_REQUESTS_MAX)
        began_at = self._clock.monotonic()
        try:
            async with asyncio.timeout(READ_SECONDS_MAX):
                with labelled("inspect"):
                    found = await make(store)
                    at = (await store.now()).middle
            requests = store.meter.requests()
            answer = SharedAnswer(found, at, requests, store.meter.dollars())
        except (QueueNotFound, TaskNotFound):
            self._answers.pop(key, None)
            raise
        except (PenstockError, TimeoutError) as error:
            if last is None:
                raise
            answer = replace(last, trouble=_read_trouble(error))
        finally:
            self._paced_until = began_at + store.meter.requests() / REQUESTS_A_SECOND
        self._answers.pop(key, None)
        self._answers[key] = (began_at, answer)
        while len(self._answers) > ANSWERS_MAX:
            del self._answers[next(iter(self._answers))]
        return answer


def _read_trouble(error: PenstockError | TimeoutError) -> str:
    if isinstance(error, PenstockError):
        return error.message
    return f"The store has not answered all of it within {READ_SECONDS_MAX:.0f} seconds."


SNAPSHOT_SECONDS: Final = 5.0
SNAPSHOT_FIRST_SECONDS: Final = 1.0
SNAPSHOT_SECONDS_MAX: Final = 3.0
SNAPSHOT_REQUESTS_MAX: Final = 400
SURVEY_PAGES: Final = 5
SHORT_SECONDS: Final = 300.0
QUEUES_MAX: Final = 8
NAMES_MAX: Final = 100
_NOTES_MAX: Final = 20
_ASKS_SECONDS: Final = 3.0
"""Who watches a queue asks at least that often."""


@dataclass(frozen=True, slots=True)
class SnapshotCost:
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
class QueueSnapshot:
    """What a look has shown."""

    names: tuple[str, ...]
    """The queues that are in the bucket."""
    stats: Stats
    lately: RecentActivity
    depths: tuple[int, ...]
    """How many tasks of each shard have not settled."""
    is_whole: bool
    """Whether all objects were looked at; otherwise there are more tasks than are counted."""
    config: QueueConfig
    a_task: TaskCost | None
    standing: WorkerCost
    notes: tuple[str, ...]
    cost: SnapshotCost
    trouble: str = ""
    """Why there is no newer one, if one was tried."""


@dataclass(slots=True)
class _Watched:
    """What is known of one queue."""

    lately: ActivityReader = field(default_factory=ActivityReader)
    known: KnownRegistrations = field(default_factory=KnownRegistrations)
    look: QueueSnapshot | None = None
    began_at: float = _NEVER
    """When the last look at it began."""
    asked_at: float = _NEVER
    short_until: float = _NEVER


class QueueInspector:
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

    async def look(self, name: str) -> QueueSnapshot:
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
            if self._clock.monotonic() >= self._named_at + SNAPSHOT_SECONDS:
                self._named_at = self._clock.monotonic()
                async with asyncio.timeout(SNAPSHOT_SECONDS_MAX):
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
        seconds: float = SNAPSHOT_SECONDS,
    ) -> SharedAnswer[Found]:
        """What is read of a queue for a page, shared by all who ask for the same `what`."""
        check_name(name, what="queue")

        async def made(store: ObjectStore) -> Found:
            return await make(await _opened(store, name, self._entropy))

        return await self._reads.read((name, what), made, seconds=seconds)

    def _is_due(self, watched: _Watched) -> bool:
        """Whether it may be looked at now: time has passed, and no other waits for longer."""
        now = self._clock.monotonic()
        return now >= self._began_at + SNAPSHOT_SECONDS and not any(
            other.began_at < watched.began_at and now - other.asked_at < _ASKS_SECONDS
            for other in self._watched.values()
        )

    async def _wait(self) -> None:
        """Let some time pass before a queue is looked at that nothing is known of."""
        wait = self._first_at + SNAPSHOT_FIRST_SECONDS - self._clock.monotonic()
        if wait > 0:
            await self._clock.sleep(wait)
        self._first_at = self._clock.monotonic()

    async def _renewed(self, name: str, watched: _Watched) -> QueueSnapshot:
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
            watched.look = replace(watched.look, trouble=_snapshot_trouble(error))
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

    async def _looked(self, name: str, watched: _Watched) -> QueueSnapshot:
        store = BoundedStore(self._store, requests_max=SNAPSHOT_REQUESTS_MAX)
        began_at = self._clock.monotonic()
        is_short = began_at < watched.short_until
        async with asyncio.timeout(SNAPSHOT_SECONDS_MAX):
            with labelled("inspect"):
                look = await self._look(store, name, watched, pages=1 if is_short else SURVEY_PAGES)
        return replace(look, cost=_cost_of(store.meter, seconds=self._clock.monotonic() - began_at))

    async def _look(
        self, store: BoundedStore, name: str, watched: _Watched, *, pages: int
    ) -> QueueSnapshot:
        access = (await _opened(store, name, self._entropy)).access
        names = await queue_names(store, names_max=NAMES_MAX)
        survey = await surveyed(access, pages_max=pages)
        figures = await stats(access, survey=survey, known=watched.known)
        lately = await watched.lately.look(access, survey)
        return QueueSnapshot(
            names=names if name in names else (*names, name),
            stats=figures,
            lately=lately,
            depths=_depths(survey, shards=figures.shards),
            is_whole=survey.is_whole,
            config=access.config,
            a_task=task_cost(puts=lately.puts, gets=lately.gets, tasks=lately.tasks_read),
            standing=standing_cost(
                owners=sum(each.role == OwnerRole.OWNER for each in figures.workers)
            ),
            notes=tuple(dict.fromkeys((*figures.notes, *lately.notes)))[:_NOTES_MAX],
            cost=SnapshotCost(),
        )


async def _opened(store: ObjectStore, name: str, entropy: Entropy) -> Queue:
    queue = Queue("", name=name, create=False)
    await queue.attach(store, entropy)
    return queue


def _cost_of(meter: Meter, *, seconds: float) -> SnapshotCost:
    lists = meter.requests(kind=Kind.LIST)
    gets = meter.requests() - lists
    return SnapshotCost(lists=lists, gets=gets, dollars=meter.dollars(), seconds=seconds)


def _snapshot_trouble(error: PenstockError | TimeoutError) -> str:
    if isinstance(error, PenstockError):
        return error.message
    return f"The store has not answered all of a look within {SNAPSHOT_SECONDS_MAX:.0f} seconds."


def _depths(survey: Survey, *, shards: int) -> tuple[int, ...]:
    depths = [0] * shards
    for at, (pack, _) in survey.pairs.items():
        if pack is not None:
            depths[shard_of(at.slot, shards=shards)] += at.count
    return tuple(depths)


REPLAYS_MAX: Final = 100
CANCELS_MAX: Final = 200
_AT_ONCE: Final = 8


@dataclass(frozen=True, slots=True)
class ReplayedTasks:
    """What became of some dead letters."""

    replayed: int
    problems: tuple[str, ...]
    """A sentence for each that was not."""


async def pause(queues: QueueInspector, name: str, *, type: str | None, reason: str) -> None:
    """Start nothing more, of a type or at all, until it is resumed."""
    await (await queues.opened(name)).pause(type, reason)
    queues.forget(name)


async def drain(queues: QueueInspector, name: str, *, type: str | None) -> None:
    """Take no more submits, of a type or at all, until it is resumed."""
    await (await queues.opened(name)).drain(type)
    queues.forget(name)


async def resume(queues: QueueInspector, name: str, *, type: str | None) -> None:
    """Lift pause and drain from a type, or from the queue as a whole."""
    await (await queues.opened(name)).resume(type)
    queues.forget(name)


async def replay(queues: QueueInspector, name: str, ids: Sequence[str]) -> ReplayedTasks:
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
    return ReplayedTasks(len(said) - len(problems), problems)


async def cancel(queues: QueueInspector, name: str, id: str, *, reason: str) -> str:
    """Cancel a task, or ask it to stop if it runs; returns its status then."""
    view = await (await queues.opened(name)).cancel(id, reason)
    queues.forget(name)
    return "asked to stop" if view.cancel_asked and not view.is_settled else view.status


async def cancel_many(
    queues: QueueInspector, name: str, *, type: str | None, tag: str, reason: str
) -> tuple[int, bool]:
    """Cancel what has not ended of a type or with a tag; how many, and whether that was all."""
    queue = await queues.opened(name)
    found = await queue.cancel_many(
        type=type, tags=[tag] if tag else None, reason=reason, limit=CANCELS_MAX
    )
    queues.forget(name)
    return len(found), found.is_whole


async def set_limit(
    queues: QueueInspector,
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


async def remove_limit(queues: QueueInspector, name: str, key: str) -> bool:
    """Let the tasks of a key run without a limit; whether there was one."""
    removed = await (await queues.opened(name)).limits.remove(key)
    queues.forget(name)
    return removed


async def steer_schedule(queues: QueueInspector, name: str, schedule: str, verb: str) -> str:
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
