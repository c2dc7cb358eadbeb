"""The order of steps is a function of the seed, and of nothing else."""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import subprocess
import sys
from collections.abc import AsyncIterator

from penstock.testing.virtual import VirtualLoop, World, simulate

SEEDS = range(100)


async def _interleave(world: World) -> str:
    order: list[str] = []
    clock = world.clock()

    async def worker(name: str) -> None:
        for _ in range(3):
            await clock.sleep(1)
            order.append(name)

    async with asyncio.TaskGroup() as group:
        for name in "abc":
            group.create_task(worker(name))
    return "".join(order)


def test_a_seed_repeats_and_seeds_differ() -> None:
    orders = [simulate(_interleave, seed=seed) for seed in SEEDS]
    assert orders == [simulate(_interleave, seed=seed) for seed in SEEDS]
    assert {order[:3] for order in orders} == {"abc", "acb", "bac", "bca", "cab", "cba"}
    assert len(set(orders)) > 50


def test_without_shuffling_first_in_is_first_out() -> None:
    assert {simulate(_interleave, seed=seed, shuffle=False) for seed in SEEDS} == {"abcabcabc"}


def test_timers_of_one_instant_are_shuffled_and_others_are_in_order() -> None:
    def order(*, seed: int, shuffle: bool) -> list[str]:
        async def main(world: World) -> list[str]:
            seen: list[str] = []
            for instant in (2, 1):
                for name in "abc":
                    world.loop.call_at(instant, seen.append, f"{instant}{name}")
            await world.clock().sleep(3)
            return seen

        return simulate(main, seed=seed, shuffle=shuffle)

    assert order(seed=0, shuffle=False) == ["1a", "1b", "1c", "2a", "2b", "2c"]
    orders = {tuple(order(seed=seed, shuffle=True)) for seed in SEEDS}
    assert len(orders) > 20
    for seen in orders:
        assert [name[0] for name in seen] == ["1", "1", "1", "2", "2", "2"]


def _append(seen: list[str], name: str, _argument: object) -> None:
    seen.append(name)


def test_callbacks_of_one_future_keep_their_order_and_let_others_between() -> None:
    async def main(world: World) -> str:
        seen: list[str] = []
        one, two = world.loop.create_future(), world.loop.create_future()
        for name in "abc":
            one.add_done_callback(functools.partial(_append, seen, name))
            two.add_done_callback(functools.partial(_append, seen, name.upper()))
        one.set_result(None)
        two.set_result(None)
        await world.clock().sleep(1)
        return "".join(seen)

    orders = {simulate(main, seed=seed) for seed in range(300)}
    assert len(orders) == 20  # every way to merge two rows of three
    for order in orders:
        assert [name for name in order if name.islower()] == ["a", "b", "c"]
        assert [name for name in order if name.isupper()] == ["A", "B", "C"]


def test_other_callbacks_are_not_kept_in_order() -> None:
    async def main(world: World) -> str:
        seen: list[str] = []
        for name in "abc":
            world.loop.call_soon(functools.partial(_append, seen, name), None)
        await world.clock().sleep(1)
        return "".join(seen)

    assert len({simulate(main, seed=seed) for seed in SEEDS}) == 6


def test_a_trace_has_a_line_for_every_step() -> None:
    async def child(world: World) -> None:
        await world.clock().sleep(1.5)

    async def main(world: World) -> int:
        await world.loop.create_task(child(world), name="child")
        world.loop.call_soon(asyncio.Event().set)
        return world.loop.steps

    lines: list[str] = []
    steps = simulate(main, seed=1, shuffle=False, trace=lines.append)
    here = "test_a_trace_has_a_line_for_every_step.<locals>"
    assert lines[: steps + 1] == [
        f"0.000000000 task Task-1 {here}.main",
        f"0.000000000 task child {here}.child",
        "1.500000000 call _wake",
        f"1.500000000 task child {here}.child",
        f"1.500000000 task Task-1 {here}.main",
        "1.500000000 call Event.set",
    ]


def test_a_call_on_a_task_is_not_taken_for_its_step() -> None:
    async def main(world: World) -> None:
        task = world.loop.create_task(asyncio.Event().wait())
        world.loop.call_later(1, task.cancel)
        await asyncio.wait([task])

    lines: list[str] = []
    simulate(main, seed=1, trace=lines.append)
    assert "1.000000000 call VirtualTask.cancel" in lines


# What follows is meant to be as sensitive to addresses and collections as code can be: groups
# that cancel many tasks at once, sets of tasks, and generators that die in cycles.


async def _count(world: World, cycle: list[object]) -> AsyncIterator[int]:
    try:
        for number in range(10):
            yield number
    finally:
        await world.clock().sleep(0.5)
        cycle.clear()


async def _leave_a_generator_in_a_cycle(world: World) -> None:
    cycle: list[object] = []
    generator = _count(world, cycle)
    cycle += [cycle, generator]
    async for _ in generator:
        break


async def _fragile(world: World) -> None:
    clock, entropy = world.clock(drift=1e-4), world.entropy("fragile")

    async def nap() -> None:
        while True:
            await clock.sleep(entropy.choice([0.0, 0.5, 1.0]))

    async def fail() -> None:
        await clock.sleep(2)
        raise ValueError

    for _ in range(3):
        try:
            async with asyncio.TaskGroup() as group:
                tasks = {group.create_task(nap()) for _ in range(30)}
                await asyncio.wait(tasks, timeout=1)
                for task in tasks:
                    if entropy.random() < 0.2:
                        task.cancel()
                await _leave_a_generator_in_a_cycle(world)
                group.create_task(fail())
        except* ValueError:
            await clock.sleep(1)
    for _ in range(6000):
        await clock.sleep(0.25)
    for _ in range(20):
        world.loop.create_task(nap())
    await clock.sleep(1)


def fragile_trace() -> str:
    """Called in other processes as well, after as much garbage as the environment asks for."""
    noise = [[object()] for _ in range(int(os.environ.get("NOISE", "0")))]
    lines: list[str] = []
    simulate(_fragile, seed=11, trace=lines.append)
    assert len(noise) >= 0
    return "\n".join(lines)


def _trace_of_another_process(*, hash_seed: int, noise: int) -> str:
    script = f"from {__name__} import fragile_trace; print(fragile_trace())"
    environment = os.environ | {"PYTHONHASHSEED": str(hash_seed), "NOISE": str(noise)}
    answer = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    return answer.stdout.rstrip("\n")


def test_a_trace_is_the_same_in_every_process() -> None:
    here = fragile_trace()
    assert here.count("\n") > 10_000  # so that the loop has collected garbage on the way
    assert "async_generator_athrow" in here
    assert _trace_of_another_process(hash_seed=1, noise=0) == here
    assert _trace_of_another_process(hash_seed=2, noise=12_345) == here


def test_a_trace_is_the_same_whatever_the_collector_was_about_to_do() -> None:
    first = fragile_trace()
    noise = []
    for _ in range(3):
        noise.append([[object()] for _ in range(777)])
        gc.collect(0)
        assert fragile_trace() == first


def test_a_runner_leaves_the_order_to_the_seed() -> None:
    async def nap(seen: list[int], number: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            seen.append(number)

    async def main(seen: list[int]) -> list[object]:
        loop = asyncio.get_running_loop()
        tasks: list[object] = [loop.create_task(nap(seen, number)) for number in range(30)]
        future: asyncio.Future[None] = loop.create_future()
        loop.call_later(1, future.set_result, None)
        await future
        return tasks

    def order(seed: int) -> list[int]:
        seen: list[int] = []
        with asyncio.Runner(loop_factory=lambda: VirtualLoop(seed=seed)) as runner:
            runner.run(main(seen))
        return seen

    assert sorted(order(1)) == list(range(30))
    assert order(1) == order(1)
    assert order(1) != order(2)
