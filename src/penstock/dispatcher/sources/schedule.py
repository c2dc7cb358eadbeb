"""Which times of a cron expression are due, and what their events are called. Pure.

A time that was missed is caught up with, but not without end: of more than `MISSED_MAX` only the
latest count, for after a long pause the first of them are old news, and there may be any number.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from penstock.dispatcher.dag.cron import Cron, next_after, parse_cron
from penstock.dispatcher.wire.events import EventAsk, SourceAnswer

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
    return parse_cron(source.cron)


def events_at(source: SourceAnswer, times: tuple[datetime, ...]) -> list[EventAsk]:
    """The events of these times: one a dataset and time, the same whoever makes them."""
    return [
        EventAsk(
            event_id=f"cron:{time.astimezone(UTC).isoformat()}",
            dataset=dataset,
            cursor=milliseconds(time),
        )
        for time in times
        for dataset in sorted(source.datasets)
    ]


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
