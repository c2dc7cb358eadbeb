"""What a worker learns from a pack that it has tried: when to try again, and what may go.

A settled pack is for the archive, if this worker guards its slot. Any other is remembered with the
time at which it is worth another try. A pointer is removed when the pack that it was written for
is settled, or when its pack can no longer come (R8). A settled pack of a batch gets its mark.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from penstock.queue.access import Access
from penstock.queue.batches.hearing import BatchHearing
from penstock.queue.claims import PackInHand
from penstock.queue.discovery.base import Discovery
from penstock.queue.discovery.scan import Sight
from penstock.queue.monitor import Monitor
from penstock.queue.pack import forgotten_ms
from penstock.queue.places import PackAt
from penstock.queue.running.memory import Memory
from penstock.queue.transitions import next_due_ms

AGAIN_MS: Final = 5_000
_LEFT_MS: Final = 60_000
_POINTER_MS: Final = 30_000


class Learning:
    """Keeps a worker's memory of packs up to date."""

    def __init__(
        self, access: Access, discovery: Discovery, memory: Memory, monitor: Monitor
    ) -> None:
        self._access = access
        self._discovery = discovery
        self._memory = memory
        self._monitor = monitor
        self._batches = BatchHearing(access)

    async def learn(self, sight: Sight, hand: PackInHand, nonce: str) -> None:
        """Remember when a pack is worth another try. `nonce` is the pack's, if some was claimed."""
        now_ms = int(self._access.now().latest * 1000)
        if hand.is_gone or hand.ledger[0] is not None:
            self._discovery.handled(sight.at)
        if hand.record is not None:
            self._memory.forget(sight)
            if not hand.is_gone:
                # It could not be deleted, or not yet: leave it for a while.
                due_ms = now_ms + _LEFT_MS
                self._memory.note(sight, ledger=hand.record[1], due_ms=due_ms, blind=False)
            if self._discovery.guarded():
                self._monitor.remember(sight.at, *hand.record)
        else:
            self._note(sight, hand, nonce, now_ms)
        await self._mind_pointer(sight, hand, nonce)
        if hand.record is not None:
            await self._batches.settled(sight.at, hand.record[0])

    def _note(self, sight: Sight, hand: PackInHand, nonce: str, now_ms: int) -> None:
        ledger, version = hand.ledger
        due_ms = hand.next_due_ms if ledger is None else next_due_ms(ledger) or 0
        if due_ms <= now_ms and hand.is_gone:
            return
        seen = sight.seen and replace(sight.seen, has_ledger=ledger is not None)
        if due_ms <= now_ms:
            due_ms = now_ms + (1 if nonce else AGAIN_MS)
        elif sight.pointer is not None and ledger is not None and not nonce:
            # No list shows that its ledger has changed.
            due_ms = min(due_ms, now_ms + _POINTER_MS)
        self._memory.note(
            replace(sight, seen=seen, ledger=version),
            ledger=version,
            due_ms=due_ms,
            noted_ms=now_ms,
            blind=bool(nonce) or ledger is None or self._is_guarded(sight.at),
        )

    def _is_guarded(self, at: PackAt) -> bool:
        """Whether nobody else looks at this pack, as a rule."""
        guarded = self._discovery.guarded() if self._discovery.is_alone else ()
        return any(first <= at.slot <= last for first, last in guarded)

    async def _mind_pointer(self, sight: Sight, hand: PackInHand, nonce: str) -> None:
        """Remove a pointer whose pack is settled, or can no longer come (R8)."""
        pointer = sight.pointer
        if pointer is None or not (hand.is_gone or hand.record is not None):
            return
        if pointer.is_entry:
            # The entry was handled; its pack's own pointer is settled with it.
            for key in pointer.twins if hand.record is not None and nonce == pointer.nonce else ():
                await self._access.store.delete(key)
            return
        now_ms = int(self._access.now().earliest * 1000)
        written_ms = int(pointer.modified * 1000)
        ends_ms = forgotten_ms(written_ms)
        if ends_ms <= now_ms or (hand.record is not None and nonce == pointer.nonce):
            await self._access.store.delete(pointer.key)
        else:
            # The pack may be on its way: look again soon, and then more and more rarely.
            pause_ms = max(1000, now_ms - written_ms)
            self._memory.note(sight, ledger=None, due_ms=min(ends_ms, now_ms + pause_ms))
