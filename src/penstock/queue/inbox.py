"""A worker's inbox in `direct` mode: lease on the name, entries, cursor, and the roster.

The protocol is in `penstock.queue.discovery.direct`.

**Lease** (`HeldWorkerLease`). One `WorkerLease` object a name, changed by compare-and-swap; the
`Cell` resolves lost answers. After a renewal whose outcome is unknown the older, shorter end is
trusted. A crash leaves the lease as it is: it ends by itself. One object a worker, used by one
coroutine.

**Roster** (`WorkerRoster`): the live workers with an inbox, refreshed by one LIST. The list
shows when each lease was written, and its size. A renewal changes neither the size nor how long
the lease lasts. So a known lease is not read again while its size is the same and its date says
that it lives; a lease that is gone, lasts longer or has other handlers usually differs in size.
N workers cost one LIST, and a GET for each that changed. The roster is a hint: an entry in the
wrong inbox costs time. That a lease is over is decided on the lease itself
(`penstock.queue.inbox_announcer`).

**Cursor** (`InboxCursor`): the minute before which everything was handled, in an object of its own,
so that it can never cost the lease. It only grows, whoever saves it: a holder that was overtaken
has handled what it says, too (SHARD-9). It is saved a minute after something was handled, and once
an hour otherwise: 720 puts or $0.004 a month idle, $0.22 at work. A crash leaves an older cursor.

**Entries** (`Inbox`). An entry is *handled* when its pack was claimed, by any worker, or is
over; what is not due, or could not be tried, is not. Handled entries are deleted with the next
look, and until then are not shown again: a crash before leaves them for the next. The list
always starts at the beginning, where urgent entries are. A look ends when it has found enough
of a usual priority, not counting what is always in front and of no use, or after `PAGES_MAX`
pages; the next one goes on from there behind its first page, so nothing starves. Only a look
that has seen all of the inbox moves the cursor. A look is a LIST for every 1,000 entries and a
delete for each that was handled.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final

import msgspec

from penstock.kernel.document_format import Stamped, decode
from penstock.kernel.entropy import Entropy, new_id
from penstock.kernel.errors import (
    NotFound,
    StoreError,
    UnreadableObject,
    VersionConflict,
    WorkerIdConflict,
)
from penstock.queue.discovery.scanner import PackCandidate, PointerCandidate
from penstock.queue.ids import URGENT_MINUTE, PackAt
from penstock.queue.incarnation import NOBODY, Incarnation
from penstock.queue.layout import InboxAt, QueueLayout
from penstock.store.base import Entry, ObjectStore, Version, pages
from penstock.store.cell import Cell
from penstock.store.metered import labelled
from penstock.store.time import Interval

IDLE_STRETCH: Final = 3.0
"""While idle, a lease lasts and is renewed so many times longer."""
UNREADABLE_SECONDS: Final = 600.0
"""A lease that cannot be read counts as over so long after it was written."""


class WorkerLease(Stamped, frozen=True, kw_only=True):
    """Who holds the name of a worker. `is_gone`: nobody, and the inbox is being given away."""

    kind: ClassVar[str] = "worker-lease"

    holder: str
    expires_ms: int
    seconds: float
    """How long it lasts from its last write on."""
    since_ms: int
    """When the inbox began: no entry in it is older."""
    handles: tuple[str, ...] = ()
    is_gone: bool = False
    host: str = ""
    pid: int = 0
    incarnation: str = ""
    """Its process, of which a lock tells when it has ended (`penstock.queue.incarnation`)."""

    def is_over(self, now: Interval) -> bool:
        """Whether it has surely ended."""
        return self.is_gone or now.earliest * 1000 >= self.expires_ms


class HeldWorkerLease:
    """One worker's hold on its name. `take` it, `renew` it, and in the end `leave`."""

    def __init__(
        self,
        store: ObjectStore,
        layout: QueueLayout,
        *,
        worker: str,
        handles: frozenset[str],
        seconds: float,
        entropy: Entropy,
        incarnation: Incarnation = NOBODY,
    ) -> None:
        self._store = store
        self._incarnation = incarnation
        self._worker = worker
        self._seconds = seconds
        self._cell = Cell(store, layout.inbox_lease(worker), WorkerLease, entropy=entropy)
        self._fresh = WorkerLease(
            holder=new_id(entropy, characters=16),
            expires_ms=0,
            seconds=seconds,
            since_ms=0,
            handles=tuple(sorted(handles)),
            host=platform.node(),
            pid=os.getpid(),
            incarnation=incarnation.id,
        )
        self._expires_ms = 0
        self.since_ms = 0
        """When the inbox began: now, if the name was free."""
        self.is_taken = False
        self.is_lost = False

    @property
    def is_live(self) -> bool:
        """Whether the lease has surely not ended. Asks for nothing."""
        now = self._store.clock.estimate()
        is_held = self.is_taken and not self.is_lost
        return is_held and now is not None and now.latest * 1000 < self._expires_ms

    async def take(self) -> None:
        """Take the name. Raises `WorkerIdConflict` if another has it, or `StoreError`."""
        with labelled("leases"):
            try:
                await self._take()
            except UnreadableObject:
                await self._remove_damaged()
                await self._take()

    async def _take(self) -> None:
        now = await self._store.now()
        before: WorkerLease | None = None

        def change(present: WorkerLease | None) -> WorkerLease | None:
            nonlocal before
            if present is None:
                return self._renewed(self._fresh, now, since_ms=int(now.earliest * 1000))
            if present.holder != self._fresh.holder:
                before = present
                is_ended = self._incarnation.is_ended(present.incarnation)
                if not is_ended and not present.is_over(now):
                    return None
            return self._renewed(self._fresh, now, since_ms=present.since_ms)

        lease = await self._cell.update(change)
        if lease is None or lease.holder != self._fresh.holder or lease.is_gone:
            raise self._conflict(before or lease, now)
        self.is_taken = True
        self.since_ms, self._expires_ms = lease.since_ms, lease.expires_ms

    def _renewed(
        self, lease: WorkerLease, now: Interval, *, since_ms: int, stretch: float = 1.0
    ) -> WorkerLease:
        seconds = self._seconds * stretch
        expires_ms = int((now.latest + seconds) * 1000)
        return msgspec.structs.replace(
            lease, expires_ms=expires_ms, seconds=seconds, since_ms=since_ms
        )

    def _conflict(self, other: WorkerLease | None, now: Interval) -> WorkerIdConflict:
        who = f" on {other.host} (process {other.pid})" if other and other.host else ""
        left = max(0.0, other.expires_ms / 1000 - now.earliest) if other else 0.0
        return WorkerIdConflict(
            f"The name {self._worker!r} is in use by another worker{who}; its lease ends in"
            f" {left:.0f} s unless it is renewed.",
            hint="Give every worker of the mode 'direct' a name of its own, or none; one that was"
            " killed can start again at once on its machine, elsewhere when its lease has ended.",
        )

    async def _remove_damaged(self) -> None:
        """What cannot be read makes room when it must be over."""
        now = await self._store.now()
        head = await self._store.head(self._cell.key)
        if now.earliest < head.modified + UNREADABLE_SECONDS:
            raise WorkerIdConflict(
                f"The lease of the worker {self._worker!r} cannot be read, and may not be over.",
                hint=f"Remove {self._cell.key}, or wait {UNREADABLE_SECONDS:.0f} s.",
            )
        with suppress(NotFound, VersionConflict):
            await self._store.delete(self._cell.key, version=head.version)

    async def renew(self, *, is_idle: bool) -> None:
        """Move the end of the lease; sets `is_lost` if another has it, or nobody."""
        now = await self._store.now()
        stretch = IDLE_STRETCH if is_idle else 1.0

        def change(present: WorkerLease | None) -> WorkerLease | None:
            if present is None or present.holder != self._fresh.holder or present.is_gone:
                return None
            return self._renewed(present, now, since_ms=present.since_ms, stretch=stretch)

        with labelled("leases"):
            try:
                lease = await self._cell.update(change)
            except UnreadableObject:
                lease = None
        if lease is None or lease.holder != self._fresh.holder or lease.is_gone:
            self.is_lost, self._expires_ms = True, 0
        else:
            self._expires_ms = lease.expires_ms

    async def leave(self) -> None:
        """Say that nobody holds the name any more. Raises `StoreError`, `UnreadableObject`."""
        if not self.is_taken or self.is_lost:
            return
        self._expires_ms = 0

        def change(present: WorkerLease | None) -> WorkerLease | None:
            if present is None or present.holder != self._fresh.holder or present.is_gone:
                return None
            return msgspec.structs.replace(present, is_gone=True, expires_ms=0)

        with labelled("leases"):
            await self._cell.update(change)


AT_ONCE_MAX: Final = 16
_PAGES_MAX: Final = 20


@dataclass(frozen=True, slots=True)
class KnownWorker:
    """A worker's lease as it was last read, and when the list says it was last written."""

    lease: WorkerLease | None
    """None if it cannot be read."""
    version: Version
    modified: float
    size: int

    def is_live(self, now: Interval) -> bool:
        """Whether the worker lives, as far as a list can tell."""
        lease = self.lease
        return bool(lease and not lease.is_gone and now.latest < self.modified + lease.seconds)

    def may_be_over(self, now: Interval) -> bool:
        """Whether it is worth looking after what the worker has left."""
        if self.lease is None:
            return now.earliest >= self.modified + UNREADABLE_SECONDS
        return self.lease.is_over(now) and not self.is_live(now)


class WorkerRoster:
    """The picture that one process has of the workers with an inbox."""

    def __init__(self, store: ObjectStore, layout: QueueLayout) -> None:
        self._store = store
        self._layout = layout
        self._seen: dict[str, KnownWorker] = {}

    @property
    def seen(self) -> Mapping[str, KnownWorker]:
        """All that were there at the last look, live or not."""
        return self._seen

    @property
    def shortest_seconds(self) -> float:
        """How long the shortest of the leases lasts."""
        leases = [seen.lease for seen in self._seen.values() if seen.lease]
        return min((lease.seconds for lease in leases if not lease.is_gone), default=float("inf"))

    def live(self, now: Interval, *, type: str | None = None) -> list[str]:
        """The workers that live, in order; those with a handler for a type, if it is given."""
        return sorted(
            worker
            for worker, seen in self._seen.items()
            if seen.is_live(now) and (type is None or (seen.lease and type in seen.lease.handles))
        )

    async def look(self) -> None:
        """Renew the picture. Raises `StoreError`."""
        with labelled("leases"):
            listed = await self._list()
            now = await self._store.now()
            known: dict[str, KnownWorker] = {}
            for worker, entry in listed.items():
                before = self._seen.get(worker)
                if before is None:
                    continue
                dated = replace(before, modified=entry.modified)
                is_same = entry.size == before.size and dated.is_live(now)
                if entry.version == before.version or is_same:
                    known[worker] = dated
            self._seen = known
            slots = asyncio.Semaphore(AT_ONCE_MAX)

            async def read(worker: str) -> None:
                async with slots:
                    await self.read(worker)

            await asyncio.gather(*(read(worker) for worker in listed if worker not in known))

    async def _list(self) -> dict[str, Entry]:
        listed: dict[str, Entry] = {}
        number = 0
        async for page in pages(self._store, self._layout.inbox_leases):
            for entry in page.entries:
                worker = self._layout.read_inbox_lease(entry.key)
                if worker is not None:
                    listed[worker] = entry
            number += 1
            if number == _PAGES_MAX:
                break
        return listed

    async def read(self, worker: str) -> KnownWorker | None:
        """One lease as it is now; the picture has it too. Raises `StoreError`."""
        key = self._layout.inbox_lease(worker)
        try:
            found = await self._store.get(key)
        except NotFound:
            self._seen.pop(worker, None)
            return None
        assert found is not None
        try:
            lease = decode(WorkerLease, found.body, where=key)
        except UnreadableObject:
            lease = None
        seen = self._seen[worker] = KnownWorker(lease, found.version, found.modified, found.size)
        return seen


_log = logging.getLogger(__name__)

BACK_MINUTES_MAX: Final = 24 * 60
"""A cursor that is older than this is not gone on from."""
LATE_MINUTES: Final = 2
"""The cursor stays so far behind the present: entries may come that late."""
SAVE_SECONDS: Final = 60.0
IDLE_SAVE_SECONDS: Final = 3600.0


class CursorDocument(Stamped, frozen=True, kw_only=True):
    """Up to which minute an inbox was worked off."""

    kind: ClassVar[str] = "inbox-cursor"

    minute: int


class InboxCursor:
    """One inbox's cursor, in the hands of its worker."""

    def __init__(
        self, store: ObjectStore, layout: QueueLayout, *, worker: str, entropy: Entropy
    ) -> None:
        self._worker = worker
        self._clock = store.clock.machine
        self._cell = Cell(store, layout.inbox_cursor(worker), CursorDocument, entropy=entropy)
        self._saved = 0
        self._saved_at = self._clock.monotonic()
        self.minute = 0
        """Everything in earlier minutes was handled."""
        self.has_worked = False
        """Whether something was handled since it was saved."""

    async def load(self, *, since_minute: int, now_minute: int) -> None:
        """Find out where to go on: the inbox began at `since_minute`. Raises `StoreError`."""
        saved: CursorDocument | None = None
        with labelled("leases"):
            try:
                saved = await self._cell.read()
            except UnreadableObject as error:
                _log.warning("damaged cursor, reading the whole inbox: %s", error)
        minute = max(saved.minute, since_minute) if saved else since_minute
        self._saved = saved.minute if saved else 0
        least = now_minute - BACK_MINUTES_MAX
        if minute < least:
            _log.warning(
                "worker %s was away for %d hours: its inbox is read from 24 hours back, and what"
                " is older is found by scavenging",
                self._worker,
                (now_minute - minute) // 60,
            )
        self.minute = max(minute, least)

    def advance(self, *, handled_before: int, now_minute: int) -> None:
        """Everything before this minute was handled, by a list that began at `now_minute`."""
        self.minute = max(self.minute, min(handled_before, now_minute - LATE_MINUTES))

    async def save(self, *, at_once: bool = False) -> None:
        """Write it down if that is due, or `at_once`. Raises `StoreError`."""
        pause = SAVE_SECONDS if self.has_worked else IDLE_SAVE_SECONDS
        if self.minute <= self._saved:
            return
        if not at_once and self._clock.monotonic() < self._saved_at + pause:
            return
        minute = self.minute

        def change(present: CursorDocument | None) -> CursorDocument | None:
            if present is None:
                return CursorDocument(minute=minute)
            if present.minute >= minute:
                return None
            return msgspec.structs.replace(present, minute=minute)

        self._saved_at = self._clock.monotonic()
        self.has_worked = False
        with labelled("leases"):
            try:
                await self._cell.update(change)
            except UnreadableObject as error:
                _log.warning("failed to save the cursor: %s", error)
        self._saved = minute


PAGES_MAX: Final = 10
"""How many pages one look reads at the most; the next goes on from there."""
_ENTRIES_MAX: Final = 50_000
_AT_ONCE: Final = 16
_URGENT_END: Final = 2 * URGENT_MINUTE


@dataclass(slots=True)
class _Listed:
    """What one look has listed so far."""

    oldest: int
    """The first minute of which something is left."""
    sights: list[PackCandidate] = field(default_factory=list)
    entries: dict[PackAt, set[str]] = field(default_factory=dict)
    found: int = 0
    reached: str = ""


class Inbox:
    """One inbox, in the hands of its worker."""

    def __init__(
        self,
        store: ObjectStore,
        layout: QueueLayout,
        *,
        worker: str,
        handles: frozenset[str],
        cursor: InboxCursor,
    ) -> None:
        self._store = store
        self._layout = layout
        self._prefix = layout.inbox(worker)
        self._handles = handles
        self._cursor = cursor
        self._entries: dict[PackAt, set[str]] = {}
        self._finished: set[str] = set()
        """What is to be deleted."""
        self._meanwhile: set[PackAt] = set()
        """What was handled since the last list began."""
        self._resume = ""
        """Behind which key the next look goes on, after its first page."""

    def handled(self, at: PackAt) -> None:
        """A pack was claimed, or is over: what is in the inbox of it may go. Asks for nothing."""
        self._meanwhile.add(at)
        keys = self._entries.pop(at, None)
        if keys:
            self._finished |= keys
            self._cursor.has_worked = True

    async def tidy(self) -> None:
        """Delete what was handled. What cannot be deleted now is tried again with the next look."""
        await delete_all(self._store, self._finished)

    async def look(
        self, *, now_minute: int, worth: Callable[[PackCandidate], int], wanted: int
    ) -> list[PackCandidate]:
        """What is in the inbox and due in this minute or before, as it is listed."""
        await self.tidy()
        self._meanwhile.clear()
        listed = _Listed(oldest=now_minute)
        is_whole = True
        start = ""
        cursor: str | None = None
        with labelled("discovery"):
            for _ in range(PAGES_MAX):
                page = await self._store.list(self._prefix, start_after=start, cursor=cursor)
                cursor = page.cursor
                if self._judge(page.entries, listed, now_minute=now_minute, worth=worth):
                    cursor = None
                if cursor is None or listed.found >= wanted:
                    break
                if is_whole and self._resume > listed.reached:
                    # What is urgent was in front; the last looks have seen what comes next.
                    is_whole, start, cursor = False, self._resume, None
            else:
                self._resume = listed.reached
        if cursor is None:
            self._resume = ""
        is_whole = is_whole and cursor is None
        self._take_over(listed.entries, is_whole=is_whole)
        if is_whole:
            self._cursor.advance(handled_before=listed.oldest, now_minute=now_minute)
        return listed.sights

    def _judge(
        self,
        entries: Iterable[Entry],
        listed: _Listed,
        *,
        now_minute: int,
        worth: Callable[[PackCandidate], int],
    ) -> bool:
        """Note what is of use among these entries; returns whether all that follow are not due."""
        for entry in entries:
            listed.reached = entry.key
            read = self._layout.read_inbox_entry(entry.key)
            if read is None or entry.key in self._finished:
                continue
            if read.minute > now_minute:
                return True
            if self._is_of_no_use(read):
                self._finished.add(entry.key)
                continue
            sight = self._sight(read, entry)
            listed.sights.append(sight)
            listed.entries.setdefault(read.to.at, set()).add(entry.key)
            # What is urgent is in minutes of its own, which the cursor does not count.
            if read.minute >= _URGENT_END:
                listed.oldest = min(listed.oldest, read.minute)
            listed.found += worth(sight) if sight.priority >= 0 else 0
        return False

    def _take_over(self, entries: dict[PackAt, set[str]], *, is_whole: bool) -> None:
        """What was listed is what there is, but for what was handled since the list began.

        What other looks have listed is remembered, unless this one has seen all or it is too much.
        """
        if not is_whole and len(self._entries) < _ENTRIES_MAX:
            for at, keys in self._entries.items():
                entries.setdefault(at, set()).update(keys)
        self._entries = entries
        for at in self._meanwhile:
            self._finished |= entries.pop(at, set())

    def _sight(self, read: InboxAt, entry: Entry) -> PackCandidate:
        at, nonce, priority, limit = read.to
        twins = self._twins(read) if at.submitted_ms is None else ()
        pointer = PointerCandidate(
            entry.key, nonce, entry.modified, priority, limit, is_entry=True, twins=twins
        )
        return PackCandidate(at, None, pointer=pointer)

    def _twins(self, read: InboxAt) -> tuple[str, ...]:
        """Where the pointer of a pack with a key may be: whether it has a delay, no key tells."""
        at, nonce, priority, limit = read.to
        ways = [True] * (read.minute >= _URGENT_END) + [False] * (priority != 0)
        return tuple(
            self._layout.pointer(
                at,
                due_ms=read.minute * 60_000,
                nonce=nonce,
                priority=priority,
                limit=limit,
                is_delayed=is_delayed,
            )
            for is_delayed in ways
        )

    def _is_of_no_use(self, read: InboxAt) -> bool:
        """Whether it came too late, or to the wrong worker: its pack is found by scavenging."""
        is_late = _URGENT_END <= read.minute < self._cursor.minute
        return is_late or read.to.at.type not in self._handles


async def delete_all(store: ObjectStore, keys: set[str]) -> None:
    """Delete these keys, a few at once; those that are deleted leave the set."""

    async def delete(key: str) -> None:
        try:
            await store.delete(key)
        except StoreError as error:
            _log.info("failed to delete an inbox entry, retrying later: %s", error)
        else:
            keys.discard(key)

    with labelled("discovery"):
        for some in _cut(sorted(keys)):
            async with asyncio.TaskGroup() as group:
                for key in some:
                    group.create_task(delete(key))


def _cut(keys: list[str]) -> Iterable[list[str]]:
    return (keys[start : start + _AT_ONCE] for start in range(0, len(keys), _AT_ONCE))
