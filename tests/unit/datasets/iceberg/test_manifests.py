"""Manifests are reused as far as they can be, and what is written follows what changed."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import fastavro
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.datasets.iceberg.files import PartitionField, PartitionSpec, TableFile
from penstock.datasets.iceberg.manifests import (
    ENTRIES_MAX,
    SMALL_MAX,
    EntryStatus,
    ManifestEntry,
    ManifestFile,
    PartitionSummary,
    entries_of,
    manifest_file,
    planned,
    read_manifest,
    read_manifest_list,
    write_manifest,
    write_manifest_list,
)
from penstock.datasets.iceberg.schemas import partition_field, schema_of
from penstock.datasets.schema import Column
from penstock.kernel.errors import Damaged

DAY, NUMBER = partition_field("the day"), partition_field("n", "long")
SPEC = PartitionSpec(0, (PartitionField(DAY, 1000), PartitionField(NUMBER, 1001)))
SCHEMA = schema_of((Column("a", "bigint"),), schema_id=2, extra=[DAY, NUMBER])
A = SCHEMA.fields[0].id


def file_at(location: str, *partition: object) -> TableFile:
    return TableFile(
        location=location,
        rows=3,
        size_bytes=70,
        partition=partition or ("d", 1),  # type: ignore[arg-type]
        nulls={A: 1},
        values={A: 3},
        lows={A: b"\x01" + bytes(7)},
        highs={A: b"\x02" + bytes(7)},
    )


def entry(location: str, status: EntryStatus, *partition: object, number: int = 1) -> ManifestEntry:
    return ManifestEntry(
        status=status,
        snapshot_id=10 + number,
        sequence_number=number,
        file=file_at(location, *partition),
    )


def test_what_is_written_is_read() -> None:
    entries = [
        entry("s3://b/a", EntryStatus.ADDED, "x", -1, number=4),
        entry("s3://b/b", EntryStatus.EXISTING, "ü", 2**40, number=2),
        entry("s3://b/c", EntryStatus.DELETED, None, None, number=3),
    ]
    body = write_manifest(entries, schema=SCHEMA, spec=SPEC)
    assert read_manifest(body, SPEC) == entries
    assert body == write_manifest(entries, schema=SCHEMA, spec=SPEC)
    assert body != write_manifest(entries[:2], schema=SCHEMA, spec=SPEC)
    told = manifest_file("s3://b/m", body, entries, spec=SPEC, snapshot_id=14, sequence_number=4)
    assert (told.added_files, told.existing_files, told.deleted_files) == (1, 1, 1)
    assert (told.live_files, told.existing_rows, told.min_sequence_number) == (2, 3, 2)
    assert told.partitions == (
        PartitionSummary(has_null=True, low=b"x", high="ü".encode()),
        PartitionSummary(
            True, (-1).to_bytes(8, "little", signed=True), (2**40).to_bytes(8, "little")
        ),
    )
    listed = write_manifest_list([told], snapshot_id=14, parent_id=None, sequence_number=4)
    assert read_manifest_list(listed) == [told]


def test_what_every_reader_asks_of_the_files() -> None:
    """DuckDB knows this codec and not others; ids stand in the Avro schema; blocks end the same."""
    body = write_manifest([entry("s3://b/a", EntryStatus.ADDED)], schema=SCHEMA, spec=SPEC)
    read: Any = fastavro.reader(io.BytesIO(body))
    assert read.codec == "deflate"
    assert {"schema", "partition-spec", "partition-spec-id", "format-version", "content"} <= set(
        read.metadata
    )
    fields = {each["name"]: each for each in read.writer_schema["fields"]}
    assert {name: each["field-id"] for name, each in fields.items()} == {
        "status": 0,
        "snapshot_id": 1,
        "sequence_number": 3,
        "file_sequence_number": 4,
        "data_file": 2,
    }
    partition = fields["data_file"]["type"]["fields"][3]["type"]["fields"]
    # What is no name in Avro is one there, and tells what it is.
    assert [(each["name"], each["iceberg-field-name"]) for each in partition] == [
        ("p1000", "the day"),
        ("n", "n"),
    ]


@pytest.mark.parametrize("body", [b"", b"Obj\x01junk", b"{}"])
def test_what_is_no_manifest_is_told(body: bytes) -> None:
    with pytest.raises(Damaged, match="is damaged"):
        read_manifest(body, SPEC)
    with pytest.raises(Damaged, match="is damaged"):
        read_manifest_list(body)


def test_a_manifest_of_something_else_is_told() -> None:
    one = write_manifest([entry("a", EntryStatus.ADDED)], schema=SCHEMA, spec=SPEC)
    with pytest.raises(Damaged, match="is damaged"):
        read_manifest_list(one)


class Table:
    """The manifests of a table, and how much was written for each of its snapshots."""

    def __init__(self, entries_max: int = ENTRIES_MAX) -> None:
        self.entries_max = entries_max
        self.held: list[ManifestFile] = []
        self.entries: dict[str, list[ManifestEntry]] = {}
        self.number = 0
        self.written: list[int] = []
        """How many entries the last snapshot has written, by manifest."""

    def live(self) -> list[str]:
        return sorted(
            each.file.location
            for one in self.held
            for each in self.entries[one.location]
            if each.status is not EntryStatus.DELETED
        )

    def change(self, *, added: Sequence[str] = (), removed: Sequence[str] = ()) -> None:
        """The next snapshot."""
        self.number += 1
        losing = {
            one.location: gone
            for one in self.held
            if (
                gone := [
                    each.file.location
                    for each in self.entries[one.location]
                    if each.file.location in removed and each.status is not EntryStatus.DELETED
                ]
            )
        }
        new = [file_at(each) for each in added]
        plan = planned(self.held, losing, new, entries_max=self.entries_max)
        self.held, self.written = list(plan.kept), []
        for place, write in enumerate(plan.writes):
            made = entries_of(
                write,
                self.entries,
                spec=SPEC,
                snapshot_id=10 + self.number,
                sequence_number=self.number,
            )
            location = f"{self.number}-{place}"
            self.entries[location] = made
            self.written.append(len(made))
            self.held.append(
                manifest_file(
                    location,
                    b"",
                    made,
                    spec=SPEC,
                    snapshot_id=10 + self.number,
                    sequence_number=self.number,
                )
            )

    def changes(self) -> dict[EntryStatus, list[str]]:
        """What readers of changes see of the last snapshot."""
        found: dict[EntryStatus, list[str]] = {status: [] for status in EntryStatus}
        for one in self.held:
            for each in self.entries[one.location]:
                if each.snapshot_id == 10 + self.number:
                    found[each.status].append(each.file.location)
        return {status: sorted(each) for status, each in found.items() if each}


@given(
    st.lists(
        st.tuples(st.sets(st.integers(0, 9), max_size=4), st.sets(st.integers(0, 9), max_size=4)),
        max_size=25,
    )
)
def test_a_snapshot_is_what_was_there_and_what_changed(
    steps: list[tuple[set[int], set[int]]],
) -> None:
    """Partitions that come, are replaced and go; in manifests that are soon full."""
    table, there = Table(entries_max=4), dict[int, str]()
    for number, (put, gone) in enumerate(steps):
        removed = [there[each] for each in put | gone if each in there]
        added = [f"{each}-{number}" for each in put]
        table.change(added=added, removed=removed)
        there = {each: location for each, location in there.items() if each not in gone | put}
        there |= {each: f"{each}-{number}" for each in put}
        assert table.live() == sorted(there.values())
        changes = {EntryStatus.ADDED: sorted(added), EntryStatus.DELETED: sorted(removed)}
        assert table.changes() == {status: each for status, each in changes.items() if each}
        assert all(each.live_files <= 4 for each in table.held)
        assert len(table.held) <= len(there) // 2 + SMALL_MAX + len(removed) + len(added) + 1


def test_one_partition_of_many_costs_one_manifest() -> None:
    table = Table()
    table.change(added=[f"{each}" for each in range(10_000)])
    assert table.written == [ENTRIES_MAX] * 10
    table.change(added=["new"], removed=["7"])
    # The one that lost it has room for it.
    assert table.written == [ENTRIES_MAX + 1]
    assert table.changes() == {EntryStatus.ADDED: ["new"], EntryStatus.DELETED: ["7"]}
    table.change(added=["newer"], removed=["new"])
    assert table.written == [ENTRIES_MAX + 1]


def test_appending_does_not_make_ever_more_manifests() -> None:
    table, written = Table(), 0
    for number in range(500):
        table.change(added=[f"{number}"])
        assert len(table.written) == 1
        written += sum(table.written)
        assert len(table.held) <= SMALL_MAX + 1
    assert written < 500 * 50


def test_a_manifest_without_a_file_is_gone_with_the_next_snapshot() -> None:
    table = Table()
    table.change(added=["a"])
    table.change(removed=["a"])
    assert table.changes() == {EntryStatus.DELETED: ["a"]}
    table.change()
    assert table.held == []


def test_what_was_added_earlier_keeps_its_number() -> None:
    table = Table()
    table.change(added=["a", "b"])
    table.change(removed=["a"])
    (kept,) = [each for each in table.entries["2-0"] if each.status is EntryStatus.EXISTING]
    assert (kept.snapshot_id, kept.sequence_number) == (11, 1)
    assert replace(table.held[0], size_bytes=0).min_sequence_number == 1
