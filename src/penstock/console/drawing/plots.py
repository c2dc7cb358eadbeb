"""Plots: bars that are stacked, over time or over ages, as rectangles within a box. Pure.

A template draws them by the macro `plot` of `parts.html`. Colours are classes of `plots.css`, named
after the states of tasks. Every plot says in words what it shows, for those who do not see it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from typing import Final

WIDTH: Final = 640.0
HEIGHT: Final = 160.0
_LEFT: Final = 44.0
_BOTTOM: Final = 20.0
_TOP: Final = 8.0
_GAP: Final = 1.5
_LABELS_MAX: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One rectangle: a series at one place."""

    x: float
    y: float
    width: float
    height: float
    series: str
    told: str


@dataclass(frozen=True, slots=True)
class Mark:
    """A label at an axis, and where."""

    at: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """What is drawn."""

    told: str
    bars: Sequence[Bar]
    marks: Sequence[Mark]
    """Below, from left to right."""
    lines: Sequence[Mark]
    """At the side, from below; each has a line across."""
    series: Sequence[str]
    width: float = WIDTH
    height: float = HEIGHT
    left: float = _LEFT
    base: float = HEIGHT - _BOTTOM


def stacked(
    places: Sequence[tuple[str, Mapping[str, float]]],
    *,
    told: str,
    series: Sequence[str],
    unit: str = "",
    is_whole: bool = False,
) -> Plot:
    """Bars side by side: a label and the values of each series at every place, in order.

    What is counted is whole, and so are the figures at the side.
    """
    base, room = HEIGHT - _BOTTOM, HEIGHT - _BOTTOM - _TOP
    highest = max((sum(values.values()) for _, values in places), default=0.0)
    top, step = ceiling(highest, step_min=1.0 if is_whole else 0.0)
    width = (WIDTH - _LEFT) / max(1, len(places))
    bars: list[Bar] = []
    for at, (label, values) in enumerate(places):
        y = base
        for name in series:
            value = values.get(name, 0.0)
            if value <= 0:
                continue
            tall = room * value / top
            y -= tall
            bars.append(
                Bar(
                    x=_LEFT + at * width + _GAP / 2,
                    y=y,
                    width=max(0.5, width - _GAP),
                    height=tall,
                    series=name,
                    told=f"{label}: {value:,.4g} {name}{unit}",
                )
            )
    every = max(1, ceil(len(places) / _LABELS_MAX))
    marks = [
        Mark(_LEFT + (at + 0.5) * width, label)
        for at, (label, _) in enumerate(places)
        if at % every == 0
    ]
    count = round(top / step)
    lines = [
        Mark(base - room * place / count, f"{place * step:,.4g}") for place in range(count + 1)
    ]
    return Plot(told=told, bars=bars, marks=marks, lines=lines, series=series)


def ceiling(highest: float, *, step_min: float = 0.0) -> tuple[float, float]:
    """A round number that is not lower, and the step that it is divided by: 2 to 5 of them."""
    if highest <= 0:
        return 1.0, 1.0
    power = 10.0 ** floor(log10(highest))
    for factor in (0.2, 0.5, 1.0, 2.0, 5.0):
        step = factor * power
        count = ceil(highest / step - 1e-9)
        if count <= 5 and step >= step_min:
            return max(1, count) * step, step
    return 10 * power, 5 * power
