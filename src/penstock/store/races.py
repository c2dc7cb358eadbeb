"""Races that a store must decide rightly, for the contract suite and for `penstock doctor`.

Each race is run by several clients of one store at once, writes only below the key it is given,
and returns what it saw; the caller judges. Bodies are stamped, so that they differ, and so that
a retrying store can settle a write whose answer was lost. Every write holds a condition: one that
does not, and that arrives twice, would bring an old body back in the middle of a race.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from penstock.kernel.document_format import Stamped, decode, encode
from penstock.kernel.entropy import Entropy, new_id
from penstock.kernel.errors import (
    AlreadyExists,
    NotFound,
    OutcomeUnknown,
    Superseded,
    VersionConflict,
)
from penstock.store.base import CREATE, ObjectStore, PutMode, Swap, Version
from penstock.store.cell import Cell


class Entrant(Stamped, frozen=True):
    """What a racer writes."""

    kind: ClassVar[str] = "race"
    count: int = 0


@dataclass(frozen=True, slots=True)
class RaceOutcome:
    """How many believe that they won, and whether the object agrees with one of them."""

    winners: int
    stands: bool

    @property
    def right(self) -> bool:
        return self.winners == 1 and self.stands


async def create_race(clients: Sequence[ObjectStore], key: str, *, entropy: Entropy) -> RaceOutcome:
    """All create the same key at once; one may win."""
    return await _race(clients, key, CREATE, entropy)


async def swap_race(clients: Sequence[ObjectStore], key: str, *, entropy: Entropy) -> RaceOutcome:
    """All swap from the same version at once; one may win."""
    version = await lay(clients[0], key, bodies_of(1, entropy)[0])
    return await _race(clients, key, Swap(version), entropy)


async def winners_among(
    clients: Sequence[ObjectStore], key: str, mode: PutMode, bodies: Sequence[bytes]
) -> list[bool]:
    """All put at once, each its own body; which of them believe that they won."""
    return await asyncio.gather(
        *(
            _succeeds(client.put(key, body, mode))
            for client, body in zip(clients, bodies, strict=True)
        )
    )


async def count_race(
    clients: Sequence[ObjectStore], key: str, *, each: int, entropy: Entropy
) -> int:
    """All increment one counter; returns where it ends. Exact only if no update is lost."""

    async def increment(client: ObjectStore) -> None:
        cell = Cell(client, key, Entrant, entropy=entropy)
        for _ in range(each):
            await cell.update(_increment)

    await asyncio.gather(*(increment(client) for client in clients))
    found = await clients[0].get(key)
    return decode(Entrant, found.body, where=key).count if found else 0


async def touch_against_swap(
    toucher: ObjectStore, swapper: ObjectStore, key: str, *, entropy: Entropy
) -> bool:
    """One refreshes the old version while another swaps: the swapped body must stand."""
    old, new = bodies_of(2, entropy)
    version = await lay(swapper, key, old)
    _, swapped = await _both(
        toucher.touch(key, version=version, metadata={"owner": "toucher"}),
        swapper.put(key, new, Swap(version)),
        entropy=entropy,
    )
    found = await swapper.get(key)
    # Where a touch gives a new version it may win; the swap is then refused and must say so.
    return found is not None and found.body == (new if swapped else old)


async def delete_against_swap(
    deleter: ObjectStore, swapper: ObjectStore, key: str, *, entropy: Entropy
) -> bool:
    """One deletes a version while another swaps it: not both may succeed."""
    old, new = bodies_of(2, entropy)
    version = await lay(swapper, key, old)
    deleted, swapped = await _both(
        deleter.delete(key, version=version),
        swapper.put(key, new, Swap(version)),
        entropy=entropy,
    )
    remains = {entry.key for entry in (await swapper.list(key)).entries}
    return not (deleted and swapped) and (key in remains or not swapped)


def _increment(present: Entrant | None) -> Entrant:
    if present is None:
        return Entrant(count=1)
    return Entrant(count=present.count + 1, writes=present.writes)


def bodies_of(count: int, entropy: Entropy) -> list[bytes]:
    """Bodies that differ and tell their writer."""
    return [
        encode(
            Entrant(count=number).stamped(
                writer=new_id(entropy, characters=12), write=new_id(entropy, characters=16)
            )
        )
        for number in range(count)
    ]


async def lay(client: ObjectStore, key: str, body: bytes) -> Version:
    """Put what a race starts from over whatever is there."""
    try:
        mode: PutMode = Swap((await client.head(key)).version)
    except NotFound:
        mode = CREATE
    return await client.put(key, body, mode)


async def _both(
    one: Awaitable[object], other: Awaitable[object], *, entropy: Entropy
) -> tuple[bool, bool]:
    """Whether each succeeds, started at once, now the one first and now the other."""
    if entropy.random() < 0.5:
        first, second = await asyncio.gather(_succeeds(one), _succeeds(other))
        return first, second
    second, first = await asyncio.gather(_succeeds(other), _succeeds(one))
    return first, second


async def _succeeds(request: Awaitable[object]) -> bool:
    try:
        await request
    except Superseded:
        return True
    except (AlreadyExists, VersionConflict, OutcomeUnknown):
        return False
    return True


async def _race(
    clients: Sequence[ObjectStore], key: str, mode: PutMode, entropy: Entropy
) -> RaceOutcome:
    bodies = bodies_of(len(clients), entropy)
    won = await winners_among(clients, key, mode, bodies)
    found = await clients[0].get(key)
    stands = any(
        winner and found is not None and found.body == body
        for body, winner in zip(bodies, won, strict=True)
    )
    return RaceOutcome(winners=sum(won), stands=stands)
