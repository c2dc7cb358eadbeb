"""Ranges, cut and gathered."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.dispatcher.ranges import PIECES_MAX, key, named, pieces, windows

STARTS = st.integers(-(10**6), 10**6)
LENGTHS = st.integers(1, 500)
SIZES = st.integers(1, 700)


def test_pieces_lie_on_the_grid() -> None:
    assert pieces(5, 25, size=10) == ((5, 10), (10, 20), (20, 25))
    assert pieces(-5, 5, size=10) == ((-5, 0), (0, 5))
    assert pieces(10, 20, size=10) == ((10, 20),)
    assert key((-5, 0)) == "-5-0"


def test_windows_that_overlap() -> None:
    assert windows(5, 25, size=10, step=10) == ((0, 10), (10, 20), (20, 30))
    assert windows(10, 11, size=10, step=5) == ((5, 15), (10, 20))
    # Between windows there may be nothing.
    assert windows(3, 5, size=2, step=10) == ()


def test_too_many() -> None:
    assert pieces(0, PIECES_MAX, size=1) is not None
    assert pieces(0, PIECES_MAX + 1, size=1) is None
    assert windows(0, 1, size=2 * PIECES_MAX, step=1) is None


@given(STARTS, LENGTHS, SIZES)
def test_pieces_are_the_range(start: int, length: int, size: int) -> None:
    found = pieces(start, start + length, size=size)
    assert found is not None
    assert [number for piece in found for number in range(*piece)] == list(
        range(start, start + length)
    )
    assert all(low // size == (high - 1) // size for low, high in found)


@given(STARTS, LENGTHS, SIZES, SIZES)
def test_windows_are_those_that_overlap(start: int, length: int, size: int, step: int) -> None:
    found = windows(start, start + length, size=size, step=step)
    assert found is not None
    low, high = (start - size - step) // step, (start + length + step) // step
    assert list(found) == [
        (place * step, place * step + size)
        for place in range(low - 1, high + 1)
        if place * step < start + length and place * step + size > start
    ]


@given(STARTS, LENGTHS)
def test_a_name_tells_its_range(start: int, length: int) -> None:
    assert named(key((start, start + length))) == (start, start + length)


@pytest.mark.parametrize(
    "text", ["", "5", "5-", "5-5", "2013-01", "05-10", "5-10-15", "-0-5", f"0-{2**63}", "¹-²"]
)
def test_what_is_no_name_of_a_range(text: str) -> None:
    assert named(text) is None
