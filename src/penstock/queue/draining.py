"""Waiting until a queue has no tasks left: one that takes no more, or one that a worker empties.

What counts is what lists show: tasks that are ready, delayed or in progress. A producer hears of a
drain within `PRODUCER_SECONDS`, so nothing is called empty before; a submit that was under way
then may still arrive, as late as five minutes after it began, and would be seen by who looks again.

Each look costs a survey: five LISTs for a small queue. Looks are 2 s apart to begin with, and a
tenth of the time that was waited later, up to 30 s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

from penstock.kernel.errors import StoreError
from penstock.queue.access import Access
from penstock.queue.control import PRODUCER_SECONDS, Control
from penstock.queue.inspection.survey import surveyed
from penstock.store.metered import labelled

_PAUSE_SECONDS_MIN: Final = 2.0
_PAUSE_SECONDS_MAX: Final = 30.0


@dataclass(frozen=True, slots=True)
class Left:
    """How many tasks have not settled, as far as lists show."""

    tasks: int
    is_whole: bool
    """Whether everything was looked at; otherwise there may be more."""


async def left(access: Access, type: str | None = None) -> Left:
    """What is left of a type, or of the whole queue. Tasks of a pack in progress all count."""
    with labelled("inspect"):
        survey = await surveyed(access)
    waiting = (
        at.count
        for at, (pack, _) in survey.pairs.items()
        if pack is not None and type in (None, at.type)
    )
    return Left(sum(waiting), survey.is_whole)


async def wait_until_empty(
    access: Access,
    type: str | None = None,
    *,
    seconds: float | None = None,
    tell: Callable[[Left], None] = lambda _: None,
) -> bool:
    """Wait until nothing is left, for at most so many seconds; whether nothing is.

    `tell` hears what every look has shown.
    """
    marks = [each for each in await Control(access).state() if each.type in (None, type)]
    since = max((each.drained_at or 0.0 for each in marks), default=0.0)
    clock = access.store.clock.machine
    began = clock.monotonic()
    try:
        async with asyncio.timeout(seconds):
            while True:
                now = await access.store.now()
                found = await left(access, type)
                tell(found)
                heard_seconds = since + PRODUCER_SECONDS - now.earliest
                if not found.tasks and found.is_whole and heard_seconds <= 0:
                    return True
                pause = min(_PAUSE_SECONDS_MAX, (clock.monotonic() - began) / 10)
                if not found.tasks:
                    pause = max(pause, heard_seconds)
                await clock.sleep(max(_PAUSE_SECONDS_MIN, pause))
    except TimeoutError:
        return False


async def until_done(
    access: Access,
    types: Collection[str],
    *,
    is_idle: Callable[[], bool],
    failed: Callable[[StoreError], None],
) -> None:
    """Wait until no task of these types is ready or in progress, anywhere; looks only while idle.

    What waits for a retry is in progress. What is delayed and has never begun is not waited for,
    unless it is due within the minute.
    """
    clock = access.store.clock.machine
    idle_since = None
    while True:
        if not is_idle():
            idle_since = None
            await clock.sleep(_PAUSE_SECONDS_MIN / 4)
            continue
        idle_since = clock.monotonic() if idle_since is None else idle_since
        try:
            with labelled("inspect"):
                survey = await surveyed(access)
                now = await access.store.now()
        except StoreError as error:
            failed(error)
        else:
            waits = any(
                pack is not None
                and at.type in types
                and (ledger is not None or survey.minute(at) * 60 <= now.latest)
                for at, (pack, ledger) in survey.pairs.items()
            )
            if not waits and survey.is_whole and is_idle():
                return
        pause = min(_PAUSE_SECONDS_MAX, (clock.monotonic() - idle_since) / 10)
        await clock.sleep(max(_PAUSE_SECONDS_MIN, pause))
