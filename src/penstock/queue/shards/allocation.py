"""Slots, shards and runs; the decisions of the shard leases; the load that drives them. Pure.

There are `SLOTS` slots, which never change, and a power of two of shards: a shard is a run of
neighbouring slots. One LIST covers a run of neighbouring shards, so shards are kept, offered and
taken in as few runs as possible. A `Cut` says into how many shards the slots are cut.

64 shards are the default: four workers can own `shards_per_worker` (16) each, 64 workers can own
one each. Choose more when more than 64 workers must be busy at once, or when the tasks of one
shard are more than one worker can run; each shard more costs a put or two in its life and makes
registrations a few bytes longer, nothing while idle.

**Load.** A worker is *full* while it has no room. Tasks that it then finds wait: after
`WAITS_SECONDS` it wants help with those types, so that nothing starves behind tasks that run for
hours, and if that lasts it is saturated and offers shards. What passes sooner is cheaper to help
with: each further owner lists and renews until it has had nothing to do for a minute. A worker
also wants help with types that it has no handler for, and with packs of which it has for
`TOO_MANY_SECONDS` had more than it can run soon. After a
time without work, in a *burst*, everybody else is idle: help is wanted at once, but only for
`BURST_SECONDS`; if the few workers that notice do not suffice, the rules above call the others.

What waits is known when a look has ended. A worker that looks again because it has used up its
candidates, or because they are old, has room until the look ends, and is still strained:
otherwise it would take back its offers for many seconds, and the takers would miss the next
ones for long.

Called by `penstock.queue.shards`, `penstock.queue.discovery` and whoever lists slots.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from penstock.kernel.clock import Clock
from penstock.kernel.errors import InvalidInput
from penstock.queue.ids import SLOTS

SHARDS_DEFAULT: Final = 64


@dataclass(frozen=True, slots=True)
class Cut:
    """How a queue is cut into shards, and how often that was changed before."""

    shards: int = SHARDS_DEFAULT
    era: int = 0


def check_shards(shards: int) -> int:
    """The number of shards, or `InvalidInput`."""
    if not 1 <= shards <= SLOTS or shards & (shards - 1):
        raise InvalidInput(
            f"A queue cannot have {shards} shards.",
            hint=f"Choose a power of two between 1 and {SLOTS}.",
        )
    return shards


def shard_of(slot: int, *, shards: int) -> int:
    """The shard that a slot belongs to."""
    return slot * shards // SLOTS


def slots_of(shard: int, *, shards: int) -> range:
    """The slots of a shard."""
    size = SLOTS // shards
    return range(shard * size, (shard + 1) * size)


def runs(numbers: Iterable[int]) -> tuple[range, ...]:
    """The numbers as runs of neighbours, in order."""
    found: list[range] = []
    for number in sorted(set(numbers)):
        if found and found[-1].stop == number:
            found[-1] = range(found[-1].start, number + 1)
        else:
            found.append(range(number, number + 1))
    return tuple(found)


def slot_runs(owned: Iterable[int], *, shards: int) -> tuple[range, ...]:
    """The slots of these shards as runs of neighbours: one LIST each."""
    return _slot_runs(frozenset(owned), shards)


@lru_cache(maxsize=64)  # Workers ask for theirs after every task.
def _slot_runs(owned: frozenset[int], shards: int) -> tuple[range, ...]:
    size = SLOTS // shards
    return tuple(range(run.start * size, run.stop * size) for run in runs(owned))


def joined(parts: Iterable[range]) -> tuple[range, ...]:
    """Runs that may overlap, as runs that do not, in order."""
    found: list[range] = []
    for part in sorted(parts, key=lambda part: part.start):
        if found and part.start <= found[-1].stop:
            found[-1] = range(found[-1].start, max(found[-1].stop, part.stop))
        else:
            found.append(part)
    return tuple(found)


def shards_in(parts: Iterable[range], *, shards: int) -> frozenset[int]:
    """The shards that have a slot in one of these runs of slots."""
    return frozenset(
        shard
        for part in parts
        if part
        for shard in range(
            shard_of(part.start, shards=shards), shard_of(part.stop - 1, shards=shards) + 1
        )
    )


def begun_in(parts: Iterable[range], *, shards: int) -> frozenset[int]:
    """The shards whose first slot is in one of these runs of slots."""
    size = SLOTS // shards
    return frozenset(
        shard for part in parts for shard in range(-(-part.start // size), -(-part.stop // size))
    )


def unowned(projections: Iterable[Iterable[int]], *, shards: int) -> tuple[int, ...]:
    """The shards that are in none of the projections."""
    owned = {shard for projection in projections for shard in projection}
    return tuple(shard for shard in range(shards) if shard not in owned)


def fair_share(*, shards: int, workers: int) -> int:
    """How many shards each of so many workers has if all have as many as one another."""
    return -(-shards // max(1, workers))


def surplus(owned: Collection[int], *, shards_per_worker: int, share: int) -> tuple[int, ...]:
    """What a saturated owner offers: what it has beyond its target and beyond its fair share.

    It keeps at least one shard, and keeps its longest runs.
    """
    keep = max(1, min(shards_per_worker, share))
    by_length = sorted(runs(owned), key=lambda run: (-len(run), run.start))
    in_order = [shard for run in by_length for shard in run]
    return tuple(sorted(in_order[keep:]))


def pick(offered: Iterable[int], *, count: int, draw: float) -> tuple[int, ...]:
    """At most `count` of what is offered, in as few runs as possible.

    Runs are cut into pieces of `count` and one of the longest is drawn, by a number in [0, 1): so
    those who pick at the same time seldom pick the same.
    """
    pieces = [
        run[start : start + count]
        for run in runs(offered)
        for start in range(0, len(run), max(1, count))
    ]
    chosen: list[int] = []
    while pieces and len(chosen) < count:
        length = max(map(len, pieces))
        longest = [piece for piece in pieces if len(piece) == length]
        piece = longest[int(draw * len(longest))]
        pieces.remove(piece)
        chosen.extend(piece[: count - len(chosen)])
    return tuple(sorted(chosen))


def takes_idle_offer(*, me: str, offerer: str, idle: bool, saturated: bool) -> bool:
    """Whether an owner takes what an idle owner offers.

    Who works takes it. Among idle owners the one that sorts first does, so that one remains.
    """
    return me < offerer if idle else not saturated


def next_epoch(*, previous: int, seen: int, earliest_ms: int) -> int:
    """The epoch of a take: beyond every one that is known, and no less than the time.

    `earliest_ms` is the earliest that the store's time can be, so an epoch is not ahead of the
    time at which it is written. Where the predecessor is not known, because its object was deleted
    or damaged, who takes waits until the earliest is past the time of that: the epoch is then
    beyond the unknown one too.
    """
    return max(previous + 1, seen + 1, earliest_ms)


def look_seconds(
    *, standbys: int, each_seconds: float, seconds_min: float, seconds_max: float
) -> float:
    """How often one of so many standbys looks, so that all of them together look evenly."""
    return min(seconds_max, max(seconds_min, standbys * each_seconds))


SATURATED_SECONDS: Final = 28.0
WAITS_SECONDS: Final = 10.0
TOO_MANY_SECONDS: Final = 30.0
MET_SECONDS: Final = 60.0
BURST_SECONDS: Final = 6.0


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """A worker's own view of itself, at one moment."""

    saturated: bool = False
    """It has found more than it has room for, for some seconds."""
    idle_seconds: float = 0.0
    help_wanted: frozenset[str] = frozenset()
    """Types that it has no handler for, or cannot take all tasks of."""


class LoadTracker:
    """How long a worker has been full, and of what. Asked every few seconds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since: dict[tuple[str, str], float] = {}
        self._met: dict[str, float] = {}
        self._is_looking = False
        self._burst: AbstractSet[str] = frozenset()
        self._burst_until = float("-inf")

    def burst(self, types: AbstractSet[str]) -> None:
        """Much of these types has come at once, after a time without work."""
        self._burst = types
        self._burst_until = self._clock.monotonic() + BURST_SECONDS

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Until this ends, what waits is not known: what was waiting goes on."""
        self._is_looking = True
        try:
            yield
        finally:
            self._is_looking = False

    def meet(self, type: str) -> None:
        """A task of a type without a handler was seen."""
        self._met[type] = self._clock.monotonic()

    def load(
        self,
        *,
        is_full: bool,
        waiting: AbstractSet[str],
        too_many: AbstractSet[str],
        idle_seconds: float,
    ) -> WorkerLoad:
        """The load, from the types that wait for room and those that are too many to run."""
        instant = self._clock.monotonic()
        present = {("waits", each) for each in waiting} | {("more", each) for each in too_many}
        if not self._is_looking:
            self._since = {
                each: self._since.get(each, instant) for each in (present if is_full else ())
            }
        met = {each for each, at in self._met.items() if at > instant - MET_SECONDS}
        wanted = self._lasting("waits", WAITS_SECONDS) | self._lasting("more", TOO_MANY_SECONDS)
        if instant < self._burst_until:
            wanted |= self._burst
        saturated = bool(self._lasting("waits", SATURATED_SECONDS))
        return WorkerLoad(saturated, idle_seconds, frozenset(wanted | met))

    def _lasting(self, what: str, seconds: float) -> set[str]:
        until = self._clock.monotonic() - seconds
        return {
            each for (kind, each), since in self._since.items() if kind == what and since <= until
        }
