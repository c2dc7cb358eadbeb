"""The whole queue holds its invariants in every world of the simulator."""

from __future__ import annotations

import pytest

from penstock.testing.simulator.plans import WorkerModes
from penstock.testing.simulator.worlds import WorldReport, run_world
from tests.sizes import SIZES, seeds

SEEDS = SIZES.seeds_of_a_mode
BLOCKS = 5


@pytest.mark.proof
@pytest.mark.parametrize("block", range(BLOCKS))
@pytest.mark.parametrize("fleet", WorkerModes)
def test_the_queue_holds_in_every_world(fleet: WorkerModes, block: int) -> None:
    size = SEEDS // BLOCKS
    reports = [run_world(seed, fleet) for seed in seeds(SEEDS)[block * size : (block + 1) * size]]
    assert [_words(report) for report in reports if report.violations] == []
    tasks = sum(report.tasks for report in reports)
    assert sum(report.starts for report in reports) > tasks, "the worlds are too kind"


def _words(report: WorldReport) -> str:
    found = report.violations[0]
    story = "\n".join(found.story)
    again = f"penstock sim --first-seed {report.seed} --seeds 1 --mode {report.fleet}"
    return f"{again}\n{found.sentence}\n{story}"
