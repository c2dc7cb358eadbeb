"""The cron source: emits an event at every time that a cron source of the DAG names.

A process of its own that keeps nothing: what it has emitted is what the dispatcher has. The time is
the dispatcher's, carried on by the monotonic clock, so this machine's clock may be wrong by days.
Any number may run at once: the id of an event is its time, so what two of them emit is one event.

- A source that is seen for the first time begins now. One that has emitted goes on from there, and
  catches up with what was missed: with the latest hundred at most, and says so. One that does not
  catch up emits the latest of them alone.
- A source that is paused emits nothing, and catches up afterwards.
- A crash between the sending and the next turn sends again what was sent.

`turn` is one turn of a `Loop`, which waits until the next time that is due.
"""

from __future__ import annotations

import asyncio
import logging
from datetime import datetime, timedelta
from functools import partial
from typing import Final

from penstock.dispatcher.sources.client import SourceClient, why_refused
from penstock.dispatcher.sources.schedule import (
    MISSED_MAX,
    Due,
    cron_of,
    due_times,
    events_at,
    left_off,
    most_of,
)
from penstock.dispatcher.wire.events import EventsAsk, SourceAnswer
from penstock.kernel.clock import Clock
from penstock.kernel.errors import DispatcherRefused

_log = logging.getLogger(__name__)

LOOK_SECONDS_MAX: Final = 10.0
"""How long a change of the DAG, or the end of a pause, may go unseen."""
LOOK_SECONDS_MIN: Final = 0.05
_SHORT: Final = timedelta(minutes=10)


class CronSource:
    """Emits the events of all cron sources."""

    def __init__(self, client: SourceClient, clock: Clock) -> None:
        self._client = client
        self._clock = clock
        self._done: dict[str, datetime] = {}
        """Up to where each source has emitted, by job."""
        self._held: set[str] = set()
        self._unreadable: set[tuple[str, str | None]] = set()

    async def turn(self) -> float | None:
        """Emit what is due; the seconds until there may be more."""
        answer = await self._client.sources()
        heard_at = self._clock.monotonic()
        sources = [each for each in answer.sources if each.kind == "cron"]
        self._forget({each.job for each in sources})
        next_due: list[datetime] = []
        for source in sources:
            now = answer.now + timedelta(seconds=self._clock.monotonic() - heard_at)
            try:
                after = await self._emit(source, now)
            except DispatcherRefused as error:
                # Of one source: the others have their times too.
                _log.warning("events of %s were refused: %s", source.job, error)
                continue
            if after is not None:
                next_due.append(after)
        now = answer.now + timedelta(seconds=self._clock.monotonic() - heard_at)
        wait = min(((each - now).total_seconds() for each in next_due), default=LOOK_SECONDS_MAX)
        return min(LOOK_SECONDS_MAX, max(LOOK_SECONDS_MIN, wait))

    async def _emit(self, source: SourceAnswer, now: datetime) -> datetime | None:
        """Emit what is due of a source; when its next time is."""
        try:
            cron = cron_of(source)
        except ValueError as error:
            self._say_unreadable(source, error)
            return None
        after = self._done.setdefault(source.job, _beginning(source, now))
        if source.paused:
            if source.job not in self._held:
                _log.info("%s is paused: %s", source.job, source.paused)
            self._held.add(source.job)
            return None
        self._held.discard(source.job)
        zone, most = source.time_zone, most_of(source)
        look = partial(due_times, cron, after=after, until=now, time_zone=zone, most=most)
        # To look back over a long outage takes its time; nobody else should wait for it.
        due = look() if now - after <= _SHORT else await asyncio.to_thread(look)
        await self._send(source, due)
        self._done[source.job] = max(after, now)
        return due.following

    async def _send(self, source: SourceAnswer, due: Due) -> None:
        if due.is_cut and source.catch_up:
            _log.warning(
                "%s has missed more than %d times; the earlier ones are passed over",
                source.job,
                MISSED_MAX,
            )
        if events := events_at(source, due.times):
            answer = await self._client.events(EventsAsk(events=events))
            if why := why_refused(answer.results):
                _log.warning("events of %s were refused: %s", source.job, why)

    def _say_unreadable(self, source: SourceAnswer, error: ValueError) -> None:
        if (source.job, source.cron) not in self._unreadable:
            _log.warning("the cron expression of %s %s", source.job, error)
            self._unreadable.add((source.job, source.cron))

    def _forget(self, present: set[str]) -> None:
        """Keep nothing of sources that have left; they begin anew if they come back."""
        self._done = {job: time for job, time in self._done.items() if job in present}
        self._held &= present
        self._unreadable = {each for each in self._unreadable if each[0] in present}


def _beginning(source: SourceAnswer, now: datetime) -> datetime:
    return left_off(source, latest=now) or now
