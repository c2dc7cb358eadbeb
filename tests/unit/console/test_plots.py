"""Plots: bars stay in their box, are as high as they should be, and axes are round."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.console.charts import PLOT_HEIGHT, PLOT_WIDTH, ceiling, stacked_bars

_VALUES = st.floats(0, 1e9, allow_nan=False).map(lambda value: round(value, 3))


@given(
    st.lists(st.tuples(st.text(max_size=5), st.fixed_dictionaries({"a": _VALUES, "b": _VALUES})))
)
def test_bars_stay_in_their_box_and_stand_on_each_other(
    places: list[tuple[str, dict[str, float]]],
) -> None:
    plot = stacked_bars(places, told="It says.", series=("a", "b"))
    for bar in plot.bars:
        assert bar.x >= plot.left
        assert bar.x + bar.width <= PLOT_WIDTH + 0.01
        assert bar.y >= -0.01
        assert bar.y + bar.height <= plot.base + 0.01
        assert bar.height > 0
    assert len(plot.marks) <= 6 or not places
    assert all(0 <= line.at <= PLOT_HEIGHT for line in plot.lines)


@pytest.mark.parametrize(
    ("highest", "found"),
    [
        (0, (1, 1)),
        (1, (1, 0.2)),
        (3, (3, 1)),
        (4.2, (5, 1)),
        (9, (10, 2)),
        (12, (15, 5)),
        (100, (100, 20)),
    ],
)
def test_axes_are_round(highest: float, found: tuple[float, float]) -> None:
    assert ceiling(highest) == pytest.approx(found)


@given(st.floats(1e-6, 1e12, allow_nan=False))
def test_an_axis_is_not_lower_than_what_it_shows(highest: float) -> None:
    top, step = ceiling(highest)
    assert top >= highest * (1 - 1e-6)
    assert 1 <= round(top / step) <= 5


def test_a_bar_is_told_in_words() -> None:
    plot = stacked_bars(
        [("10:00", {"completed": 12, "failed": 0})], told="", series=("completed", "failed")
    )
    assert [each.told for each in plot.bars] == ["10:00: 12 completed"]


def test_what_is_counted_has_whole_figures_at_its_side() -> None:
    plot = stacked_bars([("a", {"failed": 2})], told="", series=("failed",), is_whole=True)
    assert [each.text for each in plot.lines] == ["0", "1", "2"]
