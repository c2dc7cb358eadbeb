"""The figures of a workload, as values: from the runs, for people and for programs.

`price` runs what has to be run. The result is a function of the workload.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from penstock.queue.settings import Mode, WorkerSettings
from penstock.store.base import PAGE_KEYS_MAX
from penstock.store.metered import Kind
from penstock.testing.cost.bill import MONTH_SECONDS, percentile
from penstock.testing.cost.load import DAY_SECONDS, Window, Workload, window_of
from penstock.testing.cost.runs import (
    Idle,
    Saturated,
    Steady,
    run_idle,
    run_saturated,
    run_steady,
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
    return tuple(price(replace(load, mode=mode), full=full, tell=tell) for mode in Mode)


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
