"""A plain handler in a thread of its own, which can be interrupted as far as Python allows it."""

from __future__ import annotations

import asyncio
import ctypes
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final, Generic, TypeVar

_FRAMES_MAX: Final = 40

Outcome = TypeVar("Outcome")


class HandlerThread(Generic[Outcome]):
    """A function in a daemon thread of its own, into which one exception can be raised.

    The exception comes up between any two instructions of the thread, so it must not come up in
    what delivers the outcome. The lock decides: it is raised either before the function is over,
    and then the outcome does not matter any more, or not at all. `nothing` is the outcome of a
    function that was not called; frames of the file `hidden` are not shown.
    """

    def __init__(
        self, function: Callable[[], Outcome], *, nothing: Outcome, hidden: str = ""
    ) -> None:
        self._function = function
        self._nothing = nothing
        self._hidden = (__file__, threading.__file__, hidden)
        self._loop = asyncio.get_running_loop()
        self._arrived: asyncio.Future[Outcome] = self._loop.create_future()
        self._lock = threading.Lock()
        self._ident: int | None = None
        self._is_told = False
        self._is_over = False

    async def run(self) -> Outcome:
        """Run the function; returns when the thread is about to end, however long that takes."""
        threading.Thread(target=self._live, name="penstock-handler", daemon=True).start()
        return await self._arrived

    def tell(self, error: type[BaseException]) -> bool:
        """Have this raised inside, if nothing was before; whether the function was not over."""
        with self._lock:
            if self._ident is not None and not self._is_told:
                _raise_in(self._ident, error)
            self._is_told = True
            return not self._is_over

    def stack(self) -> str:
        """Where the thread is now."""
        frame = sys._current_frames().get(self._ident or 0)  # noqa: SLF001 - documented, if private
        frames = traceback.extract_stack(frame, limit=_FRAMES_MAX) if frame else ()
        shown = [each for each in frames if each.filename not in self._hidden]
        return "".join(traceback.format_list(shown))

    def _live(self) -> None:
        outcome = self._nothing
        try:
            with self._lock:
                self._ident = None if self._is_told else threading.get_ident()
            if self._ident is not None:
                outcome = self._function()
            self._end(outcome)
        except BaseException:  # noqa: BLE001 - only what was told, when the function was just over
            self._end(outcome)
        with suppress(RuntimeError):  # The loop is closed: nobody waits any more.
            self._loop.call_soon_threadsafe(self._arrive, outcome)

    def _end(self, outcome: Outcome) -> None:
        with self._lock:
            self._ident = None
            self._is_over = not isinstance(outcome, Awaitable)
            _raise_in(threading.get_ident(), None)

    def _arrive(self, outcome: Outcome) -> None:
        if not self._arrived.done():
            self._arrived.set_result(outcome)


def _raise_in(ident: int, error: type[BaseException] | None) -> None:
    """Have a thread raise this at its next instruction; None takes back what it has not raised."""
    thing = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), thing)
