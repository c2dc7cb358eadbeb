"""A table's metadata as JSON, format version 2: what a catalog answers, and what a file has. Pure.

Snapshots stand in the order of their sequence numbers, which grow over all branches of a table;
the log of `main` is made of them. Nothing here reads a clock or makes an id: who keeps the
snapshots gives them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from penstock.datasets.iceberg.files import PARTITION_ID_MIN, PartitionSpec
from penstock.datasets.iceberg.schemas import TableSchema, name_mapping, schema_json

MAIN: Final = "main"
NAME_MAPPING: Final = "schema.name-mapping.default"


class Operation(StrEnum):
    """What a snapshot did to the one before."""

    APPEND = "append"
    OVERWRITE = "overwrite"
    DELETE = "delete"
    REPLACE = "replace"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSnapshot:
    """A snapshot. Ids and sequence numbers are never used twice in a table."""

    snapshot_id: int
    sequence_number: int
    timestamp_ms: int
    manifest_list: str
    """Where its manifest list is."""
    schema_id: int
    operation: Operation
    parent_id: int | None = None
    summary: Mapping[str, str] = field(default_factory=dict)
    """More than the operation, such as `total-records`."""


@dataclass(frozen=True, slots=True)
class TableRef:
    """A branch, or a tag."""

    snapshot_id: int
    is_tag: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TableMetadata:
    """A table at a moment."""

    uuid: str
    location: str
    updated_ms: int
    schemas: Sequence[TableSchema]
    """All that a snapshot names, and the current one."""
    current_schema_id: int
    spec: PartitionSpec = field(default_factory=PartitionSpec)
    snapshots: Sequence[TableSnapshot] = ()
    refs: Mapping[str, TableRef] = field(default_factory=dict)
    main_log: Sequence[tuple[int, int]] = ()
    """Milliseconds and snapshot ids: what `main` was, oldest first."""
    last_sequence_number: int | None = None
    """If it is more than that of the last snapshot shown."""
    properties: Mapping[str, str] = field(default_factory=dict)


def metadata_json(table: TableMetadata) -> dict[str, Any]:
    """The metadata as the specification has it, with the name mapping of the current schema."""
    current = next(each for each in table.schemas if each.schema_id == table.current_schema_id)
    newest_first = sorted(table.schemas, key=lambda each: -each.schema_id)
    mapping = name_mapping(current, earlier=newest_first)
    ids = [each.id for schema in table.schemas for _, each in schema.every()]
    main = table.refs.get(MAIN)
    numbers = [each.sequence_number for each in table.snapshots]
    partition_ids = [each.id for each in table.spec.fields]
    return {
        "format-version": 2,
        "table-uuid": table.uuid,
        "location": table.location,
        "last-sequence-number": max([table.last_sequence_number or 0, *numbers]),
        "last-updated-ms": max(
            [table.updated_ms, *(each.timestamp_ms for each in table.snapshots)]
        ),
        "last-column-id": max(ids, default=0),
        "schemas": [schema_json(each) for each in table.schemas],
        "current-schema-id": table.current_schema_id,
        # Manifests of before there were partitions have none.
        "partition-specs": [
            spec_json(each) for each in ((PartitionSpec(), table.spec)[table.spec.spec_id == 0 :])
        ],
        "default-spec-id": table.spec.spec_id,
        "last-partition-id": max(partition_ids, default=PARTITION_ID_MIN - 1),
        "sort-orders": [{"order-id": 0, "fields": []}],
        "default-sort-order-id": 0,
        "properties": {
            **table.properties,
            NAME_MAPPING: json.dumps(mapping, separators=(",", ":")),
        },
        **({} if main is None else {"current-snapshot-id": main.snapshot_id}),
        "snapshots": [_snapshot_json(each) for each in table.snapshots],
        "snapshot-log": [
            {"timestamp-ms": moment, "snapshot-id": identity} for moment, identity in table.main_log
        ],
        "metadata-log": [],
        "refs": {
            name: {"snapshot-id": each.snapshot_id, "type": "tag" if each.is_tag else "branch"}
            for name, each in table.refs.items()
        },
    }


def spec_json(spec: PartitionSpec) -> dict[str, Any]:
    """A partition spec."""
    return {"spec-id": spec.spec_id, "fields": spec_fields_json(spec)}


def spec_fields_json(spec: PartitionSpec) -> list[dict[str, Any]]:
    """The fields of a partition spec."""
    return [
        {
            "source-id": each.source.id,
            "field-id": each.id,
            "name": each.source.name,
            "transform": "identity",
        }
        for each in spec.fields
    ]


def _snapshot_json(snapshot: TableSnapshot) -> dict[str, Any]:
    parent = {} if snapshot.parent_id is None else {"parent-snapshot-id": snapshot.parent_id}
    return {
        "snapshot-id": snapshot.snapshot_id,
        **parent,
        "sequence-number": snapshot.sequence_number,
        "timestamp-ms": snapshot.timestamp_ms,
        "manifest-list": snapshot.manifest_list,
        "summary": {**snapshot.summary, "operation": snapshot.operation.value},
        "schema-id": snapshot.schema_id,
    }
