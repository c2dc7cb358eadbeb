"""Notifications of Postgres: how a dispatcher tells the others that an operator has work.

One connection of each dispatcher listens, directly at the server (the setting `postgres_direct`);
notifications are sent by the pool, in transactions of their own and never in those of work, since
Postgres commits transactions that notify one after the other. What is published within
`PACE_SECONDS` goes together, so there are at most fifty such transactions a second, of however many
operators. A dispatcher pays no heed to its own.

| the connection | what is done |
|---|---|
| is there | what others send reaches `heard`. Once every `ECHO_SECONDS` it must hear itself, and |
| | what can be claimed is looked for: what was lost on the way reaches who waits, or will |
| was lost, and is there again | what was missed is looked for once, in one statement |
| hears nothing, not even itself | a pooler is in between: this is logged, and what can be |
| | claimed is looked for once a second, by one statement for all who wait |
| cannot be had | tried again, with growing pauses; with each, what can be claimed is looked |
| | for if anybody waits, by the pool |

A crash leaves nothing. Started and stopped by the wiring.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final

import msgspec
import psycopg

from penstock.dispatcher.dag.model import Priority
from penstock.dispatcher.database.pool import Database, query, watching
from penstock.dispatcher.wakeups.base import TASKS_COUNTED_MAX, TaskCounts, WakeUpChannel
from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.entropy import Entropy, new_id, system_entropy
from penstock.kernel.errors import DatabaseUnavailable, PenstockError
from penstock.kernel.service import Service

_log = logging.getLogger(__name__)

ECHO_SECONDS: Final = 20.0
LOOK_SECONDS: Final = 1.0
PACE_SECONDS: Final = 0.02
_POLLS_MAX: Final = 60
_LOOK_SECONDS_MAX: Final = 5.0
_CONNECT_SECONDS: Final = 10
_PAUSE_SECONDS_MAX: Final = 10.0
"""With the time to connect and to look: between two looks is less than half a minute."""
_PAYLOAD_BYTES_MAX: Final = 7_500
"""Postgres has room for 8,000."""

Heard = Callable[[TaskCounts], object]


class _Note(msgspec.Struct, array_like=True):
    by: str
    channels: list[tuple[str, Priority]] = []
    tasks: list[int] = []
    """How many each of the channels has; earlier releases do not say it, and pass over it."""


class _Silent(Exception):
    """What was sent to oneself did not arrive."""


class Notifications(Service):
    """One dispatcher's notifications."""

    def __init__(
        self,
        dsn: str,
        database: Database,
        *,
        heard: Heard,
        has_waiters: Callable[[], bool],
        clock: Clock | None = None,
        entropy: Entropy | None = None,
        echo_seconds: float = ECHO_SECONDS,
    ) -> None:
        self._dsn = dsn
        self._database = database
        self._heard = heard
        self._has_waiters = has_waiters
        self._clock = clock or SystemClock()
        self._entropy = entropy or system_entropy()
        self._echo_seconds = echo_seconds
        self._name = new_id(self._entropy, characters=12)
        self._runner: asyncio.Task[None] | None = None
        self._unsent: dict[WakeUpChannel, int] = {}
        self._sending: asyncio.Task[None] | None = None
        """Sends what is unsent; None while that is nothing, or was taken already."""
        self._not_before = -math.inf
        self.is_listening = False
        """Whether what others send arrives."""

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._runner = loop.create_task(self._run(), name="notifications of Postgres")

    async def stop(self) -> None:
        tasks = [each for each in (self._runner, self._sending) if each is not None]
        self._runner = self._sending = None
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def publish(self, tasks_of: TaskCounts) -> None:
        """Tell all dispatchers. Raises `DatabaseUnavailable`."""
        for channel, tasks in tasks_of.items():
            self._unsent[channel] = max(tasks, self._unsent.get(channel, 0))
        if self._sending is None:
            loop = asyncio.get_running_loop()
            self._sending = loop.create_task(self._send(), name="notify dispatchers")
        # Whoever leaves does not take along what others wait for.
        await asyncio.shield(self._sending)

    async def _send(self) -> None:
        """Send all that is unsent when it is time."""
        early_seconds = self._not_before - self._clock.monotonic()
        if early_seconds > 0:
            await self._clock.sleep(early_seconds)
        self._not_before = self._clock.monotonic() + PACE_SECONDS
        tasks_of, self._unsent, self._sending = self._unsent, {}, None
        payloads = [msgspec.json.encode(note).decode() for note in self._notes(tasks_of)]
        await self._database.fetch("notify_wakeups", {"payloads": payloads})

    def _notes(self, tasks_of: TaskCounts) -> Iterator[_Note]:
        note = _Note(self._name)
        size = 0
        for channel, tasks in tasks_of.items():
            entry = (channel.operator, channel.priority)
            entry_bytes = len(msgspec.json.encode((entry, tasks)))
            if size + entry_bytes > _PAYLOAD_BYTES_MAX:
                yield note
                note, size = _Note(self._name), 0
            note.channels.append(entry)
            note.tasks.append(tasks)
            size += entry_bytes
        yield note

    async def _run(self) -> None:
        failures = 0
        while True:
            began = self._clock.monotonic()
            try:
                await self._listen()
            except _Silent:
                await self._poll_instead()
                failures = 0
                continue
            except Exception as error:  # noqa: BLE001 - listening goes on, whatever it was
                if self._clock.monotonic() - began > _PAUSE_SECONDS_MAX:
                    failures = 0
                failures += 1
                if failures == 1:
                    is_expected = isinstance(error, psycopg.Error | PenstockError | OSError)
                    _log.warning(
                        "failed to listen for Postgres notifications; retrying: %s",
                        error,
                        exc_info=None if is_expected else error,
                    )
                # Others may be told of work meanwhile, and the pool may reach Postgres.
                await self._poll_if_anybody_waits()
            finally:
                self.is_listening = False
            seconds = min(0.25 * 2.0 ** min(failures, 10), _PAUSE_SECONDS_MAX)
            await self._clock.sleep(seconds * self._entropy.uniform(0.8, 1.2))

    async def _listen(self) -> None:
        """Hear what the others send, until the connection is lost or turns out to be deaf."""
        async with await psycopg.AsyncConnection.connect(
            self._dsn, autocommit=True, connect_timeout=_CONNECT_SECONDS, **watching(self._dsn)
        ) as connection:
            async with asyncio.timeout(_LOOK_SECONDS_MAX):
                await connection.execute(query("listen_for_wakeups"))
                await self._poll()
            self.is_listening = True
            while True:
                async with asyncio.timeout(_LOOK_SECONDS_MAX):
                    await self.publish({})
                is_heard = False
                async for each in connection.notifies(timeout=self._echo_seconds):
                    is_heard |= self._take_in(each.payload)
                if not is_heard:
                    raise _Silent
                # Also if nobody waits at this very moment: who does next is told.
                async with asyncio.timeout(_LOOK_SECONDS_MAX):
                    await self._poll()

    def _take_in(self, payload: str) -> bool:
        """Pass on what others have sent; returns whether it was ours."""
        try:
            note = msgspec.json.decode(payload, type=_Note)
        except (msgspec.DecodeError, UnicodeDecodeError):
            # A later release may have more to say; what can be claimed is looked for anyway.
            return False
        if note.by == self._name:
            return True
        counts = note.tasks or [1] * len(note.channels)
        self._heard(
            {
                WakeUpChannel(*each): tasks
                for each, tasks in zip(note.channels, counts, strict=False)
            }
        )
        return False

    async def _poll_instead(self) -> None:
        _log.warning(
            "Postgres notifications do not arrive; polling once a second instead:"
            " set postgres_direct to the address of the server itself, without a pooler"
        )
        for _ in range(_POLLS_MAX):
            await self._clock.sleep(LOOK_SECONDS)
            await self._poll_if_anybody_waits()

    async def _poll_if_anybody_waits(self) -> None:
        """Look, unless that fails or takes long: there is a next time."""
        if self._has_waiters():
            with suppress(psycopg.Error, DatabaseUnavailable, TimeoutError):
                async with asyncio.timeout(_LOOK_SECONDS_MAX):
                    await self._poll()

    async def _poll(self) -> None:
        """Find what can be claimed now, of all operators."""
        asked = {"operators": None, "tasks_max": TASKS_COUNTED_MAX}
        found = await self._database.fetch("claimable_tasks", asked)
        self._heard(
            {
                WakeUpChannel(row["operator"], Priority(row["priority"])): row["tasks"]
                for row in found
            }
        )
