"""Purging: what nobody wants any more is cancelled, or forgotten, at once.

For people who clean up, with filters: types, statuses, and how long ago it was submitted.

- **What has not ended** is cancelled as `Queue.cancel` does it, and what runs is asked to stop. No
  pack and no ledger is deleted: a ledger is what keeps a task from running again.
- **What was settled minutes ago** stays, as a tombstone for at least W (R3). What may leave it is
  archived first, so that it can be forgotten here; the rest is for a later purge, or retention.
- **Records in the archive** go a pack at a time, if all of its tasks are meant. A batch of which
  some remain is swapped, under its key, for one without the others; one of which none remains is
  deleted in the version that was read. If somebody else has changed it meanwhile, nothing was done
  and it is read again: no purge writes a record that another has dropped. Only then the payloads of
  what is gone are deleted, unless a pack or a ledger of that life is there. So a record that can be
  read has its payloads; a crash leaves payloads of nobody, for `penstock.queue.retention`.

A delete cannot decide between two purges: some stores take one of what is gone for done. It need
not: nothing is deleted but what is meant whole, and a batch that is gone has no records.

It reads all that it may have to change: a LIST for every 1,000 objects, two GETs and a put or
two for every pack that is cancelled, a GET for every batch of the archive that is old enough, and a
put for those of which a part remains.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final, TypedDict, Unpack

import msgspec

from penstock.kernel.errors import InvalidInput, TaskNotFound, UnreadableObject, VersionConflict
from penstock.kernel.words import listed
from penstock.queue import archive
from penstock.queue.access import Access
from penstock.queue.cancelling import cancel_tasks
from penstock.queue.inspection.alone import run_monitor
from penstock.queue.ledger import Ledger
from penstock.queue.owners import Owners
from penstock.queue.payloads import references
from penstock.queue.places import PackAt, check_name, day_of, payload_at
from penstock.queue.reading import Reader
from penstock.queue.views import STATES, WORDS
from penstock.store.base import Version, pages
from penstock.store.metered import labelled

LIVE: Final = frozenset(STATES[:4])
SETTLED: Final = frozenset(STATES[4:])
_AT_ONCE: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Which tasks a purge is about."""

    types: frozenset[str] | None = None
    """None for all."""
    statuses: frozenset[str] = frozenset(STATES)
    older_than_seconds: float = 0.0
    """Submitted at least so long ago."""

    def __post_init__(self) -> None:
        for each in self.types or ():
            check_name(each, what="type")
        unknown = sorted(self.statuses - set(STATES))
        if unknown or not self.statuses:
            named = f"{unknown[0]!r} is not a status" if unknown else "No status is named"
            raise InvalidInput(f"{named}.", hint=f"There are {listed(STATES)}.")
        if not 0 <= self.older_than_seconds < float("inf"):
            raise InvalidInput(f"An age of {self.older_than_seconds} s is not one.")


@dataclass(slots=True)
class Purged:
    """What a purge has done, or would do."""

    cancelled: int = 0
    asked_to_stop: int = 0
    tasks_forgotten: int = 0
    payloads_deleted: int = 0
    batches_deleted: int = 0
    batches_rewritten: int = 0
    tasks_kept: int = 0
    """Settled tasks that were meant, in packs of which others were not."""
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Parts:
    """What of a batch goes, and what stays."""

    left: list[archive.Member] = field(default_factory=list)
    dropped: list[archive.Member] = field(default_factory=list)
    tasks_kept: int = 0


class Purge:
    """One purge of one queue. With `dry_run` it only says what it would do."""

    def __init__(self, access: Access, chosen: Chosen, *, dry_run: bool = False) -> None:
        self._access = access
        self._chosen = chosen
        self._dry_run = dry_run
        self._owners = Owners(access)
        self._before_ms = 0.0
        self.purged = Purged()

    async def run(self) -> Purged:
        """Cancel and forget. May raise `StoreError`; what is done by then is in `purged`."""
        with labelled("purge"):
            now = await self._access.store.now()
            self._before_ms = (now.latest - self._chosen.older_than_seconds) * 1000
            if self._chosen.statuses & LIVE:
                await self._cancel()
            if self._chosen.statuses & SETTLED:
                if not self._dry_run:
                    await self._flush()
                await self._forget()
        return self.purged

    async def _cancel(self) -> None:
        layout = self._access.layout
        for top in (layout.ready, layout.tasks, layout.keyed, layout.unhurried):
            async for page in pages(self._access.store, top):
                packs = [
                    read[0]
                    for read in (layout.read(entry.key) for entry in page.entries)
                    if read is not None and not read[1] and self._may_be(read[0])
                ]
                for place in range(0, len(packs), _AT_ONCE):
                    await asyncio.gather(*map(self._cancel_in, packs[place : place + _AT_ONCE]))

    def _may_be(self, at: PackAt) -> bool:
        types = self._chosen.types
        return (types is None or at.type in types) and (at.submitted_ms or 0) <= self._before_ms

    async def _cancel_in(self, at: PackAt) -> None:
        """Cancel what is meant of a pack."""
        statuses = self._chosen.statuses & LIVE
        try:
            views = await Reader(self._access).views(at)
            meant = [
                view
                for view in views
                if view.status in statuses and view.submitted_at * 1000 <= self._before_ms
            ]
            after = {view.id: view for view in meant}
            if meant and not self._dry_run:
                after = await cancel_tasks(self._access, [view.id for view in meant])
        except TaskNotFound:
            return  # It has gone meanwhile.
        except UnreadableObject as error:
            self.purged.notes.append(str(error))
            return
        for view in after.values():
            if view.status == "cancelled" or (self._dry_run and view.status != "running"):
                self.purged.cancelled += 1
            elif view.cancel_asked or self._dry_run:
                self.purged.asked_to_stop += 1

    async def _flush(self) -> None:
        """Archive what may leave: only then it can be forgotten."""
        await run_monitor(self._access, tell=lambda _: None, stopping=asyncio.Event(), passes_max=1)

    async def _forget(self) -> None:
        store, layout = self._access.store, self._access.layout
        for prefix in (layout.archive, layout.dead):
            keys = [entry.key async for entry in archive.batches(store, layout, prefix)]
            for key in keys:
                first_ms, _ = layout.read_batch(key) or (0, 0)
                if first_ms <= self._before_ms:
                    await self._forget_in(key)

    async def _forget_in(self, key: str) -> None:
        """Forget what is meant of a batch."""
        problem = "others change it all the time"
        for _ in range(archive.LOOKS_MAX):
            try:
                found = await archive.whole(self._access.store, key)
                if found is None:
                    return
                version, records = found
                parts = self._parted(records)
            except (UnreadableObject, msgspec.MsgspecError) as error:
                problem = str(error)
                break
            if await self._cut(key, parts, version):
                self.purged.tasks_kept += parts.tasks_kept
                if parts.dropped:
                    self.purged.batches_rewritten += bool(parts.left)
                    self.purged.batches_deleted += not parts.left
                    self.purged.tasks_forgotten += sum(at.count for at, _ in parts.dropped)
                    await self._drop_payloads(parts.dropped)
                return
        self.purged.notes.append(f"{key} is left alone: {problem}")

    async def _cut(self, key: str, parts: _Parts, version: Version) -> bool:
        """Drop records from a batch; false if it is no longer in the version that was read."""
        if self._dry_run or not parts.dropped:
            return True
        store = self._access.store
        try:
            if parts.left:
                await archive.rewrite(store, key, parts.left, version=version)
            else:
                await store.delete(key, version=version)
        except VersionConflict:
            return False
        return True

    def _parted(self, records: Sequence[archive.Member]) -> _Parts:
        """What is to be forgotten of these, which is packs of which all tasks are meant."""
        parts = _Parts()
        for at, ledger in records:
            is_old = self._may_be(at) and ledger.submitted_ms <= self._before_ms
            statuses = self._chosen.statuses if is_old else ()
            meant = sum(WORDS[task.status] in statuses for task in ledger.tasks)
            if is_old and meant == len(ledger.tasks):
                parts.dropped.append((at, ledger))
            else:
                parts.left.append((at, ledger))
                parts.tasks_kept += meant
        return parts

    async def _drop_payloads(self, dropped: Sequence[tuple[PackAt, Ledger]]) -> None:
        for at, ledger in dropped:
            paths = owned(at, ledger)
            if not paths or await self._owners.is_live(at, day_of(ledger.submitted_ms)):
                continue
            self.purged.payloads_deleted += len(paths)
            for path in () if self._dry_run else paths:
                await self._access.store.delete(self._access.layout.payload(path))


def owned(at: PackAt, ledger: Ledger) -> list[str]:
    """The payloads of a settled pack that are its own, as all should be."""
    day = day_of(ledger.submitted_ms)
    found = ((ref.key, payload_at(ref.key)) for ref in references(ledger))
    return [path for path, owner in found if owner and (owner.at, owner.day) == (at, day)]


class Choice(TypedDict, total=False):
    """What a purge may be told; what is not named is not asked for."""

    types: Collection[str]
    statuses: Collection[str]
    older_than: float
    """Submitted at least so many seconds ago."""
    dry_run: bool


async def purge(access: Access, **choice: Unpack[Choice]) -> Purged:
    """Cancel what has not ended and forget what has, of these types, statuses and ages."""
    types = choice.get("types")
    chosen = Chosen(
        types=None if types is None else frozenset(types),
        statuses=frozenset(choice.get("statuses", STATES)),
        older_than_seconds=choice.get("older_than", 0.0),
    )
    return await Purge(access, chosen, dry_run=choice.get("dry_run", False)).run()
