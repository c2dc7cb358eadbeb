"""What is drawn around a dataset."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.console.dag_layout import NODES_MAX, STEPS, Lineage, lineage_around
from penstock.dispatcher.views.datasets import DatasetLink


def writes(job: str, dataset: str) -> DatasetLink:
    return DatasetLink(job=job, dataset=dataset, is_written=True, is_trigger=True)


def reads(job: str, dataset: str, *, is_trigger: bool = True) -> DatasetLink:
    return DatasetLink(job=job, dataset=dataset, is_written=False, is_trigger=is_trigger)


def chain_of(count: int) -> Sequence[DatasetLink]:
    """Datasets d00, d01, ... each made of the one before."""
    found = [writes(f"j{number:02}", f"d{number:02}") for number in range(count)]
    return [*found, *(reads(f"j{number:02}", f"d{number - 1:02}") for number in range(1, count))]


def names(found: Lineage) -> set[str]:
    return {each.name for each in found.nodes}


def test_a_dataset_alone_is_one_node() -> None:
    found = lineage_around([], "alone")
    assert names(found) == {"alone"}
    assert not found.edges
    assert not found.is_cut


def test_both_sides_are_drawn_in_order() -> None:
    found = lineage_around(chain_of(3), "d01")
    assert [each.name for each in found.nodes] == ["d00", "d01", "d02"]
    assert [each.kind for each in found.nodes] == ["dataset", "here", "dataset"]
    assert (found.above, found.below) == (["d00"], ["d02"])
    assert {each.told for each in found.edges} == {"j01 reads d00", "j02 reads d01"}


def test_only_what_is_near_is_drawn_and_the_rest_is_told() -> None:
    found = lineage_around(chain_of(2 * STEPS + 4), "d05")
    assert names(found) == {f"d{number:02}" for number in range(5 - STEPS, 5 + STEPS + 1)}
    assert found.is_cut
    assert not lineage_around(chain_of(STEPS + 1), "d00").is_cut


def test_no_more_nodes_than_are_readable() -> None:
    many = [writes("j", "d"), *(writes(f"r{n}", f"x{n}") for n in range(100))]
    found = lineage_around([*many, *(reads(f"r{n}", "d") for n in range(100))], "d")
    assert len(found.nodes) == NODES_MAX
    assert found.is_cut
    assert len(found.below) == 100


def test_siblings_are_not_lineage() -> None:
    links = [writes("j", "d"), writes("r1", "x"), writes("r2", "y")]
    links += [reads("r1", "d"), reads("r2", "d")]
    assert names(lineage_around(links, "x")) == {"d", "x"}


def test_a_job_without_outputs_is_a_node_of_its_own() -> None:
    found = lineage_around([writes("j", "d"), reads("mail", "d", is_trigger=False)], "d")
    (job,) = [each for each in found.nodes if each.kind == "job"]
    assert job.href == "/jobs/mail"
    assert found.below == []
    assert [each.is_trigger for each in found.edges] == [False]
