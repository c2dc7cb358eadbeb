"""One process's hands on one pack: claim, extend, settle and cancel, against the store.

The pack never changes. The first claim creates the ledger; everything after it swaps the ledger.
Both are updates of a `Cell`, which settles lost answers by the write ids in it. What is decided is
decided by `transitions`; what is kept here is the order of reads, writes and deletes:

- A claim is written before the pack is read, and the pack is read before a handler starts (R1). So
  an attempt is durable before it runs. If the pack is gone by then, all of it was settled and
  archived: whoever created the ledger just now deletes it again and runs nothing.
- A pack that the store dates `RESEND_SECONDS` or more after its first submit is void (R2): it was
  sent again, or came late, when nobody remembers any more that it was done. It is deleted, not run.
- Whoever sees a settled ledger beside its pack deletes the pack (R3).
- Every delete names the version that it means (R4).
- A ledger names the version of its pack. Beside another pack it is void and deleted (R5). Settling
  what is over, used up or cancelled, reads the pack first (R5).
- A settlement is always a swap (R7). To cancel what nobody has claimed, it is claimed first.
- A conflict is read again, and an ending is refused only for tasks that another claim holds (R9).

What a crash leaves: before the ledger is written, nothing. After it, a claim whose lease ends by
itself. Between the last settlement and the delete of the pack, a settled ledger beside its pack,
which the next who sees it deletes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from penstock.kernel.entropy import Entropy
from penstock.kernel.errors import NotFound, VersionConflict
from penstock.kernel.wire import decode
from penstock.queue import transitions
from penstock.queue.layout import PackAt, QueueLayout
from penstock.queue.ledger import Ledger, fresh
from penstock.queue.pack import Pack
from penstock.queue.transitions import Claim, Ending, Stopped
from penstock.store.base import ObjectStore, Version
from penstock.store.cell import Cell

RESEND_SECONDS: Final = 300.0
"""W: no submit is sent again later than this after its first send, on the store's clock."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a list showed of a pack."""

    version: Version
    modified: float
    has_ledger: bool


@dataclass(frozen=True, slots=True)
class Claimed:
    """What a claim gave: the pack, the places taken with the number of each attempt, the lease.

    A handler may start only while the store's time is surely before `expires_ms`.
    """

    pack: Pack
    attempts: Mapping[int, int]
    expires_ms: int


class PackInHand:
    """A pack and its ledger, in the hands of one process."""

    def __init__(
        self, store: ObjectStore, layout: QueueLayout, at: PackAt, *, entropy: Entropy
    ) -> None:
        self.at = at
        self._store = store
        self._key = layout.pack(at)
        self._ledger = Cell(store, layout.ledger(at), Ledger, entropy=entropy)
        self._pack: Pack | None = None
        self._version: Version | None = None
        self._created = False
        """Whether the last claim found no ledger and made one."""

    async def claim(self, wanted: Claim, seen: Seen) -> Claimed | None:
        """Claim tasks of this pack. None: somebody was faster, it is settled, or it is void."""
        if _is_void(self.at.submitted_ms, seen.modified):
            await self._delete_pack(seen.version)
            return None
        if seen.has_ledger:
            ledger = await self._ledger.read()
            if ledger is not None and not await self._is_worth_a_claim(ledger, wanted):
                return None
        else:
            self._ledger.assume_absent()
        ledger = await self._take(wanted, seen.version)
        if ledger is None or ledger.pack_version != seen.version:
            return None
        attempts = {
            place: task.attempt
            for place, task in enumerate(ledger.tasks)
            if task.claim == wanted.id
        }
        if not attempts:
            return None
        if self._created:
            # What was read before there was a ledger says nothing: all may be over since (R1).
            self._pack = None
        if self._pack is None and not await self._read_pack(ledger):
            with suppress(VersionConflict):
                await self._ledger.remove()
            return None
        assert self._pack is not None
        return Claimed(self._pack, attempts, ledger.leases[wanted.id].expires_ms)

    async def extend(
        self, claims: Iterable[str], *, lease_ms: int
    ) -> tuple[frozenset[str], frozenset[int]]:
        """Move the ends of these leases: the claims still held, and the places asked to stop."""
        names = frozenset(claims)
        now = await self._store.now()

        def change(present: Ledger | None) -> Ledger | None:
            if present is None:
                return None
            return transitions.extend(present, names, lease_ms=lease_ms, now=now)[0]

        ledger = await self._ledger.update(change)
        if ledger is None:
            return frozenset(), frozenset()
        asked = {
            place for place, task in enumerate(ledger.tasks) if task.claim in names and task.cancel
        }
        return names & ledger.leases.keys(), frozenset(asked)

    async def settle(self, endings: Mapping[int, tuple[str, Ending]]) -> frozenset[int]:
        """Record how attempts ended: place → (claim, ending). Returns the places refused."""
        assert self._pack is not None, "only what was claimed can be settled"
        inputs = self._pack.inputs
        now = await self._store.now()
        before: dict[int, bool] = {}

        def change(present: Ledger | None) -> Ledger | None:
            before.clear()
            if present is None:
                return None
            after, refused = transitions.settle(present, endings, now=now, inputs=inputs)
            before.update({place: place not in refused for place in endings})
            return after

        ledger = await self._ledger.update(change)
        if ledger is not None and ledger.settled:
            await self._delete_pack(self._version)
        return frozenset(place for place in endings if not before.get(place))

    async def cancel(self, places: frozenset[int], claim: Claim) -> Ledger:
        """Cancel what has not started, ask the rest to stop. Raises `NotFound` for no such pack."""
        ledger = await self._ledger.read()
        if ledger is None:
            ledger = await self._cancel_unclaimed(places, claim)
        if ledger.settled:
            return ledger
        if not await self._read_pack(ledger):
            raise NotFound(f"There is no pack {self.at.pack!r}.", key=self._key)
        assert self._pack is not None
        inputs, now = self._pack.inputs, await self._store.now()

        def change(present: Ledger | None) -> Ledger | None:
            if present is None:
                return None
            return transitions.cancel(present, places, who=claim.holder, now=now, inputs=inputs)

        cancelled = await self._ledger.update(change)
        if cancelled is None:
            raise NotFound(f"There is no ledger of pack {self.at.pack!r}.", key=self._key)
        if cancelled.settled:
            await self._delete_pack(self._version)
        return cancelled

    async def _cancel_unclaimed(self, places: frozenset[int], claim: Claim) -> Ledger:
        """Hold what is to be cancelled, so that nobody starts it, then settle it by a swap."""
        head = await self._store.head(self._key)
        seen = Seen(head.version, head.modified, has_ledger=False)
        claimed = await self.claim(claim, seen)
        if claimed is not None:
            held: dict[int, tuple[str, Ending]] = {
                place: (claim.id, Stopped()) for place in claimed.attempts if place in places
            }
            await self.settle(held)
        ledger = await self._ledger.read()
        if ledger is None:
            raise NotFound(f"There is no pack {self.at.pack!r}.", key=self._key)
        return ledger

    async def _is_worth_a_claim(self, ledger: Ledger, wanted: Claim) -> bool:
        """Tidy what is settled, void or over; whether anything may still be claimed."""
        if not await self._read_pack(ledger):
            return False
        if ledger.settled:
            await self._delete_pack(self._version)
            return False
        now = await self._store.now()
        expired = transitions.expire(ledger, now)
        if transitions.over(expired, attempts_max=wanted.attempts_max):
            closed = await self._close(wanted)
            if closed is None or closed.settled:
                await self._delete_pack(self._version)
                return False
        return True

    async def _close(self, wanted: Claim) -> Ledger | None:
        assert self._pack is not None
        inputs, now = self._pack.inputs, await self._store.now()

        def change(present: Ledger | None) -> Ledger | None:
            if present is None:
                return None
            return transitions.close(
                present,
                attempts_max=wanted.attempts_max,
                who=wanted.holder,
                now=now,
                inputs=inputs,
            )

        return await self._ledger.update(change)

    async def _take(self, wanted: Claim, pack_version: Version) -> Ledger | None:
        now = await self._store.now()

        def change(present: Ledger | None) -> Ledger | None:
            ledger = present or fresh(pack_version=pack_version, count=self.at.count)
            if ledger.pack_version != pack_version:
                return present
            after, taken = transitions.claim(ledger, wanted, now)
            self._created = present is None and bool(taken)
            return after if taken or present is not None else None

        return await self._ledger.update(change)

    async def _read_pack(self, ledger: Ledger) -> bool:
        """Read the pack that the ledger is of. False if there is none; what is void is deleted."""
        try:
            found = await self._store.get(self._key)
        except NotFound:
            return False
        assert found is not None
        pack = decode(Pack, found.body, where=self._key)
        if _is_void(pack.submitted_ms, found.modified):
            await self._delete_pack(found.version)
            return False
        if found.version != ledger.pack_version:
            with suppress(VersionConflict):
                await self._ledger.remove()
            return False
        self._pack, self._version = pack, found.version
        return True

    async def _delete_pack(self, version: Version | None) -> None:
        assert version is not None
        with suppress(VersionConflict):
            await self._store.delete(self._key, version=version)


def _is_void(submitted_ms: int | None, modified: float) -> bool:
    return submitted_ms is not None and modified * 1000 >= submitted_ms + RESEND_SECONDS * 1000
