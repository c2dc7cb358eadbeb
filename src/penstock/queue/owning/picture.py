"""What a picture of the workers says about one cut of the queue. Pure.

A picture is what a look at `workers/` has shown: name → registration, of workers that are live.
Only those of the same cut share out its shards; what the owners of another cut look at says what
they are about to take when they move (`penstock.queue.owning.moving`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from penstock.queue.owning import shards as decide
from penstock.queue.owning.registry import Registration, Role
from penstock.queue.owning.shards import Cut

Picture = Mapping[str, Registration]


def of_cut(live: Picture, cut: Cut) -> dict[str, Registration]:
    """The workers whose shards are those of a cut."""
    return {name: other for name, other in live.items() if other.is_of(cut)}


def is_covered(
    slots: Iterable[range], others: Picture, *, mine: Collection[int], shards: int
) -> bool:
    """Whether all shards with these slots are mine or another owner's of the same cut."""
    owners = [other.shards for other in others.values() if other.role is Role.OWNER]
    free = decide.unowned([*owners, mine], shards=shards)
    return decide.shards_in(slots, shards=shards).isdisjoint(free)


def left_to_others(live: Picture, cut: Cut, *, before: Collection[str]) -> frozenset[int]:
    """The shards of a cut whose first slot an owner of another cut looks at.

    `before` are the names that the worker who asks has under other cuts: what it looks at
    itself it need not leave.
    """
    looked_at = [
        run
        for name, other in live.items()
        if other.role is Role.OWNER and name not in before and not other.is_of(cut)
        for run in other.slots
    ]
    return decide.begun_in(looked_at, shards=cut.shards)
