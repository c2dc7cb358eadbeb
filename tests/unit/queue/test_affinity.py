"""What a submit names as its affinity decides whose it is, in every way to submit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from penstock.kernel.errors import InvalidInput
from penstock.queue.client import Queue
from penstock.queue.execution.handlers import TaskContext
from penstock.queue.ids import SLOTS, slot_of_affinity, task_at
from penstock.queue.settings import DiscoveryMode, DispatchSettings, WorkerSelection
from penstock.queue.submit_options import AFFINITY_CHARACTERS_MAX, SubmitOptions
from penstock.queue.worker import Worker
from penstock.testing import QueueBench, run_queue
from penstock.testing.queue_contract.bench import QUICK
from penstock.testing.virtual import World, simulate
from tests.unit.queue.test_peers_failures import Place


def test_tasks_of_one_affinity_are_in_one_slot_however_they_are_submitted() -> None:
    async def act(bench: QueueBench) -> None:
        queue = bench.queue
        named = "customer-7"
        tasks = [await queue.submit("resize", 1, affinity=named) for _ in range(5)]
        tasks += await queue.submit_many("resize", [1, 2], affinity=named)
        tasks += await queue.submit_mixed([("resize", 1)], affinity=named)
        tasks.append(await queue.submit("resize", 1, affinity=named, delay=60, priority=3))
        async with queue.new_batch() as batch:
            ids = await batch.submit_many("resize", [1], affinity=named)
        slots = {task_at(each)[0].slot for each in [*(task.id for task in tasks), *ids]}
        assert slots == {slot_of_affinity("resize", named)}

    run_queue(act)


def test_affinities_and_types_are_spread_over_all_slots() -> None:
    slots = {slot_of_affinity("resize", f"customer-{number}") for number in range(2000)}
    assert len(slots) > 1500
    assert max(slots) < SLOTS
    assert slot_of_affinity("resize", "a") != slot_of_affinity("mail", "a")


@pytest.mark.parametrize("wrong", ["x" * (AFFINITY_CHARACTERS_MAX + 1), "\ud800", 7])
def test_what_is_no_affinity_is_refused(wrong: object) -> None:
    with pytest.raises(InvalidInput, match="affinity"):
        SubmitOptions(affinity=wrong)  # type: ignore[arg-type]  # what somebody may give


AFFINITIES = [f"customer-{number}" for number in range(12)]
Ran = dict[str, set[str]]
"""Affinity → the workers that have run something of it."""


class Fleet:
    """Workers that note what they run, and a producer that chooses inboxes by a hash."""

    def __init__(self, world: World, mode: DiscoveryMode) -> None:
        self.place = Place(world, mode, shards=8)
        self.bench = self.place.bench
        self.ran: Ran = defaultdict(set)
        self._seconds = 0.0

    async def worker(self, name: str) -> Worker:
        settings = replace(QUICK, shards_per_worker=2)
        queue = await self.bench.queue()
        worker = self.bench.worker(queue, concurrency=2, name=name, settings=settings)

        @worker.handler("work")
        async def work(task: TaskContext) -> None:
            self.ran[task.input].add(name)
            await self.bench.clock.sleep(self._seconds)

        return worker

    async def producer(self) -> Queue:
        """As the queue of the bench, with inboxes by a hash."""
        config = (await self.bench.queue()).access.config
        hashed = DispatchSettings(worker_selection=WorkerSelection.HASH)
        queue = Queue("", name=(await self.bench.queue()).name, config=config, dispatch=hashed)
        await queue.attach(await self.place.open(), self.bench.entropy)
        return queue

    async def run(self, queue: Queue) -> Ran:
        """One task after the other of each affinity, with nothing to wait for; who ran them."""
        self.ran, self._seconds = defaultdict(set), 0.0
        for _ in range(3):
            for affinity in AFFINITIES:
                await (await queue.submit("work", affinity, affinity=affinity)).result(timeout=60)
        return self.ran

    async def spread(self, queue: Queue, workers: int) -> None:
        """Give all so much to do that each of them comes to own shards."""
        self._seconds = 5.0
        tasks = [await queue.submit("work", "") for _ in range(40 * workers)]
        for task in tasks:
            await task.result(timeout=3600)
        # What an owner has offered meanwhile is taken, or is its own again.
        await self.bench.clock.sleep(60)
        owners = [each for each in await self.place.registrations(queue) if each.shards]
        assert len(owners) == workers

    def check_shards(self, ran: Ran) -> None:
        """Whatever is of one shard was run by one worker."""
        owners: Ran = defaultdict(set)
        for affinity in AFFINITIES:
            shard = slot_of_affinity("work", affinity) * self.bench.shards // SLOTS
            owners[str(shard)] |= ran[affinity]
        assert all(len(each) == 1 for each in owners.values())


def _in_worlds(act: Callable[[Fleet], Awaitable[None]], mode: DiscoveryMode) -> None:
    async def main(world: World) -> None:
        await act(Fleet(world, mode))

    for seed in range(3):
        simulate(main, seed=seed)


def test_the_owner_of_a_shard_runs_all_of_its_affinities_and_they_move_together() -> None:
    async def act(fleet: Fleet) -> None:
        workers = [await fleet.worker(f"w{number}") for number in range(3)]
        async with fleet.bench.crew(*workers) as crew:
            queue = await fleet.producer()
            await fleet.spread(queue, len(workers))
            before = await fleet.run(queue)
            assert len(set().union(*before.values())) > 1, "they are on several workers"
            fleet.check_shards(before)
            (leaver,) = before[AFFINITIES[0]]
            await crew.stop(workers[int(leaver[1:])])
            await fleet.bench.clock.sleep(120)
            after = await fleet.run(queue)
            fleet.check_shards(after)
            assert leaver not in set().union(*after.values())

    _in_worlds(act, DiscoveryMode.LEASED)


def test_a_hash_keeps_an_affinity_with_a_worker_until_that_leaves() -> None:
    async def act(fleet: Fleet) -> None:
        workers = [await fleet.worker(f"w{number}") for number in range(3)]
        async with fleet.bench.crew(*workers) as crew:
            queue = await fleet.producer()
            await fleet.bench.clock.sleep(60)
            before = await fleet.run(queue)
            assert all(len(before[affinity]) == 1 for affinity in AFFINITIES)
            assert len(set().union(*before.values())) > 1, "they are on several workers"
            (leaver,) = before[AFFINITIES[0]]
            await crew.stop(workers[int(leaver[1:])])
            await fleet.bench.clock.sleep(120)
            after = await fleet.run(queue)
            assert all(len(after[affinity]) == 1 for affinity in AFFINITIES)
            moved = {each for each in AFFINITIES if before[each] != after[each]}
            assert moved == {each for each in AFFINITIES if before[each] == {leaver}}

    _in_worlds(act, DiscoveryMode.DIRECT)
