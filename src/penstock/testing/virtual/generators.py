"""The asynchronous generators of a virtual loop, and how they are closed.

Python tells a loop when a generator is first iterated, and when one that was not finished is
dropped. A dropped one is closed by a task of its own; one that is still held is closed when the
loop shuts down. Both happen in an order that no address decides. `VirtualLoop` has one of these.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any
from weakref import WeakValueDictionary


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
