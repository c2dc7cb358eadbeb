"""`penstock queue tail`: what happens in a queue, as it happens.

Looks every `--every` seconds, and up to every ten while nothing happens. A look at a small queue is
five LISTs: left running, it costs about a dollar a day while there is something to see, and a
quarter of that while there is not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import click

from penstock.cli.durations import DURATION, Seconds
from penstock.cli.queue.connection import on_a_queue, opened, tag_option
from penstock.cli.queue.showing import as_json_line, iso, notes, status
from penstock.kernel.errors import StoreError
from penstock.kernel.signals import stopped_by_signals
from penstock.queue.client import Queue
from penstock.queue.inspection import Follower, Happened
from penstock.queue.inspection.filters import tag_filters
from penstock.queue.places import check_name
from penstock.queue.running.polling import Pace, Polling

_QUIET_SECONDS: Final = 10.0
_FAILURES_MAX: Final = 10
_SECONDS_MAX: Final = 366 * 86_400.0


@click.command(
    short_help="Follow what happens.",
    epilog="Example: penstock queue tail --store file:///tmp/store",
)
@click.option("--type", help="Only tasks of this type.")
@tag_option
@click.option(
    "--every",
    metavar=DURATION,
    type=Seconds(0.1, 3600),
    default=2.0,
    show_default=True,
    help="How often to look while something happens.",
)
@click.option(
    "--for",
    "seconds",
    metavar=DURATION,
    type=Seconds(0, _SECONDS_MAX),
    default=_SECONDS_MAX,
    help="End after so long.",
)
@on_a_queue
def tail(
    *,
    type: str | None,
    tags: tuple[str, ...],
    every: float,
    seconds: float,
    store: str | None,
    name: str,
    as_json: bool,
) -> None:
    """Follow what happens in a queue: submits, claims, retries, ends.

    Prints a line for everything that happens from now on, to one task or to several of a pack at
    once, until Ctrl-C; with --json one JSON object a line. It only reads, by lists: five LISTs a
    look, which is about a dollar a day while there is something to see.
    """
    if type is not None:
        check_name(type, what="type")
    tag_filters(tags)
    asyncio.run(_tail(store, name, type, tags, every=every, seconds=seconds, as_json=as_json))


async def _tail(
    store: str | None,
    name: str,
    type: str | None,
    tags: Sequence[str],
    *,
    every: float,
    seconds: float,
    as_json: bool,
) -> None:
    stopped = asyncio.Event()
    with stopped_by_signals(stopped.set):
        async with opened(store, name) as queue:
            follower = Follower(queue.access, type=type, tags=tag_filters(tags))
            await follower.look()
            click.echo(f"Following {name!r}; Ctrl-C ends it.", err=True)
            await _follow(queue, follower, stopped, every=every, seconds=seconds, as_json=as_json)


async def _follow(
    queue: Queue,
    follower: Follower,
    stopped: asyncio.Event,
    *,
    every: float,
    seconds: float,
    as_json: bool,
) -> None:
    access = queue.access
    clock = access.store.clock.machine
    polling = Polling(min_seconds=every, max_seconds=max(every, _QUIET_SECONDS), factor=1.5)
    pace = Pace(polling, entropy=access.entropy, clock=clock)
    end = clock.monotonic() + seconds
    failures = 0
    while not stopped.is_set() and clock.monotonic() < end:
        pause = min(pace.next_seconds(), max(0.0, end - clock.monotonic()))
        try:
            async with asyncio.timeout(pause):
                await stopped.wait()
        except TimeoutError:
            pass
        try:
            heard = await follower.look()
        except StoreError as error:
            failures += 1
            if failures == _FAILURES_MAX:
                raise
            notes([f"the store did not answer, trying again: {error.message}"])
            continue
        failures = 0
        if heard.events:
            pace.reset()
        for event in heard.events:
            as_json_line(event) if as_json else click.echo(_line(event))
        notes(heard.notes)


def _line(event: Happened) -> str:
    many = f" and {event.tasks - 1:,} more" if event.tasks > 1 else ""
    attempt = f"  attempt {event.attempt}" if event.attempt else ""
    who = f"  {_plain(event.who)}" if event.who else ""
    note = f"  {_plain(event.note)}" if event.note else ""
    what = status(event.what, width=13)
    return f"{iso(event.at)}  {what}  {event.type}  {event.id}{many}{attempt}{who}{note}"


def _plain(text: str) -> str:
    """Somebody's words without what a terminal would obey."""
    return "".join(each if each.isprintable() else " " for each in text[:200])
