"""What one worker holds: its registration, and the shards whose leases are known to be its own.

The registration is the truth about the projection; this is the worker's side of it. A shard is
*held* when its lease object was written by this incarnation, and leaves as soon as a reading of
the registration shows it no more: others have taken it. What is in the projection and not held is
*pending*: a take whose outcome is not known. `settle` reads the leases of those.

If the registration turns out to be GONE, missing or unreadable, everything is lost at once and a
new incarnation begins, under a new id. Lost answers are settled by the `Cell`; after a write that
ended unknown the older, shorter lease is trusted. A crash leaves the registration as it is.

Used by `penstock.queue.owning.leases`, one object a worker, by one coroutine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from penstock.kernel.entropy import Entropy, new_id
from penstock.kernel.errors import StoreError, UnreadableObject
from penstock.queue.owning.registry import Reason, Registration, Registry, Role, ShardLease, each
from penstock.store.base import ObjectStore, Version
from penstock.store.cell import Change
from penstock.store.time import Interval

_log = logging.getLogger(__name__)
_NO_SHARDS: Final[Mapping[int, int]] = {}


@dataclass(frozen=True, slots=True)
class Said:
    """What an owner says of itself with each write."""

    offers: tuple[int, ...] = ()
    reason: Reason | None = None
    help_wanted: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Held:
    epoch: int
    version: Version


class Holding:
    """The registration of one worker and what it holds."""

    def __init__(
        self,
        store: ObjectStore,
        registry: Registry,
        *,
        name: str,
        fresh: Registration,
        entropy: Entropy,
        gained: asyncio.Event | None = None,
    ) -> None:
        self._store = store
        self._registry = registry
        self._name = name
        self._fresh = fresh
        self._entropy = entropy
        self.gained = gained or asyncio.Event()
        self.begin()

    def begin(self) -> None:
        """A new incarnation, which holds nothing and has not registered."""
        self.worker = f"{self._name}-{new_id(self._entropy, characters=12)}"
        self._cell = self._registry.cell(self.worker)
        self._cell.assume_absent()
        self.registration: Registration | None = None
        self._held: dict[int, _Held] = {}

    @property
    def is_owner(self) -> bool:
        return self.registration is not None and self.registration.role is Role.OWNER

    @property
    def shards(self) -> frozenset[int]:
        """What is held, whether the lease is live or not."""
        return frozenset(self._held)

    @property
    def projection(self) -> frozenset[int]:
        """What the registration shows: held or pending."""
        return frozenset(self.registration.shards if self.registration else ())

    @property
    def pending(self) -> frozenset[int]:
        return self.projection - self._held.keys()

    @property
    def said(self) -> Said:
        mine = self.registration
        return Said(mine.offers, mine.reason, mine.help_wanted) if mine else Said()

    def epochs(self) -> dict[int, int]:
        """What is held, with epochs; nothing unless the lease has surely not ended. No request."""
        now = self._store.clock.estimate()
        mine = self.registration
        if now is None or mine is None or now.latest * 1000 >= mine.expires_ms:
            return {}
        return {shard: held.epoch for shard, held in self._held.items()}

    def confirm(self, shard: int, version: Version) -> None:
        """The lease of a shard in the projection names this worker."""
        assert self.registration is not None
        self._held[shard] = _Held(self.registration.shards[shard], version)
        self.gained.set()

    async def register(self) -> bool:
        """Create the registration, as a standby's. False: it was lost on the way."""
        # A second try after a lost answer finds the first.
        return self._adopt(await self._update(lambda present: present or self._fresh))

    async def write(
        self,
        said: Said,
        *,
        ttl_seconds: float,
        add: Mapping[int, int] = _NO_SHARDS,
        drop: Collection[int] = (),
    ) -> bool:
        """Renew the lease, with these shards more and those less. False: everything was lost."""
        for shard in drop:
            self._held.pop(shard, None)
        now = await self._store.now()
        expires_ms = int((now.earliest + ttl_seconds) * 1000)

        def change(present: Registration | None) -> Registration | None:
            if present is None or present.role is Role.GONE:
                return None
            kept = {shard: at for shard, at in present.shards.items() if shard not in drop}
            shards = kept | dict(add)
            if not shards and present.role is Role.STANDBY:
                return None
            return msgspec.structs.replace(
                present,
                role=Role.OWNER if shards else Role.STANDBY,
                # A lease is never shortened: an answer may be lost, and the longer one trusted.
                expires_ms=max(present.expires_ms, expires_ms) if shards else 0,
                shards=shards,
                offers=tuple(shard for shard in said.offers if shard in shards),
                reason=said.reason if shards else None,
                help_wanted=said.help_wanted if shards else (),
            )

        return self._adopt(await self._update(change))

    async def refresh(self) -> bool:
        """Let a standby's registration count anew. False: it was lost."""
        if await self._registry.refresh(self.worker):
            return True
        self.begin()
        return False

    async def settle(self) -> frozenset[int]:
        """Find out what has become of pending takes; returns what is not ours."""
        others: set[int] = set()
        for shard, found in (await each(sorted(self.pending), self._registry.lease)).items():
            if isinstance(found, StoreError):
                continue
            if found and found.document and self._is_mine(shard, found.document):
                self.confirm(shard, found.version)
            else:
                others.add(shard)
        return frozenset(others)

    async def verify(self, now: Interval) -> tuple[frozenset[int], frozenset[int]]:
        """Compare the lease objects with what is held.

        Returns what is not ours any more, and what cannot be read: that is kept until it counts
        as expired.
        """
        versions = await self._registry.lease_versions()
        doubtful = [s for s, held in self._held.items() if versions.get(s) != held.version]
        lost: set[int] = set()
        unreadable: set[int] = set()
        for shard, found in (await each(doubtful, self._registry.lease)).items():
            if isinstance(found, StoreError):
                unreadable.add(shard)
            elif found is None:
                lost.add(shard)
            elif found.document is None:
                expired = now.earliest >= self._registry.lease_ends(found)
                (lost if expired else unreadable).add(shard)
            elif not self._is_mine(shard, found.document):
                lost.add(shard)
        return frozenset(lost), frozenset(unreadable)

    def _is_mine(self, shard: int, lease: ShardLease) -> bool:
        projected = self.registration.shards.get(shard) if self.registration else None
        return lease.worker == self.worker and lease.epoch == projected

    async def release(self, *, seconds_max: float) -> None:
        """End this incarnation, so that others can take what it has at once."""
        was_owner, self.registration = self.is_owner, None
        self._held = {}

        def change(present: Registration | None) -> Registration | None:
            return present and msgspec.structs.replace(
                present, role=Role.GONE, offers=(), reason=None
            )

        try:
            async with asyncio.timeout(seconds_max):
                await (self._cell.update(change) if was_owner else self._cell.remove())
        except (StoreError, UnreadableObject, TimeoutError) as error:
            _log.info("worker %s: its registration ends by itself: %s", self.worker, error)

    async def _update(self, change: Change[Registration]) -> Registration | None:
        try:
            return await self._cell.update(change)
        except UnreadableObject:
            return None

    def _adopt(self, state: Registration | None) -> bool:
        """Believe what was written or found; begin anew if that is the end."""
        if state is None or state.role is Role.GONE:
            _log.warning("worker %s: its registration is lost, with all shards", self.worker)
            self.begin()
            return False
        self.registration = state
        self._held = {
            shard: held
            for shard, held in self._held.items()
            if state.shards.get(shard) == held.epoch
        }
        return True
