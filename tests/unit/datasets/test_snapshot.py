"""From what is published to files."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from penstock.datasets.layout import path_of
from penstock.datasets.manifest import File, Manifest, digest, encode, sums
from penstock.datasets.schema import Column
from penstock.datasets.snapshot import DataFile, files, preview, read, verify
from penstock.datasets.transfer import Transfer
from penstock.kernel.errors import Damaged, NewerFormat
from penstock.runtimes.base import Part

COLUMNS = (Column("id", "bigint"),)


class Shelf:
    """Published parts in a folder."""

    def __init__(self, base: str) -> None:
        self.base = base
        self.transfer = Transfer("file:///unused?fsync=off")

    def file(self, where: str, ids: list[int]) -> File:
        sink = pa.BufferOutputStream()
        parquet.write_table(pa.table({"id": pa.array(ids, pa.int64())}), sink, row_group_size=10)
        sent = self.transfer.write_bytes(f"{self.base}/{where}", sink.getvalue().to_pybytes())
        name = where.rpartition("/")[2]
        return File(name=name, rows=len(ids), bytes=sent.bytes, sha256=sent.sha256)

    def part(self, folder: str, *ids: list[int]) -> Part:
        made = tuple(
            self.file(f"{folder}/part-{place}.parquet", each) for place, each in enumerate(ids)
        )
        manifest = Manifest(
            dataset="d",
            generation="g",
            job="j",
            task_id=1,
            attempt=1,
            files=made,
            rows=sums(made).rows,
            bytes=sums(made).bytes,
            columns=COLUMNS,
        )
        body = encode(manifest)
        self.transfer.write_bytes(f"{self.base}/{folder}/manifest.json", body)
        return Part(location=f"{self.base}/{folder}", manifest=digest(body))


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path.as_uri())


def test_the_files_are_those_that_manifests_name(shelf: Shelf) -> None:
    two, one = shelf.part("b", [3], [4, 5]), shelf.part("a", [1, 2])
    shelf.file("a/part-of-a-zombie.parquet", [666])
    contents = read([two, one], shelf.transfer)
    assert [each.columns for each in contents] == [COLUMNS, COLUMNS]
    found = files(contents)
    names = [each.location.removeprefix(shelf.base) for each in found]
    assert names == ["/b/part-0.parquet", "/b/part-1.parquet", "/a/part-0.parquet"]
    assert [each.rows for each in found] == [1, 2, 2]
    assert preview(found, shelf.transfer, rows=100) == [{"id": n} for n in (3, 4, 5, 1, 2)]
    assert list(verify(found, shelf.transfer)) == []


def test_an_empty_partition_has_no_files(shelf: Shelf) -> None:
    (contents,) = read([shelf.part("a")], shelf.transfer)
    assert contents.files == ()
    assert contents.columns == COLUMNS
    assert preview(contents.files, shelf.transfer, rows=5) == []


def test_a_part_without_a_manifest_has_the_parquet_files_below_it(shelf: Shelf) -> None:
    shelf.file("loose/x.parquet", [1])
    shelf.file("loose/deep/y.parquet", [2])
    shelf.file("loose/_temporary/z.parquet", [3])
    shelf.file("loose/.hidden.parquet", [4])
    shelf.transfer.write_bytes(f"{shelf.base}/loose/x.csv", b"1")
    parts = [
        Part(location=f"{shelf.base}/loose/"),
        Part(location=f"{shelf.base}/loose/x.parquet"),
    ]
    folder, single = read(parts, shelf.transfer)
    assert {each.location.removeprefix(shelf.base) for each in folder.files} == {
        "/loose/x.parquet",
        "/loose/deep/y.parquet",
    }
    (only,) = single.files
    assert only.sha256 is None
    assert only.bytes == len(shelf.transfer.read_bytes(only.location))
    assert list(verify([only, *folder.files], shelf.transfer)) == []


@pytest.mark.parametrize(
    "name",
    [
        "x%2F..%2F..%2Fsecret.parquet",
        "%2E%2E%2Fsecret.parquet",
        "%252E%252E%252Fsecret.parquet",
        "a %?#*[b]{c}.parquet",
        b"not \xff UTF-8.parquet".decode(errors="surrogateescape"),
    ],
)
def test_a_name_is_the_name_of_that_file_and_of_no_other(
    name: str, shelf: Shelf, tmp_path: Path
) -> None:
    shelf.file("secret.parquet", [666])
    shelf.file("loose/own.parquet", [1])
    (tmp_path / "loose" / "own.parquet").rename(tmp_path / "loose" / name)
    (contents,) = read([Part(location=f"{shelf.base}/loose")], shelf.transfer)
    (file,) = contents.files
    assert preview(contents.files, shelf.transfer, rows=5) == [{"id": 1}]
    assert path_of(file.location) == tmp_path / "loose" / name
    assert list(verify(contents.files, shelf.transfer)) == []


@pytest.mark.parametrize(("rows", "expected"), [(0, 0), (1, 1), (15, 15), (25, 25), (40, 30)])
def test_a_preview_has_as_many_rows_as_were_asked_for(
    rows: int, expected: int, shelf: Shelf
) -> None:
    found = files(read([shelf.part("a", [], list(range(20)), list(range(10)))], shelf.transfer))
    assert len(preview(found, shelf.transfer, rows=rows)) == expected


def test_a_manifest_that_was_not_published_is_refused(shelf: Shelf) -> None:
    part = shelf.part("a", [1])
    shelf.part("a", [2])
    with pytest.raises(Damaged, match="not the one that was published") as caught:
        read([part], shelf.transfer)
    assert caught.value.location == f"{shelf.base}/a/manifest.json"


def test_a_manifest_that_is_missing_is_damage(shelf: Shelf) -> None:
    part = shelf.part("a", [1])
    shelf.transfer.delete([f"{shelf.base}/a/manifest.json"])
    with pytest.raises(Damaged, match=r"manifest\.json is not there"):
        read([shelf.part("b", [2]), part], shelf.transfer)


def test_a_manifest_of_a_later_release_is_told(shelf: Shelf) -> None:
    part = shelf.part("a", [1])
    body = shelf.transfer.read_bytes(f"{part.location}/manifest.json")
    body = body.replace(b"manifest/1", b"manifest/9")
    shelf.transfer.write_bytes(f"{shelf.base}/a/manifest.json", body)
    with pytest.raises(NewerFormat):
        read([Part(location=f"{shelf.base}/a", manifest=digest(body))], shelf.transfer)


def test_every_damaged_file_is_named(shelf: Shelf) -> None:
    found = files(read([shelf.part("a", [1], [2], [3])], shelf.transfer))
    missing = DataFile(location=f"{shelf.base}/none.parquet", bytes=1)
    shelf.transfer.write_bytes(found[1].location, b"x")
    shelf.transfer.delete([found[2].location])
    problems = list(verify([*found, missing], shelf.transfer))
    assert [each for each, _ in problems] == [found[1], found[2], missing]
    assert "not what its manifest says" in problems[0][1]
    assert "is not there" in problems[1][1]
