"""A fleet with more to do than it can: its shards are spread, and nobody lists what others own.

An owner offers shards for as long as it has found more than it can run. It must not take that back
while it looks again: who would take them then reads an owner that has none to give, for minutes,
and meanwhile helps, which lists the shards of all. Whether an owner is asked in the middle of a
look is a matter of milliseconds, so here looks are many and slow.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.queue.discovery.leased import LeasedDiscovery
from penstock.testing import cost
from penstock.testing.cost import Window, Workload, run_saturated
from tests.sizes import some

LOAD = Workload(workers=32, tasks_per_day=1, handler_seconds=2.0, concurrency=2)
MOST = LOAD.workers * LOAD.concurrency / LOAD.handler_seconds
"""Tasks a second, if requests took no time."""


@pytest.mark.proof
@pytest.mark.parametrize("seed", range(some(2)))
def test_a_saturated_fleet_needs_few_requests_a_task(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(LeasedDiscovery, "sight_seconds", 2.0)
    monkeypatch.setattr(cost, "HALF_TRIP_SECONDS", (0.05, 0.1))
    run = run_saturated(replace(LOAD, seed=seed), Window(20.0, warm_up_seconds=120.0))
    assert run.busy == LOAD.workers
    assert run.tasks > 0.7 * MOST * 20.0
    # Four of each task, a look at the doorbell every three seconds, and what the leases and all
    # these looks cost.
    assert run.requests_per_task < 6.8
