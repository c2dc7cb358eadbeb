"""What runs in other processes than the driver's: users' functions, and the writing of files."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.datasets.layout import path_of
from penstock.runtimes.spark.access import folder
from penstock.runtimes.spark.access.folder import FolderAccess
from penstock.runtimes.spark.access.object_store import CommittedFile, CommitTracker
from tests.integration.spark.bench import Bench

MAPPED = {"transform": "outside:mapped", "sort_by": ["n"]}
MODULE = """
import threading

FACTOR = {factor}
LOCK = threading.Lock()


def mapped(inputs, context):
    raw = inputs["raw"]
    return raw.mapInArrow({function}, raw.schema)


def times(batches):
    for batch in batches:
        column = batch.column("n").to_numpy() * FACTOR
        yield batch.set_column(0, "n", column)


def locked(batches):
    with LOCK:
        yield from batches
"""


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module that this process finds, and the Pythons of executors do not."""
    folder = tmp_path / "code"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    yield folder / "outside.py"
    sys.modules.pop("outside", None)


def test_functions_travel_by_value_as_they_are_now(bench: Bench, outside: Path) -> None:
    raw = bench.publish({"n": [1, 2]})
    # The same Python beside Spark serves both.
    for factor in (10, 2000):
        outside.write_text(MODULE.format(factor=factor, function="times"))
        made = bench.made(bench.work("spark.python", MAPPED, inputs={"raw": [raw]}))
        assert [row["n"] for row in bench.rows(made)] == [factor, 2 * factor]


def test_a_function_that_cannot_travel_says_so(bench: Bench, outside: Path) -> None:
    outside.write_text(MODULE.format(factor=1, function="locked"))
    raw = bench.publish({"n": [1]})
    failure = bench.failure(bench.work("spark.python", MAPPED, inputs={"raw": [raw]}))
    assert failure.reason.startswith("A function cannot be sent to executors.")
    assert "_thread.lock" in failure.reason
    assert not failure.is_retried


def test_rows_that_executors_wrote_elsewhere_are_missed(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(spark, tmp_path / "root", tmp_path, master="spark://far:7077", arrow_bytes_max=0)
    # As where a Connect server has no jar of ours.
    bench.engine._accesses._made["file"] = FolderAccess(bench.transfer, is_counted=True)
    raw = bench.publish({"n": [1, 2, 3]})
    config = {"sql": "SELECT n FROM raw WHERE n > :least", "parameters": {"least": 1}}
    assert bench.finished(bench.work("spark.sql", config, inputs={"raw": [raw]})).made
    none = {**config, "parameters": {"least": 9}}
    assert bench.rows(bench.made(bench.work("spark.sql", none, inputs={"raw": [raw]}))) == []

    def nothing(folder: Path) -> Iterator[tuple[Path, int]]:
        assert folder.is_dir()
        return iter(())

    monkeypatch.setattr(folder, "left_by_spark", nothing)
    failure = bench.failure(bench.work("spark.sql", config, inputs={"raw": [raw]}))
    assert failure.reason.startswith("Executors have written 2 rows, and 0 of them are in ")
    assert not failure.is_retried


@pytest.mark.parametrize("by", ["", "n"])
def test_files_that_executors_wrote_elsewhere_are_missed(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    bench = Bench(spark, tmp_path / "root", tmp_path, master="spark://far:7077", arrow_bytes_max=0)
    raw = bench.publish({"n": [1, 2]})
    work = bench.work("spark.sql", {"sql": "SELECT n FROM raw"}, inputs={"raw": [raw]})
    place = replace(work.outputs["out"], partition_by=by)
    write = CommitTracker.write

    def elsewhere(self: CommitTracker, session: Any, writer: Any, path: str) -> list[CommittedFile]:
        made = write(self, session, writer, path)
        path_of(f"{place.location}/{made[0].name}").unlink()
        return made

    monkeypatch.setattr(CommitTracker, "write", elsewhere)
    failure = bench.failure(replace(work, outputs={"out": place}))
    assert "do not share this disk" in failure.reason
    assert not failure.is_retried


@pytest.mark.parametrize("by", ["", "n"])
def test_what_a_lost_executor_has_left_is_no_data_to_who_reads_the_folder(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    bench = Bench(spark, tmp_path / "root", tmp_path, master="spark://far:7077", arrow_bytes_max=0)
    raw = bench.publish({"n": [1, 1]})
    work = bench.work("spark.sql", {"sql": "SELECT n FROM raw"}, inputs={"raw": [raw]})
    place = replace(work.outputs["out"], partition_by=by)
    write = CommitTracker.write

    def leave(self: CommitTracker, session: Any, writer: Any, path: str) -> list[CommittedFile]:
        made = write(self, session, writer, path)
        kept = path_of(f"{place.location}/{made[0].name}")
        (kept.parent / "part-00000-999-00000.parquet").write_bytes(kept.read_bytes())
        return made

    monkeypatch.setattr(CommitTracker, "write", leave)
    made = bench.made(replace(work, outputs={"out": place}))
    named = {each.name for each in bench.manifest(made).files}
    assert {each.name for each in bench.transfer.list(made.location)} == {"manifest.json", *named}
    assert [row["n"] for row in bench.rows(made)] == [1, 1]
