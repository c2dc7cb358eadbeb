"""How a batch ends: the record, the task that comes then, and what is cleared away.

Anybody may try at any time, also several at once; `penstock.queue.batches` says why the task that
comes then is submitted once. A try costs a GET, and a LIST if the batch is sealed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from penstock.kernel.errors import AlreadyExists, StoreError, TaskNotFound, VersionConflict
from penstock.kernel.wire import decode, encode
from penstock.queue.access import Access
from penstock.queue.batches import marks as marking
from penstock.queue.batches.documents import (
    KEPT_SECONDS,
    Counts,
    EndedBatch,
    OpenBatch,
    then_input,
    then_key,
)
from penstock.queue.options import Options
from penstock.queue.places import PackAt, keyed_pack
from penstock.queue.reading import Reader
from penstock.queue.submission import Submitter
from penstock.store.base import CREATE, ObjectStore, find
from penstock.store.cell import Cell

_AT_ONCE: Final = 16


@dataclass(frozen=True, slots=True)
class Tried:
    """What a try to end a batch has shown."""

    batch: OpenBatch | None
    """None if there is no open batch of this id: it has ended, or is forgotten."""
    missing: Sequence[PackAt] = field(default=())
    """Of a sealed batch: the packs without a mark. None are missing if it has ended now."""
    marked: int = 0


class Ender:
    """Ends the batches of one queue."""

    def __init__(self, access: Access) -> None:
        self._access = access

    def cell(self, batch: str) -> Cell[OpenBatch]:
        """The open object of a batch."""
        access = self._access
        return Cell(
            access.store, access.layout.open_batch(batch), OpenBatch, entropy=access.entropy
        )

    async def try_to_end(self, batch: str, cell: Cell[OpenBatch]) -> Tried:
        """End a batch, if it is sealed and everything in it is settled."""
        access = self._access
        # Noted before anything is read: what is submitted rests on it.
        read_ms = int((await access.store.now()).earliest * 1000)
        present = await cell.read()
        if present is None or not present.sealed_ms:
            return Tried(present)
        marks = await marking.read(access.store, access.layout, batch)
        counts, missing = marking.tally(marking.members(present), marks)
        if not missing:
            await self._end(batch, cell, present, counts, read_ms)
        return Tried(present, missing, len(marks))

    async def _end(
        self, batch: str, cell: Cell[OpenBatch], present: OpenBatch, counts: Counts, read_ms: int
    ) -> None:
        ended = await self._record(
            batch,
            EndedBatch(
                made_ms=present.made_ms,
                sealed_ms=present.sealed_ms,
                ended_ms=read_ms,
                counts=counts,
                then=present.then,
            ),
        )
        if ended.then is not None and not await self._is_known(batch, ended, read_ms):
            access = self._access
            await Submitter(access.store, access.layout, access.entropy).submit_keyed(
                ended.then.type,
                then_input(batch, ended.then, ended.counts),
                Options(key=then_key(batch)),
                key_seconds=KEPT_SECONDS,
                submitted_ms=read_ms,
            )
        with suppress(VersionConflict):
            await cell.remove()
        # Last: as long as the open object is there, the marks are what the end is known by.
        await self._clear(batch)

    async def _record(self, batch: str, ended: EndedBatch) -> EndedBatch:
        """Create the record, or read the one that is there."""
        where = self._access.layout.ended_batch(batch)
        try:
            await self._access.store.put(where, encode(ended), CREATE)
        except AlreadyExists:
            found = await find(self._access.store, where)
            return decode(EndedBatch, found.body, where=where) if found else ended
        return ended

    async def _is_known(self, batch: str, ended: EndedBatch, read_ms: int) -> bool:
        """Whether what comes then was submitted so long ago that its key may be free again."""
        assert ended.then is not None, "there is something to submit"
        if read_ms < ended.ended_ms + KEPT_SECONDS * 1000:
            return False
        try:
            at = keyed_pack(type=ended.then.type, key=then_key(batch))
            await Reader(self._access).view(at, 0)
        except TaskNotFound:
            return False
        return True

    async def _clear(self, batch: str) -> None:
        """Delete the first thousand marks. What is left, the chore removes one day."""
        access = self._access
        with suppress(StoreError):
            page = await access.store.list(access.layout.marks(batch))
            await delete_all(access.store, [entry.key for entry in page.entries])


async def delete_all(store: ObjectStore, keys: Sequence[str]) -> None:
    """Delete these objects, a few at a time."""
    for place in range(0, len(keys), _AT_ONCE):
        await asyncio.gather(*map(store.delete, keys[place : place + _AT_ONCE]))
