"""What is priced: a fleet, a load, and how much of it is simulated.

A `Workload` is checked when it is made, so everything behind it may count on it. How long the
simulated window is follows from the workload alone, so the same words give the same figures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from penstock.kernel.errors import InvalidInput
from penstock.queue.settings import Mode, WorkerSettings
from penstock.queue.worker import CONCURRENCY_MAX

DAY_SECONDS: Final = 86_400.0
WORKERS_MAX: Final = 1_000
TASKS_PER_DAY_MAX: Final = 100_000_000
SUBMITS_PER_DAY_MAX: Final = 5_000_000
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
    mode: Mode = Mode.LEASED
    days: float = 1.0
    handler_seconds: float = 1.0
    concurrency: int = 32
    """So many tasks a worker runs at a time."""
    seed: int = 0
    by_tombstone: bool = False
    """Whether deletes are by tombstone, as on servers whose conditional ones are not atomic."""

    def __post_init__(self) -> None:
        _between("--workers", self.workers, 1, WORKERS_MAX)
        _between("--tasks-per-day", self.tasks_per_day, 1, TASKS_PER_DAY_MAX)
        _between("--batch", self.batch, 1, BATCH_MAX)
        _between("--concurrency", self.concurrency, 1, CONCURRENCY_MAX)
        _between("--handler-seconds", self.handler_seconds, 0, DAY_SECONDS)
        _between("--days", self.days, DAYS_MIN, DAYS_MAX)
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
    packs = load.batches_per_second * (_REQUESTS_A_PACK + load.batch / 50)
    looks = 1 / WorkerSettings().polling.min_seconds
    match load.mode:
        case Mode.LEASED:
            return packs + looks + load.workers * _REQUESTS_A_SECOND_OF_A_STANDBY
        case Mode.DIRECT:
            return packs + looks * load.workers
        case Mode.SHARED | Mode.SAMPLED:
            return packs + looks * load.workers * _WEIGHT_OF_A_LOOK


def _between(option: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise InvalidInput(f"{option} must be between {least:,g} and {most:,g}, not {value:,g}.")
