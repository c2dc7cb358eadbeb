"""Long-lived things: what is started is stopped, in the reverse order, whatever happens.

A `Service` is started and stopped once, mostly as `async with service:`. `start` returns when
the service is of use; `stop` returns within a bound when it is gone, and may be called after a
`start` that failed halfway.

How a process is asked to stop: SIGTERM and SIGINT, as long as something wants to hear them.

Before that, a signal is an exception in whatever runs just then, and Python loses exceptions in
places such as the callbacks of its imports. So the command line notes what it has heard, and what
is noted stops whatever comes to listen later.
"""

from __future__ import annotations

import asyncio
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AsyncExitStack, contextmanager
from types import TracebackType
from typing import Self


class Service(ABC):
    """Something that runs beside the caller until it is stopped."""

    @abstractmethod
    async def start(self) -> None:
        """Begin, and return when the service is of use."""

    @abstractmethod
    async def stop(self) -> None:
        """End, within a bound. Harmless if nothing runs."""

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException as error:
            await self._stop_after(error)
            raise
        return self

    async def _stop_after(self, error: BaseException) -> None:
        """Stop what has been started; why the start failed is what the caller has to learn."""
        try:
            await self.stop()
        except Exception as failure:  # noqa: BLE001 - told by the error that is raised
            error.add_note(f"Stopping it failed as well: {failure!r}")

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()


class Services(Service):
    """Several services as one: started in order, stopped in the reverse."""

    def __init__(self, services: Iterable[Service]) -> None:
        self._services = tuple(services)
        self._started: AsyncExitStack | None = None

    async def start(self) -> None:
        self._started = AsyncExitStack()
        for service in self._services:
            await self._started.enter_async_context(service)

    async def stop(self) -> None:
        if self._started is not None:
            started, self._started = self._started, None
            await started.aclose()


_noted: list[int] = []


def note(number: int) -> None:
    """Remember a signal that came while nothing listened."""
    _noted.append(number)


def forget() -> None:
    """Whatever was noted has been dealt with."""
    _noted.clear()


@contextmanager
def stopped_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Have SIGTERM and SIGINT call `stop` inside the block, each time that they come.

    One that was noted before calls it at once.
    """
    loop = asyncio.get_running_loop()
    before = {}
    for number in (signal.SIGTERM, signal.SIGINT):
        try:
            before[number] = signal.getsignal(number)
            loop.add_signal_handler(number, stop)
        except (ValueError, RuntimeError, NotImplementedError):
            # Not the main thread: whoever runs us there stops us.
            before.pop(number, None)
    try:
        if _noted:
            forget()
            stop()
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
