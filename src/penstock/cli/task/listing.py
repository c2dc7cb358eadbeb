"""`penstock task list`: tasks by job, status and partition."""

from __future__ import annotations

from typing import Final

import click

from penstock.cli.calling import asked, on_a_dispatcher
from penstock.cli.completing import jobs
from penstock.cli.options import absolute_option, paged
from penstock.cli.queue.showing import notes
from penstock.cli.telling import ago, fitted, gist, line, show_json
from penstock.dispatcher.wire.asking import TaskStatus
from penstock.dispatcher.wire.steering import TaskSummary

STATUSES: Final = tuple(each.value for each in TaskStatus)


@click.command(
    "list",
    short_help="List tasks by job, status and partition.",
    epilog="Example: penstock task list --job clean --status dead",
)
@click.option("--job", metavar="NAME", shell_complete=jobs, help="Only of this job.")
@click.option("--status", type=click.Choice(STATUSES), help="Only these.")
@click.option("--partition", metavar="KEY", help="Only of this partition.")
@paged(limit=50)
@absolute_option
@on_a_dispatcher
def list_(
    *,
    job: str | None,
    status: str | None,
    partition: str | None,
    limit: int,
    before: int | None,
    url: str,
    token: str | None,
    as_json: bool,
) -> None:
    """List tasks, the newest first."""
    answer, now = asked(
        url,
        token,
        lambda client: client.tasks(
            job=job, status=status, partition_key=partition, limit=limit, before=before
        ),
    )
    if as_json:
        show_json(answer)
        return
    if answer.tasks:
        heads = ("id", "status", "job", "partition", "attempt", "made", "worker", "note")
        fitted(heads, [_row(each, now=now) for each in answer.tasks], numbers=(0, 4), least=(6,))
    else:
        is_some = job or status or partition or before
        click.echo("No such tasks." if is_some else "No tasks.", err=True)
    if answer.before is not None:
        notes([f"there are more; go on with --before {answer.before}."])


def _row(task: TaskSummary, *, now: float) -> tuple[str, ...]:
    return (
        str(task.id),
        task.status,
        task.job,
        line(task.partition_key),
        task.attempts,
        ago(task.created_at, now=now),
        line(task.worker),
        note_of(task, now=now),
    )


def note_of(task: TaskSummary, *, now: float) -> str:
    """The one thing besides its status that is worth knowing of a task."""
    reason = gist(task.reason)
    if task.status in ("queued", "retrying") and task.due_at.timestamp() > now + 1:
        due = f"due {ago(task.due_at, now=now)}"
        return f"{due}, after: {reason}" if reason else due
    return reason
