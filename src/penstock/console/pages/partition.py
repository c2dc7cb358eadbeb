"""The page of a partition: what is published, by which task and from which inputs, and its tasks.

The preview of its files is a page of its own, which a script loads into this one: it reads the
store, and may take seconds.

The preview is the manifest and the first rows of the files, read through the store.
Only what lies in the folder of an attempt below the dispatcher's own root is read. A preview
costs four requests at most: the manifest and one file are looked at and then read, or a folder
without a manifest is listed. Each request is bounded in size, all of them together in time, and
so is the process that decodes a file (`penstock.datasets.parquet`), of which a few run at a
time. What cannot be shown becomes a sentence that says why. Every value is a text.

Nothing is written. A crash leaves a process that ends by itself within its bound.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, Final

from penstock.console.dag_layout import lineage_around
from penstock.console.pages.base import ConsolePage, PageNotFound, PageRequest
from penstock.console.pages.dataset import (
    contents_path,
    dataset_path,
    partition_path,
    partitions_path,
    placed,
    snapshot_of,
    snapshot_path,
)
from penstock.console.renderer import line
from penstock.datasets.layout import DATASETS, HIDDEN_MANIFEST, MANIFEST, place_of
from penstock.datasets.manifest import Manifest, decode, digest
from penstock.datasets.parquet import first_rows
from penstock.datasets.snapshot import TEXTS
from penstock.dispatcher.api.context import ApiContext
from penstock.dispatcher.views.datasets import (
    CurrentInput,
    GenerationView,
    OnePartition,
    PartitionTask,
    PartitionViews,
)
from penstock.kernel.errors import InvalidInput, NotFound, PenstockError
from penstock.protocol.base import TaskStatus
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
class PreviewedFile:
    """A file of a partition. What no manifest says is None."""

    name: str
    bytes: int
    rows: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionPreview:
    """What is in a folder, as far as it can be shown."""

    manifest: Manifest | None = None
    files: Sequence[PreviewedFile] = ()
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


async def preview_partition(
    store: ObjectStore | None, *, root: str, location: str, manifest: str | None
) -> PartitionPreview:
    """What is at a location that was published, with this sum of its manifest."""
    shown = PartitionPreview()
    if store is None:
        return replace(shown, why_not="This dispatcher has no store.")
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
        why = f"The store timed out after {STORE_SECONDS_MAX:.0f} seconds."
        return replace(shown, why_not=why)
    except PenstockError as error:
        return replace(shown, why_not=error.message)


def _folder(location: str, root: str) -> str:
    """The key of the folder of an attempt."""
    if location.startswith("range:"):
        raise _CannotShow("This is a range: it has no data.")
    inside = f"{root}/{DATASETS}"
    folders = location.removeprefix(inside).split("/")[:_FOLDERS]
    place = place_of(f"/{DATASETS}{'/'.join(folders)}")
    if place is None or not location.startswith(inside):
        raise _CannotShow("Its location is not the folder of an attempt in this store.")
    return f"{DATASETS}{place}"


async def _files(store: ObjectStore, folder: str, wanted: str | None) -> PartitionPreview:
    if wanted is None:
        page = await store.list(f"{folder}/", limit=FILES_SHOWN)
        names = [(each.key.removeprefix(f"{folder}/"), each.size) for each in page.entries]
        return PartitionPreview(
            files=[PreviewedFile(name=name, bytes=size) for name, size in names]
        )
    key, body = await _manifest(store, folder, wanted)
    manifest = decode(body, where=f"The manifest {key}")
    files = [
        PreviewedFile(name=each.name, bytes=each.bytes, rows=each.rows) for each in manifest.files
    ]
    return PartitionPreview(manifest=manifest, files=files)


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


async def _body(
    store: ObjectStore, folder: str, files: Sequence[PreviewedFile]
) -> tuple[PreviewedFile, bytes]:
    """The first file that can be shown."""
    known = [each for each in files if _is_shown(each.name) and each.rows != 0]
    if not files:
        raise _CannotShow("There are no files.")
    if not known:
        is_empty = all(each.rows == 0 for each in files)
        raise _CannotShow("There are no rows." if is_empty else "No file can be previewed.")
    fitting = [each for each in known if each.bytes <= FILE_BYTES_MAX]
    if not fitting:
        raise _CannotShow("The files are larger than 1 MiB, the limit of a preview.")
    return fitting[0], await _read(store, f"{folder}/{fitting[0].name}", bytes_max=FILE_BYTES_MAX)


def _is_shown(name: str) -> bool:
    # Spark's own names for what is not data begin so.
    hidden = any(part.startswith(("_", ".")) for part in name.split("/"))
    return name.endswith((".parquet", *TEXTS)) and not hidden and name != MANIFEST


async def _read(store: ObjectStore, key: str, *, bytes_max: int) -> bytes:
    head = await store.head(key)
    if head.size > bytes_max:
        raise _CannotShow(f"{key} is too large for a preview.")
    found = await store.get(key)
    assert found is not None, "Only what is asked for unless unchanged may be left out."
    return found.body


def _lines(body: bytes) -> Sequence[str]:
    text = body[: ROWS_MAX * 4 * _LINE_CHARACTERS_MAX].decode("utf-8", "replace")
    return [
        "".join(each if each.isprintable() or each == "\t" else _STRANGE for each in line)
        for line in (every[:_LINE_CHARACTERS_MAX] for every in text.splitlines()[:ROWS_MAX])
    ]


async def _with_rows(shown: PartitionPreview, body: bytes) -> PartitionPreview:
    if find_spec("pyarrow") is None:
        raise _CannotShow(
            "Parquet files are read with pyarrow, which the dispatcher does not have:"
            " pip install 'penstock[spark]'"
        )
    if _Readers.count >= READERS_MAX:
        raise _CannotShow("Too many previews at the moment: reload the page.")
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
        raise _CannotShow("Failed to start a process to read the file.") from error
    finally:
        _Readers.count -= 1
    return replace(shown, columns=found.columns, rows=found.rows, columns_left_out=found.left_out)


_KEY_BYTES_MAX: Final = 500
_INPUTS_SHOWN: Final = 50
_NO_KEY: Final = PageNotFound("Not a partition key.", "A key has 500 bytes at most.")


async def _load(parts: ApiContext, asked: PageRequest) -> Mapping[str, Any] | PageNotFound:
    place = await placed(parts, asked)
    if isinstance(place, PageNotFound):
        return place
    key = _key(asked)
    if key is None:
        return _NO_KEY
    views = PartitionViews(parts.database)
    found = await views.one(place, key)
    if not (found.publication or found.history or found.inputs or place.is_told):
        return PageNotFound(f"The dataset {place.name!r} has no partition {key!r}.")
    wanted = asked.query.get("generation") or None
    lineage = lineage_around(await views.lineage(), place.name)
    return {
        "place": place,
        "key": key,
        "found": found,
        "why": "" if found.publication else why_not(place, found),
        "is_moved": found.publication is not None and is_moved(found),
        "below": lineage.below,
        "about_input": about_input,
        "paths": {
            "dataset": dataset_path(place.name, generation=wanted),
            "partitions": partitions_path(place.name, generation=wanted),
            "contents": contents_path(place.name, key, generation=wanted),
            "partition": partition_path,
        },
    }


async def _load_contents(parts: ApiContext, asked: PageRequest) -> Mapping[str, Any] | PageNotFound:
    place = await placed(parts, asked)
    if isinstance(place, PageNotFound):
        return place
    key = _key(asked)
    if key is None:
        return _NO_KEY
    moment = asked.query.get("at", "")
    at = snapshot_of(moment)
    wanted = asked.query.get("generation") or None
    pieces = await (_now(parts, place, key) if not moment else _then(parts, place, key, moment))
    if not pieces:
        return PageNotFound(
            f"The dataset {place.name!r} has no partition {key!r}"
            + (f" in the snapshot {moment!r}, or no longer keeps it." if moment else ".")
        )
    # Of what is appended to, the last part.
    location, manifest = pieces[0]
    shown = await preview_partition(
        parts.store, root=parts.root, location=location, manifest=manifest
    )
    return {
        "place": place,
        "key": key,
        "shown": shown,
        "at": at,
        "is_piece": len(pieces) > 1,
        "rows_max": ROWS_MAX,
        "files_shown": FILES_SHOWN,
        "inputs": shown.manifest.inputs[:_INPUTS_SHOWN] if shown.manifest else (),
        "inputs_count": shown.manifest.inputs_count if shown.manifest else 0,
        "to": partition_path(place.name, key, generation=wanted),
        "then": at and snapshot_path(place.name, at),
        "partition_path": partition_path,
    }


async def _now(
    parts: ApiContext, place: GenerationView, key: str
) -> Sequence[tuple[str, str | None]]:
    """Where what is published of a partition lies, with its manifests; the last part first."""
    found = await PartitionViews(parts.database).one(place, key)
    whole = () if found.publication is None else (found.publication,)
    return [(each.location, each.manifest) for each in found.pieces or whole]


async def _then(
    parts: ApiContext, place: GenerationView, key: str, moment: str
) -> Sequence[tuple[str, str | None]]:
    """The same of what a snapshot shows."""
    try:
        found = await parts.history.at(place.name, moment, partition_key=key)
    except InvalidInput:
        return []
    return [(each.location, each.manifest) for each in reversed(found.parts)]


def _key(asked: PageRequest) -> str | None:
    """The key that is asked for; empty is the dataset without partitions."""
    key = asked.path.get("key", asked.query.get("key", ""))
    is_good = len(key.encode("utf-8", "replace")) <= _KEY_BYTES_MAX and "\x00" not in key
    return key if is_good else None


def why_not(place: GenerationView, found: OnePartition) -> str:
    """Why a partition is not published."""
    tasks = [each for each in found.history if each.is_shown]
    if place.is_told:
        return "A source emits events for its partitions and publishes no data."
    if tasks:
        return _why_of(tasks[0])
    if found.removed_at is not None:
        return "Removed by the retention of the dataset."
    triggers = [each for each in found.inputs if each.is_trigger]
    refused = [each.dataset for each in triggers if not each.is_passed]
    absent = [each.dataset for each in triggers if not _is_there(each)]
    if refused:
        return f"The filter of {' and '.join(refused)} excludes this partition."
    if absent:
        return f"Waits for {' and '.join(absent)}, which has not published it."
    return "No task: its event is not routed yet, or its task was removed."


def _why_of(task: PartitionTask) -> str:
    attempt, reason = f"attempt {task.attempt}", line(task.reason)
    match task.status:
        case TaskStatus.QUEUED:
            return f"Task {task.id} waits for a worker."
        case TaskStatus.RUNNING:
            return f"Task {task.id} is running: {attempt}."
        case TaskStatus.RETRYING:
            return f"Task {task.id} will be retried after {attempt}: {reason}"
        case TaskStatus.FAILED:
            return f"Task {task.id} is dead after {attempt}: {reason}"
        case TaskStatus.CANCELLED:
            return f"Task {task.id} was cancelled: {reason}"
        case _:
            return f"Task {task.id} has completed, and published something else."


def _is_there(each: CurrentInput) -> bool:
    return bool(each.parts) or each.is_told or each.reads != "partition"


def is_moved(found: OnePartition) -> bool:
    """Whether a task waits or runs that will publish it again."""
    return any(
        each.is_shown
        and each.status in (TaskStatus.QUEUED, TaskStatus.RUNNING, TaskStatus.RETRYING)
        for each in found.history
    )


def about_input(each: CurrentInput) -> str:
    """What a task would read of an input now, in words."""
    if each.reads == "all":
        return "all partitions"
    if each.reads == "changes":
        return "changes since the last read"
    if each.parts:
        one = "one part" if each.parts == 1 else f"{each.parts} parts"
        return f"{one}, revision {each.revision}" if each.revision is not None else one
    return "an event without data" if each.is_told else "nothing"


PAGE: Final = ConsolePage(
    "/datasets/{name}/partitions/{key:path}",
    "partition",
    _load,
    live=("state", "inputs", "tasks"),
    section="datasets",
    query=("generation",),
)
ODD: Final = ConsolePage(
    "/datasets/{name}/partition",
    "partition",
    _load,
    live=("state", "inputs", "tasks"),
    section="datasets",
    query=("generation", "key"),
)
CONTENTS: Final = ConsolePage(
    "/datasets/{name}/contents",
    "contents",
    _load_contents,
    section="datasets",
    query=("generation", "key", "at"),
)
