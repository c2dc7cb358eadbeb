"""`penstock queue batch [ID]`: how far batches are."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

import click

from penstock.cli.durations import DURATION, Seconds
from penstock.cli.options import absolute_option
from penstock.cli.progress import Bar
from penstock.cli.queue.connection import on_a_queue, opened
from penstock.cli.queue.showing import age, fields, notes, table, when
from penstock.cli.queue.showing import as_json as show_json
from penstock.kernel.clock import Clock
from penstock.kernel.errors import InvalidInput, PenstockError
from penstock.queue.batches.api import Batch
from penstock.queue.batches.documents import BatchView

_LOOK_SECONDS_MIN: Final = 1.0
_LOOK_SECONDS_MAX: Final = 15.0
_COUNTS = ("ready", "running", "succeeded", "failed", "cancelled", "expired", "lost")


@click.command(
    short_help="Show how far a batch is, or list batches.",
    epilog="Example: penstock queue batch ID --wait --store file:///tmp/store",
)
@click.argument("id", metavar="[ID]", required=False)
@click.option("--wait", is_flag=True, help="Wait until it has ended.")
@click.option("--timeout", metavar=DURATION, type=Seconds(), help="Wait no longer than that.")
@absolute_option
@on_a_queue
@click.pass_context
def batch(
    context: click.Context,
    *,
    id: str | None,
    wait: bool,
    timeout: float | None,
    store: str | None,
    name: str,
    as_json: bool,
) -> None:
    """Show how far a batch is; without ID, list the last batches.

    With --wait, exit code 0 says that every task of it has succeeded, 1 that it has ended
    otherwise, or not in time.
    """
    if id is None:
        if wait or timeout is not None:
            raise InvalidInput("--wait and --timeout go with the ID of a batch.")
        _list(store, name, as_json=as_json)
        return
    view, now = asyncio.run(_asked(store, name, id, wait=wait, timeout=timeout))
    if as_json:
        show_json(view)
    else:
        fields(_rows(view, now=now))
        if not view.is_exact:
            notes(["There is much of it: what runs may be shown as ready."])
    context.exit(1 if wait and view.succeeded != view.total else 0)


def _list(store: str | None, name: str, *, as_json: bool) -> None:
    views, now = asyncio.run(_listed(store, name))
    if as_json:
        show_json(views)
        return
    if not views:
        click.echo("There are no batches.")
        return
    rows = [
        (
            view.id,
            view.status,
            f"{view.settled}/{view.total}",
            str(view.failed),
            age(view.made_at, now=now),
        )
        for view in views
    ]
    table(("id", "status", "settled", "failed", "begun"), rows, numbers=(2, 3))


async def _listed(store: str | None, name: str) -> tuple[tuple[BatchView, ...], float]:
    async with opened(store, name) as queue:
        return await queue.batches.list(), queue.access.now().middle


async def _asked(
    store: str | None,
    name: str,
    id: str,
    *,
    wait: bool,
    timeout: float | None,  # noqa: ASYNC109 - users' word
) -> tuple[BatchView, float]:
    async with opened(store, name) as queue:
        asked = queue.batches.get(id)
        if wait:
            clock = queue.access.store.clock.machine
            view = await _waited(asked, timeout, clock=clock)
        else:
            view = await asked.progress()
        return view, queue.access.now().middle


async def _waited(
    batch: Batch,
    timeout: float | None,  # noqa: ASYNC109 - users' word
    *,
    clock: Clock,
) -> BatchView:
    """The batch when it has ended. How far it is stands on the terminal, if there is one."""
    with Bar() as bar:
        if not bar.is_live:
            return await batch.wait(timeout)
        async with asyncio.TaskGroup() as group:
            showing = group.create_task(_show_progress(batch, bar, clock=clock))
            view = await batch.wait(timeout)
            showing.cancel()
        return view


async def _show_progress(batch: Batch, bar: Bar, *, clock: Clock) -> None:
    """Look again and again, more and more rarely, until it has ended or nobody waits any more."""
    pause = _LOOK_SECONDS_MIN
    is_ended = False
    while not is_ended:
        # What is wrong is told by the waiting itself.
        with suppress(PenstockError):
            found = await batch.progress()
            is_ended = found.is_ended
            text = f"{found.settled:,} of {found.total:,} ended, {found.running:,} running"
            bar.show(text, done=found.settled, of=found.total)
        await clock.sleep(pause)
        pause = min(_LOOK_SECONDS_MAX, pause * 1.5)


def _rows(view: BatchView, *, now: float) -> Iterator[tuple[str, str]]:
    yield "id", view.id
    yield "status", view.status
    yield "tasks", str(view.total)
    for count in _COUNTS:
        number = getattr(view, count)
        if number:
            yield count, str(number)
    yield "begun", when(view.made_at, now=now)
    if view.sealed_at is not None:
        yield "sealed", when(view.sealed_at, now=now)
    else:
        yield "sealed", "no: more may come, or its producer has died"
    if view.ended_at is not None:
        yield "ended", when(view.ended_at, now=now)
    if view.then_task is not None:
        yield "then", view.then_task
