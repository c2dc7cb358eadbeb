"""`penstock queue cancel [ID...]`: tasks that are not wanted any more, by id, type or tag."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import click

from penstock.cli.queue.connection import on_a_queue, opened, tag_option
from penstock.cli.queue.showing import as_json as show_json
from penstock.cli.queue.showing import complain, notes
from penstock.kernel.errors import InvalidInput, TaskNotFound
from penstock.queue.cancelling import cancel_found, check_reason
from penstock.queue.inspection.filters import tag_filters
from penstock.queue.inspection.tasks import LIMIT_MAX
from penstock.queue.places import task_at
from penstock.queue.views import TaskView


@click.command(
    short_help="Cancel tasks, or ask those that run to stop.",
    epilog="Example: penstock queue cancel ID --store file:///tmp/store",
)
@click.argument("ids", metavar="[ID...]", nargs=-1)
@tag_option
@click.option("--type", help="Tasks of this type that have not ended; with --tag, only those.")
@click.option("--reason", default="", metavar="TEXT", help="Why, for who looks at the task later.")
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
        show_json(
            [
                {"id": view.id, "status": view.status, "cancel_asked": view.cancel_asked}
                for view in views
            ]
        )
        return
    for view in views:
        click.echo(f"{view.id}  {_words(view)}")


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
        told.append("no task that has not ended is of that type, or has such tags.")
    if not found.is_whole:
        told.append("there may be more: do it again, or raise --limit.")
    return list(found)


def _words(view: TaskView) -> str:
    if view.status == "cancelled":
        return "cancelled"
    if view.is_settled:
        return f"had ended already: {view.status}"
    return f"{view.status}, asked to stop" if view.cancel_asked else view.status
