"""Ends that are refused because others have published the partition meanwhile, on virtual time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from penstock.datasets.layout import attempt_of_place, place_of
from penstock.protocol.work import PartAnswer
from penstock.runtimes.base import (
    NOT_READ,
    AttemptWork,
    Merge,
    ProducedOutput,
    Staged,
    WorkReporter,
)
from tests.unit.worker.bench import Bench, play
from tests.unit.worker.scripted import DATASET, Dispatcher
from tests.unit.worker.test_worker import COMPLETE, HEARTBEAT

DEFINITION = {
    "outputs": [{"name": "out", "dataset": "cleaned"}],
    "datasets": {"cleaned": DATASET},
    "update": "merge",
    "unique_key": ["id"],
    "version_by": "at",
}


def part(revision: int) -> dict[str, list[PartAnswer]]:
    return {"cleaned": [PartAnswer(location=f"file:///data/{revision}", revision=revision)]}


async def merge(work: AttemptWork, reporter: WorkReporter) -> tuple[ProducedOutput, ...]:
    place = work.outputs["out"]
    base = place.current[0].revision if place.current else 0
    return (ProducedOutput(output="out", location=place.location, base_revision=base),)


def merging(*moves: Any, **fields: Any) -> Callable[[Dispatcher], None]:
    def setting(dispatcher: Dispatcher) -> None:
        dispatcher.add(definition=DEFINITION, current={}, moves=list(moves), **fields)

    return setting


def test_it_merges_again_with_what_is_published_within_its_attempt() -> None:
    async def story(bench: Bench) -> None:
        task = bench.dispatcher.tasks[1]
        await bench.until(lambda: task.status == "completed", seconds=10)
        first, second, third = bench.runtime.works
        assert {each.attempt for each in bench.runtime.works} == {1}
        assert first.merge == Merge(key=("id",), version_by="at")
        assert first.outputs["out"].current == ()
        assert [each.outputs["out"].current[0].revision for each in (second, third)] == [3, 4]
        # Nobody overwrites what another answer might still be about, nor waits for its batch.
        places = [each.outputs["out"].location for each in bench.runtime.works]
        assert len({*places, *(each.scratch for each in bench.runtime.works)}) == 6
        assert all(each.startswith(f"{places[0]}/") for each in places[1:])
        assert (second.batch, second.batch_size) == ("", 1)
        (end,) = task.ended
        assert end.outputs[0].base_revision == 4

    play(story, setting=merging(part(3), part(4), batch="b"), doing=merge)


def test_what_it_has_computed_is_given_to_the_next_run() -> None:
    """Also which partitions it is of, and where they lie: not in one that is called as the run."""
    definition = {
        **DEFINITION,
        "outputs": [{"name": "out", "dataset": "cleaned", "partition_by": "day"}],
    }
    kept = Staged(location="file:///s", files=(), columns=(), keys=(("d", None, None),))

    async def compute(work: AttemptWork, reporter: WorkReporter) -> tuple[ProducedOutput, ...]:
        del reporter
        place = work.outputs["out"]
        base = place.current[0].revision if place.current else 0
        said = base if work.staged else NOT_READ
        location = f"{place.location}/d"
        return (
            ProducedOutput(output="out", location=location, partition_key="d", base_revision=said),
        )

    async def story(bench: Bench) -> None:
        bench.runtime.staged = {"out": kept}
        task = bench.dispatcher.tasks[1]
        await bench.until(lambda: task.status == "completed", seconds=10)
        works = bench.runtime.works
        assert [each.staged for each in works] == [{}, {"out": kept}, {"out": kept}]
        home, *others = (each.outputs["out"].location for each in works)
        assert "/~many/" in home
        assert others == [f"{home}/~merge-1", f"{home}/~merge-2"]
        places = {place_of(f"{each}/d") for each in (home, *others)}
        assert len(places) == 3
        assert {str(each).rpartition("/")[2] for each in places} == {"d"}
        assert len({attempt_of_place(each or "") for each in places}) == 1
        (end,) = task.ended
        assert end.outputs[0].base_revision == 4

    def setting(dispatcher: Dispatcher) -> None:
        dispatcher.add(definition=definition, current={}, moves=[part(3), part(4)])

    play(story, setting=setting, doing=compute)


def test_it_waits_for_others_and_is_kept_alive() -> None:
    async def story(bench: Bench) -> None:
        task = bench.dispatcher.tasks[1]
        took = await bench.until(lambda: task.status == "completed", seconds=60)
        assert took > 10
        assert bench.dispatcher.paths()[HEARTBEAT] > 1
        assert bench.dispatcher.paths()[COMPLETE] == 13
        assert len(bench.runtime.works) == 2

    moves = [*[None] * 11, part(1)]
    play(story, setting=merging(*moves, heartbeat_seconds=6.0), doing=merge)


def test_waiting_and_merging_have_a_bound() -> None:
    async def story(bench: Bench) -> None:
        waiting, merging_ = bench.dispatcher.tasks.values()
        await bench.until(lambda: waiting.status == "released", seconds=60)
        assert "merge into its partition" in waiting.reason
        await bench.until(lambda: merging_.status == "failed", seconds=60)
        assert len([each for each in bench.runtime.works if each.task_id == 2]) == 11

    def setting(dispatcher: Dispatcher) -> None:
        merging(*[None] * 100, timeout_seconds=5.0)(dispatcher)
        merging(*[part(each) for each in range(100)])(dispatcher)

    play(story, setting=setting, doing=merge)


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_it_stops_while_it_waits(is_cancelled: bool) -> None:
    async def story(bench: Bench) -> None:
        task = bench.dispatcher.tasks[1]
        await bench.until(lambda: bench.dispatcher.paths()[COMPLETE] == 3)
        if is_cancelled:
            task.cancel_asked = True
            await bench.until(lambda: task.status == "cancelled", seconds=10)
            return
        bench.worker.stop()
        await bench.until(lambda: task.status == "released", seconds=10)
        assert task.reason == "The worker was stopped."

    play(story, setting=merging(*[None] * 100, heartbeat_seconds=3.0), doing=merge)
