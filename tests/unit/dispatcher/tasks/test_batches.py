"""How tasks that are claimed together are divided into batches."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from penstock.dispatcher.tasks.lifecycle import BatchMember, batch_names, divided


def members(keys: list[str]) -> list[BatchMember]:
    return [BatchMember(number, key) for number, key in enumerate(keys, start=1)]


@given(st.lists(st.sampled_from("abcdef"), max_size=40), st.integers(2, 9))
def test_divided(keys: list[str], most: int) -> None:
    batches = divided(members(keys), most=most)
    assert sorted(each.id for batch in batches for each in batch) == list(range(1, len(keys) + 1))
    for batch in batches:
        assert 1 <= len(batch) <= most
        assert len({each.partition_key for each in batch}) == len(batch)
    # As few as can be, and of about the same size.
    twins = max(Counter(keys).values(), default=0)
    assert len(batches) == max(-(-len(keys) // most), twins)
    sizes = [len(batch) for batch in batches]
    assert max(sizes, default=0) - min(sizes, default=0) <= 1


def test_a_batch_is_named_after_its_first_attempt() -> None:
    attempts = {4: 1, 5: 2, 6: 1}
    assert batch_names([[5, 4], [6]], attempts) == {5: "5-2", 4: "5-2"}
