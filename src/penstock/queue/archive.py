"""The archive: what is left of settled packs, many records in one object.

A record is the settled ledger of a pack: its inputs, attempts, outcomes and log. Records leave the
list that workers look at in batches, one put for many. Batches in which a task failed are kept
apart: the dead letters. A batch is named after the first and the last submit in it, so that a
task is found by the time in its id. A task with a key has no such time: the newest batches are
searched for it.

Whoever archives writes the batch first and deletes the ledgers then: a crash between leaves a
record in both places, and later perhaps in two batches. They are equal; the first found counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import ClassVar, Final

import msgspec

from penstock.kernel.entropy import Entropy
from penstock.kernel.errors import NotFound
from penstock.kernel.wire import Document, decode, encode
from penstock.queue.layout import QueueLayout
from penstock.queue.ledger import Ledger, Status
from penstock.queue.places import PackAt
from penstock.store.base import CREATE, ObjectStore, pages

RECORDS_MAX: Final = 1000
BATCH_BYTES_MAX: Final = 8 * 1024 * 1024
BATCHES_READ_MAX: Final = 1000
"""So many batches are read for one task: those that its submit falls into."""
_AT_ONCE: Final = 16


class Record(msgspec.Struct, frozen=True):
    """A settled pack: where it was, and its ledger as it is stored."""

    path: str
    ledger: msgspec.Raw


class Batch(Document, frozen=True, kw_only=True):
    """Many records in one object."""

    kind: ClassVar[str] = "archive"

    records: tuple[Record, ...]


async def keep(
    store: ObjectStore,
    layout: QueueLayout,
    records: Iterable[tuple[PackAt, Ledger]],
    *,
    entropy: Entropy,
) -> None:
    """Write these records into the archive; those with a failed task to the dead letters."""
    apart: dict[str, list[tuple[PackAt, Ledger]]] = {}
    for at, ledger in records:
        failed = any(task.status is Status.FAILED for task in ledger.tasks)
        apart.setdefault(layout.dead if failed else layout.archive, []).append((at, ledger))
    for prefix, members in apart.items():
        for batch, times in _batches(members):
            key = layout.batch(prefix, first_ms=min(times), last_ms=max(times), entropy=entropy)
            await store.put(key, encode(batch), CREATE)


async def find(store: ObjectStore, layout: QueueLayout, at: PackAt) -> Ledger | None:
    """The record of a pack, the last of a key; or None."""
    keys: list[str] = []
    for prefix in (layout.archive, layout.dead):
        start = layout.after_submits_before(prefix, at.submitted_ms) if at.submitted_ms else ""
        keys += [key async for key in _batch_keys(store, layout, prefix, start)]
    # Names begin with the last submit: the newest batches first.
    keys.sort(key=lambda key: key.rpartition("/")[2], reverse=True)
    keys = [key for key in keys if _may_hold(layout, key, at)][:BATCHES_READ_MAX]

    async def search(key: str) -> list[Ledger]:
        return [ledger async for where, ledger in read(store, layout, key) if where == at]

    for place in range(0, len(keys), _AT_ONCE):
        for records in await asyncio.gather(*map(search, keys[place : place + _AT_ONCE])):
            if records:
                return records[-1]
    return None


def _may_hold(layout: QueueLayout, key: str, at: PackAt) -> bool:
    first_ms, last_ms = layout.read_batch(key) or (0, 0)
    return at.submitted_ms is None or first_ms <= at.submitted_ms <= last_ms


async def dead(store: ObjectStore, layout: QueueLayout) -> AsyncIterator[tuple[PackAt, Ledger]]:
    """The records of packs in which a task failed, in no particular order."""
    async for key in _batch_keys(store, layout, layout.dead, ""):
        async for at, ledger in read(store, layout, key):
            yield at, ledger


async def read(
    store: ObjectStore, layout: QueueLayout, key: str
) -> AsyncIterator[tuple[PackAt, Ledger]]:
    """The records of one batch."""
    found = None
    with suppress(NotFound):
        found = await store.get(key)
    if found is None:
        return
    for record in decode(Batch, found.body, where=key).records:
        where = layout.read(layout.root + record.path)
        if where is not None:
            yield where[0], decode(Ledger, bytes(record.ledger), where=key)


async def _batch_keys(
    store: ObjectStore, layout: QueueLayout, prefix: str, start_after: str
) -> AsyncIterator[str]:
    async for page in pages(store, prefix, start_after=start_after):
        for entry in page.entries:
            if layout.read_batch(entry.key) is not None:
                yield entry.key


def _batches(members: Sequence[tuple[PackAt, Ledger]]) -> Iterator[tuple[Batch, list[int]]]:
    records: list[Record] = []
    times: list[int] = []
    size = 0
    # Neighbours in time share a batch, so that few batches have to be read for one task.
    for at, ledger in sorted(members, key=lambda member: member[1].submitted_ms):
        body = encode(ledger)
        if records and (len(records) == RECORDS_MAX or size + len(body) > BATCH_BYTES_MAX):
            yield Batch(records=tuple(records)), times
            records, times, size = [], [], 0
        records.append(Record(at.path, msgspec.Raw(body)))
        times.append(at.submitted_ms or ledger.submitted_ms)
        size += len(body)
    if records:
        yield Batch(records=tuple(records)), times
