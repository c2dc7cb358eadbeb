"""`sampled`: every look samples a few shards, drawn at random, and takes the oldest first.

For sampling, a queue is cut into 16 runs of slots, whatever its number of shards. They are dealt
like cards, `sample_shards` of them a look (3), all 16 before one comes again. Of each, one LIST
shows packs and ledgers together, further pages only past those that nobody here can use: packs in
progress, or of other types. What is found is tried the most urgent first, then by the store's date
of the pack, the oldest first; where the dates are equal, in an order of this worker's own. A shard
of more than a page is read a page a look, from a place of this worker's own and on to its end. So
a look costs as much with a million tasks waiting as with a thousand, and workers meet rarely.

A pack whose ledger has not been written for a while is a candidate too; its ledger decides.

`ready/` and `unhurried/` are one list each for all shards: looked at every `READY_SECONDS` at the
most, and when the next minute begins in which something is due.

**When samples are empty** the same look goes on as a rotation: it looks at the whole queue, page by
page, until there is enough, and the next one goes on from there. While the whole queue takes no
more pages than the samples would, and has little to do, the looks that follow begin with that: one
LIST shows everything. The bounds:

| queue | a task that nobody has is found |
|---|---|
| up to `sample_shards` pages of 1,000 objects | by a worker's next look: `Polling.max_seconds` |
| larger, samples are empty | within objects / 50,000 looks |
| larger, samples are not empty | within 11 looks for every page of its shard, at 3 a look |

Nothing is owned, and the only state in the bucket is the election of a monitor: a worker that dies
leaves what it had claimed, and nothing else. An idle worker costs a LIST a look, $1.60 a month at a
look every 8 seconds, and the election.
"""

from __future__ import annotations

from typing import Final

from penstock.kernel.entropy import Entropy
from penstock.queue.discovery.base import Wanted
from penstock.queue.discovery.elected import ElectedDiscovery
from penstock.queue.discovery.scan import ALL, Run, Scanner, Sight, View
from penstock.queue.incarnation import NOBODY, Incarnation
from penstock.queue.layout import QueueLayout
from penstock.queue.places import SLOTS
from penstock.queue.settings import SAMPLED_SHARDS
from penstock.store.base import ObjectStore

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

    async def look(self, wanted: Wanted) -> View:
        view = View() if self._is_sparse else await self._sample(wanted)
        if self._is_sparse or (wanted.has_room and not any(map(wanted.worth, view.sights))):
            settled = view.settled
            view = await self._rotate(wanted)
            view.settled += settled
        drawn = [(-s.priority, _dated(s), self._entropy.random(), s) for s in view.sights]
        view.sights = [each for *_, each in sorted(drawn, key=lambda of: of[:3])]
        return view

    async def _sample(self, wanted: Wanted) -> View:
        """Look at the next few shards, and at what is due besides if it is time for that."""
        now = await self._store.now()
        minute = int(now.earliest // 60)
        instant = self._store.clock.machine.monotonic()
        is_due = self._later_ms is not None and self._later_ms <= now.earliest * 1000
        with_ready = is_due or instant >= self._ready_at + READY_SECONDS
        view = View()
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
        if with_ready and sum(map(wanted.worth, view.sights)) < wanted.tasks:
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

    async def _look_at(self, shard: int, wanted: Wanted, *, found: int, minute: int) -> View:
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

    async def _rotate(self, wanted: Wanted) -> View:
        """Look at the whole queue, from where the last rotation broke off."""
        self._ready_at = self._store.clock.machine.monotonic()
        minute = int((await self._store.now()).earliest // 60)
        view = await self._whole.look(ALL, minute=minute, worth=wanted.worth, wanted=wanted.tasks)
        self._later_ms = view.later_ms
        is_small = self._whole.is_through and self._whole.lists <= self._samples
        self._is_sparse = is_small and sum(map(wanted.worth, view.sights)) < wanted.tasks
        return view


def _dated(sight: Sight) -> int:
    """The store's date of a pack, or of the pointer to it, to the second."""
    if sight.seen is not None:
        return int(sight.seen.modified)
    return int(sight.pointer.modified) if sight.pointer else 0


def _add(view: View, more: View) -> None:
    view.sights += more.sights
    view.settled += more.settled
    view.foreign += more.foreign
