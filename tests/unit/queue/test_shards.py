"""Slots, shards and runs, and the pure decisions of the shard leases."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kernel.errors import InvalidInput
from penstock.queue.ids import SLOTS
from penstock.queue.shards.allocation import (
    SHARDS_DEFAULT,
    check_shards,
    fair_share,
    look_seconds,
    next_epoch,
    pick,
    runs,
    shard_of,
    slot_runs,
    slots_of,
    surplus,
    takes_idle_offer,
    unowned,
)

COUNTS = st.integers(0, 12).map(lambda power: 2**power)
SETS = st.sets(st.integers(0, 63))


@pytest.mark.parametrize("shards", [0, -1, 3, 63, SLOTS + 1, 2 * SLOTS])
def test_only_powers_of_two_up_to_the_slots_are_shards(shards: int) -> None:
    with pytest.raises(InvalidInput, match="cannot have"):
        check_shards(shards)


def test_the_default_is_allowed() -> None:
    assert check_shards(SHARDS_DEFAULT) == 64
    assert check_shards(1) == 1
    assert check_shards(SLOTS) == SLOTS


@given(COUNTS)
def test_every_slot_is_in_one_shard(shards: int) -> None:
    slots = [slot for shard in range(shards) for slot in slots_of(shard, shards=shards)]
    assert slots == list(range(SLOTS))
    for shard in {0, shards // 2, shards - 1}:
        assert {shard_of(slot, shards=shards) for slot in slots_of(shard, shards=shards)} == {shard}


@given(SETS)
def test_runs_are_what_they_were_made_of_and_never_touch(numbers: set[int]) -> None:
    found = runs(numbers)
    assert [number for run in found for number in run] == sorted(numbers)
    assert all(one.stop < other.start for one, other in pairwise(found))


@given(SETS)
def test_slot_runs_are_the_slots_of_the_shards(owned: set[int]) -> None:
    found = slot_runs(owned, shards=64)
    assert [slot for run in found for slot in run] == [
        slot for shard in sorted(owned) for slot in slots_of(shard, shards=64)
    ]
    assert len(found) == len(runs(owned))


def test_all_shards_are_one_run() -> None:
    assert slot_runs(range(64), shards=64) == (range(SLOTS),)


def test_unowned_is_what_no_projection_has() -> None:
    assert unowned([{0, 1}, {1, 3}], shards=5) == (2, 4)
    assert unowned([], shards=2) == (0, 1)


@given(st.integers(1, 4096), st.integers(0, 200))
def test_fair_shares_cover_everything(shards: int, workers: int) -> None:
    share = fair_share(shards=shards, workers=workers)
    assert share * max(1, workers) >= shards
    assert (share - 1) * max(1, workers) < shards


@given(SETS, st.integers(1, 70), st.integers(0, 70))
def test_surplus_leaves_the_target_or_the_share_and_at_least_one(
    owned: set[int], per_worker: int, share: int
) -> None:
    offers = surplus(owned, shards_per_worker=per_worker, share=share)
    assert set(offers) <= owned
    assert len(owned) - len(offers) == min(len(owned), max(1, min(per_worker, share)))


def test_surplus_keeps_the_longest_run() -> None:
    assert surplus({0, 1, 4, 5, 6, 9}, shards_per_worker=3, share=64) == (0, 1, 9)


@given(SETS, st.integers(0, 70), st.floats(0, 1, exclude_max=True))
def test_pick_takes_as_many_as_it_may(offered: set[int], count: int, draw: float) -> None:
    picked = pick(offered, count=count, draw=draw)
    assert set(picked) <= offered
    assert len(picked) == min(count, len(offered))


def test_pick_takes_neighbours_and_spreads_by_the_draw() -> None:
    assert pick(range(8), count=4, draw=0.0) == (0, 1, 2, 3)
    assert pick(range(8), count=4, draw=0.9) == (4, 5, 6, 7)
    assert pick([0, 2, 3, 4, 9], count=3, draw=0.0) == (2, 3, 4)


def test_who_works_takes_from_the_idle_and_the_first_of_the_idle_from_the_rest() -> None:
    def takes(me: str, offerer: str, *, idle: bool, saturated: bool = False) -> bool:
        return takes_idle_offer(me=me, offerer=offerer, idle=idle, saturated=saturated)

    assert takes("b", "a", idle=False)
    assert not takes("b", "a", idle=False, saturated=True)
    assert takes("a", "b", idle=True)
    assert not takes("b", "a", idle=True)


@given(st.integers(0, 10**13), st.integers(0, 10**13), st.integers(0, 10**13))
def test_an_epoch_is_beyond_all_that_is_known(previous: int, seen: int, now: int) -> None:
    epoch = next_epoch(previous=previous, seen=seen, earliest_ms=now)
    assert epoch > previous
    assert epoch > seen
    assert epoch >= now


@pytest.mark.parametrize(("standbys", "seconds"), [(1, 5.0), (7, 7.0), (49, 45.0)])
def test_the_more_standbys_the_rarer_each_looks(standbys: int, seconds: float) -> None:
    assert seconds == look_seconds(
        standbys=standbys, each_seconds=1.0, seconds_min=5.0, seconds_max=45.0
    )
