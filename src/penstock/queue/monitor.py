"""The monitor: repairs what points to packs, and takes away what is settled.

It is the owner of a shard in `leased`, an elected worker in `shared`, or `penstock queue monitor`
by itself. Several at once do the same thing twice and no harm: all it does is conditional, or
written under a key of its own.

- **Settled ledgers** leave for the archive in batches, when their pack is gone and can not come
  back: W after the submit and after the last write, for a key after its lifetime (R3). That a pack
  is gone must have been seen by a list that began after that moment.
- **Void ledgers** are removed: not settled, without a pack, and with no live lease (R1).
- **Pointers** that are missing are written again: a pack with a key that no entry of `ready/`
  points to would never be found. What is late or double is removed by whoever follows it.

Settled ledgers cost nothing to notice: the lists of discovery show them. The sweep for pointers is
one LIST of `keyed/` a period, and one of `ready/` if there are packs, for every 1,000 objects:
at the default of 600 s, four to nine cents a month for a small queue. Whoever begins to guard slots
sweeps them within `MAINTAIN_SECONDS`. A pointer that a look has shown is missed by the next look
(`penstock.queue.running.pointers`): a HEAD for each that somebody else removed. So one that is lost
delays its task by less than a minute; only what is lost before any look has shown it, while it is
guarded, waits for the period.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from penstock.kernel.entropy import Entropy, new_id
from penstock.kernel.errors import NotFound, StoreError, UnreadableObject, VersionConflict
from penstock.kernel.wire import decode, encode
from penstock.queue import transitions
from penstock.queue.archive import keep
from penstock.queue.batches.marks import mark_before_archiving
from penstock.queue.discovery.scan import Run
from penstock.queue.heartbeats import as_of
from penstock.queue.layout import QueueLayout
from penstock.queue.ledger import Ledger
from penstock.queue.pack import Pack, forgotten_ms
from penstock.queue.places import NONCE_CHARACTERS, PackAt
from penstock.queue.submission import Pointer
from penstock.store.base import CREATE, Entry, ObjectStore, Version, find, pages
from penstock.store.metered import labelled
from penstock.store.time import Interval

_log = logging.getLogger(__name__)

BATCH: Final = 500
"""So many settled ledgers leave at once, or fewer after `WAIT_SECONDS`."""
WAIT_SECONDS: Final = 120.0
REMEMBERED_MAX: Final = 5_000
REMEMBERED_BYTES_MAX: Final = 32 * 1024 * 1024
_AT_ONCE: Final = 16
_YOUNG_SECONDS: Final = 60.0
_LEFT_SECONDS: Final = 3600.0


@dataclass(frozen=True, slots=True)
class _Settled:
    at: PackAt
    version: Version
    looked_ms: float
    """The store's time when the list began that did not show the pack."""
    noted_at: float


class Monitor:
    """Repairs the part of a queue that it is told to."""

    def __init__(
        self, store: ObjectStore, layout: QueueLayout, *, key_seconds: int, entropy: Entropy
    ) -> None:
        self._store = store
        self._layout = layout
        self._key_seconds = key_seconds
        self._entropy = entropy
        self._clock = store.clock.machine
        self._waiting: dict[PackAt, _Settled] = {}
        self._left: dict[PackAt, float] = {}
        self._known: dict[PackAt, tuple[Ledger, Version, int]] = {}
        self._known_bytes = 0

    def remember(self, at: PackAt, ledger: Ledger, version: Version) -> None:
        """What this worker has settled itself: it need not be read again."""
        size = 256 + sum(len(bytes(each)) for each in ledger.inputs) + 300 * len(ledger.tasks)
        self._forget(at)
        self._known[at] = (ledger, version, size)
        self._known_bytes += size
        while len(self._known) > REMEMBERED_MAX or self._known_bytes > REMEMBERED_BYTES_MAX:
            self._forget(next(iter(self._known)))

    def _forget(self, at: PackAt) -> tuple[Ledger | None, Version | None]:
        ledger, version, size = self._known.pop(at, (None, None, 0))
        self._known_bytes -= size
        return ledger, version

    def note(self, settled: Sequence[tuple[PackAt, Entry]], looked: Interval) -> None:
        """Take in ledgers that a list, begun at `looked`, has shown without their pack."""
        instant = self._clock.monotonic()
        for at, entry in settled:
            if self._left.get(at, 0.0) > instant or at in self._waiting:
                continue
            if self._may_leave_ms(at, entry) <= looked.earliest * 1000:
                self._waiting[at] = _Settled(at, entry.version, looked.earliest * 1000, instant)

    def _may_leave_ms(self, at: PackAt, entry: Entry) -> float:
        """When nothing of the pack can come any more: neither its submit nor an old claim."""
        written_ms = int(entry.modified * 1000)
        if at.submitted_ms is not None:
            return forgotten_ms(max(at.submitted_ms, written_ms))
        return forgotten_ms(written_ms + self._key_seconds * 1000)

    async def clear(self, *, at_once: bool = False) -> int:
        """Archive what has been noted, if it is enough or has waited long enough.

        Returns how many ledgers have left.
        """
        oldest = min((each.noted_at for each in self._waiting.values()), default=None)
        if oldest is None:
            return 0
        due = at_once or self._clock.monotonic() - oldest >= WAIT_SECONDS
        if not due and len(self._waiting) < BATCH:
            return 0
        batch = list(self._waiting.values())[: BATCH * 2]
        with labelled("monitor"):
            return await self._archive(batch)

    async def _archive(self, batch: Sequence[_Settled]) -> int:
        slots = asyncio.Semaphore(_AT_ONCE)

        async def read(each: _Settled) -> Ledger | None:
            async with slots:
                return await self._read(each)

        async def remove(each: _Settled) -> None:
            async with slots:
                try:
                    await self._store.delete(self._layout.ledger(each.at), version=each.version)
                except VersionConflict:
                    return
                except StoreError as error:
                    _log.warning("a ledger that is archived cannot be deleted: %s", error)
                    self._leave(each.at)

        ledgers = await asyncio.gather(*(read(each) for each in batch))
        now = await self._store.now()
        records, gone = [], []
        for each, ledger in zip(batch, ledgers, strict=True):
            if ledger is not None and ledger.settled:
                if ledger.key is None or forgotten_ms(ledger.key_ends_ms) <= each.looked_ms:
                    records.append((each.at, ledger))
                    gone.append(each)
                else:
                    # Its submit has given it a longer life than the queue does.
                    seconds = (forgotten_ms(ledger.key_ends_ms) - each.looked_ms) / 1000
                    self._leave(each.at, seconds)
            elif ledger is not None and _is_void(ledger, now):
                gone.append(each)
        await mark_before_archiving(self._store, self._layout, records)
        await keep(self._store, self._layout, records, entropy=self._entropy)
        await asyncio.gather(*(remove(each) for each in gone))
        for each in batch:
            self._waiting.pop(each.at, None)
        return len(gone)

    async def _read(self, each: _Settled) -> Ledger | None:
        ledger, version = self._forget(each.at)
        if ledger is not None and version == each.version:
            return ledger
        key = self._layout.ledger(each.at)
        try:
            found = await self._store.get(key)
            if found is None or found.version != each.version:
                return None
            return as_of(decode(Ledger, found.body, where=key), found.modified)
        except NotFound:
            return None
        except UnreadableObject as error:
            _log.warning("a ledger is left alone: %s", error)
            self._leave(each.at)
            return None

    def _leave(self, at: PackAt, seconds: float = _LEFT_SECONDS) -> None:
        """Nothing can be done with this one now: do not try again for a while."""
        self._left[at] = self._clock.monotonic() + seconds
        while len(self._left) > REMEMBERED_MAX:
            del self._left[next(iter(self._left))]

    async def sweep(self, runs: Sequence[Run]) -> int:
        """Write the pointers that are missing in these slots; returns how many there were."""
        with labelled("monitor"):
            packs: list[PackAt] = []
            for run in runs:
                packs += await self._keyed(run)
            if not packs:
                return 0
            pointed: set[PackAt] = set()
            for prefix in (self._layout.ready, self._layout.unhurried):
                async for page in pages(self._store, prefix):
                    read = (self._layout.read_pointer(entry.key) for entry in page.entries)
                    pointed |= {found.at for found in read if found}
            missing = [at for at in packs if at not in pointed]
            for at in missing:
                await self._point(at)
        if missing:
            _log.warning("%d packs with a key had no pointer; they have one again", len(missing))
        return len(missing)

    async def point_again(self, at: PackAt) -> bool:
        """Write a pointer to a pack whose pointer is gone; False if the pack is gone too."""
        with labelled("monitor"):
            try:
                await self._store.head(self._layout.pack(at))
            except NotFound:
                return False
            await self._point(at)
        _log.warning("the pack %s had lost its pointer; it has one again", at.path)
        return True

    async def _keyed(self, run: Run) -> list[PackAt]:
        """The packs with a key in these slots; ledgers that are alone are noted."""
        looked = await self._store.now()
        prefix, last = self._layout.keyed, f"{self._layout.keyed}{run[1]:03x}/~~"
        pairs: dict[PackAt, list[Entry | None]] = {}
        async for page in pages(self._store, prefix, start_after=f"{prefix}{run[0]:03x}/"):
            for entry in page.entries:
                read = self._layout.read(entry.key)
                if read is not None and entry.key < last:
                    pairs.setdefault(read[0], [None, None])[read[1]] = entry
            if page.entries and page.entries[-1].key >= last:
                break
        alone = [(at, ledger) for at, (pack, ledger) in pairs.items() if ledger and not pack]
        self.note(alone, looked)
        old = looked.earliest - _YOUNG_SECONDS
        return [at for at, (pack, _) in pairs.items() if pack and pack.modified <= old]

    async def _point(self, at: PackAt) -> None:
        found = await find(self._store, self._layout.pack(at))
        if found is None:
            return
        pack = decode(Pack, found.body, where=found.key)
        due_ms = int((await self._store.now()).latest * 1000)
        key = self._layout.pointer(
            at,
            due_ms=due_ms,
            nonce=new_id(self._entropy, characters=NONCE_CHARACTERS),
            priority=pack.priority,
            limit=pack.limit,
        )
        await self._store.put(key, encode(Pointer(submitted_ms=due_ms)), CREATE)


def _is_void(ledger: Ledger, now: Interval) -> bool:
    """Whether no lease in it is live: without its pack it is nothing then (R1)."""
    due_ms = transitions.next_due_ms(transitions.expire(ledger, now))
    return due_ms is None or due_ms <= now.earliest * 1000
