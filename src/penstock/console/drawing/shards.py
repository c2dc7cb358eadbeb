"""The map of a queue's shards: a cell for each, with its holder's letter and colour. Pure.

A holder has a letter, so that nobody has to tell colours apart; letters go by the holders' names.
Of more than `CELLS_MAX` shards neighbours share a cell. Every cell says in words what it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Final

CELLS_MAX: Final = 256
COLOURS: Final = 8
_SEVERAL: Final = "several"


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A worker that owns shards."""

    name: str
    letter: str
    colour: int
    """From 0 to `COLOURS` - 1."""
    shards: int
    runs: str
    """Which they are: `0-15, 40`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A shard, or neighbours of them."""

    label: str
    holder: Holder | None
    """None if nobody owns it, or several do."""
    holder_told: str
    tasks: int
    told: str


@dataclass(frozen=True, slots=True)
class ShardMap:
    """What is drawn."""

    cells: Sequence[Cell]
    holders: Sequence[Holder]
    shards_a_cell: int
    told: str


def shard_map(owned: Mapping[str, Collection[int]], depths: Sequence[int]) -> ShardMap:
    """The map of as many shards as there are depths: who owns what, and how many tasks there are.

    If two say that they own a shard, which they do while it moves, the first by name is shown.
    """
    count = len(depths)
    holders = [_holder(place, name, owned[name]) for place, name in enumerate(sorted(owned))]
    by_shard: dict[int, Holder] = {}
    for each in reversed(holders):
        by_shard.update(dict.fromkeys(owned[each.name], each))
    width = -(-count // CELLS_MAX)
    cells = [
        _cell(range(start, min(count, start + width)), by_shard, depths)
        for start in range(0, count, width)
    ]
    free = sum(shard not in by_shard for shard in range(count))
    held = "1 holder" if len(holders) == 1 else f"{len(holders)} holders"
    told = f"{count} shards, {held}, {free} shards without one"
    return ShardMap(cells, holders, width, told)


def letter_of(place: int) -> str:
    """A, B, … Z, AA, AB, …"""
    letters = len(ascii_uppercase)
    rest, last = divmod(place, letters)
    return (letter_of(rest - 1) if rest else "") + ascii_uppercase[last]


def runs_of(numbers: Iterable[int]) -> str:
    """Numbers as runs of neighbours."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}\N{EN DASH}{b}" for a, b in runs)


def _holder(place: int, name: str, owned: Collection[int]) -> Holder:
    return Holder(
        name=name,
        letter=letter_of(place),
        colour=place % COLOURS,
        shards=len(owned),
        runs=runs_of(owned),
    )


def _cell(part: range, by_shard: Mapping[int, Holder], depths: Sequence[int]) -> Cell:
    found = {by_shard[shard].letter if shard in by_shard else "": shard for shard in part}
    holder = by_shard.get(part[0]) if len(found) == 1 else None
    who = holder.name if holder else "nobody" if found.keys() == {""} else _SEVERAL
    tasks = sum(depths[shard] for shard in part)
    label = runs_of(part)
    shard = f"Shard {label}" if len(part) == 1 else f"Shards {label}"
    kept = "held by nobody" if who == "nobody" else f"held by {who}"
    words = "1 task" if tasks == 1 else f"{tasks:,} tasks"
    return Cell(
        label=label,
        holder=holder,
        holder_told=who,
        tasks=tasks,
        told=f"{shard}, {kept}, {words} not settled",
    )
