"""An event loop whose time is virtual and whose order is a function of a seed.

`VirtualLoop` owns the ready steps, the timers and the virtual time. It runs one ready step after
the other; when none is left, time jumps to the next timer. So a simulated day takes as long as
its steps do, and nothing in it depends on the machine.

What holds in every run
- The same seed and the same code give the same steps at the same instants, in every process.
- Time moves only when nothing is ready, and then to the next timer. None runs early.
- What is ready at one instant, timers that are due at it included, runs in an order drawn from
  the seed. `shuffle=False` keeps the order in which it became ready.
- Every run is bounded in virtual seconds and in steps.

What asyncio itself needs of the order holds while shuffling, too: a task has one step pending at
a time, and the callbacks that a future calls when it is done run in the order in which they were
added (a `TaskGroup` must hear of a failure before the one who awaits that task). Locks,
semaphores, conditions and queues decide by what they hold and not by who runs first. What does
not hold is what production code must not count on either: that `call_soon` and `call_later(0)`
are first in, first out; that `sleep(0)` lets everyone else run once; that waiters on one event
go on in the order in which they came.

Two things are outside of this: sets of strings (their order is PYTHONHASHSEED's), and sets of
futures or coroutines (their order is that of addresses; `asyncio.as_completed` makes such a set
of the coroutines it is given, so give it tasks). Sets of tasks are in a stable order.

It is built of these parts:
- `IsolatedLoop` refuses the real world: each method of asyncio's loop that waits for a socket, a
  process, a signal or a thread raises `NotSimulated`, with a sentence that says what was asked for.
  A function for an executor runs at once, where it is submitted.
- `FailingLoop` keeps the exceptions that other loops log and pass over: of callbacks, and of
  tasks
  that nobody looked at. The run stops; the first is raised, with the others as notes, when it has
  stopped, or when the loop next runs or closes. Nothing is raised where asyncio reports, because
  that may be a destructor.
- `Generators` closes asynchronous generators: a dropped one in a task of its own, one that is
  still
  held when the loop shuts down, in an order that no address decides.
- Garbage is collected at fixed steps. A collection ends tasks and generators that were dropped,
  and
  so adds steps; Python's own collections, which depend on all allocations of the process, are off
  while a simulation runs, and on again when it is done, also after an error.

Called by `penstock.testing.virtual.simulate`, and by anyone as
`asyncio.Runner(loop_factory=VirtualLoop)`. It holds nothing outside memory: a crash leaves
nothing.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import math
import sys
import threading
from asyncio import _get_running_loop, _set_running_loop
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from contextvars import Context, copy_context
from typing import Any, Final, NoReturn, TypeVar, TypeVarTuple, cast
from weakref import WeakValueDictionary

from penstock.kernel.entropy import seeded_entropy
from penstock.kernel.errors import InvalidInput
from penstock.testing.virtual.steps import (
    Deadlock,
    Exhausted,
    NotSimulated,
    Step,
    Timers,
    Unhandled,
    VirtualTask,
    step_name,
    task_name,
    tasks_of,
    waiting,
)

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


def refuse(what: str) -> NoReturn:
    """Raise the error for something that virtual time cannot have."""
    raise NotSimulated(
        f"A simulation in virtual time has no {what}.",
        hint="Hand the simulated code an in-memory stand-in, or test this part on a real loop.",
    )


def _refusal(what: str) -> Any:
    def refused(_loop: asyncio.AbstractEventLoop, *_args: object, **_kwargs: object) -> NoReturn:
        refuse(what)

    return refused


class IsolatedLoop(asyncio.AbstractEventLoop):
    """A loop without a world around it."""

    # The type is Any because the methods' signatures do not matter: none of them ever returns.
    getaddrinfo: Any = _refusal("name resolution (getaddrinfo)")
    getnameinfo: Any = _refusal("name resolution (getnameinfo)")
    create_connection: Any = _refusal("sockets (create_connection)")
    create_server: Any = _refusal("sockets (create_server)")
    create_unix_connection: Any = _refusal("sockets (create_unix_connection)")
    create_unix_server: Any = _refusal("sockets (create_unix_server)")
    create_datagram_endpoint: Any = _refusal("sockets (create_datagram_endpoint)")
    connect_accepted_socket: Any = _refusal("sockets (connect_accepted_socket)")
    start_tls: Any = _refusal("sockets (start_tls)")
    sendfile: Any = _refusal("sockets (sendfile)")
    sock_recv: Any = _refusal("sockets (sock_recv)")
    sock_recv_into: Any = _refusal("sockets (sock_recv_into)")
    sock_recvfrom: Any = _refusal("sockets (sock_recvfrom)")
    sock_recvfrom_into: Any = _refusal("sockets (sock_recvfrom_into)")
    sock_sendall: Any = _refusal("sockets (sock_sendall)")
    sock_sendto: Any = _refusal("sockets (sock_sendto)")
    sock_sendfile: Any = _refusal("sockets (sock_sendfile)")
    sock_connect: Any = _refusal("sockets (sock_connect)")
    sock_accept: Any = _refusal("sockets (sock_accept)")
    add_reader: Any = _refusal("file descriptors to watch (add_reader)")
    remove_reader: Any = _refusal("file descriptors to watch (remove_reader)")
    add_writer: Any = _refusal("file descriptors to watch (add_writer)")
    remove_writer: Any = _refusal("file descriptors to watch (remove_writer)")
    connect_read_pipe: Any = _refusal("pipes (connect_read_pipe)")
    connect_write_pipe: Any = _refusal("pipes (connect_write_pipe)")
    subprocess_shell: Any = _refusal("processes (subprocess_shell)")
    subprocess_exec: Any = _refusal("processes (subprocess_exec)")
    add_signal_handler: Any = _refusal("signals (add_signal_handler)")
    remove_signal_handler: Any = _refusal("signals (remove_signal_handler)")

    _debug = False

    def run_in_executor(
        self,
        executor: Executor | None,  # noqa: ARG002 - the signature is asyncio's
        func: Callable[[*Arguments], Result],
        *args: *Arguments,
    ) -> asyncio.Future[Result]:
        """Run the function at once; its result arrives in a later step."""
        future: asyncio.Future[Result] = self.create_future()
        running = _get_running_loop()
        # As in a thread: there is no running loop, and no context variable is set.
        _set_running_loop(None)
        try:
            result = Context().run(func, *args)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # noqa: BLE001 - it is raised where the future is awaited
            self.call_soon(_settle, future, future.set_exception, error)
        else:
            self.call_soon(_settle, future, future.set_result, result)
        finally:
            _set_running_loop(running)
        return future

    def set_default_executor(self, executor: Executor) -> None:
        """Accept any executor; functions run inline all the same."""

    async def shutdown_default_executor(
        self,
        timeout: float | None = None,  # noqa: ASYNC109 - the signature is asyncio's
    ) -> None:
        """Do nothing: there is no executor."""

    def set_task_factory(self, factory: object) -> None:
        if factory is not None:
            refuse("task factory but its own (set_task_factory)")

    def get_task_factory(self) -> None:
        return None

    def get_debug(self) -> bool:
        return self._debug

    def set_debug(self, enabled: bool) -> None:  # noqa: FBT001 - the signature is asyncio's
        self._debug = enabled


def _settle(future: asyncio.Future[Any], settle: Callable[[Any], None], outcome: object) -> None:
    if not future.done():
        settle(outcome)


ErrorContext = dict[str, Any]
ErrorHandler = Callable[[asyncio.AbstractEventLoop, ErrorContext], object]

_FAILURES_MAX: Final = 20

_log = logging.getLogger(__name__)


class FailingLoop(IsolatedLoop):
    """A loop that knows whether it runs, and what went wrong unseen."""

    def __init__(self) -> None:
        self._running = False
        self._stopping = False
        self._closed = False
        self._failures: list[Unhandled] = []
        self._exception_handler: ErrorHandler | None = None

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return self._closed

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("The event loop is closed.")

    def set_exception_handler(self, handler: ErrorHandler | None) -> None:
        """Have errors that nobody catches handed to this, instead of failing the run."""
        self._exception_handler = handler

    def get_exception_handler(self) -> ErrorHandler | None:
        return self._exception_handler

    def call_exception_handler(self, context: ErrorContext) -> None:
        if self._exception_handler is None:
            self.default_exception_handler(context)
            return
        try:
            self._exception_handler(self, context)
        except Exception as error:  # noqa: BLE001 - nothing can be raised from a destructor
            self.default_exception_handler(
                {"message": "The exception handler raised", "exception": error}
            )

    def default_exception_handler(self, context: ErrorContext) -> None:
        """Make the run fail."""
        failure = unhandled(context)
        if self._closed:
            _log.error("after the end of a simulation: %s", failure, exc_info=failure.__cause__)
        elif len(self._failures) < _FAILURES_MAX:
            self._failures.append(failure)
            self._stopping = self._running

    def take_failures(self) -> list[Unhandled]:
        """What went unhandled and has not been raised yet; it will not be raised any more."""
        failures, self._failures = self._failures, []
        return failures

    def _raise_failure(self) -> None:
        if self._failures:
            first, *others = self.take_failures()
            for other in others:
                first.add_note(f"Unhandled as well: {other}")
            raise first


def unhandled(context: dict[str, Any]) -> Unhandled:
    """The error for what asyncio tells an exception handler."""
    message = str(context.get("message") or "An error was not handled").rstrip(".!")
    subject = context.get("task") or context.get("future") or context.get("handle")
    if isinstance(subject, asyncio.Task):
        message += f" ({task_name(subject)})"
    elif isinstance(subject, Step):
        message += f" ({step_name(subject)})"
    error = context.get("exception")
    if not isinstance(error, BaseException):
        return Unhandled(f"{message}.")
    failure = Unhandled(f"{message}: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


class Generators:
    """The generators that were started on a loop and are neither finished nor gone."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._started: WeakValueDictionary[int, AsyncGenerator[Any, Any]] = WeakValueDictionary()
        self._count = 0
        self.closing: set[asyncio.Task[Any]] = set()
        """The tasks that close dropped generators. To cancel them would leave those open."""

    def note_start(self, generator: AsyncGenerator[Any, Any]) -> None:
        self._count += 1
        self._started[self._count] = generator

    def note_drop(self, generator: AsyncGenerator[Any, Any]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon(self._close, generator)

    def _close(self, generator: AsyncGenerator[Any, Any]) -> None:
        task = self._loop.create_task(generator.aclose())
        self.closing.add(task)
        task.add_done_callback(self.closing.discard)

    async def close_all(self) -> None:
        """Close those that are still held; what fails is told to the loop."""
        generators = list(self._started.values())
        self._started.clear()
        if not generators:
            return
        closing = [generator.aclose() for generator in generators]
        results = await asyncio.gather(*closing, return_exceptions=True)
        for generator, result in zip(generators, results, strict=True):
            if isinstance(result, Exception):
                message = "An asynchronous generator failed while it was closed"
                self._loop.call_exception_handler(
                    {"message": message, "exception": result, "asyncgen": generator}
                )


COLLECT_EVERY_STEPS: Final = 10_000
COLLECT_ALL_EVERY_STEPS: Final = 100 * COLLECT_EVERY_STEPS


@contextmanager
def collections_off() -> Iterator[None]:
    """Keep Python from collecting by itself; may be nested."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def collect(*, everything: bool) -> None:
    """Collect what was made since the last time, or what is older as well, which takes longer."""
    gc.collect(2 if everything else 0)


Trace = Callable[[str], object]
_Awaitable = Generator[Any, None, Result] | Awaitable[Result]
_Coroutine = Generator[Any, None, Result] | Coroutine[Any, Any, Result]

SECONDS_MAX: Final = 7 * 86_400.0
STEPS_MAX: Final = 10_000_000


class VirtualLoop(FailingLoop):
    """A deterministic event loop in virtual time.

    `trace` is called with one line a step: the virtual time, and what runs. The bounds can be
    moved at any time; `seconds_max` is the last instant that the time may reach.
    """

    def __init__(
        self,
        *,
        seed: int | str = 0,
        shuffle: bool = True,
        trace: Trace | None = None,
        seconds_max: float = SECONDS_MAX,
        steps_max: int = STEPS_MAX,
    ) -> None:
        super().__init__()
        self._random = seeded_entropy(f"order of steps {seed}").random
        self._shuffle = shuffle
        self._trace = trace
        self._now = 0.0
        self._steps = 0
        self._ready: deque[Step] = deque()
        self._timers = Timers()
        self._tasks_made = 0
        self.generators = Generators(self)
        self._thread = threading.get_ident()
        self._awaited: asyncio.Future[Any] | None = None
        self._stop_step: Step | None = None
        # Whose callback was made ready last, during which step, and that callback.
        self._burst_of: object = None
        self._burst_in = 0
        self._burst_tail: Step | None = None
        self._collect_at = COLLECT_EVERY_STEPS
        self.seconds_max = seconds_max
        self.steps_max = steps_max

    # Time and bounds

    def time(self) -> float:
        return self._now

    @property
    def steps(self) -> int:
        """How many steps have run."""
        return self._steps

    @property
    def is_idle(self) -> bool:
        """Whether nothing is ready at this instant."""
        return not self._ready

    @property
    def seconds_max(self) -> float:
        """The last instant that the virtual time may reach."""
        return self._seconds_max

    @seconds_max.setter
    def seconds_max(self, seconds: float) -> None:
        if not (math.isfinite(seconds) and seconds >= 0):
            raise InvalidInput(f"A simulation needs a finite bound of seconds, not {seconds!r}.")
        self._seconds_max = seconds

    @property
    def steps_max(self) -> int:
        """How many steps may run."""
        return self._steps_max

    @steps_max.setter
    def steps_max(self, steps: int) -> None:
        if steps < 0:
            raise InvalidInput(f"A simulation cannot be bound to {steps} steps.")
        self._steps_max = steps
        self._pause_at = min(steps, self._collect_at)

    # Running

    def run_forever(self) -> None:
        self._check_open()
        if self._running:
            raise RuntimeError("This event loop is already running.")
        if _get_running_loop() is not None:
            raise RuntimeError("A simulation cannot run inside a running event loop.")
        self._raise_failure()
        hooks = sys.get_asyncgen_hooks()
        self._thread = threading.get_ident()
        self._running = True
        sys.set_asyncgen_hooks(self.generators.note_start, self.generators.note_drop)
        _set_running_loop(self)
        try:
            with collections_off():
                self._run()
        finally:
            _set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)
            self._running = self._stopping = False
            self._burst_of = self._burst_tail = None
            if self._stop_step is not None:
                self._stop_step.cancel()
                self._stop_step = None
        self._raise_failure()

    def _run(self) -> None:
        """Run steps until told to stop. Everything slow is kept out of here."""
        ready = self._ready
        random, shuffle, trace = self._random, self._shuffle, self._trace
        while not self._stopping:
            if self._steps >= self._pause_at:
                self._pause()
                continue
            if not ready:
                self._advance()
            if shuffle and len(ready) > 1:
                place = int(random() * len(ready))
                ready[0], ready[place] = ready[place], ready[0]
            step = ready.popleft()
            if step.follower is not None:
                ready.append(step.follower)
            if step.is_cancelled:
                continue
            self._steps += 1
            if trace is not None:
                trace(f"{self._now:.9f} {step_name(step)}")
            try:
                step.context.run(step.callback, *step.args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:  # noqa: BLE001 - a loop reports whatever a callback raises
                self.call_exception_handler(
                    {"message": "A callback raised", "exception": error, "handle": step}
                )
            del step  # A task that it held has to be gone before anything else happens.

    def _pause(self) -> None:
        """What is done between steps from time to time: check the bound, collect garbage."""
        if self._steps >= self._steps_max:
            raise Exhausted(
                f"The simulation has run {self._steps:,} steps, which is its bound, and is at "
                f"virtual second {self._now:.6f}. Not done yet:\n{waiting(tasks_of(self))}",
                hint="Raise steps_max, or look for a loop that never sleeps.",
            )
        collect(everything=self._collect_at % COLLECT_ALL_EVERY_STEPS == 0)
        self._collect_at += COLLECT_EVERY_STEPS
        self._pause_at = min(self._steps_max, self._collect_at)

    def _advance(self) -> None:
        """Jump to the instant of the next timer and make ready what is due at it."""
        self._burst_of = self._burst_tail = None
        instant = self._timers.next_instant()
        if instant is None:
            self._starve()
            return
        if instant > self._seconds_max:
            raise Exhausted(
                f"The next timer is due at virtual second {instant:.6f}, after the bound of "
                f"{self._seconds_max:.6f}. Not done yet:\n{waiting(tasks_of(self))}",
                hint="Raise seconds_max, or look for what waits for something that never comes.",
            )
        self._now = instant
        self._ready.extend(self._timers.take(instant))

    def _starve(self) -> None:
        """Fail, because nothing can run any more, unless garbage has something to say first."""
        tasks = tasks_of(self)  # Held here, so that what is deadlocked is not collected as lost.
        collect(everything=True)
        if self._ready:
            return
        self._raise_failure()
        raise Deadlock(
            f"At virtual second {self._now:.6f} nothing can run any more. Waiting for "
            f"ever:\n{waiting(tasks)}",
            hint="Something awaited here is never set, put, released or finished.",
        )

    def run_until_complete(self, future: _Awaitable[Result]) -> Result:
        self._check_open()
        given = asyncio.isfuture(future)
        awaited = cast("asyncio.Future[Result]", future) if given else self._adopt(future)
        self._awaited = awaited
        awaited.add_done_callback(self._stop_if_awaited)
        try:
            self.run_forever()
        except BaseException as failure:
            if not given and awaited.done() and not awaited.cancelled():
                # Nobody else can ask for the error of a task that was made here.
                error = awaited.exception()
                if error is not None and error is not failure:
                    failure.add_note(f"What was run failed as well: {error!r}")
            raise
        finally:
            self._awaited = None
            awaited.remove_done_callback(self._stop_if_awaited)
        if not awaited.done():
            raise RuntimeError("The event loop was stopped before the future was done.")
        return awaited.result()

    def _adopt(self, awaitable: _Awaitable[Result]) -> VirtualTask[Result]:
        if asyncio.iscoroutine(awaitable):
            return self.create_task(awaitable)
        if not inspect.isawaitable(awaitable):
            raise TypeError(f"An awaitable is needed, not {type(awaitable).__qualname__}.")

        async def wait() -> Result:
            return await awaitable

        return self.create_task(wait())

    def _stop_if_awaited(self, future: asyncio.Future[Any]) -> None:
        # A run that failed may have left this callback behind; it must not stop the next one.
        if future is self._awaited:
            self._stopping = True

    def _stop_now(self) -> None:
        self._stopping = True

    def stop(self) -> None:
        """Stop after what is ready now; while shuffling, after some of it."""
        if self._stop_step is None:
            self._stop_step = self.call_soon(self._stop_now)

    def close(self) -> None:
        """Let go of everything; raises what went wrong unseen, if it was not raised before."""
        if self._running:
            raise RuntimeError("A running event loop cannot be closed.")
        if self._closed:
            return
        self._ready.clear()
        self._timers.clear()
        collect(everything=False)
        self._closed = True
        self._raise_failure()

    # Scheduling

    def call_soon(
        self,
        callback: Callable[[*Arguments], object],
        *args: *Arguments,
        context: Context | None = None,
    ) -> Step:
        if self._closed:
            self._check_open()
        step = Step(callback, args, copy_context() if context is None else context, self._now)
        if args and self._shuffle:
            of, tail = args[0], self._burst_tail
            self._burst_tail = step
            if of is self._burst_of and self._burst_in == self._steps:
                if tail is not None and isinstance(of, asyncio.Future):
                    # A further callback of one future: it is ready when the former has run.
                    tail.follower = step
                    return step
            else:
                self._burst_of = of
                self._burst_in = self._steps
        self._ready.append(step)
        return step

    def call_soon_threadsafe(
        self,
        callback: Callable[[*Arguments], object],
        *args: *Arguments,
        context: Context | None = None,
    ) -> Step:
        if threading.get_ident() != self._thread:
            refuse("other threads (call_soon_threadsafe)")
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self,
        delay: float,
        callback: Callable[[*Arguments], object],
        *args: *Arguments,
        context: Context | None = None,
    ) -> Step:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[*Arguments], object],
        *args: *Arguments,
        context: Context | None = None,
    ) -> Step:
        if self._closed:
            self._check_open()
        step = Step(callback, args, copy_context() if context is None else context, when)
        if when > self._now:
            self._timers.add(step)
        elif when <= self._now:
            self._ready.append(step)
        else:
            raise InvalidInput(f"A timer cannot be set to {when!r}.")
        return step

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: _Coroutine[Result],
        *,
        name: str | None = None,
        context: Context | None = None,
        **_options: object,
    ) -> VirtualTask[Result]:
        """Make a task. It starts in a step of its own: a wish for an eager start is ignored."""
        self._check_open()
        self._tasks_made = number = self._tasks_made + 1
        made_from = cast("Coroutine[Any, Any, Result]", coro)
        return VirtualTask(made_from, loop=self, number=number, name=name, context=context)

    async def shutdown_asyncgens(self) -> None:
        await self.generators.close_all()
