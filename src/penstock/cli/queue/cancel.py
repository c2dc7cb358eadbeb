"""`penstock queue cancel ID...`: tasks that are not wanted any more."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import click

from penstock.cli.queue.connection import on_a_queue, opened
from penstock.cli.queue.showing import as_json as show_json
from penstock.cli.queue.showing import complain
from penstock.kernel.errors import TaskNotFound
from penstock.queue.places import task_at
from penstock.queue.views import TaskView


@click.command(
    short_help="Cancel tasks, or ask those that run to stop.",
    epilog="Example: penstock queue cancel ID --store file:///tmp/store",
)
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@on_a_queue
@click.pass_context
def cancel(
    context: click.Context, *, ids: tuple[str, ...], store: str | None, name: str, as_json: bool
) -> None:
    """Cancel tasks that have not started; ask those that run to stop.

    A worker hears of it when it next renews the task's lease, after ten seconds or so. What has
    ended stays as it is.

    Exit code 0: every task is there. 1: one is not, the others are cancelled all the same.
    """
    for each in ids:
        task_at(each)  # Nothing is cancelled if one of the words is no id.
    answers = asyncio.run(_cancelled(store, name, ids))
    views = [each for each in answers if isinstance(each, TaskView)]
    missing = [each for each in answers if isinstance(each, TaskNotFound)]
    if as_json:
        show_json(
            [
                {"id": view.id, "status": view.status, "cancel_asked": view.cancel_asked}
                for view in views
            ]
        )
    else:
        for view in views:
            click.echo(f"{view.id}  {_words(view)}")
    complain(missing)
    context.exit(1 if missing else 0)


async def _cancelled(
    store: str | None, name: str, ids: Sequence[str]
) -> list[TaskView | TaskNotFound]:
    answers: list[TaskView | TaskNotFound] = []
    async with opened(store, name) as queue:
        for each in ids:
            try:
                answers.append(await queue.cancel(each))
            except TaskNotFound as error:
                answers.append(error)
    return answers


def _words(view: TaskView) -> str:
    if view.status == "cancelled":
        return "cancelled"
    if view.is_settled:
        return f"had ended already: {view.status}"
    return f"{view.status}, asked to stop" if view.cancel_asked else view.status
