"""The attempts of a task on a time line: a lane each, below one another, on one scale. Pure.

The scale begins when the task was made and ends when it was over, or now. Attempts of one task
never overlap. A pause between them that is much longer than all attempts together would leave
nothing of them to see: it is drawn shorter than it was, and marked as a *break*, at the same place
in every lane. Lanes are stretched to the width that there is, so there is no text in them; what
they show stands in the row of a table beside them, in words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

WIDTH: Final = 1000.0
_BAR_WIDTH_MIN: Final = 6.0
_SECONDS_MIN: Final = 1e-6
_PAUSE_PER_WORK: Final = 2.0
"""How much longer than all attempts together a pause may be drawn."""
_PAUSE_SECONDS_MIN: Final = 1.0
"""A pause up to this length is drawn as long as it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """An attempt, in seconds of whatever clock."""

    started_at: float
    ended_at: float


@dataclass(frozen=True, slots=True)
class Stretch:
    """A piece of the scale."""

    x: float
    width: float


@dataclass(frozen=True, slots=True)
class Break:
    """A pause that is drawn shorter than it was."""

    x: float
    width: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """What is drawn of one attempt: how long was waited for it, and the attempt."""

    wait: Stretch
    bar: Stretch


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What is drawn."""

    lanes: Sequence[Lane]
    breaks: Sequence[Break]
    after: Stretch | None
    """What has passed since the last attempt, if the task is not over."""
    seconds: float
    """How much time the scale stands for, with all of every break."""
    width: float = WIDTH


def timeline(spans: Sequence[Span], *, begins_at: float, ends_at: float) -> Timeline:
    """Attempts in their order, from the making of their task to its end or now."""
    pauses: list[float] = []
    works: list[float] = []
    at = begins_at
    for each in spans:
        pauses.append(max(0.0, each.started_at - at))
        works.append(max(0.0, each.ended_at - each.started_at))
        at = max(at, each.started_at + works[-1])
    rest = max(0.0, ends_at - at)
    longest = max(_PAUSE_SECONDS_MIN, _PAUSE_PER_WORK * sum(works))
    shown = [min(each, longest) for each in pauses]
    shown_rest = min(rest, longest)
    total = sum(shown) + sum(works) + shown_rest
    # Less than the clocks can tell is nothing.
    scale = WIDTH / total if total > _SECONDS_MIN else 0.0
    lanes: list[Lane] = []
    breaks: list[Break] = []
    x = 0.0
    for pause, drawn, work in zip(pauses, shown, works, strict=True):
        wait = Stretch(x, drawn * scale)
        if drawn < pause:
            breaks.append(Break(x, wait.width, pause))
        x += wait.width
        lanes.append(Lane(wait=wait, bar=_visible(x, work * scale)))
        x += work * scale
    if shown_rest < rest:
        breaks.append(Break(x, shown_rest * scale, rest))
    after = Stretch(x, shown_rest * scale) if rest > 0 else None
    seconds = sum(pauses) + sum(works) + rest
    return Timeline(lanes=lanes, breaks=breaks, after=after, seconds=seconds)


def _visible(x: float, width: float) -> Stretch:
    """A bar that can be seen, and does not stick out."""
    wide = max(width, _BAR_WIDTH_MIN)
    return Stretch(min(x, WIDTH - wide), wide)
