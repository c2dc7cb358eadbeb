"""Layout of a DAG in layers, from left to right, and the lineage drawing around a dataset. Pure.

After Sugiyama: each node stands one layer after the last of its predecessors; an edge that
passes layers has a bend in each of them; the nodes of a layer are ordered so that edges cross
least, by going back and forth over the layers and moving each to the middle of its neighbours;
then nodes move up and down towards their neighbours as far as there is room, so that edges are
nearly straight. Equal input gives an equal drawing: nothing jumps when only states change.

In a lineage a node is a dataset, or a job that writes none; an edge is a job that reads the one
and writes the other. `STEPS` steps each way are drawn, nearest first, and at most `NODES_MAX`
nodes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final
from urllib.parse import quote

from penstock.dispatcher.views.datasets import DatasetLink

_SWEEPS: Final = 12
_SETTLING: Final = 8


@dataclass(frozen=True, slots=True)
class LayoutSizes:
    """How large nodes are, and how far apart."""

    width: float = 220.0
    height: float = 76.0
    between_layers: float = 90.0
    between_nodes: float = 26.0
    between_bends: float = 14.0


@dataclass(frozen=True, slots=True)
class Point:
    x: float
    y: float


@dataclass(frozen=True, slots=True)
class DagDrawing:
    """Where everything is. Nodes by their upper left corners, edges by the points they pass."""

    width: float
    height: float
    nodes: Mapping[str, Point]
    edges: Mapping[tuple[str, str], Sequence[Point]]


@dataclass(eq=False, slots=True)
class _Spot:
    """A node in its layer, or the bend of an edge there."""

    name: str
    layer: int
    is_bend: bool
    height: float
    y: float = 0.0


def layout_dag(
    nodes: Sequence[str], edges: Iterable[tuple[str, str]], sizes: LayoutSizes | None = None
) -> DagDrawing:
    """The nodes and edges, in layers. Edges between unknown nodes, and to itself, are left out."""
    sizes = sizes or LayoutSizes()
    known = set(nodes)
    kept = sorted({(a, b) for a, b in edges if a in known and b in known and a != b})
    layer_of = _layers(sorted(nodes), kept)
    layers, paths = _spots(layer_of, kept, sizes)
    after, before = _neighbours(paths)
    _order(layers, after, before)
    _place(layers, after, before, sizes)
    return _drawing(layers, paths, sizes)


def _layers(nodes: Sequence[str], edges: Sequence[tuple[str, str]]) -> Mapping[str, int]:
    """One after the last of those that it follows. What follows itself is cut where it is met."""
    feeding: dict[str, list[str]] = defaultdict(list)
    fed: dict[str, list[str]] = defaultdict(list)
    for a, b in edges:
        feeding[b].append(a)
        fed[a].append(b)
    layer: dict[str, int] = {}
    left = {each: len(feeding[each]) for each in nodes}
    ready = [each for each in nodes if not left[each]]
    while len(layer) < len(nodes):
        if not ready:
            # A circle, which a DAG does not have: it is drawn all the same.
            ready = [next(each for each in nodes if each not in layer)]
        name = ready.pop(0)
        if name in layer:
            continue
        layer[name] = max((layer[each] + 1 for each in feeding[name] if each in layer), default=0)
        for each in fed[name]:
            left[each] -= 1
            if left[each] <= 0 and each not in layer:
                ready.append(each)
    for name in nodes:
        # A source stands right before what reads it, and not at the far end.
        if not feeding[name] and fed[name]:
            layer[name] = max(0, min(layer[each] for each in fed[name]) - 1)
    return layer


def _spots(
    layer_of: Mapping[str, int], edges: Sequence[tuple[str, str]], sizes: LayoutSizes
) -> tuple[list[list[_Spot]], dict[tuple[str, str], list[_Spot]]]:
    count = max(layer_of.values(), default=0) + 1
    layers: list[list[_Spot]] = [[] for _ in range(count)]
    spots: dict[str, _Spot] = {}
    for name, layer in layer_of.items():
        spots[name] = _Spot(name, layer, is_bend=False, height=sizes.height)
        layers[layer].append(spots[name])
    paths: dict[tuple[str, str], list[_Spot]] = {}
    for a, b in edges:
        path = [spots[a]]
        for layer in range(layer_of[a] + 1, layer_of[b]):
            bend = _Spot(f"{a} {b}", layer, is_bend=True, height=0.0)
            layers[layer].append(bend)
            path.append(bend)
        path.append(spots[b])
        paths[a, b] = path
    return layers, paths


def _neighbours(
    paths: Mapping[tuple[str, str], Sequence[_Spot]],
) -> tuple[dict[_Spot, list[_Spot]], dict[_Spot, list[_Spot]]]:
    after: dict[_Spot, list[_Spot]] = defaultdict(list)
    before: dict[_Spot, list[_Spot]] = defaultdict(list)
    for path in paths.values():
        for a, b in pairwise(path):
            after[a].append(b)
            before[b].append(a)
    return after, before


def _order(
    layers: list[list[_Spot]],
    after: Mapping[_Spot, Sequence[_Spot]],
    before: Mapping[_Spot, Sequence[_Spot]],
) -> None:
    """Put each layer into the order in which edges cross least, as far as a few passes find it."""
    best = [list(each) for each in layers]
    fewest = _crossings(best, after)
    for sweep in range(_SWEEPS):
        forth = sweep % 2 == 0
        towards = before if forth else after
        for layer in layers if forth else reversed(layers):
            place = {spot: index for each in layers for index, spot in enumerate(each)}
            layer.sort(key=lambda spot: (_middle(spot, towards, place), place[spot]))
        crossings = _crossings(layers, after)
        if crossings < fewest:
            best, fewest = [list(each) for each in layers], crossings
    for layer, order in zip(layers, best, strict=True):
        layer[:] = order


def _middle(
    spot: _Spot, towards: Mapping[_Spot, Sequence[_Spot]], place: Mapping[_Spot, int]
) -> float:
    found = [place[each] for each in towards.get(spot, ())]
    return sum(found) / len(found) if found else float(place[spot])


def _crossings(layers: Sequence[Sequence[_Spot]], after: Mapping[_Spot, Sequence[_Spot]]) -> int:
    count = 0
    for layer, following in pairwise(layers):
        place = {spot: index for index, spot in enumerate(following)}
        ends = [
            sorted(place[each] for each in after.get(spot, ()) if each in place) for spot in layer
        ]
        flat = [end for some in ends for end in some]
        count += sum(
            1 for first in range(len(flat)) for end in flat[first + 1 :] if end < flat[first]
        )
    return count


def _place(
    layers: Sequence[Sequence[_Spot]],
    after: Mapping[_Spot, Sequence[_Spot]],
    before: Mapping[_Spot, Sequence[_Spot]],
    sizes: LayoutSizes,
) -> None:
    """Give each spot its height in the drawing."""
    for layer in layers:
        y = 0.0
        for spot in layer:
            spot.y = y
            y += spot.height + _gap(spot, sizes)
    for turn in range(_SETTLING):
        for layer in layers if turn % 2 == 0 else reversed(layers):
            wanted = [_wanted(spot, before if turn % 2 == 0 else after) for spot in layer]
            _settle(layer, wanted, sizes)
    top = min((spot.y for layer in layers for spot in layer), default=0.0)
    for layer in layers:
        for spot in layer:
            spot.y -= top


def _wanted(spot: _Spot, towards: Mapping[_Spot, Sequence[_Spot]]) -> float:
    found = sorted(each.y + each.height / 2 for each in towards.get(spot, ()))
    if not found:
        return spot.y
    middle = len(found) // 2
    centre = found[middle] if len(found) % 2 else (found[middle - 1] + found[middle]) / 2
    return centre - spot.height / 2


def _settle(layer: Sequence[_Spot], wanted: Sequence[float], sizes: LayoutSizes) -> None:
    """As near to what is wanted as the order and the gaps allow: blocks that meet move as one."""
    blocks: list[tuple[float, float, int, int]] = []
    offset = 0.0
    for place, spot in enumerate(layer):
        # Each is a mean of what is wanted, its weight, and its first and last place.
        mean, weight, first = wanted[place] - offset, 1.0, place
        while blocks and blocks[-1][0] >= mean:
            other, its_weight, first, _ = blocks.pop()
            mean = (mean * weight + other * its_weight) / (weight + its_weight)
            weight += its_weight
        blocks.append((mean, weight, first, place))
        offset += spot.height + _gap(spot, sizes)
    offset = 0.0
    starts = [mean for mean, _, first, last in blocks for _ in range(first, last + 1)]
    for spot, start in zip(layer, starts, strict=True):
        spot.y = start + offset
        offset += spot.height + _gap(spot, sizes)


def _gap(spot: _Spot, sizes: LayoutSizes) -> float:
    return sizes.between_bends if spot.is_bend else sizes.between_nodes


def _drawing(
    layers: Sequence[Sequence[_Spot]],
    paths: Mapping[tuple[str, str], Sequence[_Spot]],
    sizes: LayoutSizes,
) -> DagDrawing:
    step = sizes.width + sizes.between_layers
    nodes = {
        spot.name: Point(spot.layer * step, spot.y)
        for layer in layers
        for spot in layer
        if not spot.is_bend
    }
    edges: dict[tuple[str, str], Sequence[Point]] = {}
    for ends, path in paths.items():
        points: list[Point] = []
        for spot in path:
            x, y = spot.layer * step, spot.y + spot.height / 2
            if spot is not path[0]:
                points.append(Point(x, y))
            if spot is not path[-1]:
                points.append(Point(x + sizes.width, y))
        edges[ends] = points
    height = max((spot.y + spot.height for layer in layers for spot in layer), default=0.0)
    return DagDrawing(max(0, len(layers)) * step - sizes.between_layers, height, nodes, edges)


def curve(points: Sequence[Point]) -> str:
    """The points as a path of SVG: level where it begins and ends, and through each bend."""
    first, *rest = points
    pieces = [f"M{first.x:.1f},{first.y:.1f}"]
    before = first
    for point in rest:
        half = (before.x + point.x) / 2
        pieces.append(
            f"C{half:.1f},{before.y:.1f} {half:.1f},{point.y:.1f} {point.x:.1f},{point.y:.1f}"
        )
        before = point
    return " ".join(pieces)


STEPS: Final = 3
NODES_MAX: Final = 40
SIZES: Final = LayoutSizes(
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


def lineage_around(links: Iterable[DatasetLink], name: str) -> Lineage:
    """What is around the dataset of this name."""
    writers, up, down = _pairs(links)
    chosen, is_cut = _near(name, up, down)
    pairs = {
        (above, below): reading
        for below, sides in up.items()
        for above, reading in sides.items()
        if above in chosen and below in chosen
    }
    drawing = layout_dag(chosen, pairs, SIZES)
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


def _pairs(links: Iterable[DatasetLink]) -> tuple[Mapping[str, str], _Pairs, _Pairs]:
    """Who writes what, and which dataset is made of which. A job without outputs is its own."""
    writers: dict[str, str] = {}
    outputs: dict[str, list[str]] = defaultdict(list)
    reads: list[DatasetLink] = []
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
    note = "job without an output" if is_job else f"by {writer}" if writer else "external"
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
