"""The DAG in layers: nothing overlaps, edges go forward, and equal input is drawn equally."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.console.dag_layout import LayoutSizes, curve, layout_dag


@st.composite
def _dags(draw: st.DrawFn) -> tuple[list[str], list[tuple[str, str]]]:
    count = draw(st.integers(0, 25))
    nodes = [f"n{each}" for each in range(count)]
    pairs = [(a, b) for at, b in enumerate(nodes) for a in nodes[:at]]
    edges = draw(st.lists(st.sampled_from(pairs), max_size=60)) if pairs else []
    return nodes, edges


@given(_dags())
def test_nodes_do_not_overlap_and_edges_go_to_the_right(
    dag: tuple[list[str], list[tuple[str, str]]],
) -> None:
    nodes, edges = dag
    sizes = LayoutSizes()
    drawing = layout_dag(nodes, edges, sizes)
    assert set(drawing.nodes) == set(nodes)
    places = list(drawing.nodes.values())
    for at, one in enumerate(places):
        assert 0 <= one.x <= drawing.width
        assert -0.01 <= one.y <= drawing.height
        for other in places[at + 1 :]:
            if one.x == other.x:
                assert abs(one.y - other.y) >= sizes.height + sizes.between_bends - 0.01
    assert set(drawing.edges) == set(edges)
    for (a, b), points in drawing.edges.items():
        assert drawing.nodes[a].x + sizes.width <= drawing.nodes[b].x
        assert [each.x for each in points] == sorted(each.x for each in points)
        assert curve(points).startswith("M")


@given(_dags())
def test_the_order_of_what_is_given_makes_no_difference(
    dag: tuple[list[str], list[tuple[str, str]]],
) -> None:
    nodes, edges = dag
    assert layout_dag(nodes, edges) == layout_dag(nodes[::-1], edges[::-1])


def test_a_chain_is_straight_and_an_edge_that_passes_layers_bends_around() -> None:
    drawing = layout_dag(["a", "b", "c"], [("a", "b"), ("b", "c")])
    assert len({each.y for each in drawing.nodes.values()}) == 1
    past = layout_dag(["a", "b", "c"], [("a", "b"), ("b", "c"), ("a", "c")])
    bend = past.edges["a", "c"][1]
    box = past.nodes["b"]
    assert not box.y <= bend.y <= box.y + LayoutSizes().height


def test_what_should_not_be_there_is_drawn_all_the_same() -> None:
    drawing = layout_dag(["a", "b"], [("a", "b"), ("b", "a"), ("a", "a"), ("x", "a")])
    assert set(drawing.nodes) == {"a", "b"}
    assert layout_dag([], []).nodes == {}


def test_edges_cross_as_little_as_they_have_to() -> None:
    # As they are named, these cross; as they are drawn, they do not.
    drawing = layout_dag(["a", "b", "x", "y"], [("a", "y"), ("b", "x")])
    starts = drawing.nodes["a"].y < drawing.nodes["b"].y
    ends = drawing.nodes["y"].y < drawing.nodes["x"].y
    assert starts == ends
