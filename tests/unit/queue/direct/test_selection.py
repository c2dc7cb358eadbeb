"""Three ways to choose a worker."""

from __future__ import annotations

from collections import Counter

from penstock.kernel.entropy import seeded_entropy
from penstock.queue.inbox_announcer import WorkerSelector
from penstock.queue.settings import WorkerSelection

WORKERS = [f"w{number}" for number in range(7)]


def _chosen(selection: WorkerSelection, workers: list[str], packs: int = 700) -> list[str]:
    selector = WorkerSelector(selection, entropy=seeded_entropy(1))
    return [selector.choose(workers, by=f"p{number}") for number in range(packs)]


def test_round_robin_deals_evenly_and_begins_anywhere() -> None:
    assert set(Counter(_chosen(WorkerSelection.ROUND_ROBIN, WORKERS)).values()) == {100}
    first = {
        WorkerSelector(WorkerSelection.ROUND_ROBIN, entropy=seeded_entropy(seed)).choose(
            WORKERS, by="p"
        )
        for seed in range(50)
    }
    assert len(first) == len(WORKERS)


def test_hash_keeps_a_pack_with_its_worker_when_others_come_and_go() -> None:
    before = _chosen(WorkerSelection.HASH, WORKERS)
    assert before == _chosen(WorkerSelection.HASH, WORKERS)
    assert set(before) == set(WORKERS)
    after = _chosen(WorkerSelection.HASH, [worker for worker in WORKERS if worker != "w3"])
    moved = [old for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {"w3"}


def test_random_uses_all() -> None:
    assert set(_chosen(WorkerSelection.RANDOM, WORKERS)) == set(WORKERS)
