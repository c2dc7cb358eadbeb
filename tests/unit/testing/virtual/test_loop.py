"""`VirtualLoop` as a loop: asyncio's own parts on it, and what it refuses."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Generator

import pytest

from penstock.kernel.errors import InvalidInput
from penstock.testing.virtual import (
    Deadlock,
    NotSimulated,
    Unhandled,
    VirtualLoop,
    World,
    simulate,
)

SEEDS = range(60)
VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("VARIABLE")


def test_a_runner_runs_it() -> None:
    ended = []

    async def leftover() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("leftover")

    async def main() -> float:
        loop = asyncio.get_running_loop()
        kept.append(loop.create_task(leftover()))
        async with asyncio.timeout(100):
            await asyncio.wait_for(asyncio.to_thread(len, "abc"), 5)
        future: asyncio.Future[None] = loop.create_future()
        loop.call_later(20, future.set_result, None)
        await future
        return loop.time()

    kept: list[object] = []
    with asyncio.Runner(loop_factory=VirtualLoop, debug=True) as runner:
        assert runner.get_loop().get_debug()
        assert runner.run(main()) == 20
        assert runner.run(main()) == 40
    assert ended == ["leftover", "leftover"]


def test_a_runner_fails_on_an_error_that_nobody_took() -> None:
    async def fail() -> None:
        raise ValueError("unseen")

    async def main() -> None:
        asyncio.get_running_loop().create_task(fail())
        await asyncio.Event().wait()

    with (
        pytest.raises(Unhandled, match="unseen"),
        asyncio.Runner(loop_factory=VirtualLoop) as runner,
    ):
        runner.run(main())


def test_an_exception_handler_takes_errors_over() -> None:
    seen: list[str] = []

    def explode() -> None:
        raise ValueError("handled")

    async def main(world: World) -> str:
        world.loop.set_exception_handler(
            lambda _loop, context: seen.append(str(context["exception"]))
        )
        world.loop.call_soon(explode)
        await world.clock().sleep(1)
        return "went on"

    assert simulate(main, seed=1) == "went on"
    assert seen == ["handled"]


def test_an_exception_handler_that_raises_fails_the_run() -> None:
    def handler(_loop: object, _context: object) -> None:
        raise KeyError("handler")

    async def main(world: World) -> None:
        world.loop.set_exception_handler(handler)
        world.loop.call_soon(lambda: 1 // 0)
        await world.clock().sleep(1)

    with pytest.raises(Unhandled, match="The exception handler raised: KeyError"):
        simulate(main, seed=1)


def test_keyboard_interrupts_pass_through() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    async def main(world: World) -> None:
        world.loop.call_soon(interrupt)
        await world.clock().sleep(1)

    with pytest.raises(KeyboardInterrupt):
        simulate(main, seed=1)


def test_run_forever_stops_after_what_is_ready() -> None:
    loop = VirtualLoop(shuffle=False)
    seen: list[object] = []
    loop.call_soon(seen.append, 1)
    loop.stop()
    loop.stop()
    loop.call_soon(seen.append, 2)
    loop.run_forever()
    assert seen == [1]
    loop.call_later(7, loop.stop)
    loop.run_forever()
    assert seen == [1, 2]
    assert loop.time() == 7
    with pytest.raises(Deadlock):
        loop.run_forever()
    loop.close()
    loop.close()
    assert loop.is_closed()
    with pytest.raises(RuntimeError, match="closed"):
        loop.call_soon(seen.append, 3)
    with pytest.raises(RuntimeError, match="closed"):
        loop.call_later(1, seen.append, 3)


def test_a_stop_that_a_failure_forestalls_does_not_stop_the_next_run() -> None:
    loop = VirtualLoop()

    def stop_and_fail() -> None:
        loop.stop()
        raise ValueError

    loop.call_soon(stop_and_fail)
    with pytest.raises(Unhandled):
        loop.run_forever()
    future: asyncio.Future[str] = loop.create_future()
    loop.call_later(3, future.set_result, "set")
    assert loop.run_until_complete(future) == "set"
    loop.close()


def test_it_runs_futures_and_awaitables_and_nothing_else() -> None:
    class Ready:
        def __await__(self) -> Generator[None, None, str]:
            yield from ()
            return "awaited"

    loop = VirtualLoop()
    future: asyncio.Future[str] = loop.create_future()
    loop.call_later(3, future.set_result, "set")
    assert loop.run_until_complete(future) == "set"
    assert loop.run_until_complete(Ready()) == "awaited"
    with pytest.raises(TypeError, match="not int"):
        loop.run_until_complete(5)  # type: ignore[arg-type]  # what is tested
    loop.close()


def test_it_does_not_run_inside_another_loop() -> None:
    async def inner(_world: World) -> None: ...

    async def main(_world: World) -> None:
        loop = VirtualLoop()
        with pytest.raises(RuntimeError, match="inside a running"):
            loop.run_forever()
        loop.close()
        running = asyncio.get_running_loop()
        with pytest.raises(RuntimeError, match="already running"):
            running.run_forever()
        with pytest.raises(RuntimeError, match="running"):
            running.close()

    simulate(main, seed=1)


def test_collections_are_off_while_it_runs_and_on_afterwards() -> None:
    async def check() -> bool:
        return gc.isenabled()

    def main(_world: World) -> Coroutine[None, None, bool]:
        assert not gc.isenabled()
        return check()

    assert gc.isenabled()
    assert not simulate(main, seed=1)
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert not runner.run(check())
    assert gc.isenabled()
    assert sys.get_asyncgen_hooks() == (None, None)


def test_a_generator_that_outlives_its_loop_does_no_harm() -> None:
    async def count() -> AsyncIterator[int]:
        yield 1
        yield 2

    async def main() -> AsyncIterator[int]:
        numbers = count()
        assert await anext(numbers) == 1
        return numbers

    loop = VirtualLoop()
    kept = [loop.run_until_complete(main())]
    loop.close()
    kept.clear()
    gc.collect()


def test_cancelled_timers_do_not_run_and_do_not_pile_up() -> None:
    loop = VirtualLoop()
    seen: list[int] = []
    kept = [loop.call_at(when, seen.append, when) for when in (3, 1, 2)]
    for when in range(100_000):
        loop.call_at(1000 + when, seen.append, -1).cancel()
    assert len(loop._timers) < 200
    kept[2].cancel()
    kept[2].cancel()
    assert kept[2].cancelled()
    assert kept[0].when() == 3
    assert "cancelled" in repr(kept[2])
    with pytest.raises(Deadlock):
        loop.run_forever()
    assert seen == [1, 3]
    assert loop.time() == 3
    assert len(loop._timers) == 0
    loop.close()


def test_a_timer_cancelled_at_its_own_instant_does_not_run() -> None:
    for seed in SEEDS:
        loop = VirtualLoop(seed=seed)
        seen: list[str] = []
        timers: list[asyncio.TimerHandle] = []

        def only(
            name: str, seen: list[str] = seen, timers: list[asyncio.TimerHandle] = timers
        ) -> None:
            seen.append(name)
            for timer in timers:
                timer.cancel()

        timers += [loop.call_at(5, only, name) for name in "abc"]
        with pytest.raises(Deadlock):
            loop.run_forever()
        assert len(seen) == 1
        assert loop.steps == 1
        loop.close()


def test_timers_count_what_was_cancelled() -> None:
    loop = VirtualLoop()
    timers = [loop.call_at(when, print) for when in (1, 1, 1, 2, 2)]
    for place in (1, 3):
        timers[place].cancel()
    assert loop._timers._cancelled == 2
    assert list(loop._timers.take(1)) == [timers[0], timers[2]]
    assert loop._timers._cancelled == 1
    timers[0].cancel()
    assert loop._timers._cancelled == 1
    assert loop._timers.next_instant() == 2
    assert loop._timers._cancelled == 0
    loop.close()


def test_a_timer_at_no_time_is_refused() -> None:
    loop = VirtualLoop()
    with pytest.raises(InvalidInput):
        loop.call_at(float("nan"), print)
    loop.close()


def test_functions_for_an_executor_run_at_once_and_answer_later() -> None:
    seen: list[str] = []

    def work(answer: str) -> str:
        assert VARIABLE.get("unset") == "unset"
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        seen.append(answer)
        return answer

    async def main(world: World) -> None:
        VARIABLE.set("main")
        future = world.loop.run_in_executor(None, work, "one")
        assert seen == ["one"]
        assert not future.done()
        assert await future == "one"
        with pytest.raises(ZeroDivisionError):
            await world.loop.run_in_executor(None, lambda: 1 // 0)
        world.loop.run_in_executor(None, work, "two").cancel()
        await world.loop.shutdown_default_executor()
        assert asyncio.get_running_loop() is world.loop

    simulate(main, seed=1)
    assert seen == ["one", "two"]


@pytest.mark.parametrize(
    "ask",
    [
        lambda loop: loop.create_connection(asyncio.Protocol, "localhost", 80),
        lambda loop: loop.create_server(asyncio.Protocol, "localhost", 80),
        lambda loop: loop.getaddrinfo("localhost", 80),
        lambda loop: loop.sock_connect(socket.SocketType, ("localhost", 80)),
        lambda loop: loop.add_reader(0, print),
        lambda loop: loop.subprocess_exec(asyncio.SubprocessProtocol, "true"),
        lambda loop: loop.add_signal_handler(signal.SIGTERM, print),
        lambda loop: loop.set_task_factory(print),
    ],
)
def test_the_real_world_is_refused(ask: Callable[[asyncio.AbstractEventLoop], object]) -> None:
    async def main(world: World) -> None:
        with pytest.raises(NotSimulated, match=r"^A simulation in virtual time has no .*\.$"):
            ask(world.loop)

    simulate(main, seed=1)
    assert issubclass(NotSimulated, NotImplementedError)


def test_nothing_of_the_real_world_is_forgotten() -> None:
    base = vars(asyncio.AbstractEventLoop)
    ours = {name for kind in VirtualLoop.__mro__[:-2] for name in vars(kind)}
    missing = {name for name, value in base.items() if callable(value) and name not in ours}
    assert missing <= {"_timer_handle_cancelled"}


def test_other_threads_are_refused() -> None:
    refusals: list[BaseException] = []

    async def main(world: World) -> None:
        def intrude() -> None:
            try:
                world.loop.call_soon_threadsafe(print)
            except NotSimulated as error:
                refusals.append(error)

        thread = threading.Thread(target=intrude)
        thread.start()
        thread.join()
        done = asyncio.Event()
        world.loop.call_soon_threadsafe(done.set)
        await done.wait()

    simulate(main, seed=1)
    assert "no other threads" in str(refusals[0])


def test_context_variables_are_kept() -> None:
    async def child(name: str, world: World) -> str:
        VARIABLE.set(name)
        await world.clock().sleep(1)
        return VARIABLE.get()

    async def main(world: World) -> None:
        VARIABLE.set("main")
        loop = world.loop
        assert await asyncio.gather(*[child(name, world) for name in "abc"]) == ["a", "b", "c"]
        seen: list[str] = []
        given = contextvars.Context()
        given.run(VARIABLE.set, "given")
        loop.call_soon(lambda: seen.append(VARIABLE.get()))
        loop.call_later(1, lambda: seen.append(VARIABLE.get()))
        loop.call_later(2, lambda: seen.append(VARIABLE.get()), context=given)
        VARIABLE.set("later")
        await world.clock().sleep(3)
        assert seen == ["main", "main", "given"]

        async def read() -> str:
            return VARIABLE.get()

        assert await loop.create_task(read(), context=given, eager_start=True) == "given"

    simulate(main, seed=1)


def test_tasks_are_numbered_by_their_loop() -> None:
    async def main(world: World) -> list[str]:
        async def name() -> str:
            task = asyncio.current_task()
            assert task is not None
            return task.get_name()

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(name()), group.create_task(name(), name="mine")]
        return [task.result() for task in tasks]

    for _ in range(2):
        assert simulate(main, seed=1) == ["Task-2", "mine"]
