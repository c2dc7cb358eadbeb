"""Charts as coordinates: stacked plots, the map of shards, the time line of a task, the heat map.
Pure.

Templates and scripts draw them. Every chart also says in words what it shows.

- Plots: stacked bars over time or ages, as rectangles in a box, drawn by the macro `plot` of
  `parts.html`. Colours are classes of `plots.css`, named after the states of tasks.
- The map of a queue's shards: a cell each, with its holder's letter and colour, so that nobody
  has to tell colours apart. Letters go by the holders' names. Of more than `SHARD_CELLS_MAX` shards
  neighbours share a cell.
- The time line of a task: a lane for each attempt, on one scale from the task's creation to its
  end, or now. Attempts of one task never overlap. A pause between them that is much longer than
  all attempts together is drawn shorter and marked as a *break*, at the same place in every lane.
  Lanes are stretched to the width that there is, so their text is in the table beside them.
- The heat map of a dataset's partitions: compact arrays of cells for the script that draws it. A
  cell is a partition that is published, or that should be: a task waits, runs or is dead, or
  inputs have it and there is no task. A newer task of a published partition decides the cell's
  state. Cells are ordered by their ranges, then by their keys; of more than there may be the last
  ones, which are the newest, are kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import ceil, floor, log10
from string import ascii_uppercase
from typing import Any, Final

from penstock.dispatcher.views.datasets import (
    CELLS_MAX,
    BlockingTask,
    MissingPartition,
    PartitionCell,
)

PLOT_WIDTH: Final = 640.0
PLOT_HEIGHT: Final = 160.0
_LEFT: Final = 44.0
_BOTTOM: Final = 20.0
_TOP: Final = 8.0
_GAP: Final = 1.5
_LABELS_MAX: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotBar:
    """One rectangle: a series at one place."""

    x: float
    y: float
    width: float
    height: float
    series: str
    told: str


@dataclass(frozen=True, slots=True)
class AxisLabel:
    """A label at an axis, and where."""

    at: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """What is drawn."""

    told: str
    bars: Sequence[PlotBar]
    marks: Sequence[AxisLabel]
    """Below, from left to right."""
    lines: Sequence[AxisLabel]
    """At the side, from below; each has a line across."""
    series: Sequence[str]
    width: float = PLOT_WIDTH
    height: float = PLOT_HEIGHT
    left: float = _LEFT
    base: float = PLOT_HEIGHT - _BOTTOM


def stacked_bars(
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
    base, room = PLOT_HEIGHT - _BOTTOM, PLOT_HEIGHT - _BOTTOM - _TOP
    highest = max((sum(values.values()) for _, values in places), default=0.0)
    top, step = ceiling(highest, step_min=1.0 if is_whole else 0.0)
    width = (PLOT_WIDTH - _LEFT) / max(1, len(places))
    bars: list[PlotBar] = []
    for at, (label, values) in enumerate(places):
        y = base
        for name in series:
            value = values.get(name, 0.0)
            if value <= 0:
                continue
            tall = room * value / top
            y -= tall
            bars.append(
                PlotBar(
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
        AxisLabel(_LEFT + (at + 0.5) * width, label)
        for at, (label, _) in enumerate(places)
        if at % every == 0
    ]
    count = round(top / step)
    lines = [
        AxisLabel(base - room * place / count, f"{place * step:,.4g}") for place in range(count + 1)
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


SHARD_CELLS_MAX: Final = 256
COLOURS: Final = 8
_SEVERAL: Final = "several"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardHolder:
    """A worker that owns shards."""

    name: str
    letter: str
    colour: int
    """From 0 to `COLOURS` - 1."""
    shards: int
    runs: str
    """Which they are: `0-15, 40`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCell:
    """A shard, or neighbours of them."""

    label: str
    holder: ShardHolder | None
    """None if nobody owns it, or several do."""
    holder_told: str
    tasks: int
    told: str


@dataclass(frozen=True, slots=True)
class ShardMap:
    """What is drawn."""

    cells: Sequence[ShardCell]
    holders: Sequence[ShardHolder]
    shards_a_cell: int
    told: str


def shard_map(owned: Mapping[str, Collection[int]], depths: Sequence[int]) -> ShardMap:
    """The map of as many shards as there are depths: who owns what, and how many tasks there are.

    If two say that they own a shard, which they do while it moves, the first by name is shown.
    """
    count = len(depths)
    holders = [_holder(place, name, owned[name]) for place, name in enumerate(sorted(owned))]
    by_shard: dict[int, ShardHolder] = {}
    for each in reversed(holders):
        by_shard.update(dict.fromkeys(owned[each.name], each))
    width = -(-count // SHARD_CELLS_MAX)
    cells = [
        _cell(range(start, min(count, start + width)), by_shard, depths)
        for start in range(0, count, width)
    ]
    free = sum(shard not in by_shard for shard in range(count))
    held = "1 owner" if len(holders) == 1 else f"{len(holders)} owners"
    told = f"{count} shards, {held}, {free} shards unowned"
    return ShardMap(cells, holders, width, told)


def letter_of(place: int) -> str:
    """A, B, … Z, AA, AB, …"""
    letters = len(ascii_uppercase)
    rest, last = divmod(place, letters)
    return (letter_of(rest - 1) if rest else "") + ascii_uppercase[last]


def runs_of(numbers: Iterable[int]) -> str:
    """Numbers as runs of neighbours."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}\N{EN DASH}{b}" for a, b in runs)


def _holder(place: int, name: str, owned: Collection[int]) -> ShardHolder:
    return ShardHolder(
        name=name,
        letter=letter_of(place),
        colour=place % COLOURS,
        shards=len(owned),
        runs=runs_of(owned),
    )


def _cell(part: range, by_shard: Mapping[int, ShardHolder], depths: Sequence[int]) -> ShardCell:
    found = {by_shard[shard].letter if shard in by_shard else "": shard for shard in part}
    holder = by_shard.get(part[0]) if len(found) == 1 else None
    who = holder.name if holder else "nobody" if found.keys() == {""} else _SEVERAL
    tasks = sum(depths[shard] for shard in part)
    label = runs_of(part)
    shard = f"Shard {label}" if len(part) == 1 else f"Shards {label}"
    kept = "unowned" if who == "nobody" else f"owned by {who}"
    words = "1 task" if tasks == 1 else f"{tasks:,} tasks"
    return ShardCell(
        label=label,
        holder=holder,
        holder_told=who,
        tasks=tasks,
        told=f"{shard}, {kept}, {words} unsettled",
    )


TIMELINE_WIDTH: Final = 1000.0
_BAR_WIDTH_MIN: Final = 6.0
_SECONDS_MIN: Final = 1e-6
_PAUSE_PER_WORK: Final = 2.0
"""How much longer than all attempts together a pause may be drawn."""
_PAUSE_SECONDS_MIN: Final = 1.0
"""A pause up to this length is drawn as long as it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineSpan:
    """An attempt, in seconds of whatever clock."""

    started_at: float
    ended_at: float


@dataclass(frozen=True, slots=True)
class TimelineSegment:
    """A piece of the scale."""

    x: float
    width: float


@dataclass(frozen=True, slots=True)
class TimelineBreak:
    """A pause that is drawn shorter than it was."""

    x: float
    width: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineLane:
    """What is drawn of one attempt: how long was waited for it, and the attempt."""

    wait: TimelineSegment
    bar: TimelineSegment


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What is drawn."""

    lanes: Sequence[TimelineLane]
    breaks: Sequence[TimelineBreak]
    after: TimelineSegment | None
    """What has passed since the last attempt, if the task is not over."""
    seconds: float
    """How much time the scale stands for, with all of every break."""
    width: float = TIMELINE_WIDTH


def timeline(spans: Sequence[TimelineSpan], *, begins_at: float, ends_at: float) -> Timeline:
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
    scale = TIMELINE_WIDTH / total if total > _SECONDS_MIN else 0.0
    lanes: list[TimelineLane] = []
    breaks: list[TimelineBreak] = []
    x = 0.0
    for pause, drawn, work in zip(pauses, shown, works, strict=True):
        wait = TimelineSegment(x, drawn * scale)
        if drawn < pause:
            breaks.append(TimelineBreak(x, wait.width, pause))
        x += wait.width
        lanes.append(TimelineLane(wait=wait, bar=_visible(x, work * scale)))
        x += work * scale
    if shown_rest < rest:
        breaks.append(TimelineBreak(x, shown_rest * scale, rest))
    after = TimelineSegment(x, shown_rest * scale) if rest > 0 else None
    seconds = sum(pauses) + sum(works) + rest
    return Timeline(lanes=lanes, breaks=breaks, after=after, seconds=seconds)


def _visible(x: float, width: float) -> TimelineSegment:
    """A bar that can be seen, and does not stick out."""
    wide = max(width, _BAR_WIDTH_MIN)
    return TimelineSegment(min(x, TIMELINE_WIDTH - wide), wide)


STATES: Final = ("published", "queued", "running", "retrying", "dead", "missing")
"""What a cell may be; the script is given places in this list."""
_PLACES: Final = {name: place for place, name in enumerate(STATES)}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatmapCells:
    """What is drawn, and how many of which state, those that were left out too."""

    keys: Sequence[str]
    states: Sequence[int]
    rows: Sequence[int | None]
    ages: Sequence[int | None]
    """Seconds since it was published; None for what is not."""
    tasks: Mapping[int, int]
    """The task that is at a cell, by the place of the cell."""
    counts: Mapping[str, int]
    left_out: int

    def data(self) -> dict[str, Any]:
        """As the script has it."""
        return {
            "names": STATES,
            "keys": self.keys,
            "states": self.states,
            "rows": self.rows,
            "ages": self.ages,
            "tasks": self.tasks,
            "leftOut": self.left_out,
        }


@dataclass(slots=True)
class _Cell:
    key: str
    start: int | None
    state: str = "published"
    rows: int | None = None
    age: int | None = None
    task: int | None = None


def heatmap_cells(
    cells: Sequence[PartitionCell],
    blocking: Sequence[BlockingTask],
    lacking: Sequence[MissingPartition],
    *,
    now: datetime,
    cells_max: int = CELLS_MAX,
) -> HeatmapCells:
    """All of them in order."""
    found = {
        each.partition_key: _Cell(
            each.partition_key,
            each.start,
            rows=each.rows,
            age=max(0, int((now - each.published_at).total_seconds())),
        )
        for each in cells
    }
    for task in blocking:
        key = task.partition_key or ""
        cell = found.setdefault(key, _Cell(key, task.start))
        # The latest task of a partition says how it is.
        if cell.task is None or task.id > cell.task:
            cell.state, cell.task = task.status, task.id
    for each in lacking:
        key = each.partition_key
        found.setdefault(key, _Cell(key, each.start, state="missing"))
    ordered = sorted(
        found.values(), key=lambda cell: (cell.start is None, cell.start or 0, cell.key)
    )
    shown = ordered[-cells_max:]
    return HeatmapCells(
        keys=[each.key for each in shown],
        states=[_PLACES[each.state] for each in shown],
        rows=[each.rows for each in shown],
        ages=[each.age for each in shown],
        tasks={place: each.task for place, each in enumerate(shown) if each.task is not None},
        counts=Counter(each.state for each in ordered),
        left_out=len(ordered) - len(shown),
    )
