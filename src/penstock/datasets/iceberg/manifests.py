"""Manifests and manifest lists: the Avro files of a table, for clients that plan themselves.

A **manifest** lists data files, each with the snapshot that added or deleted it; a **manifest
list** lists the manifests of one snapshot. Both are immutable, and the same values give the same
bytes. A snapshot reuses the manifests of the one before (`planned`): it writes one for what was
added, and again those from which something was removed, so what it costs follows what changed:

- a manifest that loses no file is kept, as it is;
- one that loses files is written again: what stays is `EXISTING`, what goes is `DELETED`, which
  readers of changes look for, and which the next one that writes it leaves out. New files go there
  too while it has room, so that one partition that is replaced costs one manifest;
- one without a file that is left is dropped by the next snapshot;
- small ones are put together, a few at a time, once there are more of them than `SMALL_MAX`.

Avro by `fastavro`, in blocks by `deflate`: DuckDB does not read `zstandard` (decision 0071).
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from importlib import import_module
from typing import Any, Final, TypeVar

from penstock.datasets.iceberg.files import PartitionSpec, TableFile
from penstock.datasets.iceberg.metadata import spec_fields_json
from penstock.datasets.iceberg.schemas import TableSchema, schema_json
from penstock.datasets.iceberg.values import TableValue, to_bytes
from penstock.kernel.errors import Damaged

Row = TypeVar("Row")

ENTRIES_MAX: Final = 1_000
"""How many files a manifest lists."""
SMALL_MAX: Final = 8
"""How many manifests may be small before they are put together."""


class EntryStatus(IntEnum):
    """What a snapshot did to a file. The numbers are the format's."""

    EXISTING = 0
    ADDED = 1
    DELETED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestEntry:
    """A file of a manifest."""

    status: EntryStatus
    snapshot_id: int
    """Of the snapshot that added it; if it is `DELETED`, of the one that deleted it."""
    sequence_number: int
    """Of the snapshot that added it."""
    file: TableFile


@dataclass(frozen=True, slots=True)
class PartitionSummary:
    """Of a field of the partition spec, over the files of a manifest."""

    has_null: bool
    low: bytes | None
    high: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestFile:
    """A manifest, as lists tell of it."""

    location: str
    size_bytes: int
    spec_id: int
    sequence_number: int
    """Of the snapshot that wrote it; `min_sequence_number` is the least of its files."""
    min_sequence_number: int
    snapshot_id: int
    """The one that wrote it."""
    added_files: int
    existing_files: int
    deleted_files: int
    added_rows: int
    existing_rows: int
    deleted_rows: int
    partitions: tuple[PartitionSummary, ...] = ()

    @property
    def live_files(self) -> int:
        """How many files it adds to a scan."""
        return self.added_files + self.existing_files


@dataclass(frozen=True, slots=True)
class ManifestWrite:
    """A manifest that has to be written."""

    sources: tuple[ManifestFile, ...]
    """Those whose files it takes over, and which it replaces."""
    removed: frozenset[str]
    """The locations of files that it loses."""
    added: tuple[TableFile, ...]
    """What is new in it."""


@dataclass(frozen=True, slots=True)
class ManifestPlan:
    """What the manifest list of a snapshot has."""

    kept: tuple[ManifestFile, ...]
    writes: tuple[ManifestWrite, ...]


def planned(
    held: Sequence[ManifestFile],
    removed: Mapping[str, Collection[str]],
    added: Sequence[TableFile],
    *,
    entries_max: int = ENTRIES_MAX,
) -> ManifestPlan:
    """What a snapshot keeps and writes.

    `held` are the manifests of the one before, `removed` the locations of the files that each of
    them loses, by its own location. A manifest that goes as a whole is left out of `held`.
    """
    live = [each for each in held if each.live_files or removed.get(each.location)]
    touched = [each for each in live if removed.get(each.location)]
    kept = [each for each in live if not removed.get(each.location)]
    small = [each for each in kept if each.live_files <= entries_max // 2]
    if len(small) + bool(added) > SMALL_MAX:
        touched += small
        kept = [each for each in kept if each not in small]
    new = list(added)
    writes = []
    for group in _groups(touched, entries_max):
        gone = frozenset(one for each in group for one in removed.get(each.location, ()))
        staying = sum(each.live_files for each in group) - len(gone)
        room = max(0, entries_max - staying)
        writes.append(ManifestWrite(group, gone, tuple(new[:room])))
        del new[:room]
    for start in range(0, len(new), entries_max):
        some = tuple(new[start : start + entries_max])
        writes.append(ManifestWrite((), frozenset(), some))
    return ManifestPlan(tuple(kept), tuple(writes))


def entries_of(
    write: ManifestWrite,
    read: Mapping[str, Sequence[ManifestEntry]],
    *,
    spec: PartitionSpec,
    snapshot_id: int,
    sequence_number: int,
) -> list[ManifestEntry]:
    """The entries of a manifest that is written; `read` are those of its sources, by location.

    What was written before there were partitions is in the one that has no name.
    """
    made = []
    unnamed = (None,) * len(spec.fields)
    for source in write.sources:
        for each in read[source.location]:
            if each.status is EntryStatus.DELETED:
                continue
            is_gone = each.file.location in write.removed
            status = EntryStatus.DELETED if is_gone else EntryStatus.EXISTING
            by = snapshot_id if is_gone else each.snapshot_id
            file = replace(each.file, partition=each.file.partition or unnamed)
            made.append(replace(each, status=status, snapshot_id=by, file=file))
    made += [
        ManifestEntry(
            status=EntryStatus.ADDED,
            snapshot_id=snapshot_id,
            sequence_number=sequence_number,
            file=each,
        )
        for each in write.added
    ]
    return made


def write_manifest(
    entries: Sequence[ManifestEntry], *, schema: TableSchema, spec: PartitionSpec
) -> bytes:
    """A manifest as Avro."""
    said = {
        "schema": _json(schema_json(schema)),
        "schema-id": str(schema.schema_id),
        "partition-spec": _json(spec_fields_json(spec)),
        "partition-spec-id": str(spec.spec_id),
        "format-version": "2",
        "content": "data",
    }
    return _avro(_entry_schema(spec), (_entry_row(each, spec) for each in entries), said)


def read_manifest(body: bytes, spec: PartitionSpec) -> list[ManifestEntry]:
    """The entries of a manifest that `write_manifest` has made. Raises `Damaged`."""
    return _rows(body, lambda row: _entry(row, spec))


def manifest_file(
    location: str,
    body: bytes,
    entries: Sequence[ManifestEntry],
    *,
    spec: PartitionSpec,
    snapshot_id: int,
    sequence_number: int,
) -> ManifestFile:
    """What manifest lists tell of a manifest that a snapshot has written."""
    files = dict.fromkeys(EntryStatus, 0)
    rows = dict.fromkeys(EntryStatus, 0)
    for each in entries:
        files[each.status] += 1
        rows[each.status] += each.file.rows
    live = [each for each in entries if each.status is not EntryStatus.DELETED]
    return ManifestFile(
        location=location,
        size_bytes=len(body),
        spec_id=spec.spec_id,
        sequence_number=sequence_number,
        min_sequence_number=min((each.sequence_number for each in live), default=sequence_number),
        snapshot_id=snapshot_id,
        added_files=files[EntryStatus.ADDED],
        existing_files=files[EntryStatus.EXISTING],
        deleted_files=files[EntryStatus.DELETED],
        added_rows=rows[EntryStatus.ADDED],
        existing_rows=rows[EntryStatus.EXISTING],
        deleted_rows=rows[EntryStatus.DELETED],
        partitions=tuple(
            _summary([each.file.partition[place] for each in entries], str(one.source.type))
            for place, one in enumerate(spec.fields)
        ),
    )


def write_manifest_list(
    manifests: Sequence[ManifestFile],
    *,
    snapshot_id: int,
    parent_id: int | None,
    sequence_number: int,
) -> bytes:
    """The manifest list of a snapshot as Avro."""
    said = {
        "snapshot-id": str(snapshot_id),
        "parent-snapshot-id": "null" if parent_id is None else str(parent_id),
        "sequence-number": str(sequence_number),
        "format-version": "2",
    }
    return _avro(_LIST, (_list_row(each) for each in manifests), said)


def read_manifest_list(body: bytes) -> list[ManifestFile]:
    """The manifests of a list that `write_manifest_list` has made. Raises `Damaged`."""
    return _rows(body, _manifest)


def _groups(touched: Sequence[ManifestFile], entries_max: int) -> list[tuple[ManifestFile, ...]]:
    """Manifests that become one, each of the groups of no more files than one may have."""
    groups: list[list[ManifestFile]] = []
    files = entries_max
    for each in sorted(touched, key=lambda one: one.live_files):
        if files + each.live_files > entries_max:
            groups.append([])
            files = 0
        groups[-1].append(each)
        files += each.live_files
    return [tuple(each) for each in groups]


def _summary(values: Sequence[TableValue | None], type_: str) -> PartitionSummary:
    """Strings are compared by their UTF-8, as everybody does."""
    there: list[Any] = [each for each in values if each is not None]
    if not there:
        return PartitionSummary(has_null=bool(values), low=None, high=None)
    return PartitionSummary(
        has_null=len(there) < len(values),
        low=to_bytes(min(there), type_),
        high=to_bytes(max(there), type_),
    )


def _json(said: Any) -> str:
    return json.dumps(said, separators=(",", ":"))


def _avro(schema: Any, rows: Iterable[Mapping[str, Any]], said: Mapping[str, str]) -> bytes:
    fastavro = import_module("fastavro")
    # What marks the ends of blocks is usually chance: equal files have equal bytes here.
    mark = hashlib.sha256(_json([schema, said]).encode()).digest()[:16]
    sink = io.BytesIO()
    fastavro.writer(sink, schema, rows, codec="deflate", metadata=dict(said), sync_marker=mark)
    return sink.getvalue()


def _rows(body: bytes, read: Callable[[Any], Row]) -> list[Row]:
    try:
        return [read(each) for each in import_module("fastavro").reader(io.BytesIO(body))]
    except (ValueError, EOFError, LookupError, TypeError, ArithmeticError, OSError) as error:
        raise Damaged("A manifest of the table is damaged.") from error


def _of(name: str, type_: Any, identity: int, *, is_optional: bool = False) -> dict[str, Any]:
    """A field of a record."""
    if is_optional:
        return {"name": name, "type": ["null", type_], "default": None, "field-id": identity}
    return {"name": name, "type": type_, "field-id": identity}


def _by_id(key: int, value: int, type_: str) -> dict[str, Any]:
    """A map by field id: the format has it as an array of pairs."""
    fields = [_of("key", "int", key), _of("value", type_, value)]
    items = {"type": "record", "name": f"k{key}_v{value}", "fields": fields}
    return {"type": "array", "items": items, "logicalType": "map"}


def _record(name: str, fields: Sequence[Any]) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": list(fields)}


def _partition_name(each: Any) -> str:
    name = str(each.source.name)
    return name if _NAME.fullmatch(name) else f"p{each.id}"


_PARTITION_TYPES: Final = {
    "boolean": "boolean",
    "int": "int",
    "long": "long",
    "date": {"type": "int", "logicalType": "date"},
    "string": "string",
}
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_COUNTS: Final = (
    # The name, its id, those of keys and values, what the values are, and where they stand.
    ("value_counts", 109, 119, 120, "long", "values"),
    ("null_value_counts", 110, 121, 122, "long", "nulls"),
    ("nan_value_counts", 137, 138, 139, "long", "nans"),
    ("lower_bounds", 125, 126, 127, "bytes", "lows"),
    ("upper_bounds", 128, 129, 130, "bytes", "highs"),
)
_LIST_FIELDS: Final = (
    ("manifest_path", "string", 500, "location"),
    ("manifest_length", "long", 501, "size_bytes"),
    ("partition_spec_id", "int", 502, "spec_id"),
    ("sequence_number", "long", 515, "sequence_number"),
    ("min_sequence_number", "long", 516, "min_sequence_number"),
    ("added_snapshot_id", "long", 503, "snapshot_id"),
    ("added_files_count", "int", 504, "added_files"),
    ("existing_files_count", "int", 505, "existing_files"),
    ("deleted_files_count", "int", 506, "deleted_files"),
    ("added_rows_count", "long", 512, "added_rows"),
    ("existing_rows_count", "long", 513, "existing_rows"),
    ("deleted_rows_count", "long", 514, "deleted_rows"),
)
_SUMMARY: Final = _record(
    "r508",
    [
        _of("contains_null", "boolean", 509),
        _of("contains_nan", "boolean", 518, is_optional=True),
        _of("lower_bound", "bytes", 510, is_optional=True),
        _of("upper_bound", "bytes", 511, is_optional=True),
    ],
)
_LIST: Final = _record(
    "manifest_file",
    [
        *(_of(name, type_, identity) for name, type_, identity, _ in _LIST_FIELDS[:3]),
        _of("content", "int", 517),
        *(_of(name, type_, identity) for name, type_, identity, _ in _LIST_FIELDS[3:]),
        _of(
            "partitions",
            {"type": "array", "items": _SUMMARY, "element-id": 508},
            507,
            is_optional=True,
        ),
    ],
)


def _entry_schema(spec: PartitionSpec) -> dict[str, Any]:
    partition = _record(
        "r102",
        [
            {
                **_of(
                    _partition_name(each),
                    _PARTITION_TYPES[str(each.source.type)],
                    each.id,
                    is_optional=True,
                ),
                "iceberg-field-name": each.source.name,
            }
            for each in spec.fields
        ],
    )
    file = _record(
        "r2",
        [
            _of("content", "int", 134),
            _of("file_path", "string", 100),
            _of("file_format", "string", 101),
            _of("partition", partition, 102),
            _of("record_count", "long", 103),
            _of("file_size_in_bytes", "long", 104),
            *(
                _of(name, _by_id(key, value, type_), identity, is_optional=True)
                for name, identity, key, value, type_, _ in _COUNTS
            ),
        ],
    )
    return _record(
        "manifest_entry",
        [
            _of("status", "int", 0),
            _of("snapshot_id", "long", 1, is_optional=True),
            _of("sequence_number", "long", 3, is_optional=True),
            _of("file_sequence_number", "long", 4, is_optional=True),
            _of("data_file", file, 2),
        ],
    )


def _entry_row(entry: ManifestEntry, spec: PartitionSpec) -> dict[str, Any]:
    file = entry.file
    # Told which branch of its union it is, the writer does not try all of them with every value.
    figures = {
        name: ("array", [{"key": key, "value": value} for key, value in found.items()])
        for name, *_, where in _COUNTS
        if (found := getattr(file, where))
    }
    names = [_partition_name(each) for each in spec.fields]
    return {
        "status": entry.status.value,
        "snapshot_id": entry.snapshot_id,
        "sequence_number": entry.sequence_number,
        "file_sequence_number": entry.sequence_number,
        "data_file": {
            "content": 0,
            "file_path": file.location,
            "file_format": "PARQUET",
            "partition": dict(zip(names, file.partition, strict=True)),
            "record_count": file.rows,
            "file_size_in_bytes": file.size_bytes,
            **figures,
        },
    }


def _entry(row: Mapping[str, Any], spec: PartitionSpec) -> ManifestEntry:
    said = row["data_file"]
    figures = {
        where: {each["key"]: each["value"] for each in said[name] or ()}
        for name, *_, where in _COUNTS
    }
    partition = tuple(said["partition"][_partition_name(each)] for each in spec.fields)
    return ManifestEntry(
        status=EntryStatus(row["status"]),
        snapshot_id=row["snapshot_id"],
        sequence_number=row["sequence_number"],
        file=TableFile(
            location=said["file_path"],
            rows=said["record_count"],
            size_bytes=said["file_size_in_bytes"],
            partition=partition,
            **figures,
        ),
    )


def _list_row(manifest: ManifestFile) -> dict[str, Any]:
    return {
        **{name: getattr(manifest, where) for name, _, _, where in _LIST_FIELDS},
        "content": 0,
        "partitions": [
            {
                "contains_null": each.has_null,
                "contains_nan": False,
                "lower_bound": each.low,
                "upper_bound": each.high,
            }
            for each in manifest.partitions
        ],
    }


def _manifest(row: Mapping[str, Any]) -> ManifestFile:
    summaries = tuple(
        PartitionSummary(each["contains_null"], each["lower_bound"], each["upper_bound"])
        for each in row["partitions"] or ()
    )
    return ManifestFile(
        **{where: row[name] for name, _, _, where in _LIST_FIELDS}, partitions=summaries
    )
