"""What a dataset is made of, and what is made of it: a small drawing of the datasets around it.

A node is a dataset, or a job that writes none; an edge is a job that reads the one and writes the
other. So many steps each way are drawn, nearest first, and no more nodes than are readable. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

from penstock.console.drawing.layering import Sizes, curve, drawn
from penstock.dispatcher.views.partitions import Link

STEPS: Final = 3
NODES_MAX: Final = 40
SIZES: Final = Sizes(
    width=190.0, height=50.0, between_layers=64.0, between_nodes=16.0, between_bends=12.0
)
_CHARACTERS_MAX: Final = 22

_Pairs = dict[str, dict[str, "_Reading"]]


@dataclass(frozen=True, slots=True)
class _Reading:
    job: str
    is_trigger: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LineageNode:
    name: str
    shown: str
    note: str
    x: float
    y: float
    href: str
    kind: str
    """`here`, `dataset` or `job`."""
    told: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LineageEdge:
    path: str
    told: str
    is_trigger: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    nodes: Sequence[LineageNode]
    edges: Sequence[LineageEdge]
    width: float
    height: float
    is_cut: bool
    """Whether there is more than is drawn."""
    above: Sequence[str]
    """The datasets that it is made of directly."""
    below: Sequence[str]
    """The datasets that are made of it directly."""


def around(links: Iterable[Link], name: str) -> Lineage:
    """What is around the dataset of this name."""
    writers, up, down = _pairs(links)
    chosen, is_cut = _near(name, up, down)
    pairs = {
        (above, below): reading
        for below, sides in up.items()
        for above, reading in sides.items()
        if above in chosen and below in chosen
    }
    drawing = drawn(chosen, pairs, SIZES)
    nodes = [
        _node(each, writers.get(each, ""), point.x, point.y, is_here=each == name)
        for each, point in sorted(drawing.nodes.items(), key=lambda item: (item[1].x, item[1].y))
    ]
    edges = [
        LineageEdge(
            path=curve(points),
            told=f"{pairs[ends].job} reads {ends[0]}",
            is_trigger=pairs[ends].is_trigger,
        )
        for ends, points in drawing.edges.items()
    ]
    return Lineage(
        nodes=nodes,
        edges=edges,
        width=drawing.width,
        height=drawing.height,
        is_cut=is_cut,
        above=sorted(up.get(name, {})),
        below=sorted(each for each in down.get(name, {}) if not each.startswith("job ")),
    )


def _pairs(links: Iterable[Link]) -> tuple[Mapping[str, str], _Pairs, _Pairs]:
    """Who writes what, and which dataset is made of which. A job without outputs is its own."""
    writers: dict[str, str] = {}
    outputs: dict[str, list[str]] = defaultdict(list)
    reads: list[Link] = []
    for each in links:
        if each.is_written:
            writers[each.dataset] = each.job
            outputs[each.job].append(each.dataset)
        else:
            reads.append(each)
    up: _Pairs = defaultdict(dict)
    down: _Pairs = defaultdict(dict)
    for each in reads:
        for made in outputs.get(each.job) or [f"job {each.job}"]:
            up[made][each.dataset] = down[each.dataset][made] = _Reading(each.job, each.is_trigger)
    return writers, up, down


def _near(name: str, up: _Pairs, down: _Pairs) -> tuple[list[str], bool]:
    """The names to draw, nearest first, and whether there are more."""
    chosen = {name: None}
    is_cut = False
    for pairs in (up, down):
        edge = [name]
        for step in range(STEPS + 1):
            following = sorted(
                {each for one in edge for each in pairs.get(one, {}) if each not in chosen}
            )
            if step == STEPS:
                is_cut |= bool(following)
                break
            room = NODES_MAX - len(chosen)
            is_cut |= len(following) > room
            edge = following[: max(0, room)]
            chosen |= dict.fromkeys(edge)
    return list(chosen), is_cut


def _node(name: str, writer: str, x: float, y: float, *, is_here: bool) -> LineageNode:
    is_job = name.startswith("job ")
    plain = name.removeprefix("job ")
    note = "job without an output" if is_job else f"by {writer}" if writer else "from outside"
    return LineageNode(
        name=name,
        shown=_cut(plain),
        note=_cut(note, 28),
        x=x,
        y=y,
        href=f"/{'jobs' if is_job else 'datasets'}/{quote(plain, safe='')}",
        kind="here" if is_here else "job" if is_job else "dataset",
        told=f"{'Job' if is_job else 'Dataset'} {plain}, {note}",
    )


def _cut(text: str, characters_max: int = _CHARACTERS_MAX) -> str:
    return text if len(text) <= characters_max else f"{text[: characters_max - 1]}…"
