"""What functions have made gets a manifest, which nobody but the worker has a word in."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from penstock.datasets.bounds import Bound
from penstock.datasets.iceberg.schemas import ids_of
from penstock.datasets.manifest import decode, digest
from penstock.datasets.parquet_child import field_ids
from penstock.datasets.parquet_footer import columns_in, identify_file
from penstock.datasets.schema import Column
from penstock.datasets.snapshot import preview, read, verify
from penstock.datasets.transfer import Transfer
from penstock.kernel.errors import WorkFailed
from penstock.runtimes.base import (
    AttemptWork,
    Facts,
    Part,
    ProducedOutput,
    WorkInput,
    WorkOutput,
    WorkReporter,
    WorkResult,
)
from penstock.runtimes.output_collector import OutputCollector
from tests.unit.worker.bench import Bench, play

ATTEMPT = f"7-1-{'a' * 24}"


def work_in(folder: Path, *, is_untrusted: bool = False) -> AttemptWork:
    place = WorkOutput(
        dataset="tidy",
        uuid="u",
        location=(folder / "datasets" / "tidy" / "g" / "p" / ATTEMPT).as_uri(),
    )
    given = WorkInput(
        dataset="raw",
        generation="r",
        parts=(Part(location="file:///raw", manifest="0" * 64, revision=3),),
    )
    return AttemptWork(
        task_id=7,
        attempt=1,
        job="clean",
        operator="x:y",
        generation="g",
        payload={"partition_key": "p"},
        inputs={"raw": given},
        outputs={"tidy": place},
        is_untrusted=is_untrusted,
    )


def completed(work: AttemptWork, *made: ProducedOutput) -> tuple[ProducedOutput, ...]:
    outputs = OutputCollector("file:///unused?fsync=off")
    return asyncio.run(outputs.complete(work, WorkResult(made=made), staged={})).made


def own(work: AttemptWork) -> tuple[Path, ProducedOutput]:
    """The folder of the only output, made, and that it is published."""
    location = work.outputs["tidy"].location
    folder = Path(location.removeprefix("file://"))
    folder.mkdir(parents=True)
    return folder, ProducedOutput(output="tidy", location=location, partition_key="p")


@pytest.mark.parametrize("is_untrusted", [False, True])
def test_what_is_told_was_found_by_the_worker(tmp_path: Path, is_untrusted: bool) -> None:
    work = work_in(tmp_path, is_untrusted=is_untrusted)
    folder, made = own(work)
    (folder / "deep").mkdir()
    parquet.write_table(pa.table({"n": [1, 2], "t": ["a", "b"]}), folder / "a b.parquet")
    parquet.write_table(pa.table({"n": [3], "x": [0.5]}), folder / "deep" / "%2E.parquet")
    (folder / "note.txt").write_text("hello")
    (folder / "_SUCCESS").touch()
    (told,) = completed(work, made)
    assert told.facts is not None
    assert told.facts.is_observed
    assert (told.facts.files, told.facts.rows) == (3, 3)
    words = {"n": "bigint", "t": "string", "x": "double"}
    assert told.facts.columns == tuple(Column(*each) for each in words.items())
    body = (folder / "_manifest.json").read_bytes()
    assert digest(body) == told.facts.manifest
    manifest = decode(body)
    assert (manifest.dataset, manifest.job, manifest.partition_key) == ("tidy", "clean", "p")
    assert [(each.name, each.rows) for each in manifest.files] == [
        ("a b.parquet", 2),
        ("deep/%2E.parquet", 1),
        ("note.txt", None),
    ]
    assert manifest.files[0].bounds == {"n": Bound(1, 2, 0), "t": Bound("a", "b", 0)}
    assert manifest.files[2].sha256 == hashlib.sha256(b"hello").hexdigest()
    (read_from,) = manifest.inputs
    assert (read_from.dataset, read_from.revision, read_from.manifest) == ("raw", 3, "0" * 64)
    # And it is what readers find.
    transfer = Transfer("")
    (contents,) = read([Part(location=made.location, manifest=told.facts.manifest)], transfer)
    assert [row["n"] for row in preview(contents.files, transfer, rows=9)] == [1, 2, 3]
    every = [*contents.files, *contents.others]
    assert list(verify(every, transfer)) == []
    (folder / "note.txt").write_text("other")
    assert [each.location for each, _ in verify(every, transfer)] == [f"{made.location}/note.txt"]


@pytest.mark.parametrize("is_untrusted", [False, True])
@pytest.mark.parametrize("is_staged", [False, True])
def test_columns_have_their_own_field_ids_whatever_was_copied(
    tmp_path: Path, *, is_staged: bool, is_untrusted: bool
) -> None:
    work = work_in(tmp_path, is_untrusted=is_untrusted)
    folder, made = own(work)
    outside = tmp_path / "datasets" / "staged"
    outside.mkdir()
    written = outside if is_staged else folder
    table = pa.table({"a": [1], "b": [2], "l": [[3, None]]})
    parquet.write_table(table, written / "a.parquet")
    identify_file(written / "a.parquet", columns_in(table.schema))
    renamed = parquet.read_table(written / "a.parquet").rename_columns(["b", "a", "l"])
    parquet.write_table(renamed, written / "a.parquet")
    # What is a file of others as well is theirs to change.
    parquet.write_table(table, tmp_path / "theirs.parquet")
    before = (tmp_path / "theirs.parquet").read_bytes()
    (written / "b.parquet").hardlink_to(tmp_path / "theirs.parquet")
    outputs = OutputCollector("file:///unused?fsync=off")
    staged = {"tidy": outside} if is_staged else {}
    finishing = outputs.complete(work, WorkResult(made=(made,)), staged=staged)
    (told,) = asyncio.run(finishing).made
    assert told.facts is not None
    wanted = list(ids_of(told.facts.columns))
    found = [field_ids(parquet.read_schema(folder / name)) for name in ("a.parquet", "b.parquet")]
    assert found == [wanted, [None] * 4]
    assert (tmp_path / "theirs.parquet").read_bytes() == before
    assert parquet.read_table(folder / "a.parquet").equals(renamed)
    manifest = decode((folder / "_manifest.json").read_bytes())
    assert [each.unfit for each in manifest.files] == [None, None]
    (contents,) = read([Part(location=made.location, manifest=told.facts.manifest)], Transfer(""))
    assert list(verify(contents.files, Transfer(""))) == []


def test_plain_parquet_has_a_manifest_in_the_form_of_the_first_release(tmp_path: Path) -> None:
    work = work_in(tmp_path)
    folder, made = own(work)
    parquet.write_table(pa.table({"n": [1]}), folder / "part.parquet")
    completed(work, made)
    assert (folder / "_manifest.json").read_bytes().startswith(b'{"penstock":"manifest/1"')


def test_files_that_do_not_fit_together_have_no_columns_and_junk_no_rows(tmp_path: Path) -> None:
    work = work_in(tmp_path)
    folder, made = own(work)
    parquet.write_table(pa.table({"n": [1]}), folder / "a.parquet")
    parquet.write_table(pa.table({"n": ["text"]}), folder / "b.parquet")
    (told,) = completed(work, made)
    assert told.facts is not None
    assert (told.facts.rows, told.facts.columns) == (2, ())
    (folder / "_manifest.json").unlink()
    (folder / "c.parquet").write_bytes(b"PAR1 not really PAR1")
    (told,) = completed(work, made)
    assert told.facts is not None
    assert (told.facts.rows, told.facts.columns, told.facts.files) == (None, (), 3)


def test_what_is_no_folder_with_files_has_no_manifest(tmp_path: Path) -> None:
    work = work_in(tmp_path)
    folder, made = own(work)
    assert completed(work, made) == (made,)
    (folder / "only.csv").write_text("x")
    single = replace(made, location=f"{made.location}/only.csv")
    elsewhere = replace(made, location=tmp_path.as_uri())
    event = replace(made, location="range:1-2")
    assert completed(work, single, elsewhere, event) == (single, elsewhere, event)
    assert sorted(each.name for each in tmp_path.rglob("*") if each.is_file()) == ["only.csv"]


def test_who_reads_the_whole_folder_reads_no_manifest(tmp_path: Path) -> None:
    """As `pandas.read_parquet` does; and functions may write a file with the name of Spark's."""
    work = work_in(tmp_path)
    folder, made = own(work)
    parquet.write_table(pa.table({"n": [1]}), folder / "part.parquet")
    completed(work, made)
    assert parquet.read_table(folder)["n"].to_pylist() == [1]
    (folder / "_manifest.json").unlink()
    (folder / "manifest.json").write_text("{}")
    (told,) = completed(work, made)
    assert told.facts is not None
    (contents,) = read([Part(location=made.location, manifest=told.facts.manifest)], Transfer(""))
    assert [each.location for each in contents.others] == [f"{made.location}/manifest.json"]


def test_the_name_of_a_manifest_is_taken(tmp_path: Path) -> None:
    work = work_in(tmp_path)
    folder, made = own(work)
    (folder / "_manifest.json").write_text("{}")
    with pytest.raises(WorkFailed, match="Penstock's own name") as caught:
        completed(work, made)
    assert not caught.value.is_retried
    assert (folder / "_manifest.json").read_text() == "{}"


def test_partitions_in_folders_of_one_output_have_a_manifest_each(tmp_path: Path) -> None:
    work = work_in(tmp_path)
    folder, made = own(work)
    for name in ("a", "b"):
        (folder / name).mkdir()
        (folder / name / "x.txt").write_text(name)
    parts = [replace(made, location=f"{made.location}/{name}", partition_key=name) for name in "ab"]
    told = completed(work, *parts, made)
    bodies = [(folder / name / "_manifest.json").read_bytes() for name in ("a", "b", ".")]
    manifests = [decode(each) for each in bodies]
    assert [each.partition_key for each in manifests] == ["a", "b", "p"]
    assert [each.name for each in manifests[2].files] == ["a/x.txt", "b/x.txt"]
    assert all(each.facts is not None for each in told)


def test_columns_that_were_only_seen_refuse_nothing() -> None:
    """A function's schema may differ from one day to the next, as that of pandas does."""

    async def seen(work: AttemptWork, reporter: WorkReporter) -> tuple[ProducedOutput, ...]:
        facts = Facts(
            manifest="0" * 64,
            files=1,
            rows=None,
            bytes=1,
            columns=(Column("n", "double"),),
            is_observed=True,
        )
        (name,) = work.outputs
        return (ProducedOutput(output=name, location=work.outputs[name].location, facts=facts),)

    async def story(bench: Bench) -> None:
        await bench.until(lambda: bench.dispatcher.tasks[1].status == "completed")
        (ended,) = bench.dispatcher.tasks[1].ended
        assert ended.failure is None
        (output,) = ended.outputs
        assert output.facts is not None
        assert (output.facts.columns, output.facts.manifest) == ([], "0" * 64)

    play(story, setting=lambda dispatcher: dispatcher.add(bad_columns=True), doing=seen, seeds=[1])
