"""What a worker remembers of packs: when each is worth another try, and which wait at a gate.

- `PackMemory`. A list shows by its version that a ledger has changed, but not what it says. So a
  ledger is read when its version is new, or when the time has come that was read from it, and not
  otherwise (QUEUE-10). What is due is tried without a list. A pack with a key is known by the
  pointer that led to it: its place has many lives, and a new pointer is a new candidate. Forgetting
  costs a request, never a task.
- `PackTracker` updates it after each try. A settled pack is for the archive, if this worker
  guards
  its slot. A pointer is removed when the pack that it was written for is settled, or when its pack
  can no longer come (QUEUE-8). A settled pack of a batch gets its mark.
- `PointerTracker`. A pack with a key is found by its pointer alone. Once shown, a pointer is
  shown
  by every whole look at what is due, until its pack is settled. So one that is missing was removed
  by whoever settled the pack, or is lost; the pack tells which. The guard of the slot checks, for
  a HEAD, and writes the pointer again if the pack is there. Sweeps find what no look has shown
  (`penstock.queue.maintenance`).
- `Waitlist` holds candidates that wait at a gate. Looks do not count them, and go on past them.
  When their gate opens they are tried without another look; if the last one is old by then, there
  is one as well. What a look does not show waits on, and comes first when the gate opens. Most of
  all what is *ours*: the entry of a pack in an inbox is deleted when some of it is claimed, so
  nothing leads to its rest, or to a retry, but this process, until somebody scavenges. That has a
  bound of its own.

A crash leaves nothing. Used by `penstock.queue.execution.worker_loop`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Final

from penstock.queue.batch_progress import BatchMarker
from penstock.queue.context import QueueContext
from penstock.queue.discovery.base import Discovery
from penstock.queue.discovery.scanner import PackCandidate, Run, ScanResult
from penstock.queue.execution.gates import StartGate
from penstock.queue.ids import PackAt
from penstock.queue.maintenance import Monitor
from penstock.queue.pack import forgotten_ms
from penstock.queue.pack_session import PackSession
from penstock.queue.transitions import next_due_ms
from penstock.store.base import Version

PACKS_MAX: Final = 20_000


@dataclass(frozen=True, slots=True)
class _Known:
    sight: PackCandidate
    ledger: Version | None
    due_ms: int
    noted_ms: int
    blind: bool


class PackMemory:
    """Packs by place or pointer. Forgetting one costs a request, never a task."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._soonest_ms: int | None = None
        """Not later than the next due time: what was forgotten since is still counted."""

    def note(
        self,
        sight: PackCandidate,
        *,
        ledger: Version | None,
        due_ms: int,
        noted_ms: int = 0,
        blind: bool = True,
    ) -> None:
        """This pack, with this ledger, is worth nothing before `due_ms`.

        Then it is tried, if `blind`; otherwise it waits for a list to show that it is still there.
        """
        self.forget(sight)
        if len(self._known) >= PACKS_MAX:
            del self._known[next(iter(self._known))]
        self._known[_name(sight)] = _Known(sight, ledger, due_ms, noted_ms, blind)
        self._soonest_ms = due_ms if self._soonest_ms is None else min(due_ms, self._soonest_ms)

    def forget(self, sight: PackCandidate) -> None:
        self._known.pop(_name(sight), None)

    def forget_all(self) -> None:
        self._known.clear()
        self._soonest_ms = None

    def knows(self, sight: PackCandidate) -> bool:
        """Whether anything is remembered of a pack."""
        return bool(self._known) and _name(sight) in self._known

    def is_known_idle(self, sight: PackCandidate, now_ms: float, *, reread_ms: float = 0.0) -> bool:
        """Whether there is no reason to try this pack.

        A ledger with a new version is one, but not sooner than `reread_ms` after the last reading.
        """
        known = self._known.get(_name(sight))
        if known is None or known.due_ms <= now_ms:
            return False
        if now_ms < known.noted_ms + reread_ms:
            return True
        return sight.seen is None or sight.ledger == known.ledger

    def due(self, now_ms: float) -> list[PackCandidate]:
        """The packs whose time has come; they are forgotten."""
        if self._soonest_ms is None or self._soonest_ms > now_ms:
            return []
        ready = [known for known in self._known.values() if known.due_ms <= now_ms]
        for known in ready:
            self.forget(known.sight)
        self._soonest_ms = min((known.due_ms for known in self._known.values()), default=None)
        return [known.sight for known in ready if known.blind]

    def next_due_ms(self) -> int | None:
        """When the next pack's time comes, or earlier."""
        return self._soonest_ms if self._known else None


def _name(sight: PackCandidate) -> str:
    return sight.pointer.key if sight.pointer else sight.at.path


POINTERS_MAX: Final = 20_000


class PointerTracker:
    """What the looks of one worker have shown of the slots that it guards."""

    def __init__(self) -> None:
        self._seen: dict[str, PackAt] = {}
        self._guarded: Sequence[Run] = ()

    def forget(self, key: str) -> None:
        """This worker has removed a pointer itself, or is about to."""
        self._seen.pop(key, None)

    def missing(self, view: ScanResult, guarded: Sequence[Run]) -> list[PackAt]:
        """The packs that nothing points to any more, by a look at what is due."""
        if not view.is_ready_whole or not guarded:
            return []
        is_same, self._guarded = guarded == self._guarded, guarded
        pointed = set(view.pointers.values())
        gone = {at: None for key, at in self._seen.items() if key not in view.pointers}
        self._seen = dict(islice(view.pointers.items(), POINTERS_MAX))
        return [at for at in gone if at not in pointed] if is_same else []


OURS_MAX: Final = 1000


def is_ours(sight: PackCandidate) -> bool:
    """Whether an entry of an inbox led to this pack, and none does since it was begun."""
    is_entry = sight.pointer is not None and sight.pointer.is_entry
    return is_entry and sight.ledger is not None


class Waitlist:
    """Some packs, in the order in which they were found. What is too many is found again."""

    def __init__(self, gates: Sequence[StartGate], *, most: int) -> None:
        """`most` may wait that are not ours."""
        self._gates = tuple(gates)
        self._ours: deque[PackCandidate] = deque()
        self._others: deque[PackCandidate] = deque()
        self._most = most

    def __iter__(self) -> Iterator[PackCandidate]:
        return chain(self._ours, self._others)

    def is_shut(self, sight: PackCandidate) -> bool:
        """Whether one of the gates is shut for a pack."""
        return any(gate.is_shut(sight) for gate in self._gates)

    def take_in(
        self,
        sights: Iterable[PackCandidate],
        *,
        shown: Collection[PackAt],
        busy: Collection[PackAt],
    ) -> None:
        """Of all that a look has `shown`, these wait; what is `busy` waits no longer."""
        self._ours = deque(sight for sight in self._ours if sight.at not in busy)
        self._others = deque(
            sight for sight in self._others if sight.at not in busy and sight.at not in shown
        )
        ours = {sight.at for sight in self._ours}
        self.add_all(sight for sight in sights if sight.at not in ours)

    def add_all(self, sights: Iterable[PackCandidate]) -> None:
        for sight in sights:
            self.add(sight)

    def add(self, sight: PackCandidate) -> None:
        waiting, most = (self._ours, OURS_MAX) if is_ours(sight) else (self._others, self._most)
        if len(waiting) < most:
            waiting.append(sight)

    def opened(self) -> list[PackCandidate]:
        """Those whose gates are open again; they wait no longer."""
        opened = [sight for sight in self if not self.is_shut(sight)]
        if opened:
            gone = {sight.at for sight in opened}
            self._ours = deque(sight for sight in self._ours if sight.at not in gone)
            self._others = deque(sight for sight in self._others if sight.at not in gone)
        return opened

    def seconds_to_open(self) -> float | None:
        """How long until one of them may be worth a try; None if that cannot be told."""
        if not (self._ours or self._others):
            return None
        told = [gate.seconds_to_open() for gate in self._gates]
        return min((seconds for seconds in told if seconds is not None), default=None)


AGAIN_MS: Final = 5_000
_LEFT_MS: Final = 60_000
POINTER_MS: Final = 30_000


class PackTracker:
    """Keeps a worker's memory of packs up to date."""

    def __init__(
        self, access: QueueContext, discovery: Discovery, memory: PackMemory, monitor: Monitor
    ) -> None:
        self._access = access
        self._discovery = discovery
        self._memory = memory
        self._monitor = monitor
        self._batches = BatchMarker(access)

    async def learn(self, sight: PackCandidate, session: PackSession, nonce: str) -> None:
        """Remember when a pack is worth another try. `nonce` is the pack's, if some was claimed."""
        now_ms = int(self._access.now().latest * 1000)
        if session.is_gone or session.ledger[0] is not None:
            self._discovery.handled(sight.at)
        if session.record is not None:
            self._memory.forget(sight)
            if not session.is_gone:
                # It could not be deleted, or not yet: leave it for a while.
                due_ms = now_ms + _LEFT_MS
                self._memory.note(sight, ledger=session.record[1], due_ms=due_ms, blind=False)
            if self._discovery.guarded():
                self._monitor.remember(sight.at, *session.record)
        else:
            self._note(sight, session, nonce, now_ms)
        await self._check_pointer(sight, session, nonce)
        if session.record is not None:
            await self._batches.settled(sight.at, session.record[0])

    def _note(self, sight: PackCandidate, session: PackSession, nonce: str, now_ms: int) -> None:
        ledger, version = session.ledger
        due_ms = session.next_due_ms if ledger is None else next_due_ms(ledger) or 0
        if due_ms <= now_ms and session.is_gone:
            return
        seen = sight.seen and replace(sight.seen, has_ledger=ledger is not None)
        if due_ms <= now_ms:
            due_ms = now_ms + (1 if nonce else AGAIN_MS)
        elif sight.pointer is not None and ledger is not None and not nonce:
            # No list shows that its ledger has changed.
            due_ms = min(due_ms, now_ms + POINTER_MS)
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

    async def _check_pointer(self, sight: PackCandidate, session: PackSession, nonce: str) -> None:
        """Remove a pointer whose pack is settled, or can no longer come (QUEUE-8)."""
        pointer = sight.pointer
        if pointer is None or not (session.is_gone or session.record is not None):
            return
        if pointer.is_entry:
            # The entry was handled; its pack's own pointer is settled with it.
            for key in (
                pointer.twins if session.record is not None and nonce == pointer.nonce else ()
            ):
                await self._access.store.delete(key)
            return
        now_ms = int(self._access.now().earliest * 1000)
        written_ms = int(pointer.modified * 1000)
        ends_ms = forgotten_ms(written_ms)
        if ends_ms <= now_ms or (session.record is not None and nonce == pointer.nonce):
            await self._access.store.delete(pointer.key)
        else:
            # The pack may be on its way: look again soon, and then more and more rarely.
            pause_ms = max(1000, now_ms - written_ms)
            self._memory.note(sight, ledger=None, due_ms=min(ends_ms, now_ms + pause_ms))
