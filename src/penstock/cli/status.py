"""`penstock status`: everything on one page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import click

from penstock.cli.backfill import show_backfills
from penstock.cli.dispatcher_call import (
    asked,
    counted,
    fitted,
    gist,
    line,
    on_a_dispatcher,
    show_json,
    timeout_option,
)
from penstock.cli.format import length, notes
from penstock.cli.options import absolute_option
from penstock.cli.output import ProgressBar
from penstock.dispatcher.client import Client
from penstock.protocol.steering import JobAnswer, StatusAnswer

_BEHIND_SECONDS: Final = 30.0
_UNSERVED_SECONDS: Final = 15.0
"""A worker hears within seconds of what is new in the DAG."""


@click.command(
    short_help="Show jobs, queues, workers and backfills.",
    epilog="Example: penstock status",
)
@click.option("--wait", is_flag=True, help="Wait until all tasks are settled.")
@timeout_option
@absolute_option
@on_a_dispatcher
def status(
    *, wait: bool, timeout_seconds: float, url: str, token: str | None, as_json: bool
) -> None:
    """Show the jobs of the DAG in force, what waits and runs of each, and open backfills.

    With --wait it is shown when no event, task or backfill is left to work on; tasks of sources,
    which may be always on, do not count, nor what is dead or a paused backfill.

    Exit code 0: here it is. 1: the dispatcher cannot be asked, or the time for --wait is up.
    """

    async def look(client: Client) -> StatusAnswer:
        if not wait:
            return await client.status()
        with _Progress() as progress:
            return await client.wait(timeout_seconds=timeout_seconds, told=progress)

    answer, _ = asked(url, token, look)
    if as_json:
        show_json(answer)
        return
    now = answer.now.timestamp()
    for said in _headline(answer):
        click.echo(said)
    if answer.jobs:
        click.echo()
        heads = ("job", "runs", "waiting", "running", "dead", "oldest", "remarks")
        fitted(heads, [_row(job) for job in answer.jobs], numbers=(2, 3, 4))
    if answer.backfills:
        click.echo()
        show_backfills(answer.backfills, now=now)
    notes(list(_remarks(answer)))


class _Progress(ProgressBar):
    """Says how much is left to do, as a part of the most that there was."""

    _most = 0

    def __call__(self, answer: StatusAnswer) -> None:
        waiting = sum(job.queued for job in answer.jobs)
        running = sum(job.running for job in answer.jobs)
        left = waiting + running + answer.events_pending
        self._most = max(self._most, left)
        text = f"{waiting:,} waiting, {running:,} running, {answer.events_pending:,} events"
        self.show(text, done=self._most - left, of=self._most)


def _headline(answer: StatusAnswer) -> Iterator[str]:
    if answer.dag_version is None:
        yield "No DAG is in force; run 'penstock dag apply FILE'."
    else:
        yield f"DAG version {answer.dag_version}, {counted(len(answer.jobs), 'job')}."
    yield (
        f"{counted(answer.workers, 'worker')}, {counted(answer.events_pending, 'event')} to route,"
        f" {counted(answer.outbox_pending, 'message')} to send."
    )


def _row(job: JobAnswer) -> tuple[str, ...]:
    remarks = [*(["being built"] if job.is_building else []), *map(_paused, job.paused)]
    if job.queued and job.handed_back:
        remarks.append(f"handed back: {gist(job.handed_back)}")
    if job.queued and job.is_unserved and job.oldest_seconds >= _UNSERVED_SECONDS:
        remarks.append(f"no worker takes tasks of {line(job.operator)}")
    runs = "source" if job.activation == "source" and not job.operator else job.operator
    return (
        job.name,
        line(runs),
        f"{job.queued:,}",
        f"{job.running:,}",
        f"{job.dead:,}",
        length(job.oldest_seconds) if job.queued else "",
        "; ".join(remarks),
    )


def _paused(reason: str) -> str:
    return f"paused: {line(reason)}"


def _remarks(answer: StatusAnswer) -> Iterator[str]:
    if not answer.workers and any(job.queued for job in answer.jobs):
        yield "tasks are waiting but no worker is connected; start one with 'penstock worker'."
    if any(job.dead for job in answer.jobs):
        yield "there are dead tasks; 'penstock task list --status dead' shows them."
    for each in answer.tables:
        if each.problem or each.behind_seconds >= _BEHIND_SECONDS:
            why = each.problem or f"{counted(each.behind, 'partition')} wait to be loaded."
            waits = f"; {counted(each.events, 'event')} wait for it" if each.events else ""
            yield f"the table of {each.dataset} is behind{waits}: {line(why)}"
    if answer.outbox_parked:
        yield (
            f"{counted(answer.outbox_parked, 'message')} failed;"
            " see 'penstock outbox list'. No task is lost, but some start later."
        )
