"""Partitions as cells: states, order, and what is left out."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from penstock.console.charts import STATES, HeatmapCells, heatmap_cells
from penstock.dispatcher.views.datasets import BlockingTask, MissingPartition, PartitionCell

NOW = datetime(2026, 1, 2, tzinfo=UTC)


def cell(
    key: str, *, start: int | None = None, rows: int | None = 5, seconds: float = 60
) -> PartitionCell:
    end = None if start is None else start + 1
    at = NOW - timedelta(seconds=seconds)
    return PartitionCell(partition_key=key, start=start, end=end, rows=rows, published_at=at)


def task(key: str | None, status: str, number: int = 1, start: int | None = None) -> BlockingTask:
    return BlockingTask(
        partition_key=key, start=start, end=None, id=number, status=status, attempt=1, reason=None
    )


def lacking(key: str, start: int | None = None) -> MissingPartition:
    return MissingPartition(partition_key=key, start=start, end=None, inputs=())


def named(found: HeatmapCells) -> dict[str, str]:
    return {key: STATES[state] for key, state in zip(found.keys, found.states, strict=True)}


def test_each_partition_is_one_cell_with_its_state() -> None:
    found = heatmap_cells(
        [cell("a"), cell("b")],
        [task("b", "running", 7), task("c", "dead", 8), task(None, "queued", 9)],
        [lacking("d"), lacking("a")],
        now=NOW,
    )
    assert named(found) == {
        "": "queued",
        "a": "published",
        "b": "running",
        "c": "dead",
        "d": "missing",
    }
    assert found.tasks == {0: 9, 2: 7, 3: 8}
    assert list(found.ages) == [None, 60, 60, None, None]
    assert found.counts == {"queued": 1, "published": 1, "running": 1, "dead": 1, "missing": 1}


def test_the_latest_task_says_how_a_partition_is() -> None:
    tasks = [task("a", "dead", 3), task("a", "running", 4), task("a", "queued", 2)]
    found = heatmap_cells([], tasks, [], now=NOW)
    assert named(found) == {"a": "running"}
    assert found.tasks == {0: 4}


def test_ranges_come_in_their_order_and_then_keys() -> None:
    cells = [cell("x", start=10), cell("b"), cell("w", start=9), cell("a")]
    found = heatmap_cells(cells, [task("v", "dead", start=11)], [lacking("u", start=8)], now=NOW)
    assert list(found.keys) == ["u", "w", "x", "v", "a", "b"]


def test_of_too_many_the_newest_are_kept() -> None:
    cells = [cell(str(number), start=number) for number in range(10)]
    found = heatmap_cells(cells, [task("5", "dead")], [], now=NOW, cells_max=4)
    assert list(found.keys) == ["6", "7", "8", "9"]
    assert found.left_out == 6
    assert found.tasks == {}
    assert found.counts == {"published": 9, "dead": 1}


def test_a_clock_that_is_behind_makes_no_age_negative() -> None:
    assert list(heatmap_cells([cell("a", seconds=-5)], [], [], now=NOW).ages) == [0]
