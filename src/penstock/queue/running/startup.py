"""What a worker does before its first task: functions of the user that load a model, say.

They are called one after the other when the queue is open and before anything is claimed, or the
worker registered. `async def` ones run on the loop, plain ones in a thread. One that raises, or
takes longer than it may, ends the worker, which holds nothing then.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from penstock.kernel.errors import InvalidInput, PenstockError
from penstock.queue.running.retry import SECONDS_MAX, is_number
from penstock.queue.running.threads import HandlerThread

STARTUP_SECONDS: Final = 600.0


class StartUp:
    """What one worker has to do first."""

    def __init__(self) -> None:
        self._steps: list[tuple[Callable[[], Any], float]] = []
        self._is_inline = False

    def add(self, function: Callable[[], Any], *, seconds: float) -> None:
        """Have a function called; raises `InvalidInput` for one that cannot be."""
        if not _takes_nothing(function):
            raise InvalidInput(
                f"The start-up function {_name(function)} must take no arguments.",
                hint="Write it as def prepare(): ..., or async def prepare(): ...",
            )
        if not is_number(seconds) or not 0 < seconds <= SECONDS_MAX:
            raise InvalidInput(f"{seconds!r} is not a timeout.", hint="Give seconds above 0.")
        self._steps.append((function, float(seconds)))

    def again(self, *, inline: bool) -> StartUp:
        """The same for another worker; with `inline`, without threads."""
        other = StartUp()
        other._steps = list(self._steps)
        other._is_inline = inline
        return other

    async def run(self) -> None:
        """Do all of it. Raises `PenstockError` if one fails."""
        for function, seconds in self._steps:
            name = _name(function)
            body = asyncio.get_running_loop().create_task(self._call(function))
            try:
                await asyncio.wait((body,), timeout=seconds)
            finally:
                is_late = body.cancel()
            if is_late:
                raise PenstockError(
                    f"The start-up function {name} did not end within {seconds:g} s.",
                    hint="Give it longer: @worker.startup(timeout=...).",
                )
            error = body.exception()
            if error is not None:
                raise PenstockError(
                    f"The start-up function {name} failed: {type(error).__name__}: {error}",
                    hint="The worker has not started, and nothing was claimed.",
                ) from error

    async def _call(self, function: Callable[[], Any]) -> None:
        if self._is_inline or inspect.iscoroutinefunction(function):
            made = function()
        else:
            thread = HandlerThread(lambda: _outcome(function), nothing=_Outcome())
            outcome = await thread.run()
            if outcome.error is not None:
                raise outcome.error
            made = outcome.made
        if inspect.isawaitable(made):
            await made


@dataclass(frozen=True, slots=True)
class _Outcome:
    made: Any = None
    error: Exception | None = None


def _outcome(function: Callable[[], Any]) -> _Outcome:
    try:
        return _Outcome(made=function())
    except Exception as error:  # noqa: BLE001 - it may raise anything, and is told
        return _Outcome(error=error)
    except BaseException as error:  # noqa: BLE001 - not through the loop
        return _Outcome(error=PenstockError(repr(error)))


def _takes_nothing(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind()
    except TypeError:
        return False
    except ValueError:  # Some functions in C do not tell what they take.
        return True
    return True


def _name(function: object) -> str:
    return repr(getattr(function, "__qualname__", function))
