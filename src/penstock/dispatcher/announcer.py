"""Announces work that this dispatcher has committed, to those who wait for it by long poll.

A transaction that makes work which may begin at once says which operators it is of
(`database.pool.Connection.woken`); when it is committed, the `Announcer` tells

- the loops of this dispatcher whose own operators these are,
- the requests that wait here, at once,
- the other dispatchers, by a notification of Postgres of which there is one every
  `PACE_SECONDS` at the most, for all that was committed meanwhile.

What the end of attempts makes is kept for a moment, `CLAIMED_SECONDS` at the most: the worker that
has reported the end claims it with the same call (`take`), and only what is left is told.

So no row is written, taken and deleted for a wake-up, and no transaction of work notifies: that
would have them commit one after the other. What is due later, such as a retry, still has a row
of the outbox, which the relay carries out at its time; so has everything where a bucket, SQS or
Lambda has to be told.

States: a channel is kept until it is taken or told; one that was told is pending until a
notification of it was sent, and one that fails is sent again, with growing pauses. A crash between
the commit and the announcement loses a hint and no task: a dispatcher that starts, and each of them
every twenty seconds, looks for what can be claimed (`wakeups.notifications`). Made by the wiring;
called from the event loop, by the pool after each commit and by the endpoint of ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from typing import Final

from penstock.dispatcher.dag.model import Priority
from penstock.dispatcher.wakeups.base import WakeUpChannel
from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.errors import DatabaseUnavailable
from penstock.kernel.service import Service

_log = logging.getLogger(__name__)

PACE_SECONDS: Final = 0.02
CLAIMED_SECONDS: Final = 0.05
"""How long work is kept from others for whoever claims it with the call that has made it."""
_PAUSE_SECONDS_MAX: Final = 10.0


class Announcer(Service):
    """One dispatcher's announcements."""

    def __init__(
        self,
        *,
        here: Callable[[Collection[WakeUpChannel]], None],
        elsewhere: Callable[[Collection[WakeUpChannel]], Awaitable[None]],
        own: Mapping[str, Callable[[], None]] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`here` answers who waits at this dispatcher, `elsewhere` notifies the others, and `own`
        are the operators that dispatchers run themselves."""
        self._here = here
        self._elsewhere = elsewhere
        self._own = dict(own or {})
        self._clock = clock or SystemClock()
        self._kept: set[WakeUpChannel] = set()
        self._keeping: asyncio.TimerHandle | None = None
        self._pending: set[WakeUpChannel] = set()
        self._news = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._runner = asyncio.get_running_loop().create_task(self._run(), name="announcer")

    async def stop(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.cancel()
            with suppress(asyncio.CancelledError):
                await runner

    def announce(self, woken: Collection[tuple[str, str]], *, is_kept: bool = False) -> None:
        """Operators and priorities of which there is work, by a commit of this dispatcher."""
        channels = []
        for operator, priority in woken:
            if kick := self._own.get(operator):
                kick()
            else:
                channels.append(WakeUpChannel(operator, Priority(priority)))
        if not is_kept:
            self._tell(channels)
            return
        self._kept.update(channels)
        if self._kept and self._keeping is None:
            loop = asyncio.get_running_loop()
            self._keeping = loop.call_later(CLAIMED_SECONDS, self.take, ())

    def take(self, operators: Collection[str]) -> Collection[WakeUpChannel]:
        """What was kept of one of these operators, for the caller to claim; the rest is told."""
        if self._keeping is not None:
            self._keeping.cancel()
            self._keeping = None
        kept, self._kept = self._kept, set()
        first = min((each for each in kept if each.operator in operators), default=None)
        taken = {each for each in kept if first is not None and each.operator == first.operator}
        self._tell(kept - taken)
        return taken

    def give_back(self, taken: Collection[WakeUpChannel]) -> None:
        """Tell others what was taken and could not be claimed."""
        self._tell(taken)

    def _tell(self, channels: Collection[WakeUpChannel]) -> None:
        if channels:
            self._here(channels)
            self._pending.update(channels)
            self._news.set()

    async def _run(self) -> None:
        failures = 0
        while True:
            await self._news.wait()
            self._news.clear()
            channels, self._pending = self._pending, set()
            try:
                await self._elsewhere(channels)
            except DatabaseUnavailable as error:
                if not failures:
                    _log.warning("failed to notify other dispatchers of work; retrying: %s", error)
                failures += 1
                self._pending |= channels
                self._news.set()
                await self._clock.sleep(min(0.25 * 2.0 ** min(failures, 10), _PAUSE_SECONDS_MAX))
            else:
                failures = 0
                await self._clock.sleep(PACE_SECONDS)
