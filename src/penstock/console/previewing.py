"""What is in the files of a partition: its manifest, and the first rows, through the store.

Only what lies in the folder of an attempt below the dispatcher's own root is read. It costs four
requests at most: the manifest and one file are looked at and then read, or a folder without a
manifest is listed. Each is bounded in size, all of them together in time, and so is the process
that makes rows of a file (`penstock.datasets.parquet`), of which there are a few at a time. What
cannot be shown is a sentence that says why. Every value is a text.

Nothing is written. A crash leaves a process that ends by itself within its bound.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Final

from penstock.datasets.layout import DATASETS, HIDDEN_MANIFEST, MANIFEST, place_of
from penstock.datasets.manifest import Manifest, decode, digest
from penstock.datasets.parquet import first_rows
from penstock.datasets.snapshot import TEXTS
from penstock.kernel.errors import NotFound, PenstockError
from penstock.store.base import ObjectStore

ROWS_MAX: Final = 20
FILE_BYTES_MAX: Final = 1024 * 1024
MANIFEST_BYTES_MAX: Final = 4 * 1024 * 1024
STORE_SECONDS_MAX: Final = 3.0
READER_SECONDS_MAX: Final = 8.0
READERS_MAX: Final = 4
FILES_SHOWN: Final = 50
COLUMNS_MAX: Final = 60
CHARACTERS_MAX: Final = 200
_LINE_CHARACTERS_MAX: Final = 300
_STRANGE: Final = "\N{REPLACEMENT CHARACTER}"
_FOLDERS: Final = 4
"""Of a dataset, a generation, a partition and an attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRow:
    """A file of a partition. What no manifest says is None."""

    name: str
    bytes: int
    rows: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What is in a folder, as far as it can be shown."""

    manifest: Manifest | None = None
    files: Sequence[FileRow] = ()
    file: str = ""
    """The file that the rows or lines are of."""
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str | None]] = ()
    columns_left_out: int = 0
    lines: Sequence[str] = ()
    """The first lines of a file that is a text."""
    why_not: str = ""
    """Why there are neither rows nor lines."""


class _CannotShow(Exception):
    """A sentence that says why not."""


class _Readers:
    """How many processes read files now."""

    count = 0


async def contents(
    store: ObjectStore | None, *, root: str, location: str, manifest: str | None
) -> Contents:
    """What is at a location that was published, with this sum of its manifest."""
    shown = Contents()
    if store is None:
        return replace(shown, why_not="This dispatcher has no store to read from.")
    try:
        folder = _folder(location, root)
        async with asyncio.timeout(STORE_SECONDS_MAX):
            shown = await _files(store, folder, manifest)
            file, body = await _body(store, folder, shown.files)
        shown = replace(shown, file=file.name)
        if file.name.endswith(".parquet"):
            return await _with_rows(shown, body)
        return replace(shown, lines=_lines(body))
    except _CannotShow as error:
        return replace(shown, why_not=str(error))
    except TimeoutError:
        why = f"The store has not answered within {STORE_SECONDS_MAX:.0f} seconds."
        return replace(shown, why_not=why)
    except PenstockError as error:
        return replace(shown, why_not=error.message)


def _folder(location: str, root: str) -> str:
    """The key of the folder of an attempt."""
    if location.startswith("range:"):
        raise _CannotShow("This is a range: it has no data of its own.")
    inside = f"{root}/{DATASETS}"
    folders = location.removeprefix(inside).split("/")[:_FOLDERS]
    place = place_of(f"/{DATASETS}{'/'.join(folders)}")
    if place is None or not location.startswith(inside):
        raise _CannotShow("It does not lie in the folder of an attempt below this store's root.")
    return f"{DATASETS}{place}"


async def _files(store: ObjectStore, folder: str, wanted: str | None) -> Contents:
    if wanted is None:
        page = await store.list(f"{folder}/", limit=FILES_SHOWN)
        names = [(each.key.removeprefix(f"{folder}/"), each.size) for each in page.entries]
        return Contents(files=[FileRow(name=name, bytes=size) for name, size in names])
    key, body = await _manifest(store, folder, wanted)
    manifest = decode(body, where=f"The manifest {key}")
    files = [FileRow(name=each.name, bytes=each.bytes, rows=each.rows) for each in manifest.files]
    return Contents(manifest=manifest, files=files)


async def _manifest(store: ObjectStore, folder: str, wanted: str) -> tuple[str, bytes]:
    """The manifest that was published, and its key."""
    why = f"The manifest {folder}/{MANIFEST} is not there."
    for name in (MANIFEST, HIDDEN_MANIFEST):
        key = f"{folder}/{name}"
        try:
            body = await _read(store, key, bytes_max=MANIFEST_BYTES_MAX)
        except NotFound:
            continue
        if digest(body) == wanted:
            return key, body
        why = f"The manifest {key} is not the one that was published."
    raise _CannotShow(why)


async def _body(store: ObjectStore, folder: str, files: Sequence[FileRow]) -> tuple[FileRow, bytes]:
    """The first file that can be shown."""
    known = [each for each in files if _is_shown(each.name) and each.rows != 0]
    if not files:
        raise _CannotShow("There are no files.")
    if not known:
        is_empty = all(each.rows == 0 for each in files)
        raise _CannotShow("There are no rows." if is_empty else "No file of it can be shown.")
    fitting = [each for each in known if each.bytes <= FILE_BYTES_MAX]
    if not fitting:
        raise _CannotShow("The files are larger than the 1 MiB that is read for a preview.")
    return fitting[0], await _read(store, f"{folder}/{fitting[0].name}", bytes_max=FILE_BYTES_MAX)


def _is_shown(name: str) -> bool:
    # Spark's own names for what is not data begin so.
    hidden = any(part.startswith(("_", ".")) for part in name.split("/"))
    return name.endswith((".parquet", *TEXTS)) and not hidden and name != MANIFEST


async def _read(store: ObjectStore, key: str, *, bytes_max: int) -> bytes:
    head = await store.head(key)
    if head.size > bytes_max:
        raise _CannotShow(f"{key} is too large to be read here.")
    found = await store.get(key)
    assert found is not None, "Only what is asked for unless unchanged may be left out."
    return found.body


def _lines(body: bytes) -> Sequence[str]:
    text = body[: ROWS_MAX * 4 * _LINE_CHARACTERS_MAX].decode("utf-8", "replace")
    return [
        "".join(each if each.isprintable() or each == "\t" else _STRANGE for each in line)
        for line in (every[:_LINE_CHARACTERS_MAX] for every in text.splitlines()[:ROWS_MAX])
    ]


async def _with_rows(shown: Contents, body: bytes) -> Contents:
    if find_spec("pyarrow") is None:
        raise _CannotShow(
            "Parquet files are read with pyarrow, which the dispatcher does not have:"
            " pip install 'penstock[spark]'"
        )
    if _Readers.count >= READERS_MAX:
        raise _CannotShow("Others look at rows at this moment: load the page again.")
    _Readers.count += 1
    try:
        found = await asyncio.to_thread(
            first_rows,
            io.BytesIO(body),
            rows=ROWS_MAX,
            seconds_max=READER_SECONDS_MAX,
            columns_max=COLUMNS_MAX,
            characters_max=CHARACTERS_MAX,
        )
    except OSError as error:
        raise _CannotShow("No process can be started to read the file.") from error
    finally:
        _Readers.count -= 1
    return replace(shown, columns=found.columns, rows=found.rows, columns_left_out=found.left_out)
