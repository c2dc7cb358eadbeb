"""asyncio's own parts keep their promises in every order that a seed can make."""

from __future__ import annotations

import asyncio

import pytest

from penstock.testing.virtual import World, simulate

SEEDS = range(100)


def test_a_lock_has_one_holder() -> None:
    async def main(world: World) -> int:
        lock, clock = asyncio.Lock(), world.clock()
        inside = turns = 0

        async def worker() -> None:
            nonlocal inside, turns
            for _ in range(5):
                async with lock:
                    inside += 1
                    assert inside == 1
                    await clock.sleep(0 if turns % 2 else 1)
                    inside -= 1
                    turns += 1

        async with asyncio.TaskGroup() as group:
            for _ in range(5):
                group.create_task(worker())
        return turns

    for seed in SEEDS:
        assert simulate(main, seed=seed) == 25


def test_a_semaphore_bounds_its_holders_through_cancellation() -> None:
    async def main(world: World) -> int:
        semaphore, clock = asyncio.Semaphore(3), world.clock()
        inside = most = 0

        async def worker(patience: float) -> None:
            nonlocal inside, most
            try:
                async with asyncio.timeout(patience), semaphore:
                    inside += 1
                    most = max(most, inside)
                    try:
                        await clock.sleep(2)
                    finally:
                        inside -= 1
            except TimeoutError:
                pass

        async with asyncio.TaskGroup() as group:
            for number in range(12):
                group.create_task(worker(number))
        assert inside == 0
        async with asyncio.timeout(0.5), semaphore, semaphore, semaphore:
            return most

    for seed in SEEDS:
        assert simulate(main, seed=seed) == 3


def test_a_queue_loses_and_doubles_nothing() -> None:
    async def main(world: World) -> list[int]:
        queue: asyncio.Queue[int] = asyncio.Queue(maxsize=2)
        clock, got = world.clock(), []

        async def produce(start: int) -> None:
            for number in range(start, start + 10):
                await queue.put(number)

        async def consume() -> None:
            while True:
                got.append(await queue.get())
                await clock.sleep(0)
                queue.task_done()

        async with asyncio.TaskGroup() as group:
            consumers = [group.create_task(consume()) for _ in range(3)]
            producers = [group.create_task(produce(start)) for start in (0, 10, 20)]
            await asyncio.wait(producers)
            await queue.join()
            for consumer in consumers:
                consumer.cancel()
        return got

    for seed in SEEDS:
        assert sorted(simulate(main, seed=seed)) == list(range(30))


def test_conditions_and_events_wake_their_waiters() -> None:
    async def main(world: World) -> int:
        condition, event, clock = asyncio.Condition(), asyncio.Event(), world.clock()
        tokens = taken = 0

        async def take() -> None:
            nonlocal tokens, taken
            await event.wait()
            async with condition:
                await condition.wait_for(lambda: tokens > 0)
                tokens -= 1
                taken += 1

        async with asyncio.TaskGroup() as group:
            for _ in range(6):
                group.create_task(take())
            await clock.sleep(1)
            event.set()
            for _ in range(6):
                await clock.sleep(1)
                async with condition:
                    tokens += 1
                    condition.notify()
        return taken

    for seed in SEEDS:
        assert simulate(main, seed=seed) == 6


def test_a_group_reports_a_failure_once_and_cancels_the_others() -> None:
    cancelled: list[int] = []

    async def fail() -> None:
        raise ValueError("boom")

    async def wait(number: int) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(number)
            raise

    async def main(world: World) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(5):
                group.create_task(wait(number))
            await world.clock().sleep(1)
            # The group hears of the failure before the one who awaits the task.
            await group.create_task(fail())

    for seed in SEEDS:
        cancelled.clear()
        with pytest.raises(ExceptionGroup) as caught:
            simulate(main, seed=seed)
        assert [str(error) for error in caught.value.exceptions] == ["boom"]
        assert sorted(cancelled) == list(range(5))


def test_timeouts_cancel_what_they_guard_and_nothing_else() -> None:
    async def main(world: World) -> float:
        clock = world.clock()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await clock.sleep(50)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(clock.sleep(50), 5)
        async with asyncio.timeout(50) as longer:
            await asyncio.wait_for(clock.sleep(1), 50)
            longer.reschedule(world.loop.time() + 1)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await clock.sleep(1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3), asyncio.timeout(6):
                await clock.sleep(50)
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        return round(world.loop.time(), 6)

    for seed in SEEDS:
        assert simulate(main, seed=seed) == 14


def test_a_timeout_at_the_instant_of_the_answer_gives_one_of_both() -> None:
    async def main(world: World) -> str:
        future: asyncio.Future[str] = world.loop.create_future()

        def answer() -> None:
            if not future.done():
                future.set_result("answer")

        world.loop.call_at(5, answer)
        try:
            async with asyncio.timeout_at(5):
                return await future
        except TimeoutError:
            return "timeout"

    assert {simulate(main, seed=seed) for seed in SEEDS} == {"answer", "timeout"}


def test_a_shield_keeps_what_it_shields_alive() -> None:
    async def main(world: World) -> list[str]:
        clock, seen = world.clock(), []

        async def precious() -> str:
            await clock.sleep(5)
            seen.append("done")
            return "precious"

        async with asyncio.TaskGroup() as group:
            inner = group.create_task(precious())
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1):
                    await asyncio.shield(inner)
            assert await asyncio.shield(inner) == "precious"
        return seen

    for seed in SEEDS:
        assert simulate(main, seed=seed) == ["done"]


def test_gather_and_wait_and_as_completed() -> None:
    async def main(world: World) -> None:
        clock = world.clock()

        async def after(seconds: float) -> float:
            await clock.sleep(seconds)
            if seconds == 4:
                raise ValueError(seconds)
            return seconds

        assert list(await asyncio.gather(after(3), after(1), after(2))) == [3, 1, 2]
        mixed = await asyncio.gather(after(4), after(1), return_exceptions=True)
        assert [str(outcome) for outcome in mixed] == ["4", "1"]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(after(seconds)) for seconds in (3, 1, 2)]
            done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            assert [task.result() for task in done] == [1]
            assert len(pending) == 2
            assert [await task for task in asyncio.as_completed(tasks)] == [1, 2, 3]

    for seed in SEEDS:
        simulate(main, seed=seed)
