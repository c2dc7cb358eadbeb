"""What may come with an event."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.events import DEPTH_MAX, PAYLOAD_BYTES_MAX, payload_fault

TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))


@given(
    st.dictionaries(
        TEXTS,
        st.recursive(
            st.none()
            | st.booleans()
            | st.integers()
            | st.floats(allow_nan=False, allow_infinity=False)
            | TEXTS,
            lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
            max_leaves=10,
        ),
    )
)
def test_whatever_json_says_is_allowed(payload: dict[str, Any]) -> None:
    assert payload_fault(payload) is None


def test_it_has_a_size_as_json() -> None:
    room = PAYLOAD_BYTES_MAX - len('{"a":""}')
    assert payload_fault({"a": "x" * room}) is None
    for value in ("x" * (room + 1), "é" * (room // 2 + 1), "\n" * (room // 2 + 1)):
        fault = payload_fault({"a": value})
        assert fault is not None
        assert fault.is_too_large
        assert f"has {PAYLOAD_BYTES_MAX:,} bytes at most" in fault.why


@pytest.mark.parametrize("number", [1e300, 1e-300, -1.5e-200])
def test_numbers_count_in_full(number: float) -> None:
    # A database writes them out, so a few bytes would be many there.
    short = [number] * 400
    assert len(json.dumps(short)) < PAYLOAD_BYTES_MAX // 10
    fault = payload_fault({"a": short})
    assert fault is not None
    assert fault.is_too_large
    assert payload_fault({"a": [number] * 100}) is None


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        ({"a": "x\0"}, "a NUL character"),
        ({"a": [{"b\0": 1}]}, "a NUL character"),
        ({"a": float("inf")}, "not finite"),
        ({"a": [float("nan")]}, "not finite"),
        ({"a": -(10**320)}, "320 digits at most"),
        ({"a": "\ud800"}, "valid JSON"),
        ({"a": object()}, "valid JSON"),
    ],
)
def test_what_cannot_be_stored(payload: dict[str, Any], why: str) -> None:
    fault = payload_fault(payload)
    assert fault is not None
    assert why in fault.why
    assert not fault.is_too_large


def test_it_has_a_depth() -> None:
    value: Any = 1
    for _ in range(DEPTH_MAX - 2):
        value = [value]
    assert payload_fault({"a": value}) is None
    fault = payload_fault({"a": [value]})
    assert fault is not None
    assert f"{DEPTH_MAX} levels" in fault.why
    for _ in range(100_000):
        value = {"a": value}
    assert payload_fault(value) is not None
