"""Announces work that this dispatcher has committed, to those who wait for it by long poll.

A transaction that makes work which may begin at once says of which operators it is, and how
much (`database.pool.Connection.woken`); when it is committed, the `Announcer` wakes

- the loops of this dispatcher whose own operators these are,
- as many of the requests that wait here as there are tasks, at once,
- the other dispatchers, for what is left, by a notification of Postgres of which there is one every
  `PACE_SECONDS` at the most, for all that was committed meanwhile.

What the end of attempts makes is kept for a moment, `CLAIMED_SECONDS` at the most: the worker that
has reported the end claims it with the same call (`take`), and only what is left is told.

So no row is written, taken and deleted for a wake-up, and no transaction of work notifies: that
would have them commit one after the other. What is due later, such as a retry, still has a row
of the outbox, which the relay carries out at its time; so has everything where a bucket, SQS or
Lambda has to be told.

States: a channel is kept until it is taken or told; one that was told is pending until a
notification of it was sent, and one that fails, for whatever reason, is sent again, with growing
pauses. A crash between
the commit and the announcement loses a hint and no task: a dispatcher that starts, and each of them
every twenty seconds, looks for what can be claimed (`wakeups.notifications`). Made by the wiring;
called from the event loop, by the pool after each commit and by the endpoint of ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from typing import Final

from penstock.dispatcher.dag.model import Priority
from penstock.dispatcher.wakeups.base import TaskCounts, WakeUpChannel
from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.errors import PenstockError
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
        here: Callable[[TaskCounts], TaskCounts],
        elsewhere: Callable[[TaskCounts], Awaitable[None]],
        own: Mapping[str, Callable[[], None]] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`here` answers requests that wait at this dispatcher and returns how many, `elsewhere`
        notifies the others, and `own` are the operators that dispatchers run themselves."""
        self._here = here
        self._elsewhere = elsewhere
        self._own = dict(own or {})
        self._clock = clock or SystemClock()
        self._kept: Counter[WakeUpChannel] = Counter()
        self._keeping: asyncio.TimerHandle | None = None
        self._pending: Counter[WakeUpChannel] = Counter()
        self._has_pending = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._runner = asyncio.get_running_loop().create_task(self._run(), name="announcer")

    async def stop(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.cancel()
            with suppress(asyncio.CancelledError):
                await runner

    def announce(self, woken: Mapping[tuple[str, str], int], *, is_kept: bool = False) -> None:
        """How many tasks a commit of this dispatcher has made, by operator and priority."""
        tasks_of: dict[WakeUpChannel, int] = {}
        for (operator, priority), tasks in woken.items():
            if kick := self._own.get(operator):
                kick()
            else:
                tasks_of[WakeUpChannel(operator, Priority(priority))] = tasks
        if not is_kept:
            self._send(tasks_of)
            return
        self._kept.update(tasks_of)
        if self._kept and self._keeping is None:
            loop = asyncio.get_running_loop()
            self._keeping = loop.call_later(CLAIMED_SECONDS, self.take, ())

    def take(self, operators: Collection[str]) -> TaskCounts:
        """What was kept of one of these operators, for the caller to claim; the rest is sent."""
        if self._keeping is not None:
            self._keeping.cancel()
            self._keeping = None
        kept, self._kept = self._kept, Counter()
        first = min((each for each in kept if each.operator in operators), default=None)
        operator = None if first is None else first.operator
        self._send({each: tasks for each, tasks in kept.items() if each.operator != operator})
        return {each: tasks for each, tasks in kept.items() if each.operator == operator}

    def give_back(self, taken: TaskCounts) -> None:
        """Announce to others what was taken and not claimed."""
        self._send(taken)

    def _send(self, tasks_of: TaskCounts) -> None:
        if tasks_of:
            woken = self._here(tasks_of)
            # Those who were woken here may be gone.
            for channel, tasks in tasks_of.items():
                self._pending[channel] += max(1, tasks - woken[channel])
            self._has_pending.set()

    async def _run(self) -> None:
        failures = 0
        while True:
            await self._has_pending.wait()
            self._has_pending.clear()
            tasks_of, self._pending = self._pending, Counter()
            try:
                await self._elsewhere(tasks_of)
            except Exception as error:  # noqa: BLE001 - announcing goes on, whatever it was
                if not failures:
                    _log.warning(
                        "failed to notify other dispatchers of work; retrying: %s",
                        error,
                        # Not our own kind of error is a mistake of ours, as in `loop.Loop`.
                        exc_info=None if isinstance(error, PenstockError) else error,
                    )
                failures += 1
                self._pending.update(tasks_of)
                self._has_pending.set()
                await self._clock.sleep(min(0.25 * 2.0 ** min(failures, 10), _PAUSE_SECONDS_MAX))
            else:
                if failures:
                    _log.info("notifying other dispatchers of work recovered")
                failures = 0
                await self._clock.sleep(PACE_SECONDS)
