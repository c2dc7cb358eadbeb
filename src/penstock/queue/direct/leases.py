"""The lease on a worker's name: who may call itself so, and whose inbox it is.

States and moves are in `penstock.queue.direct`. One `WorkerLease` object a name, changed by
compare-and-swap; lost answers are settled by the `Cell`. After a renewal whose outcome is unknown
the older, shorter end is trusted. A crash leaves the lease as it is: it ends by itself.

Held by `penstock.queue.discovery.direct`, one object a worker, by one coroutine at a time.
"""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from typing import ClassVar, Final

import msgspec

from penstock.kernel.entropy import Entropy, new_id
from penstock.kernel.errors import NotFound, UnreadableObject, VersionConflict, WorkerIdConflict
from penstock.kernel.wire import Stamped
from penstock.queue.incarnation import NOBODY, Incarnation
from penstock.queue.layout import QueueLayout
from penstock.store.base import ObjectStore
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


class Held:
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
            " killed can start again when its lease has ended.",
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
