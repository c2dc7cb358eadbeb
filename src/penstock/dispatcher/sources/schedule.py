"""Which times of a cron expression are due, and what their events are called. Pure.

A time that was missed is caught up with, but not without end: of more than `MISSED_MAX` only the
latest count, for after a long pause the first of them are old news, and there may be any number.

An event tells of a cursor, the time itself in milliseconds, or of an interval: the time from the
one before until it, as a partition with a range. The event of an interval comes at its end, and is
named by it, and the intervals of a source lie end to end. What a source has emitted last is where
it goes on: a cursor, or the end of an interval.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec

from penstock.dispatcher.dag.model import Emits
from penstock.dispatcher.wire.events import EventAsk, SourceAnswer
from penstock.kernel.cron import Cron, next_after, parse_cron, previous_before

MISSED_MAX: Final = 100

_FIRST_LOOK: Final = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class Due:
    """The times that are due, the oldest first."""

    times: tuple[datetime, ...]
    is_cut: bool
    """Whether there were more, earlier ones."""
    following: datetime | None
    """The first time that is not due yet; None at the end of the calendar."""


def due_times(
    cron: Cron, *, after: datetime, until: datetime, time_zone: str, most: int = MISSED_MAX
) -> Due:
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
    return Due(tuple(times[-most:]), is_cut, following)


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
