"""Errors that nobody catches or looks at make a simulation fail, whenever they happen."""

from __future__ import annotations

import asyncio
import gc

import pytest

from penstock.testing.virtual import Deadlock, Unhandled, World, simulate


async def _fail(message: str) -> None:
    raise ValueError(message)


async def _forever() -> None:
    await asyncio.Event().wait()


def test_an_error_in_a_callback_fails_the_run() -> None:
    def explode() -> None:
        raise ValueError("in a callback")

    async def main(world: World) -> None:
        world.loop.call_later(5, explode)
        await world.clock().sleep(10)
        pytest.fail("the run went on")

    with pytest.raises(Unhandled, match=r"explode\): ValueError: in a callback") as caught:
        simulate(main, seed=1)
    assert isinstance(caught.value.__cause__, ValueError)
    assert "failed at second 5.000000" in caught.value.__notes__[0]


def test_an_error_that_nobody_takes_from_a_task_fails_the_run() -> None:
    async def main(world: World) -> None:
        world.loop.create_task(_fail("never seen"), name="careless")
        await world.clock().sleep(10)
        pytest.fail("the run went on")

    with pytest.raises(Unhandled, match=r"never retrieved .careless _fail.: ValueError"):
        simulate(main, seed=1)


def test_an_error_at_the_very_end_is_found_in_every_order() -> None:
    cancelled: list[str] = []

    async def leftover(world: World) -> None:
        try:
            await _forever()
        finally:
            await world.clock().sleep(1)
            cancelled.append("leftover")

    async def main(world: World) -> None:
        world.loop.create_task(leftover(world))
        future = world.loop.create_future()
        world.loop.call_at(1, lambda: world.loop.create_task(_fail("at the end")))
        world.loop.call_at(1, future.set_result, None)
        await future
        await world.clock().sleep(0)

    for seed in range(200):
        cancelled.clear()
        try:
            simulate(main, seed=seed)
        except Unhandled as error:
            assert str(error).endswith("ValueError: at the end")  # noqa: PT017 - some seeds only
        assert cancelled == ["leftover"]


def test_an_error_beside_an_interrupt_is_noted() -> None:
    def interrupt() -> None:
        asyncio.get_running_loop().call_exception_handler({"message": "Something unseen"})
        raise KeyboardInterrupt

    ended: list[str] = []

    async def leftover(world: World) -> None:
        try:
            await _forever()
        finally:
            await world.clock().sleep(1)
            ended.append("leftover")

    async def main(world: World) -> None:
        world.loop.create_task(leftover(world))
        world.loop.call_later(1, interrupt)
        await _forever()

    with pytest.raises(KeyboardInterrupt) as caught:
        simulate(main, seed=1)
    assert caught.value.__notes__[1:] == ["While it was wound down: Something unseen."]
    assert ended == ["leftover"]


def test_an_error_that_is_dropped_after_the_end_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main(world: World) -> object:
        task = world.loop.create_task(_fail("kept"))
        await world.clock().sleep(1)
        return task

    kept = [simulate(main, seed=1)]
    assert not caplog.records
    kept.clear()
    gc.collect()
    assert "exception was never retrieved (Task-2 _fail): ValueError: kept" in caplog.text


def test_an_error_in_garbage_is_told_before_the_deadlock_that_it_caused() -> None:
    async def main(world: World) -> None:
        cycle: list[object] = [world.loop.create_task(_fail("in a cycle"))]
        cycle.append(cycle)
        del cycle
        await _forever()

    with pytest.raises(Unhandled, match="in a cycle"):
        simulate(main, seed=3)


def test_a_callback_does_not_hide_the_error_that_it_did_not_take() -> None:
    async def main(world: World) -> None:
        world.loop.create_task(_fail("not taken")).add_done_callback(lambda _: None)
        await _forever()

    for seed in range(20):
        with pytest.raises(Unhandled, match="not taken"):
            simulate(main, seed=seed)


def test_lost_tasks_are_named_by_a_deadlock() -> None:
    async def main(world: World) -> None:
        world.loop.create_task(_forever(), name="lost")
        await _forever()

    with pytest.raises(Deadlock, match="lost: _forever"):
        simulate(main, seed=3)


def test_an_error_in_garbage_is_found_after_the_end() -> None:
    async def main(world: World) -> str:
        task = world.loop.create_task(_fail("in a cycle"))
        cycle: list[object] = [task]
        cycle.append(cycle)
        await world.clock().sleep(1)
        return "fine"

    with pytest.raises(Unhandled, match="in a cycle") as caught:
        simulate(main, seed=3)
    assert "seed=3" in caught.value.__notes__[0]


def test_an_error_during_the_clean_up_fails_the_run() -> None:
    async def stubborn(world: World, message: str) -> None:
        try:
            await _forever()
        finally:
            await world.clock().sleep(1)
            await _fail(message)

    async def main(world: World) -> None:
        for message in ("first", "second"):
            world.loop.create_task(stubborn(world, message), name=message)
        await world.clock().sleep(1)

    with pytest.raises(Unhandled, match=r"when it was cancelled .*first") as caught:
        simulate(main, seed=1)
    assert "ValueError: second" in caught.value.__notes__[-1]


def test_an_error_during_the_clean_up_does_not_hide_the_first() -> None:
    async def stubborn() -> None:
        try:
            await _forever()
        finally:
            await _fail("second")

    async def main(world: World) -> None:
        task = world.loop.create_task(stubborn())
        await world.clock().sleep(1)
        assert not task.done()
        raise KeyError("first")

    with pytest.raises(KeyError, match="first") as caught:
        simulate(main, seed=1)
    assert "ValueError: second" in caught.value.__notes__[-1]
