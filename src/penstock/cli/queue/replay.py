"""`penstock queue replay ID...`: the same input again, as a new task."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import click

from penstock.cli.queue.connection import on_a_queue, opened, tag_option
from penstock.cli.queue.showing import as_json as show_json
from penstock.cli.queue.showing import complain, notes
from penstock.kernel.errors import InvalidInput, PenstockError, TaskError
from penstock.queue.client import Queue
from penstock.queue.inspection import list_tasks
from penstock.queue.inspection.filters import tag_filters
from penstock.queue.inspection.tasks import LIMIT_MAX
from penstock.queue.places import task_at
from penstock.queue.replays import name_of, replayed
from penstock.queue.replays import replay as replay_view
from penstock.queue.views import STATES, TaskView
from penstock.store.metered import labelled

_ENDS: Final = {
    "succeeded": "succeeded",
    "failed": "failed",
    "cancelled": "was cancelled",
    "expired": "expired",
}


@click.command(
    short_help="Submit settled tasks again.",
    epilog="Example: penstock queue replay --failed --store file:///tmp/store",
)
@click.argument("ids", metavar="[ID...]", nargs=-1)
@click.option("--failed", is_flag=True, help="All failed tasks that were not replayed yet.")
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
        show_json(done)
    else:
        for made in done:
            click.echo(f"{made.id}  {_words(made)}")
        if not answers:
            click.echo("No failed tasks that were not replayed yet.", err=True)
    notes(told)
    complain(refused)
    context.exit(1 if refused else 0)


@dataclass(frozen=True, slots=True)
class _Replay:
    """That one task replays another; `status` is where it is now."""

    of: str
    id: str
    status: str


def _words(made: _Replay) -> str:
    if made.status in STATES[:4]:
        return f"replays {made.of}"
    return f"has replayed {made.of} before, and {_ENDS[made.status]}; to go on, replay it"


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
            statuses=("failed",),
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
        return [await _listed(queue, view) for view in left[:limit]]


async def _one(queue: Queue, id: str) -> _Replay | PenstockError:
    try:
        task = await queue.replay(id)
        # It may have been replayed before: what became of that?
        return _Replay(id, task.id, (await task.view()).status)
    except (InvalidInput, TaskError) as error:
        return error


async def _listed(queue: Queue, view: TaskView) -> _Replay:
    """Replay what was just read, without looking for it in the archive again."""
    with labelled("submit"):
        task = await replay_view(queue.access, view)
    return _Replay(view.id, task, (await queue.get(task)).status)
