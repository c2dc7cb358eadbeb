"""`penstock pressure`: which queues are too long, and what is paused because of them."""

from __future__ import annotations

import click

from penstock.cli.calling import asked, on_a_dispatcher
from penstock.cli.options import absolute_option
from penstock.cli.queue.showing import length
from penstock.cli.telling import ago, fitted, line, show_json
from penstock.dispatcher.wire.steering import PauseAnswer, PressureAnswer


@click.command(
    short_help="Show full queues and what they pause.",
    epilog="Example: penstock pressure",
)
@absolute_option
@on_a_dispatcher
def pressure(*, url: str, token: str | None, as_json: bool) -> None:
    """Show the jobs whose queues have limits, and the jobs that are paused, and why.

    A queue that is over 'max_queue_depth' or 'max_queue_age' pauses the jobs upstream of it until
    it is well below. Events that are 'held' wait for room in the queue.
    """
    answer, now = asked(url, token, lambda client: client.pressure())
    if as_json:
        show_json(answer)
        return
    if answer.jobs:
        _show_jobs(answer.jobs, now=now)
    else:
        click.echo("No job has a limit on its queue; see max_queue_depth in docs/dag.md.")
    click.echo()
    if answer.pauses:
        _show_pauses(answer.pauses, now=now)
    else:
        click.echo("Nothing is paused.")


def _show_jobs(jobs: list[PressureAnswer], *, now: float) -> None:
    rows = [
        (
            each.job,
            "pressed" if each.pressed else "fine",
            _of(f"{each.depth:,}", None if (most := each.max_queue_depth) is None else f"{most:,}"),
            f"{each.held:,}",
            _of(
                length(each.oldest_seconds),
                None if (age := each.max_queue_age_seconds) is None else length(age),
            ),
            ago(each.since, now=now),
            ", ".join(each.pauses),
            line(each.reason),
        )
        for each in jobs
    ]
    heads = ("job", "state", "depth", "held", "oldest", "since", "pauses", "reason")
    fitted(heads, rows, numbers=(2, 3, 4), least=(5,))


def _show_pauses(pauses: list[PauseAnswer], *, now: float) -> None:
    rows = [
        (
            each.job,
            "bulk tasks" if each.scope == "bulk" else "everything",
            line(each.cause),
            ago(each.since, now=now),
            line(each.reason),
        )
        for each in pauses
    ]
    fitted(("paused", "what", "because of", "since", "reason"), rows)


def _of(now: str, most: str | None) -> str:
    return now if most is None else f"{now} of {most}"
