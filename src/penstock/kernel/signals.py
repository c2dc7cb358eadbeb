"""How a process is asked to stop: SIGTERM and SIGINT, as long as something wants to hear them.

Before that, a signal is an exception in whatever runs just then, and Python loses exceptions in
places such as the callbacks of its imports. So the command line notes what it has heard, and what
is noted stops whatever comes to listen later.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
