"""`penstock queue get|history|list|tail|cancel|replay`: show tasks, cancel or replay them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import click

from penstock.cli.format import (
    age,
    compact,
    complain,
    fields,
    iso,
    length,
    notes,
    plain,
    print_json,
    print_json_line,
    when,
)
from penstock.cli.options import DURATION, Seconds, absolute_option
from penstock.cli.output import status, table
from penstock.cli.queue.connection import note_of, on_a_queue, opened, tag_option
from penstock.kernel.errors import InvalidInput, PenstockError, StoreError, TaskError, TaskNotFound
from penstock.kernel.service import stopped_by_signals
from penstock.queue.canceller import cancel_found, check_reason
from penstock.queue.client import Queue
from penstock.queue.ids import check_name, task_at
from penstock.queue.inspection import QueueFollower, TaskHappening, TaskListing, list_tasks
from penstock.queue.inspection.task_search import LIMIT_MAX, tag_filters
from penstock.queue.ledger import LedgerProgress, QueueTaskStatus
from penstock.queue.pack import PayloadReference
from penstock.queue.replay import name_of, replayed
from penstock.queue.replay import replay as replay_view
from penstock.queue.settings import Polling, PollPace
from penstock.queue.task_views import STATES, TaskEvent, TaskView
from penstock.store.metered import labelled


@click.command(
    short_help="Show a task: status, input, result, error.",
    epilog="Example: penstock queue get ID --store file:///tmp/store",
)
@click.argument("id", metavar="ID")
@absolute_option
@on_a_queue
def get(*, id: str, store: str | None, name: str, as_json: bool) -> None:
    """Show where a task is, how far it says it is, its input, and its result or its error."""
    view, now = asyncio.run(_got(store, name, id))
    if as_json:
        print_json(view)
    else:
        fields(_rows(view, now=now))


async def _got(store: str | None, name: str, id: str) -> tuple[TaskView, float]:
    async with opened(store, name) as queue:
        view = await queue.get(id)
        return view, queue.access.now().middle


def _rows(view: TaskView, *, now: float) -> Iterator[tuple[str, str]]:
    yield "id", view.id
    yield "type", view.type
    yield "status", view.status + (" (asked to stop)" if view.cancel_asked else "")
    yield "attempt", str(view.attempt or "none yet")
    yield "submitted", when(view.submitted_at, now=now)
    if view.due_at is not None:
        yield "due", when(view.due_at, now=now)
    if view.settled_at is not None:
        yield "settled", when(view.settled_at, now=now)
    is_expired = view.status == QueueTaskStatus.EXPIRED.word
    if view.expires_at is not None and (not view.is_settled or is_expired):
        yield "expires" if not view.is_settled else "expired", when(view.expires_at, now=now)
    if view.key is not None:
        yield "key", view.key
    yield from _options(view)
    if view.progress is not None:
        yield "progress", _progress(view.progress, now=now)
    yield "input", compact(view.input) if view.input_ref is None else _stored(view.input_ref)
    if view.status == QueueTaskStatus.SUCCEEDED.word:
        yield (
            "result",
            compact(view.result) if view.result_ref is None else _stored(view.result_ref),
        )
    if view.problem:
        yield "problem", view.problem
    if view.error:
        yield "error", f"{view.error}: {view.message}" if view.message else view.error
    if view.trace:
        yield "trace", view.trace


def _options(view: TaskView) -> Iterator[tuple[str, str]]:
    if view.priority:
        yield "priority", str(view.priority)
    if view.limit:
        yield "limit", view.limit
    if view.tags:
        yield "tags", " ".join(f"{name}={value}" for name, value in sorted(view.tags.items()))
    if view.batch:
        yield "batch", view.batch


def _progress(told: LedgerProgress, *, now: float) -> str:
    share = f" ({told.done / told.total:.0%})" if told.total > 0 else ""
    said = f", {told.message}" if told.message else ""
    return f"{told.done:g} of {told.total:g}{share}{said}, {length(now - told.at_ms / 1000)} ago"


def _stored(payload: PayloadReference) -> str:
    return f"{payload.bytes:,} bytes at {payload.key}"


@click.command(
    short_help="Show the history of a task.",
    epilog="Example: penstock queue history ID --store file:///tmp/store",
)
@click.argument("id", metavar="ID")
@absolute_option
@on_a_queue
def history(*, id: str, store: str | None, name: str, as_json: bool) -> None:
    """Show what has happened to a task, oldest first: when, what, which attempt, who."""
    events, now = asyncio.run(_told(store, name, id))
    if as_json:
        print_json(events)
        return
    rows = [
        (age(each.at, now=now), each.what, str(each.attempt or ""), each.who, each.note)
        for each in events
    ]
    table(("time", "what", "attempt", "who", "note"), rows, numbers=(2,))


async def _told(store: str | None, name: str, id: str) -> tuple[list[TaskEvent], float]:
    async with opened(store, name) as queue:
        return await queue.history(id), queue.access.now().middle


@click.command(
    "list",
    short_help="List tasks by status, type and tags.",
    epilog="Example: penstock queue list --status failed --store file:///tmp/store",
)
@click.option(
    "--status",
    "statuses",
    multiple=True,
    type=click.Choice(STATES),
    help="Only these; may be repeated.",
)
@click.option("--type", help="Only tasks of this type.")
@tag_option
@click.option(
    "--limit",
    type=click.IntRange(1, 10_000),
    default=50,
    show_default=True,
    help="Maximum number of entries.",
)
@absolute_option
@on_a_queue
def list_(
    *,
    statuses: tuple[str, ...],
    type: str | None,
    tags: tuple[str, ...],
    limit: int,
    store: str | None,
    name: str,
    as_json: bool,
) -> None:
    """List tasks: those that run or retry, those that wait, and those that settled recently.

    Settled tasks leave for the archive some minutes after their end, those with a key after a
    day, and are then found by 'get' only. With --status failed alone, the dead letters in the
    archive are listed too. What failed and was replayed since is marked as replayed.
    """
    listing, again, now = asyncio.run(
        _listed(store, name, statuses, type=type, tags=tags, limit=limit)
    )
    if as_json:
        told = plain(listing)
        for task, view in zip(told["tasks"], listing.tasks, strict=True):
            task["is_replayed"] = name_of(view) in again
        print_json(told)
        return
    rows = [
        (
            view.status,
            view.type,
            str(view.attempt or ""),
            age(view.submitted_at, now=now),
            view.id,
            _note(view, now=now, is_replayed=name_of(view) in again),
        )
        for view in listing.tasks
    ]
    if rows:
        heads = ("status", "type", "attempt", "submitted", "id", "note")
        table(heads, rows, numbers=(2,), whole=(4,))
    else:
        click.echo("No such tasks." if statuses or type or tags else "No tasks.", err=True)
    notes([*listing.unknown_tags, *listing.notes])
    if not listing.is_whole:
        notes(["there may be more; raise --limit, or narrow it with --status and --type."])


async def _listed(
    store: str | None,
    name: str,
    statuses: tuple[str, ...],
    *,
    type: str | None,
    tags: tuple[str, ...],
    limit: int,
) -> tuple[TaskListing, frozenset[str], float]:
    """The tasks, the names of those that were replayed, and the store's time then."""
    tag_filters(tags)  # What is wrong is said before anything is asked.
    async with opened(store, name) as queue:
        listing = await queue.tasks(status=statuses or None, type=type, tags=tags, limit=limit)
        is_failed = any(view.status == QueueTaskStatus.FAILED.word for view in listing)
        again = await replayed(queue.access) if is_failed else frozenset()
        return listing, again, queue.access.now().middle


def _note(view: TaskView, *, now: float, is_replayed: bool) -> str:
    told = note_of(view, now=now)
    if not is_replayed:
        return told
    return f"replayed; {told}" if told else "replayed"


_QUIET_SECONDS: Final = 10.0
_FAILURES_MAX: Final = 10
_SECONDS_MAX: Final = 366 * 86_400.0


@click.command(
    short_help="Follow task events.",
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
    help="Polling interval while tasks are active.",
)
@click.option(
    "--for",
    "seconds",
    metavar=DURATION,
    type=Seconds(0, _SECONDS_MAX),
    default=_SECONDS_MAX,
    help="Exit after this time.",
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
            follower = QueueFollower(queue.access, type=type, tags=tag_filters(tags))
            await follower.look()
            click.echo(f"Following {name!r}; Ctrl-C ends it.", err=True)
            await _follow(queue, follower, stopped, every=every, seconds=seconds, as_json=as_json)


async def _follow(
    queue: Queue,
    follower: QueueFollower,
    stopped: asyncio.Event,
    *,
    every: float,
    seconds: float,
    as_json: bool,
) -> None:
    access = queue.access
    clock = access.store.clock.machine
    polling = Polling(min_seconds=every, max_seconds=max(every, _QUIET_SECONDS), factor=1.5)
    pace = PollPace(polling, entropy=access.entropy, clock=clock)
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
            notes([f"the store did not answer, retrying: {error.message}"])
            continue
        failures = 0
        if heard.events:
            pace.reset()
        for event in heard.events:
            print_json_line(event) if as_json else click.echo(_line(event))
        notes(heard.notes)


def _line(event: TaskHappening) -> str:
    many = f" and {event.tasks - 1:,} more" if event.tasks > 1 else ""
    attempt = f"  attempt {event.attempt}" if event.attempt else ""
    who = f"  {_plain(event.who)}" if event.who else ""
    note = f"  {_plain(event.note)}" if event.note else ""
    what = status(event.what, width=13)
    return f"{iso(event.at)}  {what}  {event.type}  {event.id}{many}{attempt}{who}{note}"


def _plain(text: str) -> str:
    """Somebody's words without what a terminal would obey."""
    return "".join(each if each.isprintable() else " " for each in text[:200])


@click.command(
    short_help="Cancel tasks; running ones are asked to stop.",
    epilog="Example: penstock queue cancel ID --store file:///tmp/store",
)
@click.argument("ids", metavar="[ID...]", nargs=-1)
@tag_option
@click.option("--type", help="Tasks of this type that have not ended; with --tag, only those.")
@click.option("--reason", default="", metavar="TEXT", help="The reason, recorded with the task.")
@click.option(
    "--limit",
    type=click.IntRange(1, LIMIT_MAX),
    default=1000,
    show_default=True,
    help="With --type and --tag: at most so many.",
)
@on_a_queue
@click.pass_context
def cancel(
    context: click.Context,
    *,
    ids: tuple[str, ...],
    tags: tuple[str, ...],
    type: str | None,
    reason: str,
    limit: int,
    store: str | None,
    name: str,
    as_json: bool,
) -> None:
    """Cancel tasks that have not started; ask those that run to stop.

    Name them by their ids, or all of a type with --type, or that have a tag with --tag. A worker
    hears of it when it next renews the task's lease, after ten seconds or so. What has ended stays
    as it is.

    Exit code 0: every task is there. 1: one is not, the others are cancelled all the same.
    """
    if bool(ids) == bool(tags or type):
        raise InvalidInput("Name the tasks to cancel by their ids, or by --type and --tag.")
    check_reason(reason)
    for each in ids:
        task_at(each)  # Nothing is cancelled if one of the words is no id.
    tag_filters(tags)
    told: list[str] = []
    if ids:
        answers = asyncio.run(_cancelled(store, name, ids, reason))
    else:
        which: dict[str, Any] = {"type": type, "tags": tags, "limit": limit, "reason": reason}
        answers = asyncio.run(_cancelled_found(store, name, which, told))
    views = [each for each in answers if isinstance(each, TaskView)]
    missing = [each for each in answers if isinstance(each, TaskNotFound)]
    _show(views, as_json=as_json)
    notes(told)
    complain(missing)
    context.exit(1 if missing else 0)


def _show(views: Sequence[TaskView], *, as_json: bool) -> None:
    if as_json:
        print_json(
            [
                {"id": view.id, "status": view.status, "cancel_asked": view.cancel_asked}
                for view in views
            ]
        )
        return
    for view in views:
        click.echo(f"{view.id}  {_cancel_line(view)}")


async def _cancelled(
    store: str | None, name: str, ids: Sequence[str], reason: str
) -> list[TaskView | TaskNotFound]:
    answers: list[TaskView | TaskNotFound] = []
    async with opened(store, name) as queue:
        for each in ids:
            try:
                answers.append(await queue.cancel(each, reason))
            except TaskNotFound as error:
                answers.append(error)
    return answers


async def _cancelled_found(
    store: str | None, name: str, which: Mapping[str, Any], told: list[str]
) -> list[TaskView | TaskNotFound]:
    """Cancel what has this type or these tags and has not ended, a pack at a time."""
    async with opened(store, name) as queue:
        found = await cancel_found(queue.access, **which)
    told += found.notes
    if not found:
        told.append("no open task has that type and these tags.")
    if not found.is_whole:
        told.append("there may be more: repeat, or raise --limit.")
    return list(found)


def _cancel_line(view: TaskView) -> str:
    if view.status == QueueTaskStatus.CANCELLED.word:
        return view.status
    if view.is_settled:
        return f"had ended already: {view.status}"
    return f"{view.status}, asked to stop" if view.cancel_asked else view.status


@click.command(
    short_help="Submit settled tasks again.",
    epilog="Example: penstock queue replay --failed --store file:///tmp/store",
)
@click.argument("ids", metavar="[ID...]", nargs=-1)
@click.option("--failed", is_flag=True, help="All failed tasks not replayed yet.")
@click.option("--type", help="With --failed: only tasks of this type.")
@tag_option
@click.option(
    "--limit",
    type=click.IntRange(1, LIMIT_MAX),
    default=100,
    show_default=True,
    help="With --failed: at most so many.",
)
@on_a_queue
@click.pass_context
def replay(
    context: click.Context,
    *,
    ids: tuple[str, ...],
    failed: bool,
    type: str | None,
    tags: tuple[str, ...],
    limit: int,
    store: str | None,
    name: str,
    as_json: bool,
) -> None:
    """Submit the inputs of settled tasks again, as new tasks, and print their ids.

    To replay a task twice is to replay it once: the second time shows what became of the first.
    The old task stays as it is.

    Exit code 0: all are submitted. 1: one is not, the others are all the same.
    """
    if bool(ids) == failed:
        raise InvalidInput("Name the tasks to replay by their ids, or give --failed.")
    if type is not None and not failed:
        raise InvalidInput("--type goes with --failed.")
    if tags and not failed:
        raise InvalidInput("--tag goes with --failed.")
    tag_filters(tags)
    for each in ids:
        task_at(each)  # Nothing is submitted if one of the words is no id.
    told: list[str] = []
    if ids:
        answers = asyncio.run(_replayed(store, name, ids))
    else:
        found = _replayed_failed(store, name, type=type, tags=tags, limit=limit, told=told)
        answers = asyncio.run(found)
    done = [each for each in answers if isinstance(each, _Replay)]
    refused = [each for each in answers if isinstance(each, PenstockError)]
    if as_json:
        print_json(done)
    else:
        for made in done:
            click.echo(f"{made.id}  {_replay_line(made)}")
        if not answers:
            click.echo("No failed tasks to replay.", err=True)
    notes(told)
    complain(refused)
    context.exit(1 if refused else 0)


@dataclass(frozen=True, slots=True)
class _Replay:
    """That one task replays another; `status` is where it is now."""

    of: str
    id: str
    status: str


def _replay_line(made: _Replay) -> str:
    if made.status in STATES[:4]:
        return f"replays {made.of}"
    is_cancelled = made.status == QueueTaskStatus.CANCELLED.word
    end = f"was {made.status}" if is_cancelled else made.status
    return f"has replayed {made.of} before, and {end}; to go on, replay it"


async def _replayed(
    store: str | None, name: str, ids: Sequence[str]
) -> list[_Replay | PenstockError]:
    async with opened(store, name) as queue:
        return [await _one(queue, each) for each in ids]


async def _replayed_failed(
    store: str | None,
    name: str,
    *,
    type: str | None,
    tags: Sequence[str],
    limit: int,
    told: list[str],
) -> list[_Replay | PenstockError]:
    async with opened(store, name) as queue:
        done = await replayed(queue.access)
        found = await list_tasks(
            queue.access,
            statuses=(QueueTaskStatus.FAILED.word,),
            type=type,
            tags=tags,
            limit=LIMIT_MAX,
            among="that has failed",
        )
        # A name that is mistyped must not make 'name!=value' mean everything.
        for sentence in found.unknown_tags:
            raise InvalidInput(f"Nothing was replayed: {sentence}")
        left = [view for view in found.tasks if name_of(view) not in done]
        told += found.notes
        if len(left) > limit or not found.is_whole:
            told.append(f"there are more than these {len(left[:limit])} failed tasks.")
        return [await _listed_ids(queue, view) for view in left[:limit]]


async def _one(queue: Queue, id: str) -> _Replay | PenstockError:
    try:
        task = await queue.replay(id)
        # It may have been replayed before: what became of that?
        return _Replay(id, task.id, (await task.view()).status)
    except (InvalidInput, TaskError) as error:
        return error


async def _listed_ids(queue: Queue, view: TaskView) -> _Replay:
    """Replay what was just read, without looking for it in the archive again."""
    with labelled("submit"):
        task = await replay_view(queue.access, view)
    return _Replay(view.id, task, (await queue.get(task)).status)
