"""The files of snapshots, for clients that plan scans themselves: manifests, lists, metadata.

They lie below the dataset, in `metadata/`. Each is written once, under a name that nobody else has,
and never changes. What is written goes on from the last snapshot of the generation whose files were
(the *base*): manifests that lose nothing are named again, so one partition that is replaced costs
a manifest and a list. Which manifests have the files of a part stands at the part, so that nobody
looks for them. Beside the list of a snapshot of `main` lies the table's metadata as clients are
told of it then, with what is named alone: for engines that open a file where they were told its
place. Its name is made of that of the list, and it is kept as long.

A snapshot has its files as soon as its row names the list, in a transaction that notes the
manifests too. Of two who write the same, the second finds that and has written for nothing. A crash
leaves files that no row names. These, and files that only snapshots had that are not kept any more,
are swept after `GRACE_SECONDS`.

Written when a client loads the table, or a minute after a change by the loop of a dispatcher; only
the newest snapshots of branches and tags are, and no client is told of another one. What shows a
file that no client can read is noted as unfit, with the reason. One list and the manifests that
change are read, three or four objects written. Called by the API and by the loop.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec

from penstock.datasets.iceberg.files import TableFile
from penstock.datasets.iceberg.manifests import (
    EntryStatus,
    ManifestEntry,
    ManifestFile,
    entries_of,
    manifest_file,
    planned,
    read_manifest,
    read_manifest_list,
    write_manifest,
    write_manifest_list,
)
from penstock.datasets.iceberg.metadata import MAIN, metadata_json
from penstock.datasets.iceberg.schemas import clash
from penstock.datasets.layout import DATASETS, part
from penstock.dispatcher.catalog.scan_planner import PartRow, ScanPlanner, Unreadable
from penstock.dispatcher.catalog.tables import CatalogTable, MadeSnapshot, Tables
from penstock.dispatcher.database.pool import Connection, Database, query
from penstock.dispatcher.datasets.sweeper import GRACE_SECONDS
from penstock.dispatcher.metrics import take_turn
from penstock.kernel.entropy import Entropy, new_id, system_entropy
from penstock.kernel.errors import Damaged, PenstockError
from penstock.store.base import CREATE, ObjectStore, pages

_log = logging.getLogger(__name__)

WAITED_PARTS_MAX: Final = 1000
"""How many parts may be new for a client to wait until they are written."""
PARTS_MAX: Final = 1_000_000
PACE_SECONDS: Final = 15.0
SWEEP_SECONDS: Final = 3600.0
_TABLES_MAX: Final = 100
_AT_ONCE: Final = 4
_CHUNK: Final = 2000
_TURN: Final = "table files"
_SWEEP_TURN: Final = "table files: sweep"
_FOLDER: Final = "metadata"


@dataclass(frozen=True, slots=True)
class _Moved:
    """Manifests that became part of another one, with what they still had."""

    sources: Sequence[str]
    written: str
    places: Sequence[tuple[str, str]]
    """Keys of partitions, each with a folder that is perhaps that of a part."""


@dataclass
class _Work:
    """What is to be written of one snapshot."""

    table: CatalogTable
    made: MadeSnapshot
    base: MadeSnapshot | None
    added: list[PartRow] = field(default_factory=list)
    removed: list[PartRow] = field(default_factory=list)
    owners: dict[str, list[PartRow]] = field(default_factory=dict)
    """The parts of a new manifest, by its location."""
    moved: list[_Moved] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)


class MetadataWriter:
    """Writes the files of snapshots, and sweeps them."""

    def __init__(
        self,
        database: Database,
        store: ObjectStore,
        tables: Tables,
        planner: ScanPlanner,
        *,
        entropy: Entropy | None = None,
    ) -> None:
        self._database = database
        self._store = store
        self._tables = tables
        self._planner = planner
        self._entropy = entropy or system_entropy()
        self._busy: dict[str, asyncio.Lock] = {}

    async def written(self, name: str, *, is_waited: bool = True) -> CatalogTable | str:
        """The table of a dataset as it is when what is named is written, as far as it can be.

        What has too many new parts for somebody who waits is left to the loop.
        """
        parts_max = WAITED_PARTS_MAX if is_waited else PARTS_MAX
        async with self._busy.setdefault(name, asyncio.Lock()):
            # Who had the lock before may have written it.
            table = await self._tables.load(name, is_new=False)
            if isinstance(table, str):
                return table
            for made in table.unwritten():
                base = _base(table, made)
                if _changes(table, made, base) <= parts_max:
                    await self._try(table, made, base)
        return await self._tables.load(name, is_new=False)

    async def turn(self) -> float | None:
        """Write what nobody has asked for, and sweep; the seconds until the next turn."""
        if await take_turn(self._database, _TURN, seconds=PACE_SECONDS / 2):
            rows = await self._rows("snapshots_to_write", {"after": "", "limit": _TABLES_MAX})
            while rows:
                for row in rows:
                    await self.written(row["name"], is_waited=False)
                asked = {"after": rows[-1]["name"], "limit": _TABLES_MAX}
                rows = await self._rows("snapshots_to_write", asked)
        if await take_turn(self._database, _SWEEP_TURN, seconds=SWEEP_SECONDS):
            await self.sweep()
        return PACE_SECONDS

    async def _try(
        self, table: CatalogTable, made: MadeSnapshot, base: MadeSnapshot | None
    ) -> None:
        """What fails is tried again, unless it never can be; meanwhile the server plans scans."""
        try:
            await self._write(table, made, base)
        except Unreadable as error:
            why = f"{error.message} {error.hint}".strip()
            asked = {"dataset": table.uuid, "snapshot": made.id, "why": why}
            await self._database.transact(lambda one: one.execute(query("note_unfit"), asked))
        except PenstockError as error:
            _log.warning("failed to write files of the table %s: %s", table.name, error.message)

    async def _write(
        self, table: CatalogTable, made: MadeSnapshot, base: MadeSnapshot | None
    ) -> None:
        work = _Work(table, made, base)
        if _is_grown(table, base):
            await self._check(table, made)
        asked = {
            "dataset": table.uuid,
            "generation": made.generation,
            "snapshot": made.id,
            "base": 0 if base is None else base.id,
            "limit": PARTS_MAX,
        }
        work.added = msgspec.convert(await self._rows("parts_added", asked), list[PartRow])
        work.removed = msgspec.convert(await self._rows("parts_removed", asked), list[PartRow])
        body = write_manifest_list(
            await self._manifests(work),
            snapshot_id=made.id,
            parent_id=None if base is None else base.id,
            sequence_number=made.id,
        )
        location = await self._put(table, f"snap-{made.id}", body)
        if made.branch == MAIN:
            await self._put_metadata(table, made, location)
        await self._database.transact(lambda one: _note(one, work, location, asked))

    async def _check(self, table: CatalogTable, made: MadeSnapshot) -> None:
        """Read what stays too: a name may mean something else in it. Raises `Unreadable`."""
        after = ("", "")
        for _ in range(0, PARTS_MAX, _CHUNK):
            rows = await self._planner.parts(table, made, after=after, limit=_CHUNK)
            await self._planner.owned(table, table.schema(made.schema_id), rows)
            if len(rows) < _CHUNK:
                break
            after = (rows[-1].partition_key, rows[-1].location)

    async def _manifests(self, work: _Work) -> list[ManifestFile]:
        """The manifests of a snapshot; those that are new are written."""
        table, made = work.table, work.made
        held: list[ManifestFile] = []
        if work.base is not None and work.base.manifest_list is not None:
            held = read_manifest_list(await self._get(work.base.manifest_list))
        read: dict[str, list[ManifestEntry]] = {}
        gone = await self._gone(work, held, read)
        schema = table.schema(made.schema_id)
        owners: dict[str, PartRow] = {}
        files: list[TableFile] = []
        for start in range(0, len(work.added), _CHUNK):
            for row, file in await self._planner.owned(
                table, schema, work.added[start : start + _CHUNK]
            ):
                owners[file.location] = row
                files.append(file)
        plan = planned(held, gone, files)
        await self._read((one for each in plan.writes for one in each.sources), read, table)
        manifests = list(plan.kept)
        for number, each in enumerate(plan.writes):
            entries = entries_of(
                each, read, spec=table.spec, snapshot_id=made.id, sequence_number=made.id
            )
            body = write_manifest(entries, schema=schema, spec=table.spec)
            location = await self._put(table, f"{made.id}-m{number}", body)
            manifests.append(
                manifest_file(
                    location,
                    body,
                    entries,
                    spec=table.spec,
                    snapshot_id=made.id,
                    sequence_number=made.id,
                )
            )
            parts = {id(owners[one.location]): owners[one.location] for one in each.added}
            work.owners[location] = list(parts.values())
            if each.sources:
                sources = [source.location for source in each.sources]
                work.moved.append(_Moved(sources, location, _places(table, entries)))
        kept = {each.location for each in plan.kept}
        work.replaced = [each.location for each in held if each.location not in kept]
        return manifests

    async def _gone(
        self, work: _Work, held: Sequence[ManifestFile], read: dict[str, list[ManifestEntry]]
    ) -> Mapping[str, set[str]]:
        """The files that manifests lose, by the manifest."""
        by_location = {each.location: each for each in held}
        touched = {name for row in work.removed for name in row.entries if name in by_location}
        await self._read((by_location[each] for each in sorted(touched)), read, work.table)
        folders = {row.location.rstrip("/") for row in work.removed}
        return {
            name: {
                entry.file.location
                for entry in read[name]
                if any(above in folders for above in _above(entry.file.location))
            }
            for name in touched
        }

    async def _read(
        self,
        wanted: Iterable[ManifestFile],
        read: dict[str, list[ManifestEntry]],
        table: CatalogTable,
    ) -> None:
        """Bring the entries of these manifests here, those that are not."""
        missing = [each for each in wanted if each.location not in read]
        for start in range(0, len(missing), _AT_ONCE):
            some = missing[start : start + _AT_ONCE]
            bodies = await asyncio.gather(*(self._get(each.location) for each in some))
            for each, body in zip(some, bodies, strict=True):
                read[each.location] = read_manifest(body, table.spec_of(each.spec_id))

    async def _get(self, location: str) -> bytes:
        found = await self._store.get(self._key(location))
        if found is None:
            raise Damaged(f"{location} is missing.")
        return found.body

    async def _put(self, table: CatalogTable, name: str, body: bytes) -> str:
        unique = new_id(self._entropy, characters=12)
        location = f"{table.location}/{_FOLDER}/{name}-{unique}.avro"
        await self._store.put(self._key(location), body, mode=CREATE)
        return location

    async def _put_metadata(self, table: CatalogTable, made: MadeSnapshot, location: str) -> None:
        every = [replace(made, manifest_list=location), *table.snapshots]
        seen = [each for place, each in enumerate(every) if not place or each.id < made.id]
        told = replace(table, snapshots=seen).metadata(seen[0], is_all=False)
        body = msgspec.json.encode(metadata_json(told))
        await self._store.put(self._key(metadata_location(location)), body, mode=CREATE)

    def _key(self, location: str) -> str:
        return location[len(self._tables.root) + 1 :]

    async def sweep(self) -> int:
        """Remove files that no snapshot names that is kept; how many."""
        removed = 0
        after = ""
        while rows := await self._rows("tables_to_sweep", {"after": after, "limit": _TABLES_MAX}):
            after = rows[-1]["name"]
            for row in rows:
                removed += await self._sweep(row["name"], row["uuid"])
        return removed

    async def _sweep(self, name: str, dataset: str) -> int:
        prefix = f"{DATASETS}{part(name)}/{_FOLDER}/"
        before = (await self._store.now()).earliest - GRACE_SECONDS
        removed = 0
        async for page in pages(self._store, prefix):
            old = {
                f"{self._tables.root}/{each.key}": each.key
                for each in page.entries
                if each.modified < before
            }
            lists = [each for one in old if (each := _list_of(one)) is not None]
            asked = {"dataset": dataset, "locations": [*old, *lists]}
            kept = {row["location"] for row in await self._rows("manifests_to_sweep", asked)}
            kept |= {each for each in old if _list_of(each) in kept}
            gone = [each for each in old if each not in kept]
            for location in gone:
                await self._store.delete(old[location])
            if gone:
                asked["locations"] = gone

                async def work(connection: Connection, asked: Mapping[str, object] = asked) -> None:
                    await connection.execute(query("forget_manifests"), asked)

                await self._database.transact(work)
            removed += len(gone)
        return removed

    async def _rows(self, statement: str, asked: Mapping[str, object]) -> list[dict[str, Any]]:
        return await self._database.fetch(statement, asked)


async def _note(
    connection: Connection, work: _Work, location: str, asked: Mapping[str, object]
) -> bool:
    """Say that a snapshot has its files; False if another one of the generation has them since."""

    async def ask(statement: str, **more: object) -> Any:
        return await connection.execute(query(statement), {**asked, **more})

    # One at a time: what is noted of parts is of one snapshot. Making a snapshot takes a moment.
    await ask("wait_for_table")
    if not await (await ask("note_written", manifest_list=location)).fetchall():
        return False
    if work.base is None:
        await ask("note_anew")
    await ask("note_manifests", replaced=work.replaced, written=list(work.owners))
    for each in work.moved:
        await ask(
            "note_moved",
            sources=each.sources,
            written=each.written,
            keys=[key for key, _ in each.places],
            folders=[folder for _, folder in each.places],
        )
    for written, rows in work.owners.items():
        await ask(
            "note_entries",
            keys=[row.partition_key for row in rows],
            locations=[row.location for row in rows],
            written=written,
        )
    return True


_LIST: Final = re.compile(r"(?P<folder>.*/)snap-(?P<name>(?P<id>[0-9]+)-[^/]+)\.avro")
_METADATA: Final = re.compile(r"(?P<folder>.*/)[0-9]+-(?P<name>[0-9]+-[^/]+)\.metadata\.json")


def metadata_location(manifest_list: str) -> str:
    """Where the metadata of the table lies that was written with this list.

    Its name begins with a number that grows and has 32 bits: ClickHouse asks for that.
    """
    found = _LIST.fullmatch(manifest_list)
    if found is None:
        return f"{manifest_list}.metadata.json"
    return f"{found['folder']}{int(found['id']) // 1000}-{found['name']}.metadata.json"


def _list_of(location: str) -> str | None:
    """The list that a file of metadata was written with; None for what is none."""
    found = _METADATA.fullmatch(location)
    return None if found is None else f"{found['folder']}snap-{found['name']}.avro"


def _base(table: CatalogTable, made: MadeSnapshot) -> MadeSnapshot | None:
    """The newest snapshot of the same generation that is written."""
    for each in table.made:
        if each.generation == made.generation and each.manifest_list is not None:
            return each if each.id < made.id else None
    return None


def _is_grown(table: CatalogTable, base: MadeSnapshot | None) -> bool:
    """Whether a name has another meaning now than in the base."""
    return base is not None and clash(table.schema(base.schema_id), table.current) is not None


def _changes(table: CatalogTable, made: MadeSnapshot, base: MadeSnapshot | None) -> int:
    """How many parts are read for a snapshot: nearly those that came or went since its base."""
    if base is None or _is_grown(table, base):
        return made.parts
    return sum(
        each.added + each.removed
        for each in table.made
        if each.generation == made.generation and base.id < each.id <= made.id
    )


def _places(table: CatalogTable, entries: Iterable[ManifestEntry]) -> list[tuple[str, str]]:
    """Where the parts may be whose files were in a manifest before and still are."""
    # A part has three folders at least below the dataset.
    least = table.location.count("/") + 3
    return sorted(
        {
            (str((*each.file.partition, None)[0] or ""), folder)
            for each in entries
            if each.status is EntryStatus.EXISTING
            for folder in _above(each.file.location)
            if folder.count("/") >= least or not folder.startswith(table.location)
        }
    )


def _above(location: str) -> list[str]:
    """The folders that a file lies in, as far as one may be that of a part."""
    parts = location.split("/")
    return ["/".join(parts[:depth]) for depth in range(len(parts) - 1, max(0, len(parts) - 8), -1)]
