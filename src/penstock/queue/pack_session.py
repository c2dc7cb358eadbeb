"""One process's session on one pack: claim, then extend, settle and claim more, in one swap.

The pack never changes. The first claim creates the ledger; everything after it swaps the ledger
(`LedgerSwap`: progress, renewals, outcomes and a claim together, applied again after every
conflict). Both are updates of a `Cell`, which resolves lost answers by the write ids in it
(QUEUE-20). `penstock.queue.transitions` decides; this module keeps the order of reads, writes and
deletes (`docs/queue-protocol.md` has all rules):

- A claim is written before the pack is read, and the pack is read before a handler starts
  (QUEUE-1). So an attempt is durable before it runs. If the pack is gone by then, all of it was
  settled and archived: whoever created the ledger just now deletes it again and runs nothing.
- A pack that the store dates `RESEND_SECONDS` or more after its first submit is void (QUEUE-2):
  it was sent again, or came late, when its completion is forgotten. It is deleted, not run.
- A reader of a settled ledger beside its pack deletes the pack (QUEUE-3).
- Every delete names the version that it means (QUEUE-4).
- A ledger names the version of its pack. Beside another pack it is void and deleted. Settling
  what is over, used up or cancelled, reads the pack first (QUEUE-5).
- Only a key is used again. A pack beside the settled ledger of an earlier one is a duplicate, and
  deleted, if it was first sent before that ledger's end; otherwise it is new, and the ledger is
  archived before the pack runs (QUEUE-6).
- A ledger that is deleted and created again is another one, and says so (`born`). What was read
  beside the one proves nothing beside the other: the pack is read again, and endings for the one
  are refused by the other (QUEUE-14). So a leftover that a late writer brings back runs nothing.
- A ledger that the network creates once more, long after it was archived, is the same to the
  byte: a ghost. Nobody can settle, and so archive, what a live lease of ours holds; once our last
  lease may be over, the pack must be there for a settlement to count, and for what was claimed
  with it to start (QUEUE-15).
- A settlement is always a swap (QUEUE-7); `canceller` claims before it cancels.
- A conflict is read again, and an ending is refused only for tasks that another claim holds
  (QUEUE-9).

What a crash leaves: before the ledger is written, nothing. After it, a claim whose lease ends by
itself. Between the last settlement and the delete of the pack, a settled ledger beside its pack,
which the next reader deletes. Used by `penstock.queue.execution` and `penstock.queue.canceller`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Final

from penstock.kernel.entropy import Entropy, new_id
from penstock.kernel.errors import UnreadableObject, VersionConflict
from penstock.queue import transitions
from penstock.queue.archive import keep
from penstock.queue.attempt_outcomes import AttemptOutcome, GivenBack
from penstock.queue.ids import PackAt
from penstock.queue.incarnation import NOBODY, Incarnation
from penstock.queue.layout import QueueLayout
from penstock.queue.ledger import (
    Ledger,
    LedgerProgress,
    QueueTaskStatus,
    as_of,
    check_ledger,
    fresh,
    may_touch,
    metadata_of,
)
from penstock.queue.pack import Pack, PackObject, is_void
from penstock.queue.transitions import LedgerClaim, held_by
from penstock.store.base import ObjectStore, Version
from penstock.store.cell import Cell
from penstock.store.metered import labelled
from penstock.store.time import Interval


@dataclass(frozen=True, slots=True)
class ListedPack:
    """What a list showed of a pack."""

    version: Version
    modified: float
    has_ledger: bool
    submitted_ms: int = 0
    """Of a pack with a key, which was read: when it was first sent."""


@dataclass(frozen=True, slots=True)
class ClaimResult:
    """What a claim gave: the pack, the places taken with the number of each attempt, the lease.

    A handler may start only while the store's time is surely before `expires_ms`.
    """

    pack: Pack
    attempts: Mapping[int, int]
    expires_ms: int
    given_back: Mapping[int, int]
    """How many attempts of each place do not count."""


@dataclass(frozen=True, slots=True)
class SwapResult:
    """What a swap did."""

    refused: frozenset[int]
    """The endings that did not count, because another claim, or none, holds the task by now."""
    expires_ms: Mapping[str, int]
    """The claims that are still held, with the end of each lease."""
    asked_to_stop: frozenset[int]
    more: ClaimResult | None
    """What was claimed with the same write."""


def claimed(pack: Pack, claim: str, ledger: Ledger) -> ClaimResult | None:
    """What a claim holds in a ledger; None if nothing."""
    held = held_by(claim, ledger)
    if not held:
        return None
    given_back = {place: ledger.tasks[place].given_back for place in held}
    return ClaimResult(pack, held, ledger.leases[claim].expires_ms, given_back)


Endings = Mapping[int, tuple[str, AttemptOutcome]]
"""Place → the claim that held it, and how its attempt ended."""
Reports = Mapping[int, tuple[str, LedgerProgress]]
"""Place → the claim that holds it, and what its attempt says of itself."""

NO_REPORTS: Final[Reports] = MappingProxyType({})


@dataclass(slots=True, kw_only=True)
class LedgerSwap:
    """One swap. Called with the present ledger, it gives the next one."""

    born: str
    pack: Pack | None
    now: Interval
    endings: Endings
    claims: frozenset[str] = frozenset()
    lease_ms: int = 0
    touch_ms: int = 0
    more: LedgerClaim | None = None
    reports: Reports = field(default_factory=dict)
    refused: frozenset[int] = frozenset()
    """The endings that did not count, by the ledger that it was applied to last."""
    closed: dict[int, QueueTaskStatus] = field(default_factory=dict)
    """What it settled without an attempt, likewise."""

    def __post_init__(self) -> None:
        self.refused = frozenset(self.endings)

    @property
    def ours(self) -> frozenset[str]:
        """Late or not, what is ours is not to be expired by our own write."""
        ended = {claim for claim, _ in self.endings.values()}
        return self.claims | ended | ({self.more.id} if self.more else set())

    def __call__(self, present: Ledger | None) -> Ledger | None:
        if present is None or present.born != self.born:
            self.refused = frozenset(self.endings)
            return None
        pack, now = self.pack, self.now
        after = transitions.tell(present, self.reports)
        if self.claims or self.more:
            after, _ = transitions.extend(
                after, self.ours, lease_ms=self.lease_ms, now=now, touch_ms=self.touch_ms
            )
        after, self.refused = transitions.settle(
            after,
            self.endings,
            now=now,
            inputs=pack.inputs if pack else (),
            expires_ms=pack.expires_ms if pack else 0,
        )
        self.closed = transitions.closed_by(present, after, self.endings)
        if self.more is not None:
            after, _ = transitions.claim(after, self.more, now, ours=self.ours)
        return transitions.recorded(after, pack, now) if pack else after


NEVER_MS: Final = 2**62


@dataclass(frozen=True, slots=True)
class _Checked:
    """A pack that was there beside the ledger of this birth."""

    born: str
    pack: Pack
    version: Version


class PackSession:
    """A pack and its ledger, in the hands of one process."""

    def __init__(
        self,
        store: ObjectStore,
        layout: QueueLayout,
        at: PackAt,
        *,
        entropy: Entropy,
        incarnation: Incarnation = NOBODY,
    ) -> None:
        self.at = at
        self._store = store
        self._layout = self.layout = layout
        self._entropy = entropy
        self._pack = PackObject(store, layout.pack(at), at)
        self._ledger = Cell(
            store,
            layout.ledger(at),
            Ledger,
            entropy=entropy,
            check=partial(check_ledger, at),
            dated=lambda ledger, modified: incarnation.seen(as_of(ledger, modified)),
            metadata=metadata_of,
        )
        self._touch_ms = 0
        self._checked: _Checked | None = None
        self._live_ms = 0
        """Until when a lease of ours is known to last: so long nobody can settle our tasks."""
        self.next_due_ms = 0
        """After a claim that gave nothing: when it is worth trying again."""
        self.is_sent = False
        """Whether a claim was sent, and so may be written although its answer is lost."""
        self.closed: dict[int, QueueTaskStatus] = {}
        """What this hand has settled without an attempt: used up, or expired."""

    @property
    def is_gone(self) -> bool:
        """After a claim that gave nothing: there is no pack."""
        return self._pack.is_gone

    @property
    def ledger(self) -> tuple[Ledger | None, Version | None]:
        """The ledger as last read or written, and its version."""
        last = self._ledger.last
        return (last.state, last.version) if last else (None, None)

    @property
    def record(self) -> tuple[Ledger, Version] | None:
        """The ledger as last read or written, if everything in it is settled."""
        ledger, version = self.ledger
        return (ledger, version) if ledger and version and ledger.settled else None

    def claimable(
        self, *, attempts_max: int, held: Collection[int] = (), slots: int = 2**31
    ) -> int:
        """How many tasks one who holds these places, and has so many free slots, may claim.

        By the ledger as it was last read or written.
        """
        ledger, now = self.ledger[0], self._store.clock.estimate()
        if ledger is None or now is None:
            return 0
        return transitions.claimable(
            ledger, attempts_max=attempts_max, now=now, held=held, slots=slots
        )

    def needs_exclusive(self, *, attempts_max: int) -> bool:
        """Whether it has a task that only one who holds nothing else may claim, likewise."""
        ledger, now = self.ledger[0], self._store.clock.estimate()
        if ledger is None or now is None or ledger.settled:
            return False
        return transitions.has_exclusive(ledger, attempts_max=attempts_max, now=now)

    def seconds_to_retry(self) -> float | None:
        """How long until the next task of it that is not due yet may start, likewise."""
        ledger, now = self.ledger[0], self._store.clock.estimate()
        due_ms = transitions.next_retry_ms(ledger, now) if ledger and now else None
        return due_ms / 1000 - now.earliest if due_ms is not None and now else None

    async def claim(self, wanted: LedgerClaim, seen: ListedPack | None) -> ClaimResult | None:
        """Claim tasks of this pack. None: somebody was faster, it is settled, void or not due.

        Without `seen`, the pack is looked for first.
        """
        with labelled("claim"):
            if seen is None:
                seen = await self._look()
            if seen is None or not await self._may_be_claimed(wanted, seen):
                return None
            return await self._claim(wanted, seen.version)

    async def _claim(self, wanted: LedgerClaim, pack_version: Version) -> ClaimResult | None:
        self._touch_ms = wanted.touch_ms
        ledger = await self._take(wanted, pack_version)
        if ledger is None or not transitions.held_by(wanted.id, ledger):
            self._note_due(ledger)
            return None
        checked = await self._checked_claim(ledger, wanted)
        if checked is None:
            return None
        self._live_ms = ledger.leases[wanted.id].expires_ms
        return claimed(checked.pack, wanted.id, ledger)

    async def _look(self, *, only_due: bool = True) -> ListedPack | None:
        """The pack of a key, which no list has shown."""
        found = await self._pack.read()
        if found is None or (only_due and not await self._is_due(found.pack)):
            return None
        submitted_ms = found.pack.submitted_ms
        return ListedPack(found.version, found.modified, has_ledger=True, submitted_ms=submitted_ms)

    async def _may_be_claimed(self, wanted: LedgerClaim, seen: ListedPack) -> bool:
        if is_void(self.at.submitted_ms, seen.modified):
            await self._pack.delete(seen.version)
            return False
        if self.at.due_minute is not None and not await self._is_due(None):
            return False
        if not seen.has_ledger:
            self._ledger.assume_absent()
            return True
        ledger = await self._ledger.read()
        if ledger is None:
            return True
        if ledger.settled:
            return await self._makes_room(ledger, seen)
        return await self._is_worth_a_claim(ledger, wanted)

    async def _makes_room(self, ledger: Ledger, seen: ListedPack) -> bool:
        """Whether the pack beside a settled ledger may run (QUEUE-3, QUEUE-6)."""
        is_duplicate = ledger.key is None or seen.submitted_ms < ledger.key_ends_ms
        if is_duplicate or ledger.pack_version == seen.version:
            await self._pack.delete(seen.version)
            return False
        await keep(self._store, self._layout, [(self.at, ledger)], entropy=self._entropy)
        with suppress(VersionConflict):
            await self._ledger.remove()
        return await self._ledger.read() is None

    async def _checked_claim(self, ledger: Ledger, wanted: LedgerClaim) -> _Checked | None:
        """The pack of a claim that is written; without one the claim is taken back (QUEUE-1)."""
        try:
            checked = await self._check(ledger)
        except UnreadableObject:
            # A later release may read it: the attempt does not count, and others may have it.
            held = transitions.held_by(wanted.id, ledger)
            endings = {p: (wanted.id, GivenBack()) for p in held if not ledger.tasks[p].cancel}
            now = await self._store.now()
            await self._swap(LedgerSwap(born=ledger.born, pack=None, now=now, endings=endings))
            raise
        if checked is None:
            with suppress(VersionConflict):
                await self._ledger.remove()
        return checked

    async def extend(self, claims: Iterable[str], *, lease_ms: int) -> SwapResult:
        """Move the ends of these leases, late or not, unless others have the tasks by now."""
        return await self.swap({}, claims=claims, lease_ms=lease_ms)

    async def touch(self, claims: frozenset[str], *, lease_ms: int) -> SwapResult | None:
        """Move the ends of these leases without a write; None if there is none but a swap.

        Not for tasks that are to start: see `ledger`.
        """
        ledger, _ = self.ledger
        if ledger is None or not may_touch(ledger, claims):
            return None
        with labelled("heartbeat"):
            ends_ms = int((await self._store.now()).earliest * 1000) + lease_ms
            if not await self._ledger.touch(metadata_of(ledger, expires_ms=ends_ms)):
                return None
        stopping = transitions.asked_to_stop(claims, ledger)
        return SwapResult(frozenset(), dict.fromkeys(claims, ends_ms), stopping, None)

    async def settle(self, endings: Endings) -> frozenset[int]:
        """Record how attempts ended: place → (claim, ending). Returns the places refused."""
        return (await self.swap(endings)).refused

    async def swap(
        self,
        endings: Endings,
        *,
        claims: Iterable[str] = (),
        lease_ms: int = 0,
        more: LedgerClaim | None = None,
        reports: Reports = NO_REPORTS,
    ) -> SwapResult:
        """Record endings, move the ends of these claims' leases, and claim more, in one write.

        To send an ending again is no harm: what this claim has settled is not refused.
        """
        assert self._checked is not None, "only what was claimed can be settled"
        checked = self._checked
        with labelled("settle" if endings else "heartbeat"):
            is_live = (await self._store.now()).latest * 1000 < self._live_ms
            if not is_live and not await self._is_there(checked.version):
                return SwapResult(await self._refused(checked.born, endings), {}, frozenset(), None)
            swapped = await self._swap(
                LedgerSwap(
                    born=checked.born,
                    pack=checked.pack,
                    now=await self._store.now(),
                    endings=endings,
                    claims=frozenset(claims),
                    lease_ms=lease_ms,
                    touch_ms=self._touch_ms,
                    more=more,
                    reports=reports,
                )
            )
            if swapped.more and not is_live and not await self._is_there(checked.version):
                return replace(swapped, more=None)
            return swapped

    async def _is_there(self, version: Version) -> bool:
        """Whether the pack is there: then the ledger beside it is no ghost of an archived one."""
        submitted_ms = self._checked.pack.submitted_ms if self._checked else None
        return await self._pack.is_there(version, submitted_ms)

    async def _refused(self, born: str, endings: Endings) -> frozenset[int]:
        """Of a pack that is gone: the endings that are not in its record."""
        ledger = await self._ledger.read()
        if ledger is None or ledger.born != born or not ledger.settled:
            return frozenset(endings)
        return frozenset(p for p, (claim, _) in endings.items() if ledger.tasks[p].claim != claim)

    async def _swap(self, swap: LedgerSwap) -> SwapResult:
        ledger = await self._ledger.update(swap)
        if ledger is None or ledger.born != swap.born:
            return SwapResult(swap.refused, {}, frozenset(), None)
        self.closed |= swap.closed
        if ledger.settled:
            await self._tidy(ledger)
        claims, more = swap.claims, swap.more
        ends = {name: ledger.leases[name].expires_ms for name in claims & ledger.leases.keys()}
        self._live_ms = max(
            (ledger.leases[n].expires_ms for n in swap.ours & ledger.leases.keys()), default=0
        )
        taken = claimed(swap.pack, more.id, ledger) if more and swap.pack else None
        return SwapResult(swap.refused, ends, transitions.asked_to_stop(claims, ledger), taken)

    async def _is_worth_a_claim(self, ledger: Ledger, wanted: LedgerClaim) -> bool:
        """Settle what is over; whether anything may be claimed now."""
        if transitions.held_by(wanted.id, ledger):
            return True  # The answer to this very claim was lost.
        now = await self._store.now()
        expired = transitions.expire(ledger, now)
        due_ms = transitions.next_due_ms(expired)
        if due_ms is not None and due_ms > now.earliest * 1000:
            self._note_due(expired)
            return False
        checked = await self._check(ledger)
        if checked is None:
            return False
        expires_ms = checked.pack.expires_ms
        is_over = transitions.over(expired, attempts_max=wanted.attempts_max)
        if not is_over and not transitions.has_expired(expires_ms, now):
            return True
        settled: dict[int, QueueTaskStatus] = {}

        def change(present: Ledger | None) -> Ledger | None:
            nonlocal settled
            if present is None or present.born != checked.born:
                return None
            closed = transitions.close(
                present,
                attempts_max=wanted.attempts_max,
                who=wanted.holder,
                now=now,
                inputs=checked.pack.inputs,
                expires_ms=expires_ms,
            )
            settled = transitions.closed_by(present, closed, {})
            return transitions.recorded(closed, checked.pack, now)

        closed = await self._ledger.update(change)
        if closed is None or closed.born != checked.born:
            return False
        self.closed |= settled
        if closed.settled:
            await self._pack.delete(checked.version)
        return not closed.settled

    async def _take(self, wanted: LedgerClaim, pack_version: Version) -> Ledger | None:
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
            self.is_sent = self.is_sent or bool(taken)
            return after if taken or present is not None else None

        return await self._ledger.update(change)

    async def _tidy(self, ledger: Ledger) -> None:
        """Whoever sees a settled ledger beside its pack deletes the pack (QUEUE-3)."""
        await self._pack.delete(Version(ledger.pack_version))

    async def _check(self, ledger: Ledger) -> _Checked | None:
        """Read the pack that the ledger is of. None if there is none; what is void is deleted."""
        found = await self._pack.read()
        if found is None:
            return None
        if found.version != ledger.pack_version:
            with suppress(VersionConflict):
                await self._ledger.remove()
            return None
        self._checked = _Checked(ledger.born, found.pack, found.version)
        return self._checked

    async def _is_due(self, pack: Pack | None) -> bool:
        """Whether the moment has come that a pack names."""
        if pack is None:
            found = await self._pack.read()
            if found is None:
                return False
            pack = found.pack
        self.next_due_ms = pack.due_ms
        return pack.due_ms <= (await self._store.now()).earliest * 1000

    def _note_due(self, ledger: Ledger | None) -> None:
        due_ms = transitions.next_due_ms(ledger) if ledger else 0
        self.next_due_ms = NEVER_MS if due_ms is None else due_ms
