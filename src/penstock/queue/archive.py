"""The archive: records of settled packs, many in one object.

A record is the settled ledger of a pack: its inputs, attempts, outcomes and log. Records are
moved out of the live folders in batches, one put for many. A batch is a compressed file that
Spark and pandas read, one row a task (`penstock.queue.archive_rows`). Batches in which a task
failed are kept apart: the dead letters. A batch is named after the first and the last submit in
it, so that a task is found by the time in its id. A task with a key has no such time: the
newest batches are searched.

The archiver writes the batch first and deletes the ledgers then (QUEUE-19): a crash between leaves
a record in both places, and later perhaps in two batches. They are equal; the first found counts.
Batches are deleted by `penstock.queue.retention`, and then the payloads of their records: a crash
between leaves orphaned payloads for the next sweep.

A batch only ever loses records, by a swap from the version that was read, and its key is never
used twice. So a record stays under its key until it is deleted, and concurrent deletions of
different records all take effect. (The name may then span more than is left.)

To archive is one put for up to `RECORDS_MAX` packs or `BATCH_BYTES_MAX` bytes; to find a task
is a LIST of each folder and a GET of the batches that its submit falls into, usually one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Final

from penstock.kernel.document_format import encode
from penstock.kernel.entropy import Entropy
from penstock.queue.archive_rows import packed, unpacked
from penstock.queue.ids import PackAt
from penstock.queue.layout import QueueLayout
from penstock.queue.ledger import Ledger, QueueTaskStatus
from penstock.store.base import CREATE, Entry, ObjectStore, Swap, Version, pages
from penstock.store.base import find as find_object

RECORDS_MAX: Final = 1000
BATCH_BYTES_MAX: Final = 8 * 1024 * 1024
"""Before it is compressed."""
BATCHES_READ_MAX: Final = 1000
"""So many batches are read for one task: those that its submit falls into."""
LOOKS_MAX: Final = 3
"""So often batches are looked at again that others have changed meanwhile."""
_AT_ONCE: Final = 16
_ROW_BYTES: Final = 600
"""What a row has at least, before it is compressed."""
_TASKS_A_TURN: Final = 200

Member = tuple[PackAt, Ledger]


async def keep(
    store: ObjectStore, layout: QueueLayout, records: Iterable[Member], *, entropy: Entropy
) -> None:
    """Write these records into the archive; those with a failed task to the dead letters."""
    apart: dict[str, list[Member]] = {}
    for at, ledger in records:
        failed = any(task.status is QueueTaskStatus.FAILED for task in ledger.tasks)
        apart.setdefault(layout.dead if failed else layout.archive, []).append((at, ledger))
    for prefix, members in apart.items():
        for batch in _batches(members):
            await put(store, layout, prefix, batch, entropy=entropy)


async def put(
    store: ObjectStore,
    layout: QueueLayout,
    prefix: str,
    records: Sequence[Member],
    *,
    entropy: Entropy,
) -> None:
    """Write one batch of records below `archive` or `dead`."""
    times = [at.submitted_ms or ledger.submitted_ms for at, ledger in records]
    body = await _packed(store, records)
    key = layout.batch(prefix, first_ms=min(times), last_ms=max(times), entropy=entropy)
    await store.put(key, body, CREATE)


async def rewrite(
    store: ObjectStore, key: str, records: Sequence[Member], *, version: Version
) -> None:
    """Leave only these records in a batch. Raises `VersionConflict` if it has changed or gone."""
    await store.put(key, await _packed(store, records), Swap(version))


async def _packed(store: ObjectStore, records: Sequence[Member]) -> bytes:
    pieces: list[bytes] = []
    tasks = 0
    for piece, (at, _) in zip(packed(records), (*records, records[-1]), strict=True):
        pieces.append(piece)
        tasks += at.count
        if tasks >= _TASKS_A_TURN:
            # To compress megabytes takes long: leases must be renewed meanwhile.
            tasks = 0
            await store.clock.machine.sleep(0)
    return b"".join(pieces)


async def find(store: ObjectStore, layout: QueueLayout, at: PackAt) -> Ledger | None:
    """The record of a pack, the last of a key; or None."""
    for _ in range(LOOKS_MAX):
        record, is_sure = await _look(store, layout, at)
        if record is not None or is_sure:
            return record
        # A batch has gone meanwhile: another may have come with what was in it.
    return None


async def _look(store: ObjectStore, layout: QueueLayout, at: PackAt) -> tuple[Ledger | None, bool]:
    """The record, and otherwise whether every batch that was listed could be read."""
    keys: list[str] = []
    for prefix in (layout.archive, layout.dead):
        start = layout.after_submits_before(prefix, at.submitted_ms) if at.submitted_ms else ""
        keys += [entry.key async for entry in batches(store, layout, prefix, start_after=start)]
    # Names begin with the last submit: the newest batches first.
    keys.sort(key=lambda key: key.rpartition("/")[2], reverse=True)
    keys = [key for key in keys if _may_hold(layout, key, at)][:BATCHES_READ_MAX]

    async def search(key: str) -> list[Ledger] | None:
        body = await _body(store, layout, key)
        if body is None:
            return None
        return [ledger for _, ledger in unpacked(body, where=key, only=at)]

    is_sure = True
    for place in range(0, len(keys), _AT_ONCE):
        for records in await asyncio.gather(*map(search, keys[place : place + _AT_ONCE])):
            is_sure = is_sure and records is not None
            if records:
                return records[-1], True
    return None, is_sure


def _may_hold(layout: QueueLayout, key: str, at: PackAt) -> bool:
    first_ms, last_ms = layout.read_batch(key) or (0, 0)
    return at.submitted_ms is None or first_ms <= at.submitted_ms <= last_ms


async def dead(store: ObjectStore, layout: QueueLayout) -> AsyncIterator[Member]:
    """The records of packs in which a task failed, in no particular order."""
    async for entry in batches(store, layout, layout.dead):
        async for at, ledger in read(store, layout, entry.key):
            yield at, ledger


async def read(store: ObjectStore, layout: QueueLayout, key: str) -> AsyncIterator[Member]:
    """The records of one batch; none if it has gone."""
    body = await _body(store, layout, key)
    for at, ledger in unpacked(body, where=key) if body is not None else ():
        yield at, ledger


async def whole(store: ObjectStore, key: str) -> tuple[Version, list[Member]] | None:
    """The version and the records of one batch; None if it has gone."""
    found = await find_object(store, key)
    return (found.version, list(unpacked(found.body, where=key))) if found else None


async def _body(store: ObjectStore, layout: QueueLayout, key: str) -> bytes | None:
    """A batch as it is stored; None if it has gone, or is none."""
    found = await find_object(store, key) if layout.read_batch(key) else None
    return found.body if found else None


async def batches(
    store: ObjectStore, layout: QueueLayout, prefix: str, *, start_after: str = ""
) -> AsyncIterator[Entry]:
    """The batches below `archive` or `dead`, by their last submit; one LIST for every 1,000."""
    async for page in pages(store, prefix, start_after=start_after):
        for entry in page.entries:
            if layout.read_batch(entry.key) is not None:
                yield entry


def _batches(members: Sequence[Member]) -> Iterator[list[Member]]:
    batch: list[Member] = []
    size = 0
    # Neighbours in time share a batch, so that few batches have to be read for one task.
    for at, ledger in sorted(members, key=lambda member: member[1].submitted_ms):
        length = len(encode(ledger)) + _ROW_BYTES * at.count
        if batch and (len(batch) == RECORDS_MAX or size + length > BATCH_BYTES_MAX):
            yield batch
            batch, size = [], 0
        batch.append((at, ledger))
        size += length
    if batch:
        yield batch
