"""What releases have stored: today's code reads all of it, and goes on where they have stopped."""

from __future__ import annotations

import asyncio
import importlib
import json
import pkgutil
import re
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

import penstock
from penstock.datasets import manifest
from penstock.datasets.projection import CurrentPartition, read_dataset, read_partition
from penstock.kernel import document_format
from penstock.kernel.errors import NewerFormat
from penstock.queue.client import Queue
from penstock.store.memory import MemoryStore
from penstock.testing.virtual import World, simulate
from tests.releases.bucket import QUEUE, filled, kept_at, opened, worker_of
from tests.releases.recorded import Stored, releases, stored

every_release = pytest.mark.parametrize("release", releases())
TRIALS = {"race", "marker"}
"""What only `penstock doctor` writes, and removes."""
_HEADER = re.compile(rb'\{"penstock":"([a-z-]+)/')


def kinds() -> dict[str, type[document_format.Document]]:
    """Every kind of object that there is today."""
    for package in ("queue", "datasets", "store"):
        found = importlib.import_module(f"penstock.{package}")
        for each in pkgutil.walk_packages(found.__path__, f"{found.__name__}."):
            importlib.import_module(each.name)
    every, waiting = dict[str, type[document_format.Document]](), [document_format.Document]
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        if kind.kind and kind.__module__.startswith(f"{penstock.__name__}."):
            every[kind.kind] = kind
    return every


def documents(every: Sequence[Stored]) -> list[tuple[Stored, str]]:
    found = [(each, _HEADER.match(each.body)) for each in every]
    return [(each, match[1].decode()) for each, match in found if match is not None]


def test_the_recorder_leaves_no_kind_of_object_out() -> None:
    every = filled()
    wanted = kinds().keys() - TRIALS
    # Records of the archive are rows of a compressed file.
    assert {kind for _, kind in documents(every)} | {"archive", "settled-task"} == wanted
    assert {each.key.split("/")[2] for each in every if each.key.endswith(".gz")} == {
        "archive",
        "dead",
    }


@every_release
def test_every_object_is_read(release: str) -> None:
    known = kinds()
    every = documents(stored(release))
    assert len(every) > 20
    for each, kind in every:
        found = document_format.decode(known[kind], each.body, where=each.key)
        told = json.loads(msgspec.json.encode(found))
        said = json.loads(each.body)
        # Nothing that it says is passed over.
        lost = [name for name in said if name != "penstock" and name not in told]
        assert lost == [], each.key


@every_release
def test_what_datasets_say_of_themselves_is_read(release: str) -> None:
    async def main(world: World) -> None:
        store = MemoryStore(opened(world, stored(release)), clock=world.clock())
        current = await read_dataset(store, "sales")
        assert current is not None
        key = "2026-01-01"
        partition = await read_partition(
            store, "sales", generation=current.generation, partition_key=key
        )
        assert isinstance(partition, CurrentPartition)
        (part,) = partition.parts
        where = part.location.partition("/lake/")[2]
        found = await store.get(f"{where}/manifest.json")
        assert found is not None
        assert manifest.digest(found.body) == part.manifest
        said = manifest.decode(found.body)
        assert (said.rows, [each.name for each in said.files]) == (3, ["part-0.parquet"])
        assert [each.name for each in said.columns] == ["id", "name"]

    simulate(main, seed=1)


@every_release
def test_workers_of_today_finish_what_was_left(release: str) -> None:
    """All that waited, was claimed by a worker that died, or comes later; and nothing twice."""
    every = stored(release)

    async def main(world: World) -> None:
        bucket = opened(world, every)
        store = MemoryStore(bucket, clock=world.clock())
        queue = await Queue.on(store, name=QUEUE, entropy=world.entropy("today"))
        done: list[Any] = []
        types = ("note", "part", "fail")
        worker = worker_of(world, queue, name="today", types=types, done=done)

        @worker.handler("stick")
        async def stick(task: Any) -> None:
            done.append(task.input)

        await queue.resume("held")

        @worker.handler("held")
        async def held(task: Any) -> None:
            done.append(task.input)

        async with asyncio.TaskGroup() as group:
            running = group.create_task(worker.run(signals=False))
            # Longer than the leases of the dead, and until the next hour of the schedule.
            await world.clock().sleep(3700)
            worker.stop()
            await running
        numbers = sorted(each["n"] for each in done if "n" in each)
        # 18 was done by then, and its mark says so: so the batch has ended, and its task came.
        assert numbers == [10, 11, 12, 13, 14, 15, 16, 17, 19, 30]
        (ended,) = [each for each in done if "batch" in each]
        assert (ended["succeeded"], ended["total"], ended["input"]) == (2, 2, {"n": 20})
        assert {"hour": True} in done
        assert next(len(each["text"]) for each in done if each.get("n") == 16) == 66_000
        # What was archived by then is found.
        (replayed,) = [each.key for each in every if "/replayed/" in each.key]
        found = await queue.get(replayed.rpartition("/")[2].rpartition(".")[0])
        assert found.status == "failed"

    simulate(main, seed=1, epoch=kept_at(every) + 1)


def test_an_object_of_a_later_format_is_left_alone_with_a_sentence() -> None:
    for kind in kinds().values():
        later = f'{{"penstock":"{kind.kind}/{kind.format + 1}","news":1}}'.encode()
        with pytest.raises(NewerFormat) as caught:
            document_format.decode(kind, later, where="an object")
        assert "this release reads up to" in caught.value.message
        assert "Upgrade Penstock" in caught.value.hint
