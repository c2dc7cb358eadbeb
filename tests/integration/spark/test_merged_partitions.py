"""What a task makes is merged into the partitions that it has rows of, by `partition_by`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyspark.sql import DataFrame

from penstock.datasets.manifest import File
from penstock.datasets.snapshot import preview, read
from penstock.runtimes.base import NOT_READ, AttemptWork, Merge, Part, ProducedOutput, WorkResult
from penstock.runtimes.spark.operators import PlannedTask
from tests.integration.spark.bench import Bench, part

BY_VERSION = Merge(key=("id",), version_by="at", delete_when="op = 'd'")


@dataclass
class Months:
    """A dataset whose partitions are found by tasks."""

    bench: Bench
    heads: dict[str, Part] = field(default_factory=dict)

    def begin(self, number: int, *rows: tuple[int, str, int, str], **config: Any) -> AttemptWork:
        """What computes rows and says which partitions they are of."""
        said = ", ".join(str(row) for row in rows)
        sql = f"SELECT * FROM VALUES {said} AS t(id, month, at, op)"
        work = self.bench.work("spark.sql", {"sql": sql, **config}, merge=BY_VERSION, key=None)
        out = work.outputs["out"]
        location = out.location.replace("/~all/", "/~many/")
        place = replace(out, partition_by="to_date(month)", location=location)
        return replace(work, task_id=number, outputs={"out": place})

    def computed(self, work: AttemptWork) -> WorkResult:
        """What the first run has said and kept, as it comes back from the host."""
        body = msgspec.json.encode(self.bench.finished(work))
        found = msgspec.json.decode(body, type=WorkResult)
        assert {each.base_revision for each in found.made} == {NOT_READ}
        return found

    def merged(
        self, work: AttemptWork, kept: WorkResult, *, run: int = 1
    ) -> tuple[ProducedOutput, ...]:
        """Merge what was kept with what is published of its partitions now."""
        place = work.outputs["out"]
        told = [each.partition_key or "" for each in kept.made]
        current = tuple(self.heads[key] for key in told if key in self.heads)
        location = f"{place.location}/~merge-{run}"
        next_ = replace(
            work,
            # Nothing is computed again.
            config={**work.config, "sql": "SELECT raise_error('again') AS id"},
            staged=kept.staged,
            outputs={"out": replace(place, current=current, location=location)},
            scratch=f"{work.scratch}/merge-{run}",
        )
        made = self.bench.finished(next_).made
        assert [each.partition_key for each in made] == sorted(told)
        return made

    def publish(self, made: Sequence[ProducedOutput]) -> bool:
        """Whether all were merged with what is published, and so are."""
        there = {key: each.revision for key, each in self.heads.items()}
        if any(each.base_revision != there.get(each.partition_key or "", 0) for each in made):
            return False
        for each in made:
            revision = (each.base_revision or 0) + 1
            self.heads[each.partition_key or ""] = part(each, revision=revision)
        return True

    def take(self, number: int, *rows: tuple[int, str, int, str], **config: Any) -> None:
        work = self.begin(number, *rows, **config)
        assert self.publish(self.merged(work, self.computed(work)))

    @property
    def seen(self) -> dict[str, dict[int, str]]:
        found: dict[str, dict[int, str]] = {}
        for key, head in sorted(self.heads.items()):
            (contents,) = read([head], self.bench.transfer)
            rows = preview(contents.files, self.bench.transfer, rows=100)
            found[key] = {row["id"]: row["op"] for row in rows}
        return found


JANUARY, FEBRUARY, MARCH = "2026-01-01", "2026-02-01", "2026-03-01"
TASKS = (
    (
        3,
        (1, JANUARY, 10, "old"),
        (2, JANUARY, 20, "kept"),
        (4, FEBRUARY, 5, "a"),
        (9, MARCH, 1, "x"),
    ),
    # One is deleted, and moves to February; the only one of March is deleted.
    (
        5,
        (1, JANUARY, 30, "d"),
        (1, FEBRUARY, 30, "moved"),
        (2, JANUARY, 10, "late"),
        (9, MARCH, 2, "d"),
    ),
    (7, (1, JANUARY, 20, "zombie"), (3, JANUARY, 1, "new"), (4, FEBRUARY, 5, "c")),
)
ROWS = {
    JANUARY: {2: "kept", 3: "new"},
    FEBRUARY: {1: "moved", 4: "c"},
    MARCH: {},
}


@pytest.mark.parametrize("is_written_by_spark", [False, True])
def test_every_order_gives_the_same_rows_of_each_partition(
    spark: Any, tmp_path: Path, is_written_by_spark: bool
) -> None:
    bytes_max = 0 if is_written_by_spark else 2**26
    bench = Bench(spark, tmp_path / "root", tmp_path, arrow_bytes_max=bytes_max)
    months = Months(bench)
    order = (1, 2, 0) if is_written_by_spark else (2, 1, 0)
    for place in order:
        months.take(*TASKS[place])
    assert months.seen == ROWS


def test_keys_with_a_collation_are_deleted_too(bench: Bench) -> None:
    """Such texts do not leave Spark through Arrow, as other keys of deleted rows do."""
    months = Months(bench)
    for number, key, op in ((1, "Key", "x"), (2, "KEY", "d")):
        work = months.begin(number, (number, JANUARY, number, op))
        sql = f"SELECT '{key}' COLLATE UTF8_LCASE AS id, month, at, op FROM ({work.config['sql']})"
        work = replace(work, config={"sql": sql})
        assert months.publish(months.merged(work, months.computed(work)))
    assert months.seen == {JANUARY: {}}


def test_deleted_keys_that_are_too_many_to_gather_are_computed_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    months = Months(bench)
    months.take(*TASKS[0])
    usual, files = bench.engine._merger._write_files, list[list[str]]()

    def seen(
        session: Any, member: PlannedTask, output: str, *, frame: DataFrame, **more: Any
    ) -> tuple[File, ...]:
        if member.work.outputs[output].location.endswith("/_deleted"):
            files.append(frame.inputFiles())
        return usual(session, member, output, frame=frame, **more)

    monkeypatch.setattr(bench.engine._merger, "_write_files", seen)
    monkeypatch.setattr(bench.engine, "_collected_max", 1)
    for task in TASKS[1:]:
        months.take(*task)
    # Of January and March, and of January again.
    assert len(files) == 3
    assert all("/deleted/out/kept/" in name for some in files for name in some)
    assert all(files)
    assert months.seen == ROWS


def test_of_two_that_share_a_partition_the_second_merges_again_what_it_has(bench: Bench) -> None:
    months = Months(bench)
    one, two = (months.begin(*each) for each in TASKS[:2])
    first, second = months.computed(one), months.computed(two)
    early, late = months.merged(one, first), months.merged(two, second)
    assert months.publish(late)
    assert not months.publish(early)
    assert months.publish(months.merged(one, first, run=2))
    months.take(*TASKS[2], sort_by=["op"])
    assert months.seen == ROWS
    # What is read of it is a dataset like any other.
    reading = bench.work("compact", {}, inputs={"raw": list(months.heads.values())})
    found = bench.rows(bench.made(reading))
    assert sorted(row["id"] for row in found) == [1, 2, 3, 4]
    assert found[0].keys() == {"id", "month", "at", "op"}
    # Nothing that it makes is of no partition.
    work = months.begin(8, (1, JANUARY, 1, "x"))
    empty = replace(work, config={"sql": f"{work.config['sql']} WHERE false"})
    assert bench.finished(empty).made == ()


def test_what_cannot_be_merged_into_partitions_is_told(bench: Bench) -> None:
    months = Months(bench)
    twice = months.begin(1, (1, JANUARY, 1, "x"), (1, JANUARY, 2, "y"), (1, FEBRUARY, 1, "z"))
    failure = bench.failure(twice)
    assert "'each id once in a partition (unique_key)' fails: 1 values" in failure.reason
    taken = {"sql": "SELECT 1 AS id, '2026-01-01' AS month, 1 AS at, '' AS op, 1 AS _partition"}
    failure = bench.failure(replace(twice, config=taken))
    assert "The result has the column _partition" in failure.reason
    assert not failure.is_retried
    few = Bench(bench.session, bench.root, Path(bench.settings.data), partitions_max=1)
    failure = few.failure(months.begin(2, *TASKS[0][1:]))
    assert "more than 1 partitions of the result, and 1 are allowed" in failure.reason
