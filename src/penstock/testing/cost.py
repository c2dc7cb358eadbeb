"""What a queue costs: the real code, in virtual time, over a bucket whose requests are counted.

    figures = price(Workload(workers=50, tasks_per_day=100_000))
    figures.dollars_per_month, figures.start_seconds(50)

A fleet of real workers and a producer runs over one bucket in memory that answers like S3:
after 20 to 40 ms, dated to the second. Each has a machine of its own: its own clock and its own
store, and one meter counts all requests. It is simulated twice: with its load, and with nothing
to do. Counting begins when the fleet has warmed up, or has been idle for an hour; a third run
is of a saturated fleet. When handlers start, and when submits are answered, is noted in true
time.

- A `Workload` is checked when it is made, so everything behind it may rely on it. The length of
  the
  simulated window follows from it alone, so equal workloads give equal figures, on every machine.
- A `Bill` is the requests of some seconds, by cause and kind; dollars a month follow from it.

Used by `penstock cost`, by tests, and by users who want to know before they pay. It is all
memory: a crash leaves nothing.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

from penstock.kernel.clock import Clock
from penstock.kernel.errors import InvalidInput
from penstock.queue.client import Queue
from penstock.queue.config import QueueConfig
from penstock.queue.execution.handlers import TaskContext
from penstock.queue.settings import DiscoveryMode, WorkerSettings
from penstock.queue.submitter import check_seconds
from penstock.queue.worker import CONCURRENCY_MAX, Worker
from penstock.store.base import PAGE_KEYS_MAX, ObjectStore
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.store.metered import Kind, Meter, MeteredStore, Prices
from penstock.store.retrying import RetryingStore
from penstock.store.tombstoned import TombstonedStore
from penstock.testing.virtual import World, simulate

MONTH_SECONDS: Final = 30 * 86_400.0
CAUSES: Final = ("submit", "discovery", "claim", "settle", "leases", "time", "monitor")
"""What requests are for. A cause that is not among them is shown behind them."""

Slot = tuple[str, Kind]


@dataclass(frozen=True, slots=True)
class Bill:
    """The billed requests of so many seconds, by cause and kind."""

    counts: Mapping[Slot, int]
    seconds: float
    prices: Prices = field(default_factory=Prices)

    @classmethod
    def between(cls, before: Counter[Slot], after: Counter[Slot], *, seconds: float) -> Bill:
        """What has come between two readings of a meter, so many seconds apart."""
        new = {slot: count - before[slot] for slot, count in after.items()}
        return cls({slot: count for slot, count in new.items() if count}, seconds)

    @property
    def causes(self) -> tuple[str, ...]:
        """The causes, in the order in which they are shown."""
        others = {cause for cause, _ in self.counts} - set(CAUSES)
        return (*CAUSES, *sorted(others))

    def requests(self, *, cause: str | None = None, kind: Kind | None = None) -> int:
        """How many there are of this cause and this kind, if they are given."""
        return sum(
            count
            for (its_cause, its_kind), count in self.counts.items()
            if cause in (None, its_cause) and kind in (None, its_kind)
        )

    def dollars(self, *, cause: str | None = None) -> float:
        """What they cost."""
        return sum(
            count * self.prices.of(kind)
            for (its_cause, kind), count in self.counts.items()
            if cause in (None, its_cause)
        )

    def dollars_per_month(self, *, cause: str | None = None) -> float:
        """What a month of 30 days costs that is like these seconds."""
        return self.dollars(cause=cause) * MONTH_SECONDS / self.seconds


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The least value that so many percent of the values do not exceed; they are in order."""
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


DAY_SECONDS: Final = 86_400.0
WORKERS_MAX: Final = 1_000
TASKS_PER_DAY_MAX: Final = 100_000_000
SUBMITS_PER_DAY_MAX: Final = 20_000_000
BATCH_MAX: Final = 100_000
DAYS_MIN: Final = 0.01
DAYS_MAX: Final = 366.0
WARM_UP_SECONDS: Final = 600.0
"""Leases are taken, and the first settled tasks leave for the archive: that takes eight minutes."""
WINDOW_SECONDS_MIN: Final = 600.0
REQUESTS_SIMULATED: Final = 50_000
"""About so many requests are simulated, unless the whole is asked for."""
TASKS_SIMULATED: Final = 500_000
_REQUESTS_A_PACK: Final = 6
_REQUESTS_A_SECOND_OF_A_STANDBY: Final = 0.025
_WEIGHT_OF_A_LOOK: Final = 3
"""A list of what was settled lately takes longer to simulate than other requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A fleet of workers and the tasks that are submitted to it, evenly through the day."""

    workers: int = 50
    tasks_per_day: int = 100_000
    batch: int = 1
    """So many tasks are submitted at a time."""
    mode: DiscoveryMode = DiscoveryMode.LEASED
    days: float = 1.0
    handler_seconds: float = 1.0
    concurrency: int = 32
    """So many tasks a worker runs at a time."""
    seed: int = 0
    gather_seconds: float | None = None
    """For so long the producer gathers submits into one pack, if it does."""
    keyed: bool = False
    """Whether each task has a key of its own."""
    by_tombstone: bool = False
    """Whether deletes are by tombstone, as on servers whose conditional ones are not atomic."""

    def __post_init__(self) -> None:
        _between("--workers", self.workers, 1, WORKERS_MAX)
        _between("--tasks-per-day", self.tasks_per_day, 1, TASKS_PER_DAY_MAX)
        _between("--batch", self.batch, 1, BATCH_MAX)
        _between("--concurrency", self.concurrency, 1, CONCURRENCY_MAX)
        _between("--handler-seconds", self.handler_seconds, 0, DAY_SECONDS)
        _between("--days", self.days, DAYS_MIN, DAYS_MAX)
        if self.gather_seconds is not None:
            check_seconds(self.gather_seconds)
        if self.batch > 1 and (self.keyed or self.gather_seconds is not None):
            raise InvalidInput(
                "--keyed and --gather-seconds are for tasks that are submitted one by one.",
                hint="Leave --batch out.",
            )
        if self.keyed and self.gather_seconds is not None:
            raise InvalidInput("Tasks with a key are not gathered: --keyed or --gather-seconds.")
        submits = self.tasks_per_day / self.batch
        if submits > SUBMITS_PER_DAY_MAX:
            raise InvalidInput(
                f"{submits:,.0f} submits a day are more than can be simulated in passable time.",
                hint="Simulate fewer --tasks-per-day, or a larger --batch.",
            )
        busy = self.tasks_per_day * self.handler_seconds / DAY_SECONDS
        if busy > self.workers * self.concurrency:
            raise InvalidInput(
                f"These tasks keep {busy:,.1f} handlers busy, and the fleet has"
                f" {self.workers * self.concurrency:,}.",
                hint="Give it more --workers, or workers more --concurrency.",
            )
        if self.tasks_per_day * self.days < self.batch:
            raise InvalidInput(
                f"Not one batch of {self.batch:,} comes in the simulated time.",
                hint=f"Simulate --days {math.ceil(self.batch / self.tasks_per_day)}.",
            )

    @property
    def batches_per_second(self) -> float:
        """How often a batch is submitted."""
        return self.tasks_per_day / self.batch / DAY_SECONDS


@dataclass(frozen=True, slots=True)
class Window:
    """How long is simulated: first to warm up, which is not counted, then to be counted."""

    seconds: float
    warm_up_seconds: float = WARM_UP_SECONDS
    is_whole: bool = True
    """Whether all days are simulated that were asked for."""


def window_of(load: Workload, *, full: bool = False) -> Window:
    """As much of the days as can be simulated in about a minute, or with `full` all of it."""
    whole_seconds = load.days * DAY_SECONDS
    seconds = whole_seconds
    if not full:
        by_requests = REQUESTS_SIMULATED / _requests_per_second(load)
        by_tasks = TASKS_SIMULATED * DAY_SECONDS / load.tasks_per_day
        seconds = max(WINDOW_SECONDS_MIN, min(by_requests, by_tasks))
        # At least one batch comes.
        seconds = min(whole_seconds, max(seconds, 1 / load.batches_per_second))
    return Window(seconds, is_whole=seconds >= whole_seconds)


def _requests_per_second(load: Workload) -> float:
    """A guess, for choosing a window and nothing else."""
    packs = load.batches_per_second
    if load.gather_seconds is not None:
        packs = min(packs, 1 / load.gather_seconds)
    packs *= _REQUESTS_A_PACK + load.batch / 50
    looks = 1 / WorkerSettings().polling.min_seconds
    match load.mode:
        case DiscoveryMode.LEASED:
            return packs + looks + load.workers * _REQUESTS_A_SECOND_OF_A_STANDBY
        case DiscoveryMode.DIRECT:
            return packs + looks * load.workers
        case DiscoveryMode.SHARED | DiscoveryMode.SAMPLED:
            return packs + looks * load.workers * _WEIGHT_OF_A_LOOK


def _between(option: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise InvalidInput(f"{option} must be between {least:,g} and {most:,g}, not {value:,g}.")


HALF_TRIP_SECONDS: Final = (0.010, 0.020)
"""A request takes so long to arrive, and its answer as long again."""
_TYPE: Final = "work"
_SUBMITTERS: Final = 64


class SimulatedFleet:
    """The workers of a workload, a producer, and what is noted of both."""

    def __init__(self, world: World, load: Workload) -> None:
        self.clock = world.clock()
        self.meter = Meter()
        self.ended: Counter[str] = Counter()
        """How many handlers have ended, by worker."""
        self._world = world
        self._load = load
        self._bucket = MemoryBucket(world.clock(), date_resolution_seconds=1.0)
        self._submitted = 0
        self._answered: dict[int, float] = {}
        self._started: dict[int, float] = {}
        self._running: list[asyncio.Task[None]] = []

    async def open(self, group: asyncio.TaskGroup) -> None:
        """Make the queue, for the producer; what runs beside it runs in this group."""
        self._group = group
        self._queue = await self._open("producer", self.clock)

    async def start(self) -> None:
        """Let the workers run."""
        for number in range(self._load.workers):
            name = f"worker-{number}"
            clock = self._world.clock()
            worker = Worker(
                await self._open(name, clock),
                concurrency=self._load.concurrency,
                mode=self._load.mode,
                name=name,
                settings=WorkerSettings(),
            )
            worker.handler(_TYPE)(self._handler(name, clock))
            self._running.append(self._group.create_task(worker.run(signals=False)))

    def end(self) -> None:
        """End the workers at once, wherever they are: what counts has been counted."""
        for task in self._running:
            task.cancel()

    async def _open(self, name: str, clock: Clock) -> Queue:
        entropy = self._world.entropy(name)
        config = QueueConfig(direct=("*",) if self._load.mode is DiscoveryMode.DIRECT else ())
        queue = Queue("", name="cost", config=config, gather_seconds=self._load.gather_seconds)
        await queue.attach(self._store(name, clock), entropy)
        return queue

    def _store(self, name: str, clock: Clock) -> ObjectStore:
        entropy = self._world.entropy(f"latency of {name}")

        async def delay() -> None:
            await clock.sleep(entropy.uniform(*HALF_TRIP_SECONDS))

        store: ObjectStore = MemoryStore(self._bucket, clock=clock, delay=delay)
        store = MeteredStore(store, self.meter)
        if self._load.by_tombstone:
            store = TombstonedStore(store, entropy=self._world.entropy(f"tombstones of {name}"))
        return RetryingStore(store, entropy=self._world.entropy(f"retries of {name}"))

    def _handler(self, name: str, clock: Clock) -> Callable[[TaskContext], Awaitable[None]]:
        async def work(task: TaskContext) -> None:
            self._started.setdefault(task.input, self._world.now())
            await clock.sleep(self._load.handler_seconds)
            self.ended[name] += 1

        return work

    async def submit(self, count: int) -> range:
        """Submit a batch; returns the numbers of its tasks."""
        numbers = range(self._submitted, self._submitted + count)
        self._submitted += count
        if count == 1:
            key = str(numbers.start) if self._load.keyed else None
            await self._queue.submit(_TYPE, numbers.start, key=key)
        else:
            await self._queue.submit_many(_TYPE, list(numbers))
        self._answered.update(dict.fromkeys(numbers, self._world.now()))
        return numbers

    async def submit_through(self, seconds: float) -> range:
        """Submit batches at random instants for so long; returns the numbers of their tasks.

        As many come as the load says, at instants of their own: a Poisson process of which the
        total is known, so that a short window has no luck with it.
        """
        batches = round(seconds * self._load.batches_per_second)
        draw = self._world.entropy("arrivals")
        first, began = self._submitted, self.clock.monotonic()
        for instant in sorted(draw.uniform(0, seconds) for _ in range(batches)):
            await self.clock.sleep(began + instant - self.clock.monotonic())
            self._group.create_task(self._submit_one())
        await self.clock.sleep(began + seconds - self.clock.monotonic())
        return range(first, first + batches * self._load.batch)

    async def submit_backlog(self, tasks: int) -> None:
        """Submit so many tasks one by one, as fast as a few submitters can."""
        each, more = divmod(tasks, _SUBMITTERS)
        shares = [each + (number < more) for number in range(_SUBMITTERS)]

        async def submit(count: int) -> None:
            for _ in range(count):
                await self.submit(1)

        async with asyncio.TaskGroup() as group:
            for share in shares:
                group.create_task(submit(share))

    async def _submit_one(self) -> None:
        await self.submit(self._load.batch)

    def has_started(self, numbers: range) -> bool:
        """Whether all these tasks have started."""
        return all(number in self._started for number in reversed(numbers))

    async def wait_for(self, numbers: range, *, seconds_max: float) -> None:
        """Wait until these tasks have started, but no longer than so."""
        until = self.clock.monotonic() + seconds_max
        while not self.has_started(numbers) and self.clock.monotonic() < until:
            await self.clock.sleep(0.5)

    def start_seconds(self, numbers: range) -> tuple[float, ...]:
        """From the answer of the submit to the start of the handler, for those that have started.

        A task may start before its submitter hears that it was submitted: that is 0.
        """
        return tuple(
            sorted(
                max(0.0, self._started[number] - self._answered[number])
                for number in numbers
                if number in self._started and number in self._answered
            )
        )


CALM_SECONDS: Final = 3600.0
IDLE_SECONDS: Final = 3600.0
FIRST_TRIES: Final = 3
_LATE_SECONDS_MAX: Final = 900.0
_STEPS_MAX: Final = 10**10

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Steady:
    """A fleet at work: the bill of the window, and when the window's tasks started."""

    bill: Bill
    tasks: int
    start_seconds: tuple[float, ...]
    """In order. Tasks that have not started long after the window are missing."""


@dataclass(frozen=True, slots=True)
class Idle:
    """A fleet with nothing to do, and how long the first task waits each time."""

    bill: Bill
    first_seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Saturated:
    """A fleet with more to do than it can: the bill of the window, and the tasks it has ended."""

    bill: Bill
    tasks: int
    busy: int
    """How many workers have run tasks."""

    @property
    def requests_per_task(self) -> float:
        """Requests to process a task; submits are not among them."""
        return (self.bill.requests() - self.bill.requests(cause="submit")) / self.tasks


def run_steady(load: Workload, window: Window) -> Steady:
    """Run the workload for a window."""

    async def main(fleet: SimulatedFleet) -> Steady:
        await fleet.start()
        await fleet.submit_through(window.warm_up_seconds)
        before = fleet.meter.billed.copy()
        tasks = await fleet.submit_through(window.seconds)
        bill = Bill.between(before, fleet.meter.billed, seconds=window.seconds)
        await fleet.wait_for(tasks, seconds_max=_LATE_SECONDS_MAX)
        return Steady(bill, len(tasks), fleet.start_seconds(tasks))

    return _run(load, main)


def run_idle(load: Workload, *, seconds: float = IDLE_SECONDS, tries: int = FIRST_TRIES) -> Idle:
    """Run the fleet of a workload without its tasks: an hour, and some seconds that are counted.

    Then submit one, so many times, with an hour without any before each.
    """

    async def main(fleet: SimulatedFleet) -> Idle:
        await fleet.start()
        await fleet.clock.sleep(CALM_SECONDS)
        before = fleet.meter.billed.copy()
        await fleet.clock.sleep(seconds)
        bill = Bill.between(before, fleet.meter.billed, seconds=seconds)
        first: list[float] = []
        for number in range(tries):
            await fleet.clock.sleep(CALM_SECONDS if number else 0)
            task = await fleet.submit(1)
            await fleet.wait_for(task, seconds_max=_LATE_SECONDS_MAX)
            first += fleet.start_seconds(task)
        return Idle(bill, tuple(sorted(first)))

    return _run(load, main)


def run_saturated(load: Workload, window: Window) -> Saturated:
    """Run the fleet on a backlog of single tasks, submitted before, that outlasts the window."""
    if load.handler_seconds <= 0:
        raise InvalidInput("--handler-seconds must be more than 0 to saturate a fleet.")

    async def main(fleet: SimulatedFleet) -> Saturated:
        per_second = load.workers * load.concurrency / load.handler_seconds
        await fleet.submit_backlog(int(per_second * (window.warm_up_seconds + window.seconds)))
        await fleet.start()
        await fleet.clock.sleep(window.warm_up_seconds)
        before, ended = fleet.meter.billed.copy(), fleet.ended.copy()
        await fleet.clock.sleep(window.seconds)
        bill = Bill.between(before, fleet.meter.billed, seconds=window.seconds)
        done = fleet.ended - ended
        return Saturated(bill, done.total(), len(done))

    return _run(load, main)


def run_backlog(load: Workload, *, backlog: int, seconds: float = 20.0) -> Saturated:
    """Run the fleet for some seconds on so many single tasks, which must outlast them."""

    async def main(fleet: SimulatedFleet) -> Saturated:
        await fleet.submit_backlog(backlog)
        before = fleet.meter.billed.copy()
        await fleet.start()
        await fleet.clock.sleep(seconds)
        bill = Bill.between(before, fleet.meter.billed, seconds=seconds)
        return Saturated(bill, fleet.ended.total(), len(fleet.ended))

    return _run(load, main)


def _run(load: Workload, main: Callable[[SimulatedFleet], Coroutine[Any, Any, Result]]) -> Result:
    async def world_main(world: World) -> Result:
        fleet = SimulatedFleet(world, load)
        async with asyncio.TaskGroup() as group:
            await fleet.open(group)
            try:
                return await main(fleet)
            finally:
                fleet.end()

    return simulate(
        world_main,
        seed=f"cost {load.seed}",
        seconds_max=(load.days + 1) * 86_400.0,
        steps_max=_STEPS_MAX,
    )


SATURATED_WINDOW: Final = Window(60.0, warm_up_seconds=90.0)
MILLION: Final = 1_000_000

Tell = Callable[[str], None]
"""Hears what is simulated next."""
TOMBSTONES_A_KEY: Final = 2


def _nobody(_what: str) -> None:
    """Nobody wants to hear it."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What a workload costs, and how soon its tasks start."""

    load: Workload
    window: Window
    steady: Steady
    idle: Idle

    @property
    def requests_per_task(self) -> float:
        """All requests of the window, by its tasks."""
        return self.steady.bill.requests() / self.steady.tasks

    @property
    def dollars_per_month(self) -> float:
        """Of the fleet at work."""
        return self.steady.bill.dollars_per_month()

    @property
    def idle_dollars_per_month(self) -> float:
        """Of the same fleet with nothing to do."""
        return self.idle.bill.dollars_per_month()

    @property
    def dollars_per_million(self) -> float:
        """Of a million tasks, beyond what the idle fleet costs."""
        tasks = self.steady.tasks * MONTH_SECONDS / self.window.seconds
        return (self.dollars_per_month - self.idle_dollars_per_month) / tasks * MILLION

    @property
    def unstarted(self) -> int:
        """How many tasks had not started long after the window: the fleet cannot keep up."""
        return self.steady.tasks - len(self.steady.start_seconds)

    def start_seconds(self, percent: float) -> float | None:
        """So many percent of the tasks started within this time; None if none did."""
        starts = self.steady.start_seconds
        return percentile(starts, percent) if starts else None

    @property
    def first_start_seconds(self) -> float | None:
        """How long the first task after an hour of idleness waited, at the most."""
        return max(self.idle.first_seconds, default=None)

    @property
    def tombstone_dollars_per_million_keys(self) -> float:
        """Of the tombstones that a million keys leave: one for the pack, one for the ledger."""
        return TOMBSTONES_A_KEY * MILLION * self.steady.bill.prices.of(Kind.PUT)

    @property
    def tombstone_dollars_per_month(self) -> float:
        """From then on, every month: these tombstones are in each list of the monitor's sweep."""
        sweeps = MONTH_SECONDS / WorkerSettings().sweep_seconds
        lists = TOMBSTONES_A_KEY * MILLION / PAGE_KEYS_MAX
        return sweeps * lists * self.steady.bill.prices.of(Kind.LIST)

    def as_dict(self) -> dict[str, Any]:
        """The figures for programs."""
        bill = self.steady.bill
        tombstones = {
            "dollars_per_million_keys": self.tombstone_dollars_per_million_keys,
            "dollars_per_month_for_each_million_keys": self.tombstone_dollars_per_month,
        }
        return {
            "mode": self.load.mode.value,
            "deletes": "tombstone" if self.load.by_tombstone else "conditional",
            "tombstones": tombstones if self.load.by_tombstone else None,
            "workers": self.load.workers,
            "tasks_per_day": self.load.tasks_per_day,
            "batch": self.load.batch,
            "gather_seconds": self.load.gather_seconds,
            "keyed": self.load.keyed,
            "handler_seconds": self.load.handler_seconds,
            "concurrency": self.load.concurrency,
            "seed": self.load.seed,
            "days": self.load.days,
            "simulated_days": self.window.seconds / DAY_SECONDS,
            "simulated_tasks": self.steady.tasks,
            "unstarted_tasks": self.unstarted,
            "requests_per_task": self.requests_per_task,
            "requests_per_task_by_kind": {
                kind.value: bill.requests(kind=kind) / self.steady.tasks for kind in Kind
            },
            "requests_per_task_by_cause": {
                cause: bill.requests(cause=cause) / self.steady.tasks for cause in bill.causes
            },
            "dollars_per_month": self.dollars_per_month,
            "dollars_per_month_by_cause": {
                cause: bill.dollars_per_month(cause=cause) for cause in bill.causes
            },
            "idle_dollars_per_month": self.idle_dollars_per_month,
            "idle_dollars_per_month_by_cause": {
                cause: self.idle.bill.dollars_per_month(cause=cause)
                for cause in self.idle.bill.causes
            },
            "dollars_per_million": self.dollars_per_million,
            "start_seconds_p50": self.start_seconds(50),
            "start_seconds_p99": self.start_seconds(99),
            "first_start_seconds_after_idle_hour": self.first_start_seconds,
        }


def price(load: Workload, *, full: bool = False, tell: Tell = _nobody) -> Figures:
    """Run a workload, and its fleet without it. `tell` hears before each run what it is."""
    window = window_of(load, full=full)
    tell(f"the mode {load.mode.value} with its load")
    steady = run_steady(load, window)
    tell(f"the mode {load.mode.value} with nothing to do")
    return Figures(load, window, steady, run_idle(load))


def price_modes(load: Workload, *, full: bool = False, tell: Tell = _nobody) -> tuple[Figures, ...]:
    """The same workload in every mode."""
    return tuple(price(replace(load, mode=mode), full=full, tell=tell) for mode in DiscoveryMode)


@dataclass(frozen=True, slots=True)
class Growth:
    """A saturated queue, worked on by fleets of different sizes."""

    load: Workload
    by_workers: Sequence[tuple[int, Saturated]]

    @property
    def percent(self) -> float:
        """How much more requests a task takes with the last fleet than with the first."""
        (_, first), *_, (_, last) = self.by_workers
        return 100 * (last.requests_per_task / first.requests_per_task - 1)

    def as_dict(self) -> dict[str, Any]:
        """The figures for programs."""
        return {
            "mode": self.load.mode.value,
            "concurrency": self.load.concurrency,
            "handler_seconds": self.load.handler_seconds,
            "growth_percent": self.percent,
            "fleets": [
                {
                    "workers": workers,
                    "workers_busy": run.busy,
                    "tasks": run.tasks,
                    "requests_per_task": run.requests_per_task,
                    "requests_per_task_by_cause": {
                        cause: run.bill.requests(cause=cause) / run.tasks
                        for cause in run.bill.causes
                        if cause != "submit"
                    },
                }
                for workers, run in self.by_workers
            ],
        }


def saturate(
    load: Workload,
    *,
    fleets: Sequence[int],
    window: Window = SATURATED_WINDOW,
    tell: Tell = _nobody,
) -> Growth:
    """Let fleets of these sizes work on a backlog of single tasks that they cannot finish."""
    # Nothing but the backlog is submitted: what the load says of that does not count.
    alone = replace(load, tasks_per_day=1, batch=1, days=1.0)
    runs = []
    for workers in fleets:
        tell(f"a fleet of {workers:,}")
        runs.append((workers, run_saturated(replace(alone, workers=workers), window)))
    return Growth(alone, runs)


__all__ = [
    "CAUSES",
    "Bill",
    "Figures",
    "Growth",
    "Idle",
    "Saturated",
    "Steady",
    "Window",
    "Workload",
    "percentile",
    "price",
    "price_modes",
    "run_backlog",
    "run_idle",
    "run_saturated",
    "run_steady",
    "saturate",
    "window_of",
]
