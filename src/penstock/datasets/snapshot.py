"""From what is published to the files that hold it, and what is in them.

What is published is a list of parts: folders, each with the SHA-256 of its manifest. `read` turns
them into the files that the manifests name, in order. All of a list that was taken in one
transaction is one consistent snapshot, and its files stay for at least the grace of the sweeper. A
manifest whose sum is another than what was published is `Damaged`, and so is one that is missing.
Parts without a manifest were made by jobs that write what they like; their Parquet files are
listed.

Called by runtimes that read inputs, and by the command line (`files`, `preview`, `verify`). Blocks;
asks for several manifests at a time.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final, Protocol, TypeVar

from penstock.datasets.layout import MANIFEST
from penstock.datasets.manifest import Manifest, decode, digest
from penstock.datasets.schema import Column
from penstock.datasets.transfer import Transfer
from penstock.kernel.errors import Damaged, NotFound

AT_ONCE: Final = 8
_HINT: Final = "Make the partition again: a backfill of it writes new files."

Answer = TypeVar("Answer")
Asked = TypeVar("Asked")


class Published(Protocol):
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What a part holds. `manifest` is None for a part without one."""

    location: str
    files: tuple[DataFile, ...]
    manifest: Manifest | None = None

    @property
    def columns(self) -> tuple[Column, ...]:
        """What the manifest says of the columns; nothing without one."""
        return () if self.manifest is None else self.manifest.columns


def read(parts: Sequence[Published], transfer: Transfer) -> list[Contents]:
    """What these parts hold, in their order."""
    return list(_each(lambda part: _contents(part, transfer), parts))


def files(contents: Iterable[Contents]) -> list[DataFile]:
    """All files of these parts, in order."""
    return [each for part in contents for each in part.files]


def preview(every: Sequence[DataFile], transfer: Transfer, *, rows: int) -> list[dict[str, Any]]:
    """The first rows of these files, as far as they go. Reads no more of them than it needs."""
    parquet = import_module("pyarrow.parquet")
    found: list[dict[str, Any]] = []
    for each in every:
        if len(found) >= rows:
            break
        if each.rows == 0:
            continue
        with transfer.open(each.location) as opened:
            file = parquet.ParquetFile(opened)
            for batch in file.iter_batches(batch_size=max(1, rows - len(found))):
                found.extend(batch.to_pylist())
                if len(found) >= rows:
                    break
    return found[:rows]


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


def _contents(part: Published, transfer: Transfer) -> Contents:
    base = part.location.rstrip("/")
    if part.manifest is None:
        return Contents(location=base, files=tuple(_loose(base, transfer)))
    where = f"{base}/{MANIFEST}"
    try:
        body = transfer.read_bytes(where)
    except NotFound as error:
        raise Damaged(f"The manifest {where} is not there.", location=where, hint=_HINT) from error
    found = digest(body)
    if found != part.manifest:
        raise Damaged(
            f"The manifest {where} is not the one that was published: its SHA-256 is {found},"
            f" and it should be {part.manifest}.",
            location=where,
            hint=_HINT,
        )
    manifest = decode(body, where=where)
    named = tuple(
        DataFile(
            location=f"{base}/{each.name}", bytes=each.bytes, rows=each.rows, sha256=each.sha256
        )
        for each in manifest.files
    )
    return Contents(location=base, files=named, manifest=manifest)


def _loose(base: str, transfer: Transfer) -> Iterator[DataFile]:
    """The Parquet files below a location, or the file that it is."""
    if base.endswith(".parquet"):
        with transfer.open(base) as file:
            yield DataFile(location=base, bytes=file.seek(0, io.SEEK_END))
        return
    for each in transfer.list(base):
        parts = each.name.split("/")
        # Spark's own names for what is not data begin so.
        if each.name.endswith(".parquet") and not any(one.startswith(("_", ".")) for one in parts):
            yield DataFile(location=f"{base}/{each.name}", bytes=each.bytes)


def _each(ask: Callable[[Asked], Answer], every: Sequence[Asked]) -> Iterator[Answer]:
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="penstock-snapshot") as pool:
        yield from pool.map(ask, every)
