"""How a process is asked to stop: SIGTERM and SIGINT, as long as something wants to hear them."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def stopped_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Have SIGTERM and SIGINT call `stop` inside the block, each time that they come."""
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
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
