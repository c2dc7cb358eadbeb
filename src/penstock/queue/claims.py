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
- A ledger that is deleted and created again is another one, and says so (`born`). What was read
  beside the one proves nothing beside the other: the pack is read again, and endings for the one
  are refused by the other. So a leftover that a late writer brings back runs nothing.
- A settlement is always a swap (R7). To cancel what nobody has claimed, it is claimed first.
- A conflict is read again, and an ending is refused only for tasks that another claim holds (R9).

What a crash leaves: before the ledger is written, nothing. After it, a claim whose lease ends by
itself. Between the last settlement and the delete of the pack, a settled ledger beside its pack,
which the next who sees it deletes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from penstock.kernel.entropy import Entropy, new_id
from penstock.kernel.errors import (
    NotFound,
    NotOurs,
    StoreError,
    UnreadableObject,
    VersionConflict,
)
from penstock.kernel.wire import decode
from penstock.queue import transitions
from penstock.queue.endings import Ending, GivenBack, Stopped
from penstock.queue.layout import PackAt, QueueLayout
from penstock.queue.ledger import Ledger, Status, fresh
from penstock.queue.pack import Pack
from penstock.queue.transitions import Claim
from penstock.store.base import ObjectStore, Version
from penstock.store.cell import Cell

RESEND_SECONDS: Final = 300.0
"""W: no submit is sent again later than this after its first send, on the store's clock."""

_LOOKS_MAX: Final = 10


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


@dataclass(frozen=True, slots=True)
class Extended:
    """The claims that are still held, with the new end of each, and the places asked to stop."""

    expires_ms: Mapping[str, int]
    asked_to_stop: frozenset[int]


@dataclass(frozen=True, slots=True)
class _Checked:
    """A pack that was there beside the ledger of this birth."""

    born: str
    pack: Pack
    version: Version


class PackInHand:
    """A pack and its ledger, in the hands of one process."""

    def __init__(
        self, store: ObjectStore, layout: QueueLayout, at: PackAt, *, entropy: Entropy
    ) -> None:
        self.at = at
        self._store = store
        self._entropy = entropy
        self._key = layout.pack(at)
        self._ledger = Cell(store, layout.ledger(at), Ledger, entropy=entropy)
        self._checked: _Checked | None = None

    async def claim(self, wanted: Claim, seen: Seen) -> Claimed | None:
        """Claim tasks of this pack. None: somebody was faster, it is settled, void or not due."""
        if _is_void(self.at.submitted_ms, seen.modified):
            await self._delete_pack(seen.version)
            return None
        if self.at.due_minute is not None and not await self._is_due():
            return None
        if seen.has_ledger:
            ledger = await self._ledger.read()
            if ledger is not None and not await self._is_worth_a_claim(ledger, wanted):
                return None
        else:
            self._ledger.assume_absent()
        ledger = await self._take(wanted, seen.version)
        attempts = _held_by(wanted.id, ledger)
        if ledger is None or not attempts:
            return None
        checked = await self._checked_claim(ledger, wanted)
        if checked is None:
            return None
        return Claimed(checked.pack, attempts, ledger.leases[wanted.id].expires_ms)

    async def _checked_claim(self, ledger: Ledger, wanted: Claim) -> _Checked | None:
        """The pack of a claim that is written; without one the claim is taken back (R1)."""
        checked = self._checked
        if checked is not None and checked.born == ledger.born:
            return checked
        try:
            checked = await self._check(ledger)
        except UnreadableObject:
            # A later release may read it: the attempt does not count, and others may have it.
            endings = {place: (wanted.id, GivenBack()) for place in _held_by(wanted.id, ledger)}
            await self._record(ledger.born, endings, ())
            raise
        if checked is None:
            with suppress(VersionConflict):
                await self._ledger.remove()
        return checked

    async def extend(self, claims: Iterable[str], *, lease_ms: int) -> Extended:
        """Move the ends of these leases, late or not, unless others have the tasks by now."""
        names = frozenset(claims)
        now = await self._store.now()
        born = self._born()

        def change(present: Ledger | None) -> Ledger | None:
            if present is None or present.born != born:
                return None
            return transitions.extend(present, names, lease_ms=lease_ms, now=now)[0]

        ledger = await self._ledger.update(change)
        if ledger is None or ledger.born != born:
            return Extended({}, frozenset())
        asked = {
            place
            for place, task in enumerate(ledger.tasks)
            if task.status is Status.CLAIMED and task.claim in names and task.cancel
        }
        ends = {
            name: ledger.leases[name].expires_ms for name in sorted(names & ledger.leases.keys())
        }
        return Extended(ends, frozenset(asked))

    async def settle(self, endings: Mapping[int, tuple[str, Ending]]) -> frozenset[int]:
        """Record how attempts ended: place → (claim, ending). Returns the places refused.

        To send an ending again is no harm: what this claim has settled is not refused.
        """
        assert self._checked is not None, "only what was claimed can be settled"
        return await self._record(self._checked.born, endings, self._checked.pack.inputs)

    async def cancel(self, places: frozenset[int], claim: Claim) -> Ledger:
        """Cancel what has not started, ask the rest to stop. Raises `NotFound` for no such pack."""
        for _ in range(_LOOKS_MAX):
            ledger = await self._ledger.read()
            if ledger is None:
                ledger = await self._cancel_unclaimed(places, claim)
            elif ledger.settled:
                await self._tidy(ledger)
                return ledger
            else:
                ledger = await self._cancel_beside(ledger, places, claim)
            if ledger is not None:
                return ledger
        raise VersionConflict(f"Pack {self.at.pack!r} changes too fast.", key=self._key)

    async def _cancel_unclaimed(self, places: frozenset[int], claim: Claim) -> Ledger | None:
        """Hold what is to be cancelled, so that nobody starts it, then settle it by a swap (R7)."""
        head = await self._store.head(self._key)
        seen = Seen(head.version, head.modified, has_ledger=False)
        claimed = await self.claim(replace(claim, places=places), seen)
        if claimed is None:
            return None
        await self.settle({place: (claim.id, Stopped()) for place in claimed.attempts})
        return await self._ledger.read()

    async def _cancel_beside(
        self, ledger: Ledger, places: frozenset[int], claim: Claim
    ) -> Ledger | None:
        checked = await self._check(ledger)
        if checked is None:
            return None
        now = await self._store.now()

        def change(present: Ledger | None) -> Ledger | None:
            if present is None or present.born != checked.born:
                return None
            return transitions.cancel(
                present, places, who=claim.holder, now=now, inputs=checked.pack.inputs
            )

        cancelled = await self._ledger.update(change)
        if cancelled is None or cancelled.born != checked.born:
            return None
        if cancelled.settled:
            await self._delete_pack(checked.version)
        return cancelled

    async def _is_worth_a_claim(self, ledger: Ledger, wanted: Claim) -> bool:
        """Tidy what is settled, void or over; whether anything may still be claimed."""
        if ledger.settled:
            await self._tidy(ledger)
            return False
        checked = await self._check(ledger)
        if checked is None:
            return False
        now = await self._store.now()
        expired = transitions.expire(ledger, now)
        if not transitions.over(expired, attempts_max=wanted.attempts_max):
            return True

        def change(present: Ledger | None) -> Ledger | None:
            if present is None or present.born != checked.born:
                return None
            return transitions.close(
                present,
                attempts_max=wanted.attempts_max,
                who=wanted.holder,
                now=now,
                inputs=checked.pack.inputs,
            )

        closed = await self._ledger.update(change)
        if closed is None or closed.born != checked.born:
            return False
        if closed.settled:
            await self._delete_pack(checked.version)
        return not closed.settled

    async def _take(self, wanted: Claim, pack_version: Version) -> Ledger | None:
        now = await self._store.now()
        new = fresh(
            pack_version=pack_version,
            born=new_id(self._entropy, characters=12),
            count=self.at.count,
        )

        def change(present: Ledger | None) -> Ledger | None:
            ledger = present or new
            if ledger.pack_version != pack_version:
                return None
            after, taken = transitions.claim(ledger, wanted, now)
            return after if taken or present is not None else None

        return await self._ledger.update(change)

    async def _record(
        self,
        born: str,
        endings: Mapping[int, tuple[str, Ending]],
        inputs: Sequence[msgspec.Raw],
    ) -> frozenset[int]:
        now = await self._store.now()
        refused = frozenset(endings)

        def change(present: Ledger | None) -> Ledger | None:
            nonlocal refused
            if present is None or present.born != born:
                refused = frozenset(endings)
                return None
            after, refused = transitions.settle(present, endings, now=now, inputs=inputs)
            return after

        ledger = await self._ledger.update(change)
        if ledger is not None and ledger.born == born and ledger.settled:
            await self._tidy(ledger)
        return refused

    async def _tidy(self, ledger: Ledger) -> None:
        """Whoever sees a settled ledger beside its pack deletes the pack (R3)."""
        await self._delete_pack(Version(ledger.pack_version))

    async def _check(self, ledger: Ledger) -> _Checked | None:
        """Read the pack that the ledger is of. None if there is none; what is void is deleted."""
        try:
            found = await self._store.get(self._key)
        except NotFound:
            return None
        assert found is not None
        pack = decode(Pack, found.body, where=self._key)
        if len(pack.inputs) != self.at.count or pack.type != self.at.type:
            raise NotOurs(f"{self._key} does not hold what its name says.")
        if _is_void(pack.submitted_ms, found.modified):
            await self._delete_pack(found.version)
            return None
        if found.version != ledger.pack_version:
            with suppress(VersionConflict):
                await self._ledger.remove()
            return None
        self._checked = _Checked(ledger.born, pack, found.version)
        return self._checked

    async def _is_due(self) -> bool:
        """Whether the moment has come that a delayed pack names."""
        try:
            found = await self._store.get(self._key)
        except NotFound:
            return False
        assert found is not None
        pack = decode(Pack, found.body, where=self._key)
        return pack.due_ms <= (await self._store.now()).earliest * 1000

    def _born(self) -> str:
        assert self._checked is not None, "only what was claimed can be extended"
        return self._checked.born

    async def _delete_pack(self, version: Version) -> None:
        # Whoever comes next deletes it if we cannot: what was recorded stands all the same.
        with suppress(StoreError):
            await self._store.delete(self._key, version=version)


def _held_by(claim: str, ledger: Ledger | None) -> dict[int, int]:
    """The tasks that a claim holds, with the number of each attempt."""
    return {
        place: task.attempt
        for place, task in enumerate(ledger.tasks if ledger else ())
        if task.status is Status.CLAIMED and task.claim == claim
    }


def _is_void(submitted_ms: int | None, modified: float) -> bool:
    return submitted_ms is not None and modified * 1000 >= submitted_ms + RESEND_SECONDS * 1000
