"""What a submit names as its affinity decides whose it is, in every way to submit."""

from __future__ import annotations

import pytest

from penstock.kernel.errors import InvalidInput
from penstock.queue.ids import SLOTS, slot_of_affinity, task_at
from penstock.queue.submit_options import AFFINITY_CHARACTERS_MAX, SubmitOptions
from penstock.testing import QueueBench, run_queue


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
