"""The cron source: emits an event at every time that a cron source of the DAG names.

A process that keeps nothing: what it has emitted is what the dispatcher has. The time is the
dispatcher's, carried on by the monotonic clock. Any number may run: the id of an event is its
time, so what two of them emit is one event.

- A source that is seen for the first time begins now. One that has emitted goes on from there
  and
  catches up with what was missed: the latest `MISSED_MAX` at most. One that does not catch up emits
  the latest of them alone. A paused source emits nothing, and catches up afterwards.
- An event has a cursor, the time in milliseconds, or an interval: the time from the one before
  until it, as a partition with a range, emitted and named by its end. Intervals lie end to end.
- A crash between sending and the next turn sends again what was sent.

Which times are due is pure (`due_times`, `events_at`). `turn` is one turn of a `Loop`.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final

import msgspec

from penstock.dispatcher.dag.model import Emits
from penstock.dispatcher.sources.client import SourceClient, why_refused
from penstock.kernel.clock import Clock
from penstock.kernel.cron import Cron, next_after, parse_cron, previous_before
from penstock.kernel.errors import DispatcherRefused
from penstock.protocol.events import EventAsk, EventsAsk, SourceAnswer

MISSED_MAX: Final = 100

_FIRST_LOOK: Final = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class DueTimes:
    """The times that are due, the oldest first."""

    times: tuple[datetime, ...]
    is_cut: bool
    """Whether there were more, earlier ones."""
    following: datetime | None
    """The first time that is not due yet; None at the end of the calendar."""


def due_times(
    cron: Cron, *, after: datetime, until: datetime, time_zone: str, most: int = MISSED_MAX
) -> DueTimes:
    """The times later than `after` and not later than `until`; the latest of them."""
    start = max(after, until - _FIRST_LOOK)
    times, following = _between(cron, start, until, time_zone)
    # Looks back piece by piece, each twice as long, so that years of minutes cost no more than
    # as many minutes as are wanted.
    look = _FIRST_LOOK
    while start > after and len(times) < most:
        look *= 2
        end, start = start, max(after, until - look)
        earlier, _ = _between(cron, start, end, time_zone)
        times = earlier + times
    is_cut = len(times) > most
    if not is_cut and start > after:
        first = next_after(cron, after, time_zone=time_zone)
        is_cut = first is not None and first <= start
    return DueTimes(tuple(times[-most:]), is_cut, following)


def cron_of(source: SourceAnswer) -> Cron:
    """When a source fires. A `ValueError` if a later release says what this one cannot read."""
    if source.cron is None:
        raise ValueError("has no expression")
    if source.emits not in tuple(Emits):
        raise ValueError(f"emits {source.emits!r}, which this release does not know")
    return parse_cron(source.cron)


def events_at(source: SourceAnswer, times: tuple[datetime, ...]) -> list[EventAsk]:
    """The events of these times: one a dataset and time, the same whoever makes them."""
    said = _interval if source.emits == Emits.INTERVAL else _cursor
    return [
        msgspec.structs.replace(said(source, time), dataset=dataset)
        for time in times
        for dataset in sorted(source.datasets)
    ]


def most_of(source: SourceAnswer) -> int:
    """How many times that were missed a source makes up for."""
    return MISSED_MAX if source.catch_up else 1


def left_off(source: SourceAnswer, *, latest: datetime) -> datetime | None:
    """The time that a source has emitted last, but none after `latest`; None if there is none."""
    if source.emits == Emits.INTERVAL:
        cursor = None if source.last_end is None else source.last_end * 1000
    else:
        cursor = source.last_cursor
    return None if cursor is None else time_of(cursor, latest=latest)


def _cursor(_: SourceAnswer, time: datetime) -> EventAsk:
    return EventAsk(event_id=_event_id(time), cursor=milliseconds(time))


def _interval(source: SourceAnswer, time: datetime) -> EventAsk:
    found = previous_before(cron_of(source), time, time_zone=source.time_zone)
    # Nothing comes before the first time of the calendar, which nobody will see.
    begin = found or time - timedelta(minutes=1)
    return EventAsk(
        event_id=_event_id(time),
        partition_key=f"{begin.astimezone(UTC):%Y-%m-%dT%H:%MZ}",
        start=milliseconds(begin) // 1000,
        end=milliseconds(time) // 1000,
    )


def _event_id(time: datetime) -> str:
    return f"cron:{time.astimezone(UTC).isoformat()}"


def milliseconds(time: datetime) -> int:
    """A time as a cursor."""
    return (time - _EPOCH) // timedelta(milliseconds=1)


def time_of(cursor: int, *, latest: datetime) -> datetime:
    """The time of a cursor, or `latest` if it is none that has been."""
    if not 0 <= cursor < milliseconds(latest):
        return latest
    return _EPOCH + timedelta(milliseconds=cursor)


_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def _between(
    cron: Cron, after: datetime, until: datetime, time_zone: str
) -> tuple[list[datetime], datetime | None]:
    """All times in between, and the one that follows."""
    found = []
    time = next_after(cron, after, time_zone=time_zone)
    while time is not None and time <= until:
        found.append(time)
        time = next_after(cron, time, time_zone=time_zone)
    return found, time


_log = logging.getLogger(__name__)

LOOK_SECONDS_MAX: Final = 10.0
"""How long a change of the DAG, or the end of a pause, may go unseen."""
LOOK_SECONDS_MIN: Final = 0.05
_SHORT: Final = timedelta(minutes=10)


class CronEmitter:
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
        received_at = self._clock.monotonic()
        sources = [each for each in answer.sources if each.kind == "cron"]
        self._forget({each.job for each in sources})
        next_due: list[datetime] = []
        for source in sources:
            now = answer.now + timedelta(seconds=self._clock.monotonic() - received_at)
            try:
                after = await self._emit(source, now)
            except DispatcherRefused as error:
                # Of one source: the others have their times too.
                _log.warning("events of %s were rejected: %s", source.job, error)
                continue
            if after is not None:
                next_due.append(after)
        now = answer.now + timedelta(seconds=self._clock.monotonic() - received_at)
        wait = min(((each - now).total_seconds() for each in next_due), default=LOOK_SECONDS_MAX)
        return min(LOOK_SECONDS_MAX, max(LOOK_SECONDS_MIN, wait))

    async def _emit(self, source: SourceAnswer, now: datetime) -> datetime | None:
        """Emit what is due of a source; when its next time is."""
        try:
            cron = cron_of(source)
        except ValueError as error:
            self._warn_invalid(source, error)
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

    async def _send(self, source: SourceAnswer, due: DueTimes) -> None:
        if due.is_cut and source.catch_up:
            _log.warning(
                "%s missed more than %d ticks; skipping the earlier ones",
                source.job,
                MISSED_MAX,
            )
        if events := events_at(source, due.times):
            answer = await self._client.events(EventsAsk(events=events))
            if why := why_refused(answer.results):
                _log.warning("events of %s were rejected: %s", source.job, why)

    def _warn_invalid(self, source: SourceAnswer, error: ValueError) -> None:
        if (source.job, source.cron) not in self._unreadable:
            _log.warning("invalid cron expression of %s: it %s", source.job, error)
            self._unreadable.add((source.job, source.cron))

    def _forget(self, present: set[str]) -> None:
        """Keep nothing of sources that have left; they begin anew if they come back."""
        self._done = {job: time for job, time in self._done.items() if job in present}
        self._held &= present
        self._unreadable = {each for each in self._unreadable if each[0] in present}


def _beginning(source: SourceAnswer, now: datetime) -> datetime:
    return left_off(source, latest=now) or now
