"""Modes in which nobody owns shards: `shared` and `sampled`, with an elected monitor.

Several workers look at the same packs. A pack in progress is left to its holder as long as its
holder writes. The ledger decides.

**Election.** One worker is the monitor of the whole queue. One cell holds its name and the end
of its term. Whoever finds the term over takes the next. The elected trusts its term only while
it has surely not ended, and resigns when it stops. Two monitors at once are safe: their writes
are conditional. It costs a request a minute for each worker: a read, or a put by the elected.

**`shared`**: every worker looks at everything. For one worker or a few: nothing to own and
nothing to take over. Each pays for its own looks, and two that want the same pack waste a
request. Each tries what it finds in an order of its own, the most urgent first, and in a long
list goes on from a slot of its own choice.

**`sampled`**: every look samples a few shards at random, and takes the oldest packs first. For
sampling, a queue is cut into 16 runs of slots, whatever its number of shards. They are dealt
like cards, `sample_shards` of them a look (3), all 16 before one comes again. Of each, one LIST
shows packs and ledgers, further pages only past those that nobody here can use: packs in
progress, or of other types. What is found is tried by priority, then by the store's date, the
oldest first; equal dates in an order of this worker's own. A shard of more than a page is read
a page a look, from a place of this worker's own and on to its end. So a look costs as much with
a million tasks as with a thousand, and workers rarely collide. A pack whose ledger has not been
written for a while is a candidate too.

`ready/` and `unhurried/` are one list each for all shards: looked at every `READY_SECONDS` at
most, and when the next minute begins in which something is due.

When samples are empty the same look goes on as a rotation over the whole queue, page by page,
until there is enough, and the next one goes on from there. While the whole queue takes no more
pages than the samples would, and has little to do, the following looks begin with that. The
bounds:

| queue | an unclaimed task is found |
|---|---|
| up to `sample_shards` pages of 1,000 objects | by a worker's next look: `Polling.max_seconds` |
| larger, samples are empty | within objects / 50,000 looks |
| larger, samples are not empty | within 11 looks for every page of its shard, at 3 a look |

The only state in the bucket is the election: a worker that dies leaves its claims, and nothing
else. An idle worker costs a LIST a look, $1.60 a month at one every 8 seconds, and the election.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import ClassVar, Final

import msgspec

from penstock.kernel.document_format import Stamped
from penstock.kernel.entropy import Entropy, new_id
from penstock.kernel.errors import NotFound, StoreError, UnreadableObject, VersionConflict
from penstock.queue.discovery.base import Discovery, DiscoveryRequest
from penstock.queue.discovery.scanner import ALL, PackCandidate, Run, Scanner, ScanResult
from penstock.queue.ids import SLOTS, PackAt
from penstock.queue.incarnation import NOBODY, Incarnation
from penstock.queue.layout import QueueLayout
from penstock.queue.settings import SAMPLED_SHARDS
from penstock.queue.shards.allocation import WorkerLoad
from penstock.store.base import ObjectStore
from penstock.store.cell import Cell
from penstock.store.metered import labelled
from penstock.store.time import Interval

TERM_SECONDS: Final = 180.0
RENEW_SECONDS: Final = 60.0


class MonitorTerm(Stamped, frozen=True, kw_only=True):
    """Who is the monitor, and until when."""

    kind: ClassVar[str] = "monitor"

    holder: str
    expires_ms: int
    incarnation: str = ""


class MonitorElection:
    """One worker's part in it. Call `turn` every `RENEW_SECONDS`."""

    def __init__(
        self,
        store: ObjectStore,
        layout: QueueLayout,
        *,
        holder: str,
        entropy: Entropy,
        incarnation: Incarnation = NOBODY,
    ) -> None:
        self._store = store
        self._incarnation = incarnation
        self._holder = holder
        self._cell = Cell(store, layout.monitor, MonitorTerm, entropy=entropy)
        self._expires_ms = 0

    @property
    def is_elected(self) -> bool:
        """Whether this worker's term has surely not ended."""
        now = self._store.clock.estimate()
        return now is not None and now.latest * 1000 < self._expires_ms

    async def turn(self) -> None:
        """Renew the own term, or take one that is over."""
        with labelled("leases"):
            now = await self._store.now()
            try:
                await self._turn(now)
            except UnreadableObject:
                await self._remove_damaged(now)

    async def _remove_damaged(self, now: Interval) -> None:
        """What cannot be read counts as over when its term must be, and makes room."""
        self._expires_ms = 0
        with suppress(NotFound, VersionConflict):
            head = await self._store.head(self._cell.key)
            if now.earliest >= head.modified + TERM_SECONDS:
                await self._store.delete(self._cell.key, version=head.version)

    async def _turn(self, now: Interval) -> None:
        if not self.is_elected:
            present = await self._cell.read()
            if present is not None and self._is_another(present, now):
                return
        term_ms = int((now.latest + TERM_SECONDS) * 1000)

        def change(present: MonitorTerm | None) -> MonitorTerm | None:
            if present is not None and self._is_another(present, now):
                return present
            mine = MonitorTerm(
                holder=self._holder, expires_ms=term_ms, incarnation=self._incarnation.id
            )
            if present is None:
                return mine
            return msgspec.structs.replace(
                present, holder=mine.holder, expires_ms=term_ms, incarnation=mine.incarnation
            )

        elected = await self._cell.update(change)
        is_mine = elected is not None and elected.holder == self._holder
        self._expires_ms = elected.expires_ms if elected and is_mine else 0

    async def resign(self) -> None:
        """Lay the term down, so that another can begin at once."""
        if not self.is_elected:
            return
        self._expires_ms = 0

        def change(present: MonitorTerm | None) -> MonitorTerm | None:
            if present is None or present.holder != self._holder:
                return present
            return msgspec.structs.replace(present, expires_ms=0)

        with labelled("leases"):
            await self._cell.update(change)

    def _is_another(self, present: MonitorTerm, now: Interval) -> bool:
        """Whether somebody else's term may not be over."""
        if present.holder == self._holder or self._incarnation.is_ended(present.incarnation):
            return False
        return present.expires_ms > now.earliest * 1000


_log = logging.getLogger(__name__)

PATIENCE_SECONDS_MAX: Final = 12.0
RELEASE_SECONDS: Final = 5.0


class ElectedDiscovery(Discovery):
    """A mode whose monitor is elected; what it looks at is for the modes to say."""

    sight_seconds = 3.0
    reread_seconds = 3.0
    is_alone = False

    def __init__(
        self,
        store: ObjectStore,
        layout: QueueLayout,
        *,
        name: str,
        lease_seconds: float,
        entropy: Entropy,
        incarnation: Incarnation = NOBODY,
    ) -> None:
        super().__init__()
        self._lease_seconds = lease_seconds
        self.name = f"{name}-{new_id(entropy, characters=12)}"
        self._store = store
        self._entropy = entropy
        self._election = MonitorElection(
            store, layout, holder=self.name, entropy=entropy, incarnation=incarnation
        )
        self._peeking = Scanner(store, layout)

    def patience_seconds(self, at: PackAt) -> float:
        # Its holder writes at every third of a lease; of a pack of many there may be some left.
        return min(0.4 * self._lease_seconds, PATIENCE_SECONDS_MAX) if at.count == 1 else 0.0

    async def peek(self, wanted: DiscoveryRequest) -> ScanResult | None:
        view = await self._peeking.look_at_urgent(ALL, worth=wanted.worth, wanted=wanted.tasks)
        self._sort_by_age(view)
        return view

    def _sort_by_age(self, view: ScanResult) -> None:
        """The most urgent first, then by age and chance: others look at the same."""
        drawn = [
            (-each.priority, each.age_ms + self._entropy.uniform(0, AGE_MS), each)
            for each in view.sights
        ]
        view.sights = [each for *_, each in sorted(drawn, key=lambda of: of[:2])]

    def guarded(self) -> Sequence[Run]:
        return ALL if self._election.is_elected else ()

    async def keep(self, load: Callable[[], WorkerLoad]) -> None:  # noqa: ARG002 - nothing depends on it
        clock = self._store.clock.machine
        while True:
            try:
                await self._election.turn()
            except (StoreError, UnreadableObject) as error:
                _log.warning("the election of a monitor failed, retrying: %s", error)
            await clock.sleep(RENEW_SECONDS * self._entropy.uniform(0.8, 1.2))

    async def release(self) -> None:
        try:
            async with asyncio.timeout(RELEASE_SECONDS):
                await self._election.resign()
        except (StoreError, UnreadableObject, TimeoutError) as error:
            _log.info("failed to release the monitor's lease, it will expire: %s", error)


AGE_MS: Final = 60_000
"""What is older by so much comes first, and what is by less only more likely."""


class SharedDiscovery(ElectedDiscovery):
    """Looks at all slots."""

    is_whole = True

    def __init__(
        self,
        store: ObjectStore,
        layout: QueueLayout,
        *,
        name: str,
        lease_seconds: float,
        entropy: Entropy,
        incarnation: Incarnation = NOBODY,
    ) -> None:
        super().__init__(
            store,
            layout,
            name=name,
            lease_seconds=lease_seconds,
            entropy=entropy,
            incarnation=incarnation,
        )
        self._scanner = Scanner(store, layout)

    async def look(self, wanted: DiscoveryRequest) -> ScanResult:
        minute = int((await self._store.now()).earliest // 60)
        view = await self._scanner.look(ALL, minute=minute, worth=wanted.worth, wanted=wanted.tasks)
        self._scanner.go_on_from(ALL[0], self._entropy.randrange(SLOTS))
        self._sort_by_age(view)
        return view


READY_SECONDS: Final = 5.0
_SHARDS: Final = range(SAMPLED_SHARDS)
_SLOTS_A_SHARD: Final = SLOTS // SAMPLED_SHARDS


class SampledDiscovery(ElectedDiscovery):
    """Looks at samples, and at everything when those are empty."""

    def __init__(
        self,
        store: ObjectStore,
        layout: QueueLayout,
        *,
        name: str,
        lease_seconds: float,
        sample_shards: int,
        entropy: Entropy,
        incarnation: Incarnation = NOBODY,
    ) -> None:
        super().__init__(
            store,
            layout,
            name=name,
            lease_seconds=lease_seconds,
            entropy=entropy,
            incarnation=incarnation,
        )
        self._samples = sample_shards
        self._whole = Scanner(store, layout)
        # One each: a scanner remembers where it broke off.
        self._scanners = tuple(Scanner(store, layout) for _ in _SHARDS)
        self._deck: list[int] = []
        self._entered: set[int] = set()
        self._is_sparse = False
        self._ready_at = float("-inf")
        self._later_ms: int | None = None

    async def look(self, wanted: DiscoveryRequest) -> ScanResult:
        view = ScanResult() if self._is_sparse else await self._sample(wanted)
        # What has a low priority is no reason not to look for more.
        usual = [sight for sight in view.sights if sight.priority >= 0]
        if self._is_sparse or (wanted.has_room and not any(map(wanted.worth, usual))):
            settled = view.settled
            view = await self._rotate(wanted)
            view.settled += settled
        drawn = [(-s.priority, _dated(s), self._entropy.random(), s) for s in view.sights]
        view.sights = [each for *_, each in sorted(drawn, key=lambda of: of[:3])]
        return view

    async def _sample(self, wanted: DiscoveryRequest) -> ScanResult:
        """Look at the next few shards, and at what is due besides if it is time for that."""
        now = await self._store.now()
        minute = int(now.earliest // 60)
        instant = self._store.clock.machine.monotonic()
        is_due = self._later_ms is not None and self._later_ms <= now.earliest * 1000
        with_ready = is_due or instant >= self._ready_at + READY_SECONDS
        view = ScanResult()
        if with_ready:
            self._ready_at = instant
            due = await self._whole.look_at_due(
                minute=minute, worth=wanted.worth, wanted=wanted.tasks
            )
            self._later_ms = due.later_ms
            _add(view, due)
        for shard in self._deal():
            found = sum(map(wanted.worth, view.sights))
            _add(view, await self._look_at(shard, wanted, found=found, minute=minute))
        if with_ready and wanted.has_room and sum(map(wanted.worth, view.sights)) < wanted.tasks:
            _add(
                view,
                await self._whole.look_at_unhurried(worth=wanted.worth, wanted=wanted.tasks),
            )
        view.later_ms = self._later_ms
        return view

    def _deal(self) -> list[int]:
        """The next shards: all of them come up, in an order of chance, before one does again."""
        dealt: list[int] = []
        while len(dealt) < self._samples:
            if not self._deck:
                drawn = [(each not in dealt, self._entropy.random(), each) for each in _SHARDS]
                # Those that this look has already lie at the bottom.
                self._deck = [shard for *_, shard in sorted(drawn)]
            dealt.append(self._deck.pop())
        return dealt

    async def _look_at(
        self, shard: int, wanted: DiscoveryRequest, *, found: int, minute: int
    ) -> ScanResult:
        first = shard * _SLOTS_A_SHARD
        run: Run = (first, first + _SLOTS_A_SHARD - 1)
        scanner = self._scanners[shard]
        view = await scanner.look(
            (run,),
            minute=minute,
            worth=wanted.worth,
            wanted=max(0, wanted.tasks - found),
            with_ready=False,
        )
        if shard not in self._entered and not scanner.is_through:
            # All workers begin a shard with its first page; from there each goes its own way.
            self._entered.add(shard)
            scanner.go_on_from(run, first + self._entropy.randrange(_SLOTS_A_SHARD))
        return view

    async def _rotate(self, wanted: DiscoveryRequest) -> ScanResult:
        """Look at the whole queue, from where the last rotation broke off."""
        self._ready_at = self._store.clock.machine.monotonic()
        minute = int((await self._store.now()).earliest // 60)
        view = await self._whole.look(ALL, minute=minute, worth=wanted.worth, wanted=wanted.tasks)
        self._later_ms = view.later_ms
        is_small = self._whole.is_through and self._whole.lists <= self._samples
        self._is_sparse = is_small and sum(map(wanted.worth, view.sights)) < wanted.tasks
        return view


def _dated(sight: PackCandidate) -> int:
    """The store's date of a pack, or of the pointer to it, to the second."""
    if sight.seen is not None:
        return int(sight.seen.modified)
    return int(sight.pointer.modified) if sight.pointer else 0


def _add(view: ScanResult, more: ScanResult) -> None:
    view.sights += more.sights
    view.settled += more.settled
    view.foreign += more.foreign
