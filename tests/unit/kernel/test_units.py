"""Durations and counts; the refusals are in test_problems."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kernel.units import DURATION_MS_MAX, count, duration_ms, duration_text


@pytest.mark.parametrize(
    ("text", "milliseconds", "written"),
    [
        ("500ms", 500, "500ms"),
        ("30s", 30_000, "30s"),
        ("90s", 90_000, "1m30s"),
        ("5m", 300_000, "5m"),
        ("1h30m", 5_400_000, "1h30m"),
        ("1.5h", 5_400_000, "1h30m"),
        ("0.001s", 1, "1ms"),
        ("24h", 86_400_000, "1d"),
        ("366d", DURATION_MS_MAX, "366d"),
        ("0ms", 0, "0s"),
        ("1d2h3m4s5ms", 93_784_005, "1d2h3m4s5ms"),
    ],
)
def test_durations(text: str, milliseconds: int, written: str) -> None:
    assert duration_ms(text) == milliseconds
    assert duration_text(milliseconds) == written


@given(st.integers(0, DURATION_MS_MAX))
def test_what_is_written_is_read_back(milliseconds: int) -> None:
    assert duration_ms(duration_text(milliseconds)) == milliseconds


@pytest.mark.parametrize("text", ["", "s", "5", "5 s", "-5s", "5S", "1e3s", "5sec", "٣s", "1_0s"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        duration_ms(text)


@pytest.mark.parametrize(
    ("text", "number"),
    [("0", 0), ("250", 250), ("1_000", 1000), ("10k", 10_000), ("2M", 2_000_000), ("007", 7)],
)
def test_counts(text: str, number: int) -> None:
    assert count(text) == number


@pytest.mark.parametrize("text", ["", "k", "-1", "+1", "1.5", "1K", "1m", "1_00", "_1", "٣", "1 k"])
def test_what_is_no_count(text: str) -> None:
    with pytest.raises(ValueError, match="is not a count"):
        count(text)
