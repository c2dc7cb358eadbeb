"""`penstock pause` and `penstock resume`: let a job, or all of them, start nothing for a while."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import click

from penstock.cli.calling import asked, on_a_dispatcher
from penstock.cli.completing import jobs
from penstock.cli.telling import counted, line, show_json
from penstock.dispatcher.wire.steering import EverythingAnswer, JobPausesAnswer, PauseAnswer
from penstock.kernel.errors import InvalidInput

_NAMED_MAX: Final = 10


@click.command(
    short_help="Let a job start nothing for now.",
    epilog="Example: penstock pause clean --reason 'The bucket is being moved.'",
)
@click.argument("job", metavar="[JOB]", required=False, shell_complete=jobs)
@click.option("--all", "is_all", is_flag=True, help="All jobs, instead of one.")
@click.option("--reason", metavar="TEXT", help="What others are told.")
@on_a_dispatcher
def pause(
    *,
    job: str | None,
    is_all: bool,
    reason: str | None,
    url: str,
    token: str | None,
    as_json: bool,
) -> None:
    """Let a job start nothing until it is resumed. What runs goes on; what comes waits.

    With --all it is all jobs of the DAG, and those of earlier ones that something waits for, at
    once. Each can be resumed by itself. A job that a DAG brings later is not paused.

    Exit code 0: it is paused. 1: there is no such job, or the dispatcher cannot be asked.
    """
    name = _one_or_all(job, is_all=is_all)
    if name is None:
        everything, _ = asked(url, token, lambda client: client.pause_all(reason=reason))
        _show_all(everything, "paused", as_json=as_json)
    else:
        answer, _ = asked(url, token, lambda client: client.pause(name, reason=reason))
        _show(answer, as_json=as_json)


@click.command(
    short_help="Let a paused job go on.",
    epilog="Example: penstock resume --all",
)
@click.argument("job", metavar="[JOB]", required=False, shell_complete=jobs)
@click.option("--all", "is_all", is_flag=True, help="All jobs, instead of one.")
@on_a_dispatcher
def resume(*, job: str | None, is_all: bool, url: str, token: str | None, as_json: bool) -> None:
    """Take back what 'penstock pause' did. A pause because of pressure ends by itself.

    With --all it ends all pauses that people have made, also those of single jobs.

    Exit code 0: nobody pauses it. 1: there is no such job, or the dispatcher cannot be asked.
    """
    name = _one_or_all(job, is_all=is_all)
    if name is None:
        everything, _ = asked(url, token, lambda client: client.resume_all())
        _show_all(everything, "resumed", as_json=as_json)
    else:
        answer, _ = asked(url, token, lambda client: client.resume(name))
        _show(answer, as_json=as_json)


def _one_or_all(job: str | None, *, is_all: bool) -> str | None:
    """The job that is meant; None for all of them."""
    if (job is None) != is_all:
        raise InvalidInput(
            "Name one job, or give --all.", hint="'penstock status' shows the jobs that there are."
        )
    return job


def _show(answer: JobPausesAnswer, *, as_json: bool) -> None:
    """Why a job is paused now, whoever did it."""
    if as_json:
        show_json(answer)
    elif answer.pauses:
        click.echo(f"{answer.job} is paused: {'; '.join(map(_words, answer.pauses))}")
    else:
        click.echo(f"{answer.job} goes on: nothing pauses it.")


def _words(pause: PauseAnswer) -> str:
    return f"bulk tasks only, {line(pause.reason)}" if pause.scope == "bulk" else line(pause.reason)


def _show_all(answer: EverythingAnswer, done: str, *, as_json: bool) -> None:
    """What was done now, and how things are then."""
    if as_json:
        show_json(answer)
        return
    named = f": {_names(answer.jobs)}" if answer.jobs else ""
    click.echo(f"{counted(len(answer.jobs), 'job')} {done}{named}.")
    now = f"Paused by people now: {answer.paused_by_people:,}."
    pressed = f" By pressure: {answer.paused_by_pressure:,}." if answer.paused_by_pressure else ""
    click.echo(f"{now}{pressed}")


def _names(jobs: Sequence[str]) -> str:
    rest = len(jobs) - _NAMED_MAX
    return ", ".join([*jobs[:_NAMED_MAX], *([f"and {rest:,} more"] if rest > 0 else [])])
