"""What a queue costs in requests, from what a look has shown. Pure.

What a task costs is counted in its ledger (`penstock.queue.inspection.ended`). What workers cost
that are there, whether they have work or not, is computed from their settings, which are taken to
be the usual ones: an owner renews its lease and looks at its shards, rarely while it is idle and
often while it has work. Workers of the modes `shared` and `sampled` are not registered, so what
they spend on looks is not known here; their own `/metrics` count it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from penstock.queue.owning.times import LeaseSettings
from penstock.queue.running.polling import Polling
from penstock.store.metered import Kind, Prices

_HOUR_SECONDS: Final = 3600.0
_MONTH_HOURS: Final = 720.0


@dataclass(frozen=True, slots=True)
class TaskCost:
    """What a task costs, submitted and claimed and settled."""

    puts: float
    gets: float
    dollars: float

    @property
    def requests(self) -> float:
        """All of them."""
        return self.puts + self.gets

    @property
    def dollars_per_million(self) -> float:
        """What a million such tasks cost."""
        return self.dollars * 1_000_000


@dataclass(frozen=True, slots=True)
class StandingCost:
    """What workers cost in an hour, idle and always busy."""

    idle_requests: float
    idle_dollars: float
    busy_requests: float
    busy_dollars: float

    @property
    def idle_dollars_per_month(self) -> float:
        """A month of 30 days without work."""
        return self.idle_dollars * _MONTH_HOURS

    @property
    def busy_dollars_per_month(self) -> float:
        """A month of 30 days with nothing but work."""
        return self.busy_dollars * _MONTH_HOURS


def task_cost(*, puts: int, gets: int, tasks: int, prices: Prices | None = None) -> TaskCost | None:
    """What each of so many tasks cost that took these requests; None if there were none."""
    if tasks <= 0:
        return None
    paid = prices or Prices()
    dollars = puts * paid.of(Kind.PUT) + gets * paid.of(Kind.GET)
    return TaskCost(puts / tasks, gets / tasks, dollars / tasks)


def standing_cost(*, owners: int, prices: Prices | None = None) -> StandingCost:
    """What so many owners of shards cost in an hour."""
    paid = prices or Prices()
    leases, polling = LeaseSettings(), Polling()

    def hour(*, renew_seconds: float, look_seconds: float) -> tuple[float, float]:
        puts = owners * _HOUR_SECONDS / renew_seconds
        lists = owners * _HOUR_SECONDS / look_seconds
        return puts + lists, puts * paid.of(Kind.PUT) + lists * paid.of(Kind.LIST)

    idle = hour(
        renew_seconds=leases.renew_seconds * leases.idle_stretch, look_seconds=polling.max_seconds
    )
    busy = hour(renew_seconds=leases.renew_seconds, look_seconds=polling.min_seconds)
    return StandingCost(*idle, *busy)
