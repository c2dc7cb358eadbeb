"""What a task makes is merged with what is published: the same rows in any order, each key once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from penstock.datasets.snapshot import preview, read
from penstock.runtimes.base import AttemptWork, Merge, Part, ProducedOutput
from penstock.runtimes.spark.engine_protocol import WorkFailure
from tests.integration.spark.bench import Bench, part

BY_ID = Merge(key=("id",))
BY_VERSION = Merge(key=("id",), version_by="at", delete_when="op = 'd'")


@dataclass(frozen=True)
class Task:
    """A task, and the query that makes its rows."""

    number: int
    sql: str


def values(*rows: tuple[Any, ...], names: str = "id, at, op") -> str:
    said = ", ".join(str(row) for row in rows)
    return f"SELECT * FROM VALUES {said} AS t({names})"


@dataclass
class Table:
    """A partition that tasks are merged into, one after the other."""

    bench: Bench
    merge: Merge = BY_VERSION
    current: ProducedOutput | None = None
    revision: int = 0

    def work(self, task: Task, **config: Any) -> AttemptWork:
        said = self.bench.work("spark.sql", {"sql": task.sql, **config}, merge=self.merge)
        place = said.outputs["out"]
        parts: tuple[Part, ...] = ()
        if self.current is not None:
            parts = (part(self.current, revision=self.revision),)
        outputs = {"out": replace(place, current=parts)}
        return replace(said, task_id=task.number, outputs=outputs)

    def take(self, task: Task, **config: Any) -> None:
        made = self.bench.made(self.work(task, **config))
        assert made.base_revision == self.revision
        self.current, self.revision = made, self.revision + 1

    def failure(self, sql: str, **config: Any) -> WorkFailure:
        return self.bench.failure(self.work(Task(9, sql), **config))

    @property
    def seen(self) -> list[dict[str, Any]]:
        """What readers see."""
        assert self.current is not None
        (contents,) = read([part(self.current)], self.bench.transfer)
        found = preview(contents.files, self.bench.transfer, rows=100)
        return sorted(found, key=lambda row: str(sorted(row.items(), key=str)))


def ids(table: Table, column: str = "op") -> dict[int, Any]:
    return {row["id"]: row[column] for row in table.seen}


TASKS = (
    Task(3, values((1, 10, "old"), (2, 20, "kept"), (4, 5, "a"))),
    Task(5, values((1, 30, "d"), (2, 10, "late"), (4, 5, "b"))),
    Task(7, values((1, 20, "zombie"), (3, 1, "new"), (4, 5, "c"))),
)


@pytest.mark.parametrize("is_written_by_spark", [False, True])
def test_every_order_gives_the_same_rows(
    spark: Any, tmp_path: Path, is_written_by_spark: bool
) -> None:
    """Also of rows that were deleted, which an older one that comes later does not bring back."""
    bytes_max = 0 if is_written_by_spark else 2**26
    bench = Bench(spark, tmp_path / "root", tmp_path, arrow_bytes_max=bytes_max)
    first, second, third = TASKS
    table = Table(bench)
    for each in (second, third, first) if is_written_by_spark else (third, second, first):
        table.take(each)
    assert ids(table) == {2: "kept", 3: "new", 4: "c"}


def test_what_was_computed_is_only_merged_again(bench: Bench) -> None:
    table = Table(bench)
    first, second, _ = TASKS
    late = bench.finished(table.work(first))
    table.take(second)
    again = replace(
        table.work(Task(first.number, "SELECT raise_error('again') AS id")), staged=late.staged
    )
    # It has checked what it expects, of what it has.
    (table.current,) = bench.finished(again).made
    assert ids(table) == {2: "kept", 4: "b"}


def test_without_versions_the_later_task_wins(bench: Bench) -> None:
    table = Table(bench, BY_ID)
    # The same task again, as if nobody had heard of it, changes nothing.
    for number in (5, 7, 3, 7):
        table.take(Task(number, values((1, number), (number, 0), names="id, said")))
    assert ids(table, "said") == {1: 7, 3: 0, 5: 0, 7: 0}
    assert table.current is not None
    # Readers see no column that is not in the schema, whether they ask Spark or look at files.
    work = bench.work("compact", {}, inputs={"raw": [part(table.current)]})
    assert bench.rows(bench.made(work))[0].keys() == {"id", "said"}
    assert bench.rows(table.current)[0].keys() == {"id", "said", "_penstock_task"}
    assert table.seen[0].keys() == {"id", "said"}
    # Nothing that it makes is nothing that changes.
    table.take(Task(8, values((1, 1), names="id, said") + " WHERE false"))
    assert ids(table, "said") == {1: 7, 3: 0, 5: 0, 7: 0}
    assert bench.manifest(table.current).rows == 4


def test_columns_grow_and_whole_rows_are_replaced(bench: Bench) -> None:
    table = Table(bench, BY_ID)
    table.take(Task(1, values((1, "a"), (2, "b"), names="id, old")))
    table.take(Task(2, values((2, 5), (3, 6), names="id, new")))
    assert table.seen == [
        {"id": 1, "old": "a", "new": None},
        {"id": 2, "old": None, "new": 5},
        {"id": 3, "old": None, "new": 6},
    ]
    failure = table.failure(values((1, True), names="id, old"))
    assert "'old' is boolean here, and string" in failure.reason
    assert not failure.is_retried
    assert "running" not in bench.told.phases[-2:]


def test_what_is_nested_grows_too(bench: Bench) -> None:
    """Spark's own union has no type for two maps whose values have different fields."""
    table = Table(bench, BY_ID)
    table.take(Task(1, "SELECT 1 AS id, map('k', named_struct('a', 1)) AS m"))
    table.take(Task(2, "SELECT 2L AS id, map('k', named_struct('b', 2, 'a', 1L)) AS m"))
    table.take(Task(3, "SELECT 3 AS id, map('k', named_struct('a', 3)) AS m"))
    assert table.current is not None
    found = {row["id"]: dict(row["m"])["k"] for row in bench.rows(table.current)}
    assert found == {1: {"a": 1, "b": None}, 2: {"a": 1, "b": 2}, 3: {"a": 3, "b": None}}


@pytest.mark.parametrize(
    ("sql", "merge", "words"),
    [
        (
            values((1, 1, "x"), (1, 2, "y"), (2, 1, "z")),
            BY_VERSION,
            "'each id once (unique_key)' fails: 1 values are there more than once: {id=1, count=2}",
        ),
        (
            "SELECT * FROM VALUES (NULL, 1, 'x') AS t(id, at, op)",
            Merge(key=("op", "id")),
            "'The column",
        ),
        (values((1, 1, "x")), Merge(key=("nope",)), "unique_key: the result has no column 'nope'"),
        (
            values((1, 1, "x")),
            Merge(key=("id",), version_by="nope"),
            "version_by: the result has no",
        ),
        (
            "SELECT 1 AS id, CAST(NULL AS int) AS at, 'x' AS op",
            BY_VERSION,
            "'at is not null' fails",
        ),
        ("SELECT CAST(NULL AS int) AS id", BY_ID, "'id is not null' fails for 1 of 1 rows"),
        ("SELECT 1.5e0 AS id", BY_ID, "'id' is double, which cannot be what identifies rows"),
        ("SELECT map('a', 1) AS id", BY_ID, "cannot be what identifies rows"),
        ("SELECT 1 AS id, array(1) AS at, 'd' AS op", BY_VERSION, "cannot be what orders rows"),
        ("SELECT 1 AS id, 2 AS _penstock_task", BY_ID, "names that begin so are kept"),
        ("SELECT 1 AS id", Merge(key=("id",), delete_when="nope"), "delete_when: A column"),
    ],
)
def test_what_cannot_be_merged_is_told(bench: Bench, sql: str, merge: Merge, words: str) -> None:
    failure = Table(bench, merge).failure(sql)
    assert words in failure.reason.replace("The column 'id' of the result", "'The column")
    assert not failure.is_retried


def test_tasks_of_a_batch_are_merged_each_with_its_own(bench: Bench) -> None:
    tables = [Table(bench, BY_ID), Table(bench, BY_ID)]
    for place, table in enumerate(tables):
        table.take(Task(1, values((place, "old"), (5, "old"), names="id, said")))
    works = [
        replace(table.work(Task(10 + place, values((5, f"{place}"), names="id, said"))), batch="b")
        for place, table in enumerate(tables)
    ]
    ended = bench.ended(*works)
    for place, work in enumerate(works):
        (made,) = ended[work.task_id].made  # type: ignore[union-attr]
        rows = {row["id"]: row["said"] for row in bench.rows(made)}
        assert rows == {place: "old", 5: f"{place}"}


def test_expectations_are_about_what_the_task_has_made(bench: Bench) -> None:
    table = Table(bench, BY_ID)
    table.take(Task(1, values((1, -1), (2, 2), names="id, n")))
    table.take(
        Task(2, values((3, 3), names="id, n")), expect=[{"check": "n > 0"}, {"rows": {"max": 1}}]
    )
    assert len(table.seen) == 3
    assert "n > 0" in table.failure("SELECT 4 AS id, -4 AS n", expect=[{"check": "n > 0"}]).reason


@pytest.mark.parametrize("is_written_by_spark", [False, True])
def test_what_is_merged_may_be_clustered_by_any_column(
    spark: Any, tmp_path: Path, is_written_by_spark: bool
) -> None:
    """Also by one that the keys of deleted rows do not have."""
    bytes_max = 0 if is_written_by_spark else 2**26
    bench = Bench(spark, tmp_path / "root", tmp_path, arrow_bytes_max=bytes_max)
    table = Table(bench)
    for each in TASKS:
        table.take(each, cluster_by=["op"])
    assert ids(table) == {2: "kept", 3: "new", 4: "c"}
