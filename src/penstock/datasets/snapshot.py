"""From what is published to the files that hold it, and what is in them.

What is published is a list of parts: folders, each with the SHA-256 of its manifest. `read` turns
them into the files that the manifests name, in order. All of a list that was taken in one
transaction is one consistent snapshot, and its files stay for at least the grace of the sweeper. A
manifest whose sum is another than what was published is `Damaged`, and so is one that is missing.
Parts without a manifest were made by jobs that write what they like; their Parquet files are
listed, and where there are none, what else lies there.

Called by runtimes that read inputs, and by the command line (`files`, `preview`, `verify`). Blocks;
asks for several manifests at a time.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeVar

from penstock.datasets.bounds import Bound
from penstock.datasets.layout import DELETED, HIDDEN_MANIFEST, MANIFEST, location_below
from penstock.datasets.manifest import File, Manifest, decode, digest
from penstock.datasets.parquet import first_rows
from penstock.datasets.schema import Column
from penstock.datasets.transfer import Transfer
from penstock.kernel.errors import Damaged, NotFound

AT_ONCE: Final = 8
TEXTS: Final = (".csv", ".json", ".jsonl", ".md", ".ndjson", ".tsv", ".txt")
"""How the names of files end whose first lines can be shown."""
PREVIEW_SECONDS_MAX: Final = 120.0
_PARQUET: Final = ".parquet"
_LINE_BYTES_MAX: Final = 4096
_HINT: Final = "Make the partition again: a backfill of it writes new files."

Answer = TypeVar("Answer")
Asked = TypeVar("Asked")


class PublishedParts(Protocol):
    """A part: something that is published, as runtimes and the API have it."""

    @property
    def location(self) -> str: ...

    @property
    def manifest(self) -> str | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """A file of a snapshot. What no manifest says is None."""

    location: str
    bytes: int
    rows: int | None = None
    sha256: str | None = None
    bounds: Mapping[str, Bound] = field(default_factory=dict, hash=False)
    partition_key: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FileContents:
    """What a part holds. `manifest` is None for a part without one."""

    location: str
    files: tuple[DataFile, ...]
    manifest: Manifest | None = None
    others: tuple[DataFile, ...] = ()
    """What is no Parquet; of a part without a manifest only if it has no Parquet at all."""
    deleted: tuple[DataFile, ...] = ()
    """The keys of rows that were deleted, for those that merge with it."""

    @property
    def columns(self) -> tuple[Column, ...]:
        """What the manifest says of the columns; nothing without one."""
        return () if self.manifest is None else self.manifest.columns


def read(parts: Sequence[PublishedParts], transfer: Transfer) -> list[FileContents]:
    """What these parts hold, in their order."""
    return list(_each(lambda part: _contents(part, transfer), parts))


def read_what_is_there(
    parts: Sequence[PublishedParts], transfer: Transfer
) -> tuple[list[FileContents], list[Damaged]]:
    """The same of the parts whose manifests can be read; and what is wrong with those of others."""

    def look(part: PublishedParts) -> FileContents | Damaged:
        try:
            return _contents(part, transfer)
        except Damaged as error:
            return error

    found = list(_each(look, parts))
    return (
        [each for each in found if isinstance(each, FileContents)],
        [each for each in found if isinstance(each, Damaged)],
    )


def files(contents: Iterable[FileContents]) -> list[DataFile]:
    """All files of these parts that have rows, in order."""
    return [each for part in contents for each in part.files]


def preview(every: Sequence[DataFile], transfer: Transfer, *, rows: int) -> list[dict[str, Any]]:
    """The first rows of these files, as far as they go. Reads no more of them than it needs.

    Raises `PenstockError` for a file that cannot be read so.
    """
    found: list[dict[str, Any]] = []
    for each in every:
        if len(found) >= rows:
            break
        if each.rows == 0:
            continue
        with transfer.open(each.location) as opened:
            shown = first_rows(opened, rows=rows - len(found), seconds_max=PREVIEW_SECONDS_MAX)
        found.extend(dict(zip(shown.columns, row, strict=False)) for row in shown.rows)
    return found


def first_lines(file: DataFile, transfer: Transfer, *, lines: int) -> list[str]:
    """The first lines of a text; long ones are cut. What is no text is shown as far as it goes."""
    with transfer.open(file.location) as opened:
        body = opened.read(lines * _LINE_BYTES_MAX)
    return [each[:_LINE_BYTES_MAX] for each in body.decode("utf-8", "replace").splitlines()[:lines]]


def verify(every: Sequence[DataFile], transfer: Transfer) -> Iterator[tuple[DataFile, str]]:
    """Read every file through; yields those that are damaged, with a sentence for each.

    A file without a sum is only looked for. Raises `StoreError` where the store does not answer.
    """

    def look(each: DataFile) -> str:
        try:
            if each.sha256 is None:
                transfer.sum(each.location)
            else:
                transfer.verify(each.location, sha256=each.sha256)
        except (Damaged, NotFound) as error:
            return error.message
        return ""

    for each, said in zip(every, _each(look, every), strict=True):
        if said:
            yield each, said


def _contents(part: PublishedParts, transfer: Transfer) -> FileContents:
    base = part.location.rstrip("/")
    if part.manifest is None:
        tables, others = _loose(base, transfer)
        return FileContents(location=base, files=tables, others=others)
    where, body = _manifest(base, part.manifest, transfer)
    manifest = decode(body, where=where)
    named = [_named(base, each) for each in manifest.files]
    deleted = tuple(_named(f"{base}/{DELETED}", each) for each in manifest.deleted)
    tables = tuple(each for each in named if each.location.endswith(_PARQUET))
    others = tuple(each for each in named if not each.location.endswith(_PARQUET))
    return FileContents(
        location=base, files=tables, others=others, manifest=manifest, deleted=deleted
    )


def _named(base: str, file: File) -> DataFile:
    return DataFile(
        location=location_below(base, file.name),
        bytes=file.bytes,
        rows=file.rows,
        sha256=file.sha256,
        bounds=file.bounds,
    )


def _manifest(base: str, wanted: str, transfer: Transfer) -> tuple[str, bytes]:
    """Where the manifest that was published lies, and what it says; see `HIDDEN_MANIFEST`."""
    where, told = f"{base}/{MANIFEST}", ""
    for name in (MANIFEST, HIDDEN_MANIFEST):
        try:
            body = transfer.read_bytes(f"{base}/{name}")
        except NotFound:
            continue
        found = digest(body)
        if found == wanted:
            return f"{base}/{name}", body
        where = f"{base}/{name}"
        told = (
            f"The manifest {where} is not the one that was published: its SHA-256 is {found},"
            f" and it should be {wanted}."
        )
    told = told or f"The manifest {where} is not there, and no {HIDDEN_MANIFEST} either."
    raise Damaged(told, location=where, hint=_HINT)


def _loose(base: str, transfer: Transfer) -> tuple[tuple[DataFile, ...], tuple[DataFile, ...]]:
    """The Parquet files below a location, or the file that it is; without any, what is there."""
    if base.endswith(_PARQUET):
        return (_one(base, transfer),), ()
    found = [
        DataFile(location=location_below(base, each.name), bytes=each.bytes)
        for each in transfer.list(base)
        if is_data(each.name)
    ]
    tables = tuple(each for each in found if each.location.endswith(_PARQUET))
    if found:
        return tables, () if tables else tuple(found)
    try:
        return (), (_one(base, transfer),) if base.endswith(TEXTS) else ()
    except NotFound:
        return (), ()


def is_data(name: str) -> bool:
    """Whether a file is data, by its name: what Spark calls so that is none begins otherwise."""
    return not any(part.startswith(("_", ".")) for part in name.split("/"))


def _one(location: str, transfer: Transfer) -> DataFile:
    with transfer.open(location) as file:
        return DataFile(location=location, bytes=file.seek(0, io.SEEK_END))


def _each(ask: Callable[[Asked], Answer], every: Sequence[Asked]) -> Iterator[Answer]:
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="penstock-snapshot") as pool:
        yield from pool.map(ask, every)
