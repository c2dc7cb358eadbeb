"""The promises between several: one winner a race, no update lost, reads after writes, time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from penstock.kernel.entropy import seeded_entropy
from penstock.store.base import ObjectStore
from penstock.store.races import (
    count_race,
    create_race,
    delete_against_swap,
    swap_race,
    touch_against_swap,
)
from penstock.testing.store_contract.check import Check, OpenClient, read

WRITERS: Final = 16
_ROUNDS: Final = 3
_DATE_SECONDS: Final = 1.0
"""Stores date their objects to the second."""


async def _clients(open_client: OpenClient) -> Sequence[ObjectStore]:
    """Sixteen writers on four clients: some share one, some do not."""
    opened = [await open_client() for _ in range(4)]
    return [opened[number % 4] for number in range(WRITERS)]


async def one_creator_wins(open_client: OpenClient) -> None:
    clients = await _clients(open_client)
    entropy = seeded_entropy("one creator wins")
    for number in range(_ROUNDS):
        outcome = await create_race(clients, f"race/{number}", entropy=entropy)
        assert outcome.right, outcome


async def one_swapper_wins(open_client: OpenClient) -> None:
    clients = await _clients(open_client)
    entropy = seeded_entropy("one swapper wins")
    for _ in range(_ROUNDS):
        outcome = await swap_race(clients, "race", entropy=entropy)
        assert outcome.right, outcome


async def one_creator_wins_after_a_delete(open_client: OpenClient) -> None:
    clients = await _clients(open_client)
    entropy = seeded_entropy("one creator wins after a delete")
    for _ in range(_ROUNDS):
        outcome = await create_race(clients, "race", entropy=entropy)
        assert outcome.right, outcome
        await clients[0].delete("race")


async def no_increment_is_lost(open_client: OpenClient) -> None:
    clients = await _clients(open_client)
    entropy = seeded_entropy("no increment is lost")
    assert await count_race(clients, "counter", each=4, entropy=entropy) == 4 * WRITERS


async def a_touch_never_brings_an_old_body_back(open_client: OpenClient) -> None:
    toucher, swapper = await open_client(), await open_client()
    entropy = seeded_entropy("a touch never brings an old body back")
    for _ in range(4 * _ROUNDS):
        assert await touch_against_swap(toucher, swapper, "race", entropy=entropy)


async def a_delete_and_a_swap_never_both_win(open_client: OpenClient) -> None:
    deleter, swapper = await open_client(), await open_client()
    entropy = seeded_entropy("a delete and a swap never both win")
    for _ in range(4 * _ROUNDS):
        assert await delete_against_swap(deleter, swapper, "race", entropy=entropy)


async def readers_see_whole_objects(open_client: OpenClient) -> None:
    """While one writer replaces an object, its body and its metadata always fit together."""
    writer, reader = await open_client(), await open_client()

    async def write() -> None:
        for number in range(1, 40):
            body = f"{number}:".encode() + b"x" * (10_000 * (number % 3))
            await writer.put("a", body, metadata={"number": str(number)} if number % 2 else {})

    await writer.put("a", b"0:")
    async with asyncio.TaskGroup() as group:
        writing = group.create_task(write())
        while not writing.done():
            # A store that never suspends would starve the writer otherwise.
            await reader.clock.machine.sleep(0)
            found = await read(reader, "a")
            number = int(found.body.split(b":")[0])
            assert len(found.body) == len(f"{number}:") + 10_000 * (number % 3)
            assert dict(found.metadata) == ({"number": str(number)} if number % 2 else {})


async def the_stores_time_holds_what_it_dates(open_client: OpenClient) -> None:
    store, other = await open_client(), await open_client()
    before = await store.now()
    await store.put("a", b"one")
    modified = (await store.head("a")).modified
    after = await other.now()
    assert before.earliest <= before.latest
    assert before.earliest - _DATE_SECONDS <= modified <= after.latest
    assert before.earliest <= after.latest


CHECKS: Final[tuple[Check, ...]] = (
    one_creator_wins,
    one_swapper_wins,
    one_creator_wins_after_a_delete,
    no_increment_is_lost,
    a_touch_never_brings_an_old_body_back,
    a_delete_and_a_swap_never_both_win,
    readers_see_whole_objects,
    the_stores_time_holds_what_it_dates,
)
