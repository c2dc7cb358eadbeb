"""The part of a virtual loop that makes a run fail when an error would go unseen.

Other loops log an exception that a callback raised or that nobody took from a task, and go on. In
a simulation that would hide the very thing it is for. `LoudLoop` keeps such errors and stops the
run; the loop raises the first of them, with the others as notes, when the run has stopped, or
else when it next runs or closes. Nothing is raised where asyncio reports, because it may do so
from a destructor. `VirtualLoop` is built on this class.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

from penstock.testing.virtual.errors import Unhandled
from penstock.testing.virtual.refusals import SealedLoop
from penstock.testing.virtual.steps import Step, step_name, task_name

ErrorContext = dict[str, Any]
ErrorHandler = Callable[[asyncio.AbstractEventLoop, ErrorContext], object]

_FAILURES_MAX: Final = 20

_log = logging.getLogger(__name__)


class LoudLoop(SealedLoop):
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
