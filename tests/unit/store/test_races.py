"""The races tell a store that decides rightly from one that does not."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import pytest

from penstock.kernel.entropy import seeded_entropy
from penstock.kernel.errors import NotFound, OutcomeUnknown, StoreError, Superseded
from penstock.store.base import (
    NO_METADATA,
    REPLACE,
    ObjectStore,
    Put,
    PutMode,
    Swap,
    Version,
    Wrapper,
)
from penstock.store.faulty import FaultPlan, FaultyStore
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.store.races import (
    RaceOutcome,
    count_race,
    create_race,
    delete_against_swap,
    swap_race,
    touch_against_swap,
)
from penstock.store.retrying import Retries, RetryingStore
from penstock.testing.virtual import World, simulate

SEEDS = range(30)


class Careless(Wrapper):
    """A server that checks these conditions, but not in the same instant as it writes."""

    def __init__(self, inner: ObjectStore, *conditions: str) -> None:
        super().__init__(inner)
        self._conditions = conditions

    async def _version(self, key: str) -> Version | None:
        try:
            return (await self.inner.head(key)).version
        except NotFound:
            return None

    async def put(
        self,
        key: str,
        body: bytes,
        mode: PutMode = REPLACE,
        *,
        metadata: Mapping[str, str] = NO_METADATA,
    ) -> Version:
        condition = "create" if mode is Put.CREATE else "swap" if isinstance(mode, Swap) else ""
        if condition not in self._conditions:
            return await self.inner.put(key, body, mode, metadata=metadata)
        present = await self._version(key)
        wrong = present is not None if mode is Put.CREATE else mode != Swap(present or Version(""))
        if wrong:
            return await self.inner.put(key, body, mode, metadata=metadata)
        return await self.inner.put(key, body, metadata=metadata)

    async def touch(
        self, key: str, *, version: Version, metadata: Mapping[str, str] = NO_METADATA
    ) -> Version:
        if "touch" not in self._conditions:
            return await self.inner.touch(key, version=version, metadata=metadata)
        found = await self.inner.get(key)
        assert found is not None
        return await self.inner.put(key, found.body, metadata=metadata)

    async def delete(self, key: str, *, version: Version | None = None) -> None:
        await self.inner.delete(key, version=None if "delete" in self._conditions else version)


def _clients(world: World, count: int, *careless: str) -> list[ObjectStore]:
    bucket = MemoryBucket(world.clock())

    def client() -> ObjectStore:
        store = MemoryStore(bucket, clock=world.clock())
        return Careless(store, *careless) if careless else store

    return [client() for _ in range(count)]


@pytest.mark.parametrize("race", [create_race, swap_race])
def test_one_wins(race: Callable[..., Awaitable[RaceOutcome]]) -> None:
    async def main(world: World) -> None:
        outcome = await race(_clients(world, 8), "a", entropy=world.entropy("race"))
        assert outcome == RaceOutcome(winners=1, stands=True)
        assert outcome.right

    for seed in SEEDS:
        simulate(main, seed=seed)


@pytest.mark.parametrize(("race", "condition"), [(create_race, "create"), (swap_race, "swap")])
def test_a_store_with_two_winners_is_found(
    race: Callable[..., Awaitable[RaceOutcome]], condition: str
) -> None:
    async def main(world: World) -> bool:
        clients = _clients(world, 8, condition)
        return (await race(clients, "a", entropy=world.entropy("race"))).right

    assert not all(simulate(main, seed=seed) for seed in SEEDS)


@pytest.mark.parametrize(("winners", "stands"), [(0, False), (1, False), (2, True), (0, True)])
def test_other_outcomes_are_wrong(winners: int, stands: bool) -> None:
    assert not RaceOutcome(winners=winners, stands=stands).right


def test_a_counter_is_exact() -> None:
    async def main(world: World) -> int:
        return await count_race(_clients(world, 6), "a", each=3, entropy=world.entropy("race"))

    assert {simulate(main, seed=seed) for seed in SEEDS} == {18}


def test_a_store_that_loses_updates_is_found() -> None:
    async def main(world: World) -> int:
        clients = _clients(world, 6, "swap")
        return await count_race(clients, "a", each=3, entropy=world.entropy("race"))

    assert min(simulate(main, seed=seed) for seed in SEEDS) < 18


@pytest.mark.parametrize("race", [touch_against_swap, delete_against_swap])
def test_two_that_exclude_each_other(race: Callable[..., Awaitable[bool]]) -> None:
    async def main(world: World) -> bool:
        return await race(*_clients(world, 2), "a", entropy=world.entropy("race"))

    assert all(simulate(main, seed=seed) for seed in SEEDS)


@pytest.mark.parametrize(
    ("race", "condition"), [(touch_against_swap, "touch"), (delete_against_swap, "delete")]
)
def test_a_store_that_lets_both_pass_is_found(
    race: Callable[..., Awaitable[bool]], condition: str
) -> None:
    async def main(world: World) -> bool:
        return await race(*_clients(world, 2, condition), "a", entropy=world.entropy("race"))

    assert not all(simulate(main, seed=seed) for seed in SEEDS)


def test_races_are_decided_rightly_through_lost_answers() -> None:
    plan = FaultPlan(lost_request=0.1, lost_answer=0.2, duplicate=0.1, late_seconds_max=0.5)

    async def main(world: World) -> None:
        entropy = world.entropy("race")
        clients: list[ObjectStore] = [
            RetryingStore(
                FaultyStore(store, plan, entropy=entropy),
                entropy=entropy,
                retries=Retries(tries_max=20),
            )
            for store in _clients(world, 6)
        ]
        assert (await create_race(clients, "create", entropy=entropy)).right
        assert (await swap_race(clients, "swap", entropy=entropy)).right
        assert await count_race(clients, "count", each=2, entropy=entropy) == 12

    for seed in SEEDS:
        simulate(main, seed=seed)


class Conditional(Wrapper):
    """A store that takes no write without a condition."""

    async def put(
        self,
        key: str,
        body: bytes,
        mode: PutMode = REPLACE,
        *,
        metadata: Mapping[str, str] = NO_METADATA,
    ) -> Version:
        assert mode is not REPLACE
        return await self.inner.put(key, body, mode, metadata=metadata)

    async def delete(self, key: str, *, version: Version | None = None) -> None:
        assert version is not None
        await self.inner.delete(key, version=version)


def test_every_write_holds_a_condition() -> None:
    """One without, repeated by a network, brings an old body back: two swaps of it succeed."""

    async def main(world: World) -> None:
        one, other = (Conditional(store) for store in _clients(world, 2))
        entropy = world.entropy("race")
        for _ in range(2):
            await swap_race([one, other], "swap", entropy=entropy)
            await count_race([one, other], "count", each=1, entropy=entropy)
            await touch_against_swap(one, other, "touch", entropy=entropy)
            await delete_against_swap(one, other, "delete", entropy=entropy)
        await create_race([one, other], "create", entropy=entropy)

    simulate(main, seed=1)


class Telling(Wrapper):
    """A store that carries out a put and then raises."""

    def __init__(self, inner: ObjectStore, error: StoreError) -> None:
        super().__init__(inner)
        self._error = error

    async def put(
        self,
        key: str,
        body: bytes,
        mode: PutMode = REPLACE,
        *,
        metadata: Mapping[str, str] = NO_METADATA,
    ) -> Version:
        await self.inner.put(key, body, mode, metadata=metadata)
        raise self._error


@pytest.mark.parametrize(
    ("error", "winners"), [(Superseded("replaced since"), 1), (OutcomeUnknown("lost"), 0)]
)
def test_who_counts_as_a_winner(error: StoreError, winners: int) -> None:
    async def main(world: World) -> None:
        (client,) = _clients(world, 1)
        outcome = await create_race([Telling(client, error)], "a", entropy=seeded_entropy(1))
        assert outcome.winners == winners
        assert outcome.stands is bool(winners)

    simulate(main, seed=1)


def test_other_errors_are_raised() -> None:
    async def main(world: World) -> None:
        (client,) = _clients(world, 1)
        telling = Telling(client, StoreError("broken"))
        with pytest.raises(StoreError, match="broken"):
            await create_race([telling], "a", entropy=seeded_entropy(1))

    simulate(main, seed=1)
