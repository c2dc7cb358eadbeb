"""What an attempt says of what it has made."""

from __future__ import annotations

import msgspec
import pytest

from penstock.datasets.bounds import Bound
from penstock.datasets.manifest import (
    File,
    InputTotal,
    Manifest,
    ManifestInput,
    decode,
    digest,
    encode,
    sums,
)
from penstock.datasets.schema import Column
from penstock.kernel.errors import NewerFormat, NotOurs

FILES = (
    File(name="part-0.parquet", rows=2, bytes=10, sha256="0" * 64),
    File(name="part-1.parquet", rows=3, bytes=20, sha256="1" * 64),
)
MANIFEST = Manifest(
    dataset="sales",
    generation="g",
    partition_key="2013-01-01",
    start=0,
    end=86_400,
    job="clean",
    task_id=7,
    attempt=2,
    files=FILES,
    rows=5,
    bytes=30,
    columns=(Column("id", "bigint", is_nullable=False),),
    inputs=(
        ManifestInput(
            input="raw", dataset="raw", generation="h", location="s3://b/x", manifest="2" * 64
        ),
    ),
)


def test_what_was_written_is_read() -> None:
    body = encode(MANIFEST)
    assert decode(body) == MANIFEST
    assert body == encode(decode(body))
    assert body.startswith(b'{"penstock":"manifest/1",')


def test_earlier_releases_read_one_with_bounds_and_totals() -> None:
    assert b"bounds" not in encode(MANIFEST)
    assert b"input_totals" not in encode(MANIFEST)
    assert MANIFEST.inputs_count == 1
    more = msgspec.structs.replace(
        MANIFEST,
        files=(msgspec.structs.replace(FILES[0], bounds={"id": Bound(1, 9, 0)}),),
        input_totals=(
            InputTotal(input="raw", dataset="raw", generation="h", parts=10_001, digest="3" * 64),
        ),
    )
    body = encode(more)
    assert body.startswith(b'{"penstock":"manifest/1",')
    assert decode(body) == more
    assert more.inputs_count == 10_001


def test_its_sum_is_that_of_its_bytes() -> None:
    other = msgspec.structs.replace(MANIFEST, rows=6)
    assert digest(encode(MANIFEST)) == digest(encode(MANIFEST))
    assert digest(encode(MANIFEST)) != digest(encode(other))
    assert len(digest(b"")) == 64


def test_an_empty_partition_has_columns_and_no_files() -> None:
    empty = msgspec.structs.replace(MANIFEST, files=(), rows=0, bytes=0)
    assert decode(encode(empty)).columns == MANIFEST.columns


def test_sums() -> None:
    assert (sums(FILES).files, sums(FILES).rows, sums(FILES).bytes) == (2, 5, 30)
    assert sums(()).files == 0


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (b"manifest/1", b"manifest/3", NewerFormat),
        (b"manifest/1", b"pack/1", NotOurs),
        (b'{"penstock":"manifest/1",', b"{", NotOurs),
        (b'"rows":5', b'"rows":-5', NotOurs),
        (b'"rows":5', b'"rows":"5"', NotOurs),
        (b"part-0.parquet", b"../part-0.parquet", NotOurs),
        (b"part-0.parquet", b"a/../part-0.parquet", NotOurs),
        (b"part-0.parquet", b"a//part-0.parquet", NotOurs),
        (b"part-0.parquet", b"/part-0.parquet", NotOurs),
        (b"part-0.parquet", b".parquet", NotOurs),
        (b"part-0.parquet", b"part-0.parquet\\n", NotOurs),
        (b"0" * 64, b"0" * 63, NotOurs),
    ],
)
def test_what_is_not_a_manifest_is_refused(
    old: bytes, new: bytes, problem: type[Exception]
) -> None:
    body = encode(MANIFEST)
    assert old in body
    with pytest.raises(problem, match="The manifest of sales"):
        decode(body.replace(old, new, 1), where="The manifest of sales")
