"""Old logs go, and nothing else does."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from penstock.kernel.clock import SystemClock
from penstock.worker.worker import LogPruner


def test_logs_of_attempts_go_when_they_are_old(tmp_path: Path) -> None:
    clock = SystemClock()
    names = ["1-1.log", "2-1.log", "worker.log", "3-1.log.gz"]
    for name in names:
        (tmp_path / name).write_text("said")
        if name != "2-1.log":
            os.utime(tmp_path / name, (clock.wall() - 3 * 86_400,) * 2)
    pruning = LogPruner(tmp_path, days=2, clock=clock)
    assert asyncio.run(pruning.turn()) is None
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(names[1:])


def test_a_folder_that_is_not_there_is_no_matter(tmp_path: Path) -> None:
    pruning = LogPruner(tmp_path / "none", days=1, clock=SystemClock())
    assert asyncio.run(pruning.turn()) is None
