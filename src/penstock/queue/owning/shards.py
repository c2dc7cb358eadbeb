"""Slots, shards and runs, and the decisions of the shard leases as functions of values.

There are `SLOTS` slots, which never change, and a power of two of shards: a shard is a run of
neighbouring slots. One LIST covers a run of neighbouring shards, so whoever keeps, offers or takes
shards does it in as few runs as possible.

64 shards are the default: four workers can own `shards_per_worker` (16) each, 64 workers can own
one each. Choose more when more than 64 workers must be busy at the same time, or when the tasks of
one shard are more than one worker can run; each shard more costs a put or two in its life and
makes registrations a few bytes longer, nothing while idle.

Everything here is pure and is called by `penstock.queue.owning.leases` and by those who list slots.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

from penstock.kernel.errors import InvalidInput
from penstock.queue.places import SLOTS

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
