"""What an attempt has made of one partition: `manifest.json`, written last into its own folder.

A manifest names the files, with their sizes and SHA-256 sums, the columns, and what was read to
make them, by the sums of their manifests: of each input the first hundred parts, and of a larger
one a count and a digest, or ten thousand partitions that are made of all others would be a hundred
million lines. It never changes once it is written (PUBLISH-1). Readers read what a manifest names
and nothing else, so files beside those that are named do not exist. An empty partition is a
manifest with columns and without files.

What Spark has made is Parquet, each file with its rows. What a function has made may be any files,
in folders too; where one is not Parquet, or cannot be read as such, its rows are not known. A
manifest with a name or a file of that kind has format 2, and all others have format 1, which
release 0.1 reads. Of Parquet it may tell the bounds of columns, by which readers leave files out
(`bounds`), and what other engines would misread; earlier releases pass over both.

Nothing in it depends on when or where it was made: equal work has equal files, and two manifests of
it differ in the task's number, the attempt and the locations of what was read. Its own sum is
what the dispatcher publishes. Pure; written by runtimes, read by everyone who reads datasets.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, ClassVar, Final

import msgspec
from msgspec import Meta

from penstock.datasets.bounds import Bound, with_room
from penstock.datasets.schema import Column
from penstock.kernel import document_format

# What a manifest names lies in its own folder, or below it: no part of a name begins with a dot.
FileName = Annotated[
    str,
    Meta(
        pattern=r"^[^./\x00-\x1f\x7f][^/\x00-\x1f\x7f]*(/[^./\x00-\x1f\x7f][^/\x00-\x1f\x7f]*)*\Z",
        max_length=1024,
    ),
]
Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]

LISTED_MAX: Final = 100
"""How many parts of an input are listed."""
BYTES_MAX: Final = 64 * 1024 * 1024
"""The largest manifest that is read: some hundred thousand files."""
_BOUNDS_MAX: Final = 100_000
"""How many bounds a manifest has: some ten megabytes at the most."""
_PLAIN: Final = re.compile(r"[A-Za-z0-9_=~@-][A-Za-z0-9_.=~@-]{0,254}")


class Unfit(StrEnum):
    """What is in a Parquet file that Iceberg's readers would misread."""

    FIELD_IDS = "field_ids"
    """They are of another table: those of Penstock are others, or none."""
    UNSIGNED = "unsigned"
    """Whole numbers without a sign, of 32 bits or more."""


class File(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A file of a manifest, in the folder of the manifest."""

    name: FileName
    rows: Count | None
    """None if they are not known: it is no Parquet."""
    bytes: Count
    sha256: Sha256
    bounds: dict[str, Bound] = {}
    """Of its columns, as far as they are known."""
    unfit: Unfit | None = None
    """What engines that read it as a table would misread, if there is something."""


class ManifestInput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something that was read. `manifest` is the sum of its manifest, if it has one."""

    input: str
    """The job's name for it."""
    dataset: str
    generation: str
    location: str
    partition_key: str | None = None
    revision: int | None = None
    manifest: Sha256 | None = None


class InputTotal(msgspec.Struct, frozen=True, kw_only=True):
    """How much was read of an input of which not all parts are listed."""

    input: str
    dataset: str
    generation: str
    parts: Count
    digest: Sha256
    """Of all parts: the SHA-256 of a line for each, its location, a tab, and the sum of its
    manifest or nothing. Equal for those that have read the same."""


class Manifest(document_format.Document, frozen=True, kw_only=True):
    """What was made of one partition."""

    kind: ClassVar[str] = "manifest"
    format: ClassVar[int] = 2

    dataset: str
    generation: str
    job: str
    task_id: int
    attempt: int
    partition_key: str | None = None
    start: int | None = None
    end: int | None = None
    rows: Count | None
    """Of all its Parquet files; None if there are none, or if those of one are not known."""
    bytes: Count
    columns: tuple[Column, ...] = ()
    files: tuple[File, ...] = ()
    inputs: tuple[ManifestInput, ...] = ()
    """The first of what was read."""
    input_totals: tuple[InputTotal, ...] | msgspec.UnsetType = msgspec.UNSET
    """Of inputs of which there is more: how much, and what it was."""
    deleted: tuple[File, ...] = ()
    """In the folder `DELETED`: the keys of rows that were deleted, for those that merge with it."""

    @property
    def inputs_count(self) -> int:
        """How many parts were read."""
        totals = () if self.input_totals is msgspec.UNSET else self.input_totals
        counted = {each.input for each in totals}
        listed = sum(each.input not in counted for each in self.inputs)
        return listed + sum(each.parts for each in totals)


@dataclass(frozen=True, slots=True)
class FileSums:
    """How much some files are together."""

    files: int
    rows: int
    bytes: int


def sums(files: Iterable[File]) -> FileSums:
    """How much these files are together."""
    every = tuple(files)
    return FileSums(
        len(every), sum(each.rows or 0 for each in every), sum(each.bytes for each in every)
    )


def with_bounds(files: Sequence[File]) -> tuple[File, ...]:
    """These files with no more bounds than a manifest has room for."""
    columns_max = _BOUNDS_MAX // max(1, len(files))
    return tuple(
        each
        if len(each.bounds) <= columns_max
        else msgspec.structs.replace(
            each, bounds=with_room(each.bounds.items(), columns_max=columns_max)
        )
        for each in files
    )


def encode(manifest: Manifest) -> bytes:
    """The manifest as it is stored: the same bytes for the same manifest."""
    body = document_format.encode(manifest)
    if not manifest.deleted:
        # What merges nothing is written as it always was.
        body = body.removesuffix(b',"deleted":[]}') + b"}"
    is_plain = manifest.rows is not None and all(
        each.rows is not None and _PLAIN.fullmatch(each.name) for each in manifest.files
    )
    # Only what an earlier release would misread has the later format.
    return body.replace(b'"manifest/2"', b'"manifest/1"', 1) if is_plain else body


def decode(body: bytes, *, where: str = "The manifest") -> Manifest:
    """The manifest in `body`. Raises `NotOurs` or `NewerFormat`; `where` names it in errors."""
    return document_format.decode(Manifest, body, where=where)


def digest(body: bytes) -> str:
    """The SHA-256 of a manifest as it is stored: what is published of it."""
    return hashlib.sha256(body).hexdigest()
