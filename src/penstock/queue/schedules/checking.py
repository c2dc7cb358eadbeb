"""What is refused of a schedule before it is written, and the sentences for it. Pure.

Nothing is taken here that would be refused at a tick, when nobody is there to read the error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from penstock.kernel.cron import is_time_zone, parse_cron, time_zones
from penstock.kernel.errors import InvalidInput
from penstock.kernel.words import listed, nearest, shown
from penstock.queue.options import TAGS_MAX
from penstock.queue.schedules.document import SCHEDULE_TAG, TICK_TAG, Schedule
from penstock.queue.schedules.ticks import CatchUp

_OWN_TAGS: Final = (SCHEDULE_TAG, TICK_TAG)
REPLACE: Final = "replace=True"
"""How one says in Python that a schedule replaces another; the command line has its own word."""


def check_cron(text: str) -> str:
    """The expression as it is stored, or `InvalidInput`."""
    try:
        return parse_cron(text).expression
    except ValueError as error:
        raise InvalidInput(
            f"The cron line {shown(text)} {error}.",
            hint="For example: '0 3 * * *' is every day at three, '*/5 * * * *' every 5 minutes.",
        ) from error


def check_time_zone(name: str) -> str:
    """The name of a time zone, or `InvalidInput`."""
    if not is_time_zone(name):
        by_small = {each.lower(): each for each in time_zones()}
        like = by_small.get(nearest(name, by_small), "")
        hint = f"Did you mean {like!r}?" if like else "For example: 'Europe/Paris', or 'UTC'."
        raise InvalidInput(f"{shown(name)} is not a time zone.", hint=hint)
    return name


def check_catch_up(text: str) -> CatchUp:
    """What to do about missed ticks, or `InvalidInput`."""
    try:
        return CatchUp(text)
    except ValueError as error:
        raise InvalidInput(
            f"{shown(str(text))} is no way to catch up.",
            hint="'skip' leaves missed ticks out, 'one' submits the last, 'all' every one.",
        ) from error


def check_tags(tags: Mapping[str, str]) -> dict[str, str]:
    """The tags, unless they are in the way of those that a schedule gives its tasks."""
    for name in _OWN_TAGS:
        if name in tags:
            raise InvalidInput(
                f"The tag {name!r} is given to the tasks of a schedule by itself.",
                hint="Choose another name.",
            )
    if len(tags) > TAGS_MAX - len(_OWN_TAGS):
        raise InvalidInput(
            f"A schedule has at most {TAGS_MAX - len(_OWN_TAGS)} tags, not {len(tags)}."
        )
    return dict(tags)


def taken(name: str, present: Schedule, new: Schedule, differences: Sequence[str]) -> InvalidInput:
    """The error for a second definition of one name."""
    told = listed(
        f"its {each} is {_word(present, each)} and not {_word(new, each)}" for each in differences
    )
    return InvalidInput(
        f"There is another schedule {name!r}: {told}.",
        hint=f"Choose another name, or replace it: {REPLACE}.",
    )


def _word(schedule: Schedule, part: str) -> str:
    return shown(value) if isinstance(value := schedule.part(part), str) else f"{value!r:.60}"
