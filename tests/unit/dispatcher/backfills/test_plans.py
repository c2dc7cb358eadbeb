"""What a backfill may be asked for."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.dispatcher.backfills import (
    BackfillKind,
    BackfillPlan,
    BackfillRefusalReason,
    BackfillRefused,
    plan_of,
)
from penstock.protocol.steering import BackfillAsk


def ask(**fields: Any) -> BackfillAsk:
    return BackfillAsk(job="clean", **fields)


def test_ranges_are_counted_and_not_listed() -> None:
    plan = plan_of(ask(start=0, end=1_000_000, step=1))
    assert plan == BackfillPlan(
        kind=BackfillKind.RANGES, partitions=1_000_000, start=0, end=1_000_000, step=1
    )
    assert plan.stored == {"kind": "ranges", "start": 0, "end": 1_000_000, "step": 1}


@given(st.integers(-(2**63), 2**63 - 2), st.integers(1, 2000), st.integers(1, 2**63 - 1))
def test_every_number_is_in_one_range(start: int, length: int, step: int) -> None:
    end = min(start + length, 2**63 - 1)
    plan = plan_of(ask(start=start, end=end, step=step))
    assert isinstance(plan, BackfillPlan)
    assert (plan.partitions - 1) * step < end - start <= plan.partitions * step


def test_keys_are_taken_once_in_their_order() -> None:
    plan = plan_of(ask(keys=["b", "a", "b"]))
    assert plan == BackfillPlan(kind=BackfillKind.KEYS, partitions=2, keys=("b", "a"))
    assert plan.stored == {"kind": "keys"}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "needs keys, or a start"),
        ({"start": 1, "end": 2}, "needs keys, or a start"),
        ({"keys": ["a"], "start": 1}, "leave one out"),
        ({"start": 2, "end": 2, "step": 1}, "must be lower"),
        ({"start": 0, "end": 2**62, "step": 1}, "make the step larger"),
        ({"keys": ["a\x00"]}, "bytes that can be stored"),
        ({"keys": ["\ud800"]}, "bytes that can be stored"),
        ({"keys": ["é" * 251]}, "bytes that can be stored"),
    ],
)
def test_what_makes_no_sense(fields: dict[str, Any], said: str) -> None:
    refused = plan_of(ask(**fields))
    assert isinstance(refused, BackfillRefused)
    assert refused.why is BackfillRefusalReason.INVALID
    assert said in refused.detail
