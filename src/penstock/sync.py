"""The queue without `async`, for scripts and notebooks.

    from penstock.sync import Queue, Worker

    with Queue("file:///tmp/bucket", name="images") as queue:
        task = queue.submit("resize", {"n": 1})
        print(task.result(timeout=60))

Nothing is written twice: `Queue` and `Worker` are mirrors of the async ones. Whatever those have,
methods, properties, what they return, is there under the same name with the same arguments; what is
awaited there is waited for here, what is used with `async with` and `async for` there is used with
`with` and `for` here. An object that has nothing to be awaited is handed out as it is.

A queue has one thread with an event loop, in which everything happens; a mirror may be used from
any number of threads, also where a loop is running, as in notebooks. (A call blocks that loop as
long as it lasts: inside of `async def` use the async ones.) `close`, the end of a `with` block, and
the end of the process stop the workers, close the connection and end the thread; so does a queue
that nobody refers to any more. A call that is interrupted, by Ctrl-C say, is cancelled in the loop.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import signal
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, nullcontext, suppress
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from penstock.kernel.errors import InvalidInput
from penstock.queue import client
from penstock.queue import worker as workers

__all__ = ["Queue", "Worker"]

_STOP_SECONDS: Final = 10.0
_OURS: Final = "penstock."

Result = TypeVar("Result")
Function = TypeVar("Function", bound=Callable[..., Any])


class _Portal:
    """A thread with an event loop, and the way into it."""

    def __init__(self) -> None:
        self._ready: concurrent.futures.Future[asyncio.AbstractEventLoop] = (
            concurrent.futures.Future()
        )
        self._stopped = asyncio.Event()
        self._is_open = True
        # A daemon: a process that is not stopped properly must still end.
        self._thread = threading.Thread(target=self._live, name="penstock.sync", daemon=True)
        self._thread.start()
        self._loop = self._ready.result()

    def _live(self) -> None:
        async def main() -> None:
            self._ready.set_result(asyncio.get_running_loop())
            await self._stopped.wait()

        asyncio.run(main())  # Cancels what is left, and waits for that.

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run this in the loop, and wait for what it comes to."""
        return self.start(coroutine, wait=True).result()

    def start(
        self, coroutine: Coroutine[Any, Any, Result], *, wait: bool = False
    ) -> concurrent.futures.Future[Result]:
        """Begin to run this in the loop; with `wait`, until it has ended."""
        try:
            self._check()
        except BaseException:
            coroutine.close()
            raise
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        if wait:
            try:
                concurrent.futures.wait([future])
            except BaseException:
                future.cancel()
                raise
        return future

    def _check(self) -> None:
        if not self._is_open:
            raise InvalidInput("The queue is closed.", hint="Open another.")
        if threading.current_thread() is self._thread:
            raise InvalidInput(
                "An async handler cannot use penstock.sync: it would wait for itself.",
                hint="Use 'await' with penstock.Queue there, or a plain 'def' handler.",
            )

    def stop(self) -> None:
        """End the loop and the thread."""
        if not self._is_open:
            return
        self._is_open = False
        self._loop.call_soon_threadsafe(self._stopped.set)
        # The garbage collector may come here from the thread itself.
        if threading.current_thread() is not self._thread:
            self._thread.join(_STOP_SECONDS)


class Mirror:
    """An async object as it looks without `async`."""

    def __init__(self, target: Any, portal: _Portal, *, owner: object = None) -> None:
        self._target = target
        self._portal = portal
        # What a queue has handed out keeps the queue open.
        self._owner = owner

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        found = getattr(self._target, name)
        return self._method(found) if callable(found) else self._shown(found)

    def __dir__(self) -> list[str]:
        names = {*super().__dir__(), *dir(self._target)}
        return sorted(name for name in names if not name.startswith("_"))

    def __repr__(self) -> str:
        return repr(self._target)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mirror) and bool(_unmirrored(other) == self._target)

    def __hash__(self) -> int:
        return hash(self._target)

    def __enter__(self) -> Any:
        entered = self._call(self._target.__aenter__)
        return self if entered is self._target else self._shown(entered)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        ended: bool | None = self._call(self._target.__aexit__, kind, error, trace)
        return ended

    def __iter__(self) -> Iterator[Any]:
        if not hasattr(type(self._target), "__aiter__"):
            yield from map(self._shown, self._target)
            return
        items = self._target.__aiter__()
        while True:
            try:
                item = self._call(items.__anext__)
            except StopAsyncIteration:
                return
            yield self._shown(item)

    def _method(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def method(*values: Any, **named: Any) -> Any:
            return self._shown(self._call(function, *values, **named))

        method.__name__ = getattr(function, "__name__", "method")
        method.__doc__ = function.__doc__
        with suppress(TypeError, ValueError):  # Some callables do not tell.
            vars(method)["__signature__"] = inspect.signature(function)
        return method

    def _call(self, function: Callable[..., Any], *values: Any, **named: Any) -> Any:
        """Call it in the loop, and wait if there is something to wait for."""

        async def call() -> Any:
            plain = [_unmirrored(value) for value in values]
            result = function(*plain, **{name: _unmirrored(each) for name, each in named.items()})
            return await result if inspect.isawaitable(result) else result

        return self._portal.run(call())

    def _shown(self, value: Any) -> Any:
        """What callers are given of a value: a mirror if there is something to await in it."""
        if isinstance(value, list | tuple) and type(value) in (list, tuple):
            return type(value)(self._shown(each) for each in value)
        if not _is_async(value):
            return value
        return Mirror(value, self._portal, owner=self if self._owner is None else self._owner)


_Run = tuple[workers.Worker, "concurrent.futures.Future[None]"]
_OPEN: weakref.WeakSet[Queue] = weakref.WeakSet()


class Queue(Mirror):
    """`penstock.Queue` without `async`: opened when it is made, until it is closed."""

    def __init__(self, url: str, *, name: str, **options: Any) -> None:
        portal = _Portal()
        try:
            opened = portal.run(client.Queue.open(url, name=name, **options))
        except BaseException:
            portal.stop()
            raise
        super().__init__(opened, portal)
        self._workers: list[Worker] = []
        self._runs: list[_Run] = []
        self._end = weakref.finalize(self, _end, opened, portal, self._runs)
        _OPEN.add(self)

    @classmethod
    def open(cls, url: str, *, name: str, **options: Any) -> Self:
        """The same as making one."""
        return cls(url, name=name, **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop its workers, close the connection, end the thread. May be called again."""
        for each in self._workers:
            each.stop()
        for each in self._workers:
            with suppress(Exception):  # What it ended with is told to who runs it.
                each.join()
        self._workers.clear()
        self._end()


class Worker(Mirror):
    """`penstock.Worker` without `async`: `run` it, or let it run beside with `with`.

    Its handlers may be plain functions, which run in threads and may use the queue, or
    `async def`, which run in the loop and may not.
    """

    def __init__(self, queue: Queue, **options: Any) -> None:
        parts = vars(queue)
        made = workers.Worker(parts["_target"], **options)
        super().__init__(made, parts["_portal"], owner=queue)
        self._siblings: list[Worker] = parts["_workers"]
        self._runs: list[_Run] = parts["_runs"]
        self._run: concurrent.futures.Future[None] | None = None

    def handler(self, type: str, **options: Any) -> Callable[[Function], Function]:
        """As of `penstock.Worker`: `@worker.handler("resize")` above a function."""
        register: Callable[[Function], Function] = self._target.handler(type, **options)
        return register

    def startup(self, **options: Any) -> Callable[[Function], Function]:
        """As of `penstock.Worker`: `@worker.startup()` above a function."""
        register: Callable[[Function], Function] = self._target.startup(**options)
        return register

    def start(self, **until: Any) -> None:
        """Begin to work beside the caller; `max_tasks`, `until_empty` as of `penstock.Worker`."""
        if self._run is not None:
            raise InvalidInput("A worker runs once; make another.")
        self._run = self._portal.start(self._target.run(signals=False, **until))
        self._siblings.append(self)
        self._runs.append((self._target, self._run))

    def stop(self) -> None:
        """Begin to stop; asked a second time, give back at once what runs. Does not wait."""
        if self._run is not None and not self._run.done():
            self._portal.start(_called(self._target.stop))

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has stopped; raises what it ended with, and `TimeoutError`."""
        if self._run is not None:
            self._run.result(timeout)

    def run(self, *, signals: bool = True, **until: Any) -> None:
        """Work until stopped: by `stop`, from another thread or a handler, or by a signal.

        Or until it is done, if `max_tasks` or `until_empty` say so.
        """
        self.start(**until)
        with _stopping_on_signals(self.stop) if signals else nullcontext():
            try:
                self.join()
            except BaseException:
                self.stop()
                raise

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        self.join()


async def _called(function: Callable[[], Any]) -> None:
    function()


@contextmanager
def _stopping_on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Have SIGTERM and SIGINT call `stop` inside the block, where a thread can have that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {}
    for number in (signal.SIGTERM, signal.SIGINT):
        before[number] = signal.signal(number, lambda *_: stop())
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(queue: client.Queue, portal: _Portal, runs: list[_Run]) -> None:
    """Close what nobody uses any more; also called when the process ends."""
    try:
        with suppress(Exception):  # The connection goes with the thread in any case.
            portal.start(_stopped(runs)).result(_STOP_SECONDS)
            concurrent.futures.wait([run for _, run in runs], _STOP_SECONDS)
            portal.start(queue.close()).result(_STOP_SECONDS)
    finally:
        portal.stop()


async def _stopped(runs: list[_Run]) -> None:
    """Have workers give back what runs, and let go of their leases."""
    for worker, run in runs:
        for _ in range(0 if run.done() else 2):
            worker.stop()


def _end_all() -> None:
    for queue in tuple(_OPEN):
        queue._end()  # noqa: SLF001 - this module is one thing


# Leases are let go of by requests, and those need threads: after `atexit` none can be started.
threading._register_atexit(_end_all)  # type: ignore[attr-defined]  # noqa: SLF001 - as futures do


def _unmirrored(value: Any) -> Any:
    if isinstance(value, Mirror):
        return vars(value)["_target"]
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(map(_unmirrored, value))
    return value


def _is_async(value: Any) -> bool:
    """Whether there is something to be awaited in an object of ours, or around it."""
    kind = type(value)
    if any(hasattr(kind, name) for name in ("__aenter__", "__anext__", "__aiter__")):
        return True
    if not kind.__module__.startswith(_OURS) or isinstance(value, type):
        return False
    return any(
        inspect.iscoroutinefunction(getattr(kind, name, None))
        for name in dir(kind)
        if not name.startswith("_")
    )
