"""`penstock queue schedule|batch`: tasks at the times of a cron line, and groups of tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any, Final

import click

from penstock.cli.format import age, compact, fields, notes, print_json, when
from penstock.cli.options import DURATION, Seconds, absolute_option
from penstock.cli.output import ProgressBar, table
from penstock.cli.queue.connection import on_a_queue, opened
from penstock.cli.queue.submit import INPUT, json_value, tags_from
from penstock.kernel.clock import Clock
from penstock.kernel.errors import InvalidInput, PenstockError
from penstock.queue.batch_marks import BatchView
from penstock.queue.batches import Batch
from penstock.queue.client import Queue
from penstock.queue.schedules import REPLACE, CatchUp, ScheduleView


@click.group(
    invoke_without_command=True,
    short_help="Manage cron schedules.",
    epilog="Example: penstock queue schedule add nightly '0 3 * * *' report"
    " --store file:///tmp/store",
)
@click.pass_context
def schedule(context: click.Context) -> None:
    """Submit tasks at the times of a cron line, once a time, however many workers run.

    Workers do it, or 'penstock queue monitor' where none runs.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@schedule.command(
    short_help="Add a schedule, or change one.",
    epilog="Example: penstock queue schedule add nightly '0 3 * * *' report '{\"of\": \"day\"}'"
    " --time-zone Europe/Paris --store file:///tmp/store",
)
@click.argument("schedule_name", metavar="NAME")
@click.argument("cron", metavar="CRON")
@click.argument("type", metavar="TYPE")
@click.argument("given", metavar="[INPUT]", required=False)
@click.option("--time-zone", metavar="ZONE", default="UTC", show_default=True, help="Of the times.")
@click.option(
    "--catch-up",
    metavar="|".join(CatchUp),
    default=str(CatchUp.SKIP),
    show_default=True,
    help="Missed runs: skip them, submit the last, or all.",
)
@click.option("--priority", type=int, default=0, show_default=True, help="From -9 to 9.")
@click.option(
    "--limit", metavar="KEY", default="", help="The key of the limit its tasks fall under."
)
@click.option(
    "--expires",
    metavar=DURATION,
    type=Seconds(),
    help="Expiry: never start a task later than this.",
)
@click.option("--tag", "tags", metavar="NAME=VALUE", multiple=True, help="A tag of its tasks.")
@click.option("--replace", is_flag=True, help="Change the schedule of that name, if there is one.")
@on_a_queue
def add(
    *,
    schedule_name: str,
    given: str | None,
    tags: tuple[str, ...],
    store: str | None,
    name: str,
    as_json: bool,
    **how: Any,
) -> None:
    """Submit a task of TYPE with INPUT at every time of CRON, from now on.

    All four are given without a name, in this order. CRON is one word, so put it in quotes; it has
    five fields: minute, hour, day of month, month and day of week. Makes the queue if
    there is none. To add the same again changes nothing.
    """
    value = None if given is None else json_value(given, where=INPUT)

    async def act(queue: Queue) -> ScheduleView:
        try:
            return await queue.schedules.add(
                schedule_name, input=value, tags=tags_from(tags), **how
            )
        except InvalidInput as error:
            error.hint = error.hint.replace(REPLACE, "--replace")
            raise

    _show(_run(store, name, act, create=True), as_json=as_json)


@schedule.command(
    name="list",
    short_help="List the schedules.",
    epilog="Example: penstock queue schedule list --store file:///tmp/store",
)
@absolute_option
@on_a_queue
def list_(*, store: str | None, name: str, as_json: bool) -> None:
    """List the schedules of a queue, by name."""

    async def act(queue: Queue) -> tuple[ScheduleView, ...]:
        return await queue.schedules.list()

    views, now = _run(store, name, act)
    if as_json:
        print_json(views)
        return
    if not views:
        click.echo("There are no schedules.")
        return
    rows = [
        (
            view.name,
            view.cron,
            view.time_zone,
            view.type,
            _next(view, now, shown=age),
            "-" if view.last_at is None else age(view.last_at, now=now),
        )
        for view in views
    ]
    table(("name", "cron", "zone", "type", "next", "last"), rows)


@schedule.command(
    short_help="Show a schedule.",
    epilog="Example: penstock queue schedule show nightly --store file:///tmp/store",
)
@click.argument("schedule_name", metavar="NAME")
@on_a_queue
def show(*, schedule_name: str, store: str | None, name: str, as_json: bool) -> None:
    """Show a schedule: what it submits, when it is next due, and its last task."""

    async def act(queue: Queue) -> ScheduleView:
        return await queue.schedules.get(schedule_name)

    _show(_run(store, name, act), as_json=as_json)


@schedule.command(
    short_help="Pause a schedule.",
    epilog="Example: penstock queue schedule pause nightly --store file:///tmp/store",
)
@click.argument("schedule_name", metavar="NAME")
@on_a_queue
def pause(*, schedule_name: str, store: str | None, name: str, as_json: bool) -> None:
    """Submit nothing for a schedule until it is resumed."""

    async def act(queue: Queue) -> ScheduleView:
        return await queue.schedules.pause(schedule_name)

    _show(_run(store, name, act), as_json=as_json)


@schedule.command(
    short_help="Resume a schedule.",
    epilog="Example: penstock queue schedule resume nightly --store file:///tmp/store",
)
@click.argument("schedule_name", metavar="NAME")
@on_a_queue
def resume(*, schedule_name: str, store: str | None, name: str, as_json: bool) -> None:
    """Go on with a schedule that was paused, from its next time on."""

    async def act(queue: Queue) -> ScheduleView:
        return await queue.schedules.resume(schedule_name)

    _show(_run(store, name, act), as_json=as_json)


@schedule.command(
    short_help="Remove a schedule.",
    epilog="Example: penstock queue schedule remove nightly --store file:///tmp/store",
)
@click.argument("schedule_name", metavar="NAME")
@on_a_queue
def remove(*, schedule_name: str, store: str | None, name: str, as_json: bool) -> None:
    """Remove a schedule; what it has submitted stays."""

    async def act(queue: Queue) -> None:
        await queue.schedules.remove(schedule_name)

    _run(store, name, act)
    if as_json:
        print_json({"removed": schedule_name})
    else:
        click.echo(f"The schedule {schedule_name!r} is removed.")


@schedule.command(
    short_help="Submit the task of a schedule now.",
    epilog="Example: penstock queue schedule run nightly --store file:///tmp/store",
)
@click.argument("schedule_name", metavar="NAME")
@on_a_queue
def run(*, schedule_name: str, store: str | None, name: str, as_json: bool) -> None:
    """Submit the task of a schedule now, besides its times, and print its id."""

    async def act(queue: Queue) -> str:
        return await queue.schedules.run(schedule_name)

    task, _ = _run(store, name, act)
    if as_json:
        print_json({"id": task})
    else:
        click.echo(task)


def _run(
    store: str | None, name: str, act: Callable[[Queue], Awaitable[Any]], *, create: bool = False
) -> tuple[Any, float]:
    """What is done to a queue, and the store's time then."""

    async def ran() -> tuple[Any, float]:
        async with opened(store, name, create=create) as queue:
            return await act(queue), queue.access.now().middle

    return asyncio.run(ran())


def _show(answer: tuple[ScheduleView, float], *, as_json: bool) -> None:
    view, now = answer
    if as_json:
        print_json(view)
    else:
        fields(_rows(view, now))


def _next(view: ScheduleView, now: float, *, shown: Callable[..., str] = when) -> str:
    if view.is_paused:
        return "paused"
    return shown(view.next_at, now=now) if view.next_at is not None else "never"


def _rows(view: ScheduleView, now: float) -> Iterator[tuple[str, str]]:
    yield "name", view.name
    yield "cron", f"{view.cron}  ({view.time_zone})"
    yield "catch up", view.catch_up
    yield "type", view.type
    yield "input", compact(view.input)
    if view.priority:
        yield "priority", str(view.priority)
    if view.limit:
        yield "limit", view.limit
    if view.expires is not None:
        yield "expires", f"{view.expires:g} s after its submit"
    for tag, value in view.tags.items():
        yield "tag", f"{tag}={value}"
    yield "added", when(view.created_at, now=now)
    yield "next", _next(view, now)
    if view.last_at is not None:
        yield "last", when(view.last_at, now=now)
        yield "last task", view.last_task


_LOOK_SECONDS_MIN: Final = 1.0
_LOOK_SECONDS_MAX: Final = 15.0
_COUNTS = ("ready", "running", "succeeded", "failed", "cancelled", "expired", "lost")


@click.command(
    short_help="Show the progress of a batch, or list batches.",
    epilog="Example: penstock queue batch ID --wait --store file:///tmp/store",
)
@click.argument("id", metavar="[ID]", required=False)
@click.option("--wait", is_flag=True, help="Wait until it has ended.")
@click.option("--timeout", metavar=DURATION, type=Seconds(), help="Timeout of --wait.")
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
        print_json(view)
    else:
        fields(_batch_rows(view, now=now))
        if not view.is_exact:
            notes(["There is much of it: what runs may be shown as ready."])
    context.exit(1 if wait and view.succeeded != view.total else 0)


def _list(store: str | None, name: str, *, as_json: bool) -> None:
    views, now = asyncio.run(_listed(store, name))
    if as_json:
        print_json(views)
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
    with ProgressBar() as bar:
        if not bar.is_live:
            return await batch.wait(timeout)
        async with asyncio.TaskGroup() as group:
            showing = group.create_task(_show_progress(batch, bar, clock=clock))
            view = await batch.wait(timeout)
            showing.cancel()
        return view


async def _show_progress(batch: Batch, bar: ProgressBar, *, clock: Clock) -> None:
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


def _batch_rows(view: BatchView, *, now: float) -> Iterator[tuple[str, str]]:
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
