"""The ticks of a schedule: which of them are to be submitted now. Pure.

A tick is a time that the cron expression names in the schedule's time zone. Ticks up to and
including the cursor are done with. What is due and not done with is treated by `catch_up`:

| catch_up | what is submitted |
|---|---|
| `skip` | ticks that are at most `GRACE_SECONDS` late, oldest first; older ones are left out |
| `one` | the last tick that is due, for all before it too |
| `all` | every tick, oldest first, the last `CATCH_UP_MAX` of them |

Whoever looks later picks a tick that is the same or later: `minding` rests its argument on that.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Final

from penstock.kernel.cron import next_after, parse_cron, previous_before

GRACE_SECONDS: Final = 300
"""So late a tick still counts as in time: the takeover from a scheduler that died is shorter."""
CATCH_UP_MAX: Final = 1000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)


class CatchUp(StrEnum):
    """What becomes of ticks for which nobody was there."""

    SKIP = "skip"
    ONE = "one"
    ALL = "all"


def due_ticks(
    cron: str, *, time_zone: str, cursor_ms: int, now_ms: int, catch_up: CatchUp
) -> tuple[int, ...]:
    """The ticks to submit, oldest first, in milliseconds since the epoch."""
    most = 1 if catch_up is CatchUp.ONE else CATCH_UP_MAX
    late_ms = now_ms - GRACE_SECONDS * 1000 - 1
    after_ms = max(cursor_ms, late_ms) if catch_up is CatchUp.SKIP else cursor_ms
    found: list[int] = []
    before = _time(now_ms) + _MILLISECOND
    while len(found) < most:
        tick = previous_before(parse_cron(cron), before, time_zone=time_zone)
        if tick is None or milliseconds(tick) <= after_ms:
            break
        found.append(milliseconds(tick))
        before = tick
    return tuple(reversed(found))


def next_tick(cron: str, *, time_zone: str, after_ms: int) -> int | None:
    """The first tick after a moment; None only at the end of the calendar."""
    tick = next_after(parse_cron(cron), _time(after_ms), time_zone=time_zone)
    return None if tick is None else milliseconds(tick)


def _time(ms: int) -> datetime:
    return _EPOCH + ms * _MILLISECOND


def milliseconds(time: datetime) -> int:
    """A time in milliseconds since the epoch."""
    return (time - _EPOCH) // _MILLISECOND
