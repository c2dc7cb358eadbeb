"""A loop of the dispatcher: runs one function again and again until it is stopped.

A `Loop` runs its function, and again after a pause: `idle_seconds` if there was nothing to do,
none if there was, or until the time that the function returns. `kick` ends the pause at once.
An error never ends a loop: it is logged once, and the pauses grow up to a bound until the
function succeeds. Every dispatcher runs every loop; what may be done once is decided in the
database, never here.

The wiring starts and stops loops with the dispatcher. `stop` lets the function finish within a
bound and then interrupts it; an interrupted transaction is rolled back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.entropy import Entropy, system_entropy
from penstock.kernel.errors import PenstockError
from penstock.kernel.service import Service

_log = logging.getLogger(__name__)

_FAILED_SECONDS_MAX: Final = 15.0
_STOP_SECONDS_MAX: Final = 10.0

Turn = Callable[[], Awaitable[float | None]]
"""One turn of a loop. It returns the seconds until the next one; 0 for at once, None for the idle
pause of the loop."""


class Loop(Service):
    """Runs a turn again and again."""

    def __init__(
        self,
        name: str,
        turn: Turn,
        *,
        idle_seconds: float,
        clock: Clock | None = None,
        entropy: Entropy | None = None,
    ) -> None:
        self.name = name
        self._turn = turn
        self._idle_seconds = idle_seconds
        self._clock = clock or SystemClock()
        self._entropy = entropy or system_entropy()
        self._kicked = asyncio.Event()
        self._stopping = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None
        self._failures = 0

    @property
    def is_failing(self) -> bool:
        """Whether the last turn has failed."""
        return self._failures > 0

    def kick(self) -> None:
        """Have the next turn begin at once."""
        self._kicked.set()

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._runner = loop.create_task(self._run(), name=f"loop {self.name}")

    async def stop(self) -> None:
        if self._runner is None:
            return
        self._stopping.set()
        self.kick()
        done, _ = await asyncio.wait({self._runner}, timeout=_STOP_SECONDS_MAX)
        if not done:
            self._runner.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._runner
        self._runner = None

    async def _run(self) -> None:
        while not self._stopping.is_set():
            self._kicked.clear()
            pause_seconds = await self._one_turn()
            if pause_seconds <= 0:
                # Let others run, also if there is always something to do.
                await self._clock.sleep(0)
                continue
            # A kick must not make a failing loop spin.
            waited_for = self._stopping if self._failures else self._kicked
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_seconds):
                    await waited_for.wait()

    async def _one_turn(self) -> float:
        try:
            said = await self._turn()
        except Exception as error:  # noqa: BLE001 - a loop goes on, whatever its function raises
            return self._after_failure(error)
        if self._failures:
            _log.info("%s recovered", self.name)
            self._failures = 0
        return self._jittered(self._idle_seconds) if said is None else said

    def _after_failure(self, error: Exception) -> float:
        if not self._failures:
            # Not our own kind of error is a mistake of ours: its traceback is worth having.
            is_ours = isinstance(error, PenstockError)
            _log.warning("%s failed: %s", self.name, error, exc_info=None if is_ours else error)
        self._failures = min(self._failures + 1, 10)
        return self._jittered(min(_FAILED_SECONDS_MAX, 0.25 * 2**self._failures))

    def _jittered(self, seconds: float) -> float:
        return seconds * self._entropy.uniform(0.8, 1.2)
