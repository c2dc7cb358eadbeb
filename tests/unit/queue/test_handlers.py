"""One attempt: every way in which a handler can end, and every way in which it can be ended.

Handlers that are `async def` run in virtual time. Those in threads run on a real loop whose clock
is set forward by hand, and signal where they are: nothing here sleeps.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import json
import logging
import math
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import msgspec
import pytest

from penstock.kernel.entropy import seeded_entropy
from penstock.kernel.errors import InvalidInput
from penstock.queue.attempt_outcomes import (
    RESULT_BYTES_MAX,
    AttemptCancelled,
    AttemptOutcome,
    Failed,
    GivenBack,
    Retried,
    Succeeded,
)
from penstock.queue.execution import attempt as module
from penstock.queue.execution.attempt import AttemptResult, HandlerAttempt, HandlerThread
from penstock.queue.execution.handlers import Cancelled, Handler, HandlerRegistry, TaskContext
from penstock.queue.execution.retry import Retry
from penstock.queue.ids import TaskId
from penstock.testing.virtual import World, simulate

Result = TypeVar("Result")
Run = Callable[[Coroutine[Any, Any, Any]], Any]

NOW_MS = 1_000_000
FLAT = Retry(jitter=0)
SEEDS = range(20)
place: contextvars.ContextVar[str] = contextvars.ContextVar("place", default="nowhere")


def _task(input: object = None, *, attempt: int = 1) -> TaskContext:
    raw = msgspec.Raw(json.dumps(input).encode())
    return TaskContext(id=TaskId("some-task"), type="t", attempt=attempt, raw_input=raw)


def _attempt(
    function: Callable[[TaskContext], Any],
    *,
    timeout_seconds: float | None = None,
    retry: Retry = FLAT,
    counted: int = 1,
    task: TaskContext | None = None,
) -> HandlerAttempt:
    return HandlerAttempt(
        Handler(type="t", function=function, timeout_seconds=timeout_seconds, retry=retry),
        task or _task(),
        counted=counted,
        now_ms=lambda: NOW_MS,
        entropy=seeded_entropy(1),
    )


def _result(ended: AttemptResult) -> object:
    assert isinstance(ended.ending, Succeeded)
    return json.loads(bytes(ended.ending.result))


def _failed(ending: AttemptOutcome | None) -> Failed:
    assert isinstance(ending, Failed)
    return ending


def _retried(ending: AttemptOutcome | None) -> Retried:
    assert isinstance(ending, Retried)
    return ending


class Skipping(asyncio.SelectorEventLoop):
    """A real loop whose clock can be set forward."""

    skipped_seconds = 0.0

    def time(self) -> float:
        return super().time() + self.skipped_seconds


def _run(main: Coroutine[Any, Any, Result]) -> Result:
    with asyncio.Runner(loop_factory=Skipping) as runner:
        return runner.run(main)


def _skip(seconds: float) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, Skipping)
    loop.skipped_seconds += seconds


class Signal:
    """Set in any thread, awaited on the loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()
        self._past = threading.Event()

    def set(self) -> None:
        self._loop.call_soon_threadsafe(self._event.set)
        self._past.set()

    async def wait(self) -> None:
        async with asyncio.timeout(60):
            await self._event.wait()
        # asyncio swallows each OSError while it is woken up. A TimeoutError is one, and must not
        # be raised in there.
        assert self._past.wait(60)


def _spin(began: Signal) -> None:
    """Be busy in Python, where an exception can be raised, for long but not for ever."""
    began.set()
    for _ in range(10**9):
        pass


# What is registered


def test_a_type_has_one_handler() -> None:
    handlers = HandlerRegistry()
    first = Handler(type="resize", function=print)
    handlers.add(first)
    handlers.add(Handler(type="crop", function=print))
    with pytest.raises(InvalidInput, match="There is a handler of 'resize' already"):
        handlers.add(Handler(type="resize", function=repr))
    assert handlers.get("resize") is first
    assert handlers.get("unknown") is None
    assert handlers.types == ("crop", "resize")


def _two(task: TaskContext, other: int) -> None: ...


def _none() -> None: ...


def _generator(task: TaskContext) -> Any:
    yield 1


async def _async_generator(task: TaskContext) -> Any:
    yield 1


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"function": None}, "cannot be called"),
        ({"function": "resize"}, "cannot be called"),
        ({"function": _two}, "does not take one argument"),
        ({"function": _none}, "does not take one argument"),
        ({"function": _generator}, "is a generator"),
        ({"function": _async_generator}, "is a generator"),
        ({"timeout_seconds": 0}, "is not a timeout"),
        ({"timeout_seconds": -1}, "is not a timeout"),
        ({"timeout_seconds": math.nan}, "is not a timeout"),
        ({"timeout_seconds": math.inf}, "is not a timeout"),
        ({"timeout_seconds": True}, "is not a timeout"),
        ({"timeout_seconds": "30"}, "is not a timeout"),
        ({"type": "a/b"}, "is not the name of a type"),
        ({"type": ""}, "is not the name of a type"),
        ({"type": print}, "needs the name of its type"),
        ({"retry": 3}, "not a Retry"),
        ({"retry": None}, "not a Retry"),
    ],
)
def test_a_handler_that_cannot_be_right_is_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        Handler(**{"type": "t", "function": print, **wrong})


class Service:
    async def __call__(self, task: TaskContext) -> str:
        return f"service {task.input}"

    async def method(self, task: TaskContext) -> str:
        return f"method {task.input}"


async def _second(first: str, task: TaskContext) -> str:
    return f"{first} {task.input}"


def _inner(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    async def wrapper(*args: Any) -> Any:
        return await function(*args)

    return wrapper


@pytest.mark.parametrize(
    ("function", "result"),
    [
        (functools.partial(_second, "partial"), "partial 5"),
        (functools.partial(functools.partial(_second), "nested"), "nested 5"),
        (Service(), "service 5"),
        (functools.partial(Service()), "service 5"),
        (Service().method, "method 5"),
        (_inner(functools.partial(_second, "wrapped")), "wrapped 5"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_kind_of_async_function_runs_on_the_loop(
    function: Callable[..., Any], result: str
) -> None:
    async def main(world: World) -> AttemptResult:
        # A thread would fail here: virtual time has none.
        return await _attempt(function, task=_task(5)).run()

    assert _result(simulate(main, seed=1)) == result


def test_a_plain_decorator_around_an_async_function_is_awaited_on_the_loop() -> None:
    async def handler(task: TaskContext) -> list[object]:
        return [task.input, threading.current_thread() is threading.main_thread()]

    @functools.wraps(handler)
    def decorated(task: TaskContext) -> Coroutine[Any, Any, list[object]]:
        return handler(task)

    assert _result(_run(_attempt(decorated, task=_task(5)).run())) == [5, True]


# What a handler is given


def test_the_input_is_decoded_when_asked_for_and_once() -> None:
    task = _task({"n": [1, 10**30, "ü"]})
    assert task.input == {"n": [1, 10**30, "ü"]}
    assert task.input is task.input
    broken = TaskContext(id=TaskId("x"), type="t", attempt=2, raw_input=msgspec.Raw(b"{broken"))
    assert (broken.id, broken.type, broken.attempt, broken.cancel_asked) == ("x", "t", 2, False)
    with pytest.raises(ValueError, match="Expecting"):
        _ = broken.input


def test_an_input_that_cannot_be_read_fails_the_attempt_only() -> None:
    async def handler(task: TaskContext) -> object:
        return task.input

    task = TaskContext(id=TaskId("x"), type="t", attempt=1, raw_input=msgspec.Raw(b"{"))
    ended = simulate(_attempt(handler, task=task).run(), seed=1)
    assert _retried(ended.ending).failure.error == "JSONDecodeError"


@pytest.mark.parametrize("is_async", [True, False])
def test_context_variables_do_not_leak_between_attempts(is_async: bool) -> None:
    def note(task: TaskContext) -> str:
        before = place.get()
        place.set(f"attempt {task.attempt}")
        return before

    async def note_async(task: TaskContext) -> str:
        return note(task)

    async def main() -> list[object]:
        place.set("caller")
        function = note_async if is_async else note
        seen = [_result(await _attempt(function, task=_task(attempt=n)).run()) for n in range(1, 4)]
        return [*seen, place.get()]

    assert contextvars.copy_context().run(_run, main()) == ["caller"] * 4


# Results


@pytest.mark.parametrize("run", [functools.partial(simulate, seed=1), _run])
@pytest.mark.parametrize("value", [None, 0, "ü", [1, None], {"ok": True}, "x" * 1000, (1, 2)])
def test_what_a_handler_returns_is_its_result(run: Run, value: object) -> None:
    async def handler(task: TaskContext) -> object:
        return value

    plain: Callable[[TaskContext], object] = lambda _: value  # noqa: E731 - a lambda is one too
    ended = run(_attempt(plain if run is _run else handler).run())
    assert _result(ended) == (list(value) if isinstance(value, tuple) else value)
    assert ended.released is None


class Odd(dict[str, int]):
    def items(self) -> Any:
        raise LookupError("odd")


_circular: list[object] = []
_circular.append(_circular)
_deep: list[object] = []
for _ in range(100_000):
    _deep = [_deep]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (object(), "not JSON"),
        ({1, 2}, "not JSON"),
        (b"bytes", "not JSON"),
        (math.nan, "not JSON"),
        (math.inf, "not JSON"),
        ({(1, 2): 3}, "not JSON"),
        (_circular, "not JSON"),
        (_deep, "not JSON"),
        ("\ud800", "not JSON"),
        (Odd(a=1), "not JSON"),
        ("x" * (RESULT_BYTES_MAX - 1), "67,108,865 bytes and at most 67,108,864"),
        ("ü" * (RESULT_BYTES_MAX // 2), "67,108,866 bytes and at most 67,108,864"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else value[:8],
)
def test_a_result_that_cannot_be_stored_fails_and_is_not_retried(value: object, words: str) -> None:
    async def handler(task: TaskContext) -> object:
        return value

    ended = simulate(_attempt(handler).run(), seed=1)
    failure = _failed(ended.ending).failure
    assert failure.error == "BadResult"
    assert failure.message.startswith("The result cannot be stored: it ")
    assert words in failure.message
    assert failure.message.endswith(".")


def test_a_result_of_the_largest_size_is_taken() -> None:
    async def handler(task: TaskContext) -> str:
        return "x" * (RESULT_BYTES_MAX - 2)

    assert _result(simulate(_attempt(handler).run(), seed=1)) == "x" * (RESULT_BYTES_MAX - 2)


# Failures


def _divide(task: TaskContext) -> float:
    return 1 / 0


async def _divide_async(task: TaskContext) -> float:
    return _divide(task)


@pytest.mark.parametrize("function", [_divide, _divide_async])
def test_a_failure_tells_what_and_where_without_our_own_frames(
    function: Callable[[TaskContext], Any],
) -> None:
    ending = _retried(_run(_attempt(function).run()).ending)
    assert ending.due_ms == NOW_MS + 1000
    assert ending.failure.error == "ZeroDivisionError"
    assert ending.failure.message == "division by zero"
    assert "return 1 / 0" in ending.failure.trace
    assert "attempt.py" not in ending.failure.trace


def test_attempts_that_were_given_back_do_not_count_towards_the_last() -> None:
    task = _task(attempt=9)
    assert _retried(_run(_attempt(_divide, task=task, counted=2).run()).ending).due_ms > NOW_MS
    _failed(_run(_attempt(_divide, counted=3).run()).ending)


def test_a_class_that_is_not_retried_fails_at_once() -> None:
    _failed(_run(_attempt(_divide, retry=Retry(on=(OSError,))).run()).ending)
    _retried(_run(_attempt(_divide, retry=Retry(on=(ArithmeticError,))).run()).ending)


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize(
    "kind", [KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError, StopIteration]
)
def test_a_handler_that_raises_an_exit_does_not_end_the_worker(
    kind: type[BaseException], is_async: bool
) -> None:
    def handler(task: TaskContext) -> None:
        raise kind("bye")

    async def handler_async(task: TaskContext) -> None:
        handler(task)

    async def main() -> AttemptResult:
        return await _attempt(handler_async if is_async else handler).run()

    ending = _run(main()).ending
    # An `async def` cannot raise StopIteration: Python makes it a RuntimeError.
    name = "RuntimeError" if is_async and kind is StopIteration else kind.__name__
    assert isinstance(ending, Retried if issubclass(kind, Exception) else Failed)
    assert ending.failure.error == name


# Timeouts of async handlers


@pytest.mark.parametrize("seed", SEEDS)
def test_timeouts_are_enforced(seed: int) -> None:
    async def main(world: World) -> None:
        seen = []

        async def handler(task: TaskContext) -> str:
            try:
                await world.clock().sleep(5)
            except asyncio.CancelledError:
                seen.append(("cancelled", world.loop.time(), task.cancel_asked))
                raise
            return "ran in full"

        ended = await _attempt(handler, timeout_seconds=1).run()
        assert seen == [("cancelled", 1.0, True)]
        assert world.loop.time() == 1.0
        ending = _retried(ended.ending)
        assert ending.failure.error == "TimeoutError"
        assert ending.failure.message == "The handler did not end within 1 s."
        assert "world.clock().sleep(5)" in ending.failure.trace
        assert ending.due_ms == NOW_MS + 1000
        assert ended.released is None

    simulate(main, seed=seed)


def test_an_enforced_timeout_is_retried_by_its_class() -> None:
    async def handler(task: TaskContext) -> None:
        await asyncio.Event().wait()

    async def main(world: World, retry: Retry, counted: int) -> AttemptOutcome | None:
        attempt = _attempt(handler, timeout_seconds=1, retry=retry, counted=counted)
        return (await attempt.run()).ending

    for on in (Exception, OSError, TimeoutError):
        retried = simulate(functools.partial(main, retry=Retry(on=on), counted=1), seed=1)
        assert isinstance(retried, Retried), on
    _failed(simulate(functools.partial(main, retry=Retry(on=ValueError), counted=1), seed=1))
    _failed(simulate(functools.partial(main, retry=Retry(), counted=3), seed=1))


def test_a_timeout_of_the_handlers_own_is_an_error_like_any_other() -> None:
    async def handler(task: TaskContext) -> None:
        async with asyncio.timeout(1):
            await asyncio.Event().wait()

    attempt_of = functools.partial(_attempt, handler, timeout_seconds=60)
    assert _retried(simulate(attempt_of().run(), seed=1).ending).failure.message == ""
    _failed(simulate(attempt_of(retry=Retry(on=ValueError)).run(), seed=1).ending)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_handler_that_swallows_the_timeout_has_timed_out_all_the_same(seed: int) -> None:
    async def main(world: World) -> None:
        async def handler(task: TaskContext) -> str:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            await world.clock().sleep(2)
            return "done after all"

        ended = await _attempt(handler, timeout_seconds=1).run()
        assert _retried(ended.ending).failure.error == "TimeoutError"
        assert world.loop.time() == 3.0
        assert ended.released is None

    simulate(main, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_handler_that_does_not_end_is_abandoned_after_its_grace(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def main(world: World) -> None:
        go_on = asyncio.Event()

        async def handler(task: TaskContext) -> str:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            await go_on.wait()
            raise ValueError("nobody wants to know")

        attempt = _attempt(handler, timeout_seconds=1)
        ended = await attempt.run()
        assert _retried(ended.ending).failure.error == "TimeoutError"
        assert world.loop.time() == 1.0 + attempt.grace_seconds
        assert ended.released is not None
        assert not ended.released.done()
        assert ended.released in module._left
        go_on.set()
        await asyncio.wait([ended.released])
        assert world.loop.time() == 1.0 + attempt.grace_seconds
        await world.clock().sleep(0.001)
        assert module._left == set()

    with caplog.at_level(logging.WARNING):
        simulate(main, seed=seed)
    assert [record.getMessage() for record in caplog.records] == [
        "attempt 1 of task some-task has ended, but its handler has not yet"
    ]


def test_a_handler_within_its_timeout_is_left_alone() -> None:
    async def main(world: World) -> None:
        async def handler(task: TaskContext) -> bool:
            await world.clock().sleep(59)
            return task.cancel_asked

        assert _result(await _attempt(handler, timeout_seconds=60).run()) is False
        assert _result(await _attempt(handler).run()) is False

    simulate(main, seed=1)


# Interrupting async handlers

Interrupt = Callable[[HandlerAttempt], None]


async def _interrupted(
    world: World, function: Callable[[TaskContext], Any], *interrupts: Interrupt, **rules: Any
) -> AttemptResult:
    """Run an attempt that is interrupted after 10 s, and each second after that."""
    attempt = _attempt(function, **rules)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(attempt.run())
        await world.clock().sleep(9)
        for interrupt in interrupts:
            await world.clock().sleep(1)
            interrupt(attempt)
    return running.result()


async def _obedient(task: TaskContext) -> None:
    await asyncio.Event().wait()


async def _polite(task: TaskContext) -> str:
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.Event().wait()
    assert task.cancel_asked
    return "stopped cleanly"


async def _clumsy(task: TaskContext) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        raise ValueError("while cleaning up")


@pytest.mark.parametrize("function", [_obedient, _polite, _clumsy])
@pytest.mark.parametrize(
    ("interrupt", "ending"),
    [
        (HandlerAttempt.ask_to_stop, AttemptCancelled()),
        (HandlerAttempt.give_back, GivenBack()),
        (HandlerAttempt.lose, None),
    ],
)
def test_a_cooperatively_cancelled_task_does_not_end_as_completed(
    function: Callable[[TaskContext], Any], interrupt: Interrupt, ending: AttemptOutcome | None
) -> None:
    async def main(world: World) -> AttemptResult:
        ended = await _interrupted(world, function, interrupt, timeout_seconds=60)
        assert world.loop.time() == 10.0
        return ended

    for seed in SEEDS:
        assert simulate(main, seed=seed) == AttemptResult(ending)


def _stubborn(world: World) -> Callable[[TaskContext], Any]:
    async def handler(task: TaskContext) -> None:
        for _ in range(10):
            with contextlib.suppress(asyncio.CancelledError):
                await world.clock().sleep(30)

    return handler


@pytest.mark.parametrize(
    ("interrupts", "ending"),
    [
        ([HandlerAttempt.ask_to_stop], AttemptCancelled()),
        ([HandlerAttempt.give_back, HandlerAttempt.ask_to_stop], AttemptCancelled()),
        ([HandlerAttempt.ask_to_stop, HandlerAttempt.give_back], AttemptCancelled()),
        ([HandlerAttempt.ask_to_stop, HandlerAttempt.lose], None),
        ([HandlerAttempt.lose, HandlerAttempt.ask_to_stop], None),
        ([HandlerAttempt.lose, HandlerAttempt.give_back], None),
    ],
)
def test_of_several_interruptions_the_weightiest_counts(
    interrupts: list[Interrupt], ending: AttemptOutcome | None
) -> None:
    async def main(world: World) -> None:
        ended = await _interrupted(world, _stubborn(world), *interrupts)
        assert ended.ending == ending
        assert ended.released is not None
        assert world.loop.time() == 10.0 + module.GRACE_SECONDS
        await asyncio.wait([ended.released])

    simulate(main, seed=1)


def test_a_task_cancelled_after_its_timeout_and_before_its_end_is_cancelled() -> None:
    async def main(world: World) -> AttemptOutcome | None:
        ended = await _interrupted(
            world, _stubborn(world), HandlerAttempt.ask_to_stop, timeout_seconds=9.5
        )
        return ended.ending

    assert simulate(main, seed=1) == AttemptCancelled()


def test_a_worker_that_stops_does_not_excuse_a_timeout() -> None:
    async def main(world: World) -> AttemptOutcome | None:
        ended = await _interrupted(
            world, _stubborn(world), HandlerAttempt.give_back, timeout_seconds=9.5
        )
        return ended.ending

    assert _retried(simulate(main, seed=1)).failure.error == "TimeoutError"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_handler_that_has_ended_keeps_its_result_when_asked_to_stop(seed: int) -> None:
    async def main(world: World) -> AttemptResult:
        async def handler(task: TaskContext) -> str:
            # They come when the handler is over and before anybody has taken its result.
            world.loop.call_soon(attempt.ask_to_stop)
            world.loop.call_soon(attempt.give_back)
            return "done"

        attempt = _attempt(handler)
        return await attempt.run()

    assert _result(simulate(main, seed=seed)) == "done"


@pytest.mark.parametrize(
    ("interrupt", "ending"),
    [
        (HandlerAttempt.ask_to_stop, AttemptCancelled()),
        (HandlerAttempt.give_back, GivenBack()),
        (HandlerAttempt.lose, None),
    ],
)
def test_what_is_interrupted_before_it_starts_does_not_start(
    interrupt: Interrupt, ending: AttemptOutcome | None
) -> None:
    calls = []

    async def handler(task: TaskContext) -> None:
        calls.append(task)

    async def before() -> AttemptResult:
        attempt = _attempt(handler)
        interrupt(attempt)
        return await attempt.run()

    async def first_step(world: World) -> AttemptResult:
        attempt = _attempt(handler)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(attempt.run())
            # In one order this is before the handler's first step; in others it never is.
            while attempt._body is None:
                await world.clock().sleep(0)
            interrupt(attempt)
        return running.result()

    assert simulate(before(), seed=1) == AttemptResult(ending)
    assert calls == []
    endings = []
    for seed in SEEDS:
        calls.clear()
        ended = simulate(first_step, seed=seed)
        if not calls:
            endings.append(ended)
    assert endings
    assert all(ended == AttemptResult(ending) for ended in endings)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_worker_that_is_cancelled_cancels_its_handlers_and_waits_for_none(seed: int) -> None:
    async def main(world: World) -> None:
        seen = []

        async def handler(task: TaskContext) -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                seen.append(task.cancel_asked)
                await world.clock().sleep(60)

        async with asyncio.TaskGroup() as group:
            running = group.create_task(_attempt(handler).run())
            await world.clock().sleep(1)
            running.cancel()
        assert running.cancelled()
        assert world.loop.time() == 1.0
        assert len(module._left) == 1
        await world.clock().sleep(61)
        assert seen == [True]
        assert module._left == set()

    simulate(main, seed=seed)


# Plain handlers, in threads


def test_a_plain_handler_runs_in_a_daemon_thread_of_its_own() -> None:
    def handler(task: TaskContext) -> list[object]:
        thread = threading.current_thread()
        return [thread is threading.main_thread(), thread.daemon, task.input, task.attempt]

    assert _result(_run(_attempt(handler, task=_task("in", attempt=2)).run())) == [
        False,
        True,
        "in",
        2,
    ]


def test_a_thread_that_times_out_ends_at_once_and_its_late_result_is_dropped() -> None:
    async def main() -> None:
        began, go_on = Signal(), threading.Event()

        def handler(task: TaskContext) -> str:
            with contextlib.suppress(TimeoutError):
                _spin(began)
            go_on.wait(60)
            return "done after all"

        attempt = _attempt(handler, timeout_seconds=3600)
        attempt.grace_seconds = 10**6  # It would be waited for in vain.
        async with asyncio.TaskGroup() as group:
            running = group.create_task(attempt.run())
            await began.wait()
            _skip(3600)
        ended = running.result()
        ending = _retried(ended.ending)
        assert ending.failure.error == "TimeoutError"
        assert ending.failure.message == "The handler did not end within 3600 s."
        assert "_spin(began)" in ending.failure.trace
        assert "attempt.py" not in ending.failure.trace
        assert ended.released is not None
        assert not ended.released.done()

        # A stuck one blocks no other.
        assert _result(await _attempt(lambda task: "other").run()) == "other"
        assert not ended.released.done()

        go_on.set()
        await asyncio.wait([ended.released], timeout=60)
        assert ended.released.done()

    _run(main())


@pytest.mark.parametrize(
    ("interrupt", "raised", "ending"),
    [
        (None, TimeoutError, Retried),
        (HandlerAttempt.ask_to_stop, Cancelled, AttemptCancelled),
        (HandlerAttempt.give_back, Cancelled, GivenBack),
        (HandlerAttempt.lose, Cancelled, type(None)),
    ],
)
def test_an_interruption_is_raised_inside_a_thread(
    interrupt: Interrupt | None, raised: type[BaseException], ending: type
) -> None:
    async def main() -> None:
        began = Signal()
        seen: list[object] = []

        def handler(task: TaskContext) -> None:
            try:
                _spin(began)
            except BaseException as error:
                seen.extend([type(error), task.cancel_asked])
                raise

        attempt = _attempt(handler, timeout_seconds=3600)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(attempt.run())
            await began.wait()
            if interrupt:
                interrupt(attempt)
            else:
                _skip(3600)
        ended = running.result()
        assert isinstance(ended.ending, ending)
        if ended.released:
            await asyncio.wait([ended.released], timeout=60)
        assert seen == [raised, True]

    _run(main())


def test_cancelled_is_not_swallowed_by_except_exception() -> None:
    assert not issubclass(Cancelled, Exception)


def test_a_thread_that_looks_whether_to_stop_does_not_end_as_completed() -> None:
    async def main() -> AttemptResult:
        began = Signal()

        def handler(task: TaskContext) -> str:
            with contextlib.suppress(Cancelled):
                _spin(began)
            return f"stopped cleanly: {task.cancel_asked}"

        attempt = _attempt(handler)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(attempt.run())
            await began.wait()
            attempt.ask_to_stop()
        return running.result()

    assert _run(main()) == AttemptResult(AttemptCancelled())


def test_a_thread_that_does_not_stop_is_abandoned_after_its_grace() -> None:
    async def main() -> None:
        began, told, go_on = Signal(), Signal(), threading.Event()

        def handler(task: TaskContext) -> None:
            with contextlib.suppress(Cancelled):
                _spin(began)
            told.set()
            go_on.wait(60)

        attempt = _attempt(handler)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(attempt.run())
            await began.wait()
            attempt.ask_to_stop()
            await told.wait()
            assert not running.done()
            _skip(attempt.grace_seconds)
        ended = running.result()
        assert ended.ending == AttemptCancelled()
        assert ended.released is not None
        go_on.set()
        await asyncio.wait([ended.released], timeout=60)
        assert ended.released.done()

    _run(main())


async def _run_interrupted_late(
    function: Callable[[TaskContext], Any], interrupt: Interrupt
) -> AttemptResult:
    """Interrupt an attempt whose thread has ended and whose outcome is on its way to the loop."""
    loop = asyncio.get_running_loop()
    attempt = _attempt(function, timeout_seconds=3600)

    def when_started() -> None:
        if attempt._thread is None:
            loop.call_soon(when_started)
            return
        # The loop stands still meanwhile, so that nothing arrives.
        for thread in threading.enumerate():
            if thread.name == "penstock-handler":
                thread.join(60)
        assert attempt._body is not None
        assert not attempt._body.done()
        interrupt(attempt)

    loop.call_soon(when_started)
    return await attempt.run()


def _time_out(_: HandlerAttempt) -> None:
    _skip(3600)


@pytest.mark.parametrize(
    "interrupt", [HandlerAttempt.ask_to_stop, HandlerAttempt.give_back, _time_out]
)
def test_a_result_that_is_on_its_way_survives_an_interruption(interrupt: Interrupt) -> None:
    assert _run(_run_interrupted_late(lambda _: None, interrupt)) == AttemptResult(Succeeded())


def test_a_result_that_is_on_its_way_is_of_no_use_when_the_claim_is_lost() -> None:
    assert _run(_run_interrupted_late(lambda _: None, HandlerAttempt.lose)) == AttemptResult(None)


def test_a_coroutine_that_is_on_its_way_does_not_start_when_asked_to_stop() -> None:
    calls = []

    async def handler(task: TaskContext) -> None:
        calls.append(task)

    def decorated(task: TaskContext) -> Coroutine[Any, Any, None]:
        return handler(task)

    assert _run(_run_interrupted_late(decorated, HandlerAttempt.ask_to_stop)) == AttemptResult(
        AttemptCancelled()
    )
    assert calls == []


def test_a_coroutine_from_a_thread_does_not_start_when_asked_to_stop_before() -> None:
    calls = []

    async def handler(task: TaskContext) -> None:
        calls.append(task)

    async def main() -> AttemptResult:
        began = Signal()

        def decorated(task: TaskContext) -> Coroutine[Any, Any, None]:
            coroutine = handler(task)
            with contextlib.suppress(Cancelled):
                _spin(began)
            return coroutine

        attempt = _attempt(decorated)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(attempt.run())
            await began.wait()
            attempt.ask_to_stop()
        return running.result()

    assert _run(main()) == AttemptResult(AttemptCancelled())
    assert calls == []


def test_a_coroutine_from_a_thread_is_timed_out_and_cancelled_like_any_other() -> None:
    async def handler(began: Signal, task: TaskContext) -> None:
        began.set()
        await asyncio.Event().wait()

    async def main(interrupt: Interrupt) -> AttemptResult:
        began = Signal()
        attempt = _attempt(lambda task: handler(began, task), timeout_seconds=3600)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(attempt.run())
            await began.wait()
            interrupt(attempt)
        return running.result()

    assert _run(main(HandlerAttempt.ask_to_stop)) == AttemptResult(AttemptCancelled())
    ended = _run(main(_time_out))
    assert _retried(ended.ending).failure.error == "TimeoutError"
    assert ended.released is None


def test_a_thread_told_before_its_first_step_does_not_call_the_handler() -> None:
    async def main() -> None:
        calls: list[int] = []

        def function() -> Succeeded:
            calls.append(1)
            return Succeeded()

        thread = HandlerThread(function, nothing=Succeeded())
        assert thread.tell(Cancelled)
        await asyncio.wait_for(thread.run(), 60)
        assert calls == []

    _run(main())


def test_an_interruption_that_comes_when_the_function_is_over_stops_no_delivery() -> None:
    async def main() -> None:
        def function() -> Succeeded:
            thread.tell(Cancelled)
            return Succeeded()

        thread = HandlerThread(function, nothing=Succeeded())
        assert await asyncio.wait_for(thread.run(), 60) == Succeeded()

    _run(main())


def test_an_interruption_never_hits_what_delivers_the_outcome() -> None:
    async def main() -> None:
        for turn in range(300):
            thread = HandlerThread(Succeeded, nothing=Succeeded())
            async with asyncio.TaskGroup() as group, asyncio.timeout(60):
                running = group.create_task(thread.run())
                for _ in range(turn % 30):
                    await asyncio.wait([running], timeout=0)
                thread.tell(Cancelled)
            assert running.result() == Succeeded()

    _run(main())


def test_a_thread_that_outlives_the_loop_ends_quietly() -> None:
    threads = []
    go_on = threading.Event()

    async def main() -> None:
        began = Signal()

        def handler(task: TaskContext) -> None:
            threads.append(threading.current_thread())
            with contextlib.suppress(TimeoutError):
                _spin(began)
            go_on.wait(60)

        async with asyncio.TaskGroup() as group:
            running = group.create_task(_attempt(handler, timeout_seconds=1).run())
            await began.wait()
            _skip(1)
        assert running.result().released

    _run(main())
    # An error in the thread would be a warning, and so fail this test.
    go_on.set()
    threads[0].join(60)
    assert not threads[0].is_alive()


STUCK = """
import asyncio, threading, msgspec
from penstock.kernel.entropy import seeded_entropy
from penstock.queue.execution.attempt import HandlerAttempt
from penstock.queue.execution.handlers import Handler, TaskContext

def stuck(task):
    print("stuck", flush=True)
    loop.call_soon_threadsafe(attempt.ask_to_stop)
    threading.Event().wait()

async def main():
    global attempt, loop
    loop = asyncio.get_running_loop()
    handler = Handler(type="t", function=stuck)
    task = TaskContext(id="x", type="t", attempt=1, raw_input=msgspec.Raw(b"1"))
    attempt = HandlerAttempt(
        handler, task, counted=1, now_ms=int, entropy=seeded_entropy(1), grace_seconds=0
    )
    print(await attempt.run())

asyncio.run(main())
"""


def test_a_stuck_thread_does_not_keep_the_process_from_ending() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("stuck\nAttemptResult(ending=AttemptCancelled(), released=")
