"""What is published is written anew: the same rows and all that belongs to them, in other files."""

from __future__ import annotations

import io
from dataclasses import replace
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from pyspark.sql.pandas.types import from_arrow_schema

from penstock.datasets.manifest import File
from penstock.datasets.snapshot import read
from penstock.runtimes.base import MAINTAIN, AttemptWork, Part, ProducedOutput
from penstock.runtimes.spark.access.parquet import file_bounds
from penstock.runtimes.spark.columns import columns_of
from penstock.runtimes.spark.job_config import JobConfig
from penstock.runtimes.spark.operators import PlannedTask
from penstock.runtimes.spark.output_writer import OutputWriter
from tests.integration.spark.bench import Bench, part
from tests.integration.spark.test_merging import BY_VERSION, Table, Task, ids, values

FILES = 50
ROWS = 5_000
KINDS: dict[str, list[Any]] = {
    "k": list(range(ROWS)),
    "f": [0.5, float("nan"), None, -0.0] * (ROWS // 4),
}


def splintered(bench: Bench) -> ProducedOutput:
    """A publication of fifty small files, each of which has values of the whole range."""
    raw = bench.publish({"a": [1]})
    work = bench.work("compact", {}, inputs={"raw": [raw]})
    table = pa.table({**KINDS, "v": [sha256(b"%d" % each).hexdigest() for each in KINDS["k"]]})
    location = work.outputs["out"].location
    files = []
    for number in range(FILES):
        sink = io.BytesIO()
        parquet.write_table(table.take(list(range(number, ROWS, FILES))), sink)
        name = f"part-{number:05}.parquet"
        sent = bench.transfer.write_bytes(f"{location}/{name}", sink.getvalue())
        files.append(
            File(
                name=name,
                rows=ROWS // FILES,
                bytes=sent.bytes,
                sha256=sent.sha256,
                bounds=file_bounds(sink),
            )
        )
    writer = OutputWriter(bench.transfer, target_file_bytes=2**27)
    member = PlannedTask(work=work, config=JobConfig(operator="compact"))
    columns = columns_of(from_arrow_schema(table.schema))
    return writer.manifest(member, "out", columns, files)


def anew(
    bench: Bench, current: ProducedOutput | None, *, revision: int = 7, **config: Any
) -> AttemptWork:
    said = bench.work(MAINTAIN, config)
    parts: tuple[Part, ...] = () if current is None else (part(current, revision=revision),)
    return replace(said, outputs={"out": replace(said.outputs["out"], current=parts)})


def rows(bench: Bench, made: ProducedOutput) -> list[str]:
    return sorted(map(repr, bench.rows(made)))


@pytest.mark.parametrize("is_written_by_spark", [False, True])
def test_fifty_small_files_become_few(
    spark: Any, tmp_path: Path, is_written_by_spark: bool
) -> None:
    bytes_max = 0 if is_written_by_spark else 2**26
    bench = Bench(spark, tmp_path / "root", tmp_path, arrow_bytes_max=bytes_max)
    old = splintered(bench)
    finished = bench.finished(anew(bench, old))
    (made,) = finished.made
    assert made.base_revision == 7
    assert made.facts is not None
    assert made.facts.files <= 2
    assert made.partition_key == old.partition_key
    assert rows(bench, made) == rows(bench, old)
    before, after = bench.manifest(old), bench.manifest(made)
    assert (after.columns, after.rows, after.inputs) == (before.columns, ROWS, before.inputs)
    assert before.inputs
    assert finished.metrics["rows_in"] == finished.metrics["rows_out"] == ROWS


def test_parts_that_were_appended_become_one(bench: Bench) -> None:
    """Of several columns and types; what was read to make any of them is said of all."""
    raw = [bench.publish({"a": [each]}) for each in range(3)]
    texts = (
        "SELECT 1 AS k",
        "SELECT 2L AS k, 'x' AS v UNION ALL SELECT 3L, NULL",
        "SELECT k, v FROM VALUES (0L, 'no') AS t(k, v) WHERE k > 0",
    )
    made = [
        bench.made(bench.work("spark.sql", {"sql": text}, inputs={"raw": [one]}))
        for text, one in zip(texts, raw, strict=True)
    ]
    said = bench.work(MAINTAIN, {"sort_by": ["k"]})
    parts = tuple(part(each, revision=4) for each in made)
    whole = replace(said, outputs={"out": replace(said.outputs["out"], current=parts)})
    run = bench.made(whole)
    assert bench.rows(run) == [{"k": 1, "v": None}, {"k": 2, "v": "x"}, {"k": 3, "v": None}]
    assert run.base_revision == 4
    manifest = bench.manifest(run)
    assert [(each.name, each.type) for each in manifest.columns] == [
        ("k", "bigint"),
        ("v", "string"),
    ]
    assert [each.location for each in manifest.inputs] == [each.location for each in raw]
    assert len(manifest.files) == 1


def test_clustered_files_can_be_skipped(bench: Bench) -> None:
    old = splintered(bench)
    made = bench.made(anew(bench, old, cluster_by=["k"], target_file_bytes="64KiB"))
    assert rows(bench, made) == rows(bench, old)
    (contents,) = read([part(made)], bench.transfer)
    found: list[Any] = [each.bounds["k"] for each in contents.files]
    bounds = sorted((each.low, each.high) for each in found)
    assert 1 < len(bounds) < FILES
    assert all(before[1] < after[0] for before, after in pairwise(bounds))
    failure = bench.failure(anew(bench, old, cluster_by=["nope"]))
    assert "maintain.cluster: the dataset has no column 'nope'; it has k, f" in failure.reason
    assert not failure.is_retried


def test_what_is_merged_goes_on_to_merge(bench: Bench) -> None:
    """The tasks of rows and the keys of deleted ones are there, or older rows would come back."""
    table = Table(bench)
    table.take(Task(5, values((1, 30, "old"), (2, 10, "kept"), (3, 9, "a"))))
    table.take(Task(6, values((1, 40, "d"))))
    assert table.current is not None
    before = table.current
    said = anew(bench, before, revision=table.revision, cluster_by=["op"])
    made = bench.made(replace(said, merge=BY_VERSION))
    assert rows(bench, made) == rows(bench, before)
    deleted = bench.manifest(made).deleted
    assert [each.rows for each in deleted] == [1]
    table.current = made
    # Tasks that are older than what is there, by version or, where that is equal, by number.
    table.take(Task(4, values((1, 35, "zombie"), (2, 10, "earlier"), (3, 10, "new"))))
    assert ids(table) == {2: "kept", 3: "new"}


def test_nothing_is_made_of_what_is_not_there_or_loses_rows(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bench.finished(anew(bench, None)).made == ()
    old = splintered(bench)
    monkeypatch.setattr(
        bench.engine._rewriter, "_frame", lambda *_: bench.session.sql("SELECT 1 AS k")
    )
    failure = bench.failure(anew(bench, old))
    assert failure.reason == "5,000 rows were read, and 1 written."
