"""`penstock pause|resume|pressure|operator`: what may run, how much, and what is held back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import click

from penstock.cli.completion import jobs, operators
from penstock.cli.dispatcher_call import (
    ago,
    asked,
    counted,
    fitted,
    line,
    on_a_dispatcher,
    show_json,
)
from penstock.cli.format import length
from penstock.cli.options import absolute_option
from penstock.kernel.errors import InvalidInput
from penstock.protocol.steering import (
    EverythingAnswer,
    JobPausesAnswer,
    PauseAnswer,
    PressureAnswer,
)

_NAMED_MAX: Final = 10


@click.command(
    short_help="Pause a job: start no new tasks.",
    epilog="Example: penstock pause clean --reason 'The bucket is being moved.'",
)
@click.argument("job", metavar="[JOB]", required=False, shell_complete=jobs)
@click.option("--all", "is_all", is_flag=True, help="All jobs.")
@click.option("--reason", metavar="TEXT", help="The reason, shown to others.")
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
    """Start no task of a job until it is resumed. Running tasks continue; new ones wait.

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
    short_help="Resume a paused job.",
    epilog="Example: penstock resume --all",
)
@click.argument("job", metavar="[JOB]", required=False, shell_complete=jobs)
@click.option("--all", "is_all", is_flag=True, help="All jobs.")
@on_a_dispatcher
def resume(*, job: str | None, is_all: bool, url: str, token: str | None, as_json: bool) -> None:
    """Take back what 'penstock pause' did. A pause because of pressure ends by itself.

    With --all it ends all pauses that people have made, also those of single jobs.

    Exit code 0: it is resumed. 1: there is no such job, or the dispatcher cannot be asked.
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
        click.echo(f"{answer.job} is resumed: nothing pauses it.")


def _words(pause: PauseAnswer) -> str:
    return f"bulk tasks only, {line(pause.reason)}" if pause.scope == "bulk" else line(pause.reason)


def _show_all(answer: EverythingAnswer, done: str, *, as_json: bool) -> None:
    """What was done now, and how things are then."""
    if as_json:
        show_json(answer)
        return
    named = f": {_names(answer.jobs)}" if answer.jobs else ""
    click.echo(f"{counted(len(answer.jobs), 'job')} {done}{named}.")
    now = f"Paused manually: {answer.paused_by_people:,}."
    pressed = (
        f" By backpressure: {answer.paused_by_pressure:,}." if answer.paused_by_pressure else ""
    )
    click.echo(f"{now}{pressed}")


def _names(jobs: Sequence[str]) -> str:
    rest = len(jobs) - _NAMED_MAX
    return ", ".join([*jobs[:_NAMED_MAX], *([f"and {rest:,} more"] if rest > 0 else [])])


@click.command(
    short_help="Show backpressure: full queues and paused jobs.",
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


@click.group(
    invoke_without_command=True,
    short_help="Show and set concurrency limits of operators.",
    epilog="Example: penstock operator list",
)
@click.pass_context
def operator(context: click.Context) -> None:
    """What runs and waits of operators, for people and autoscalers, and their limits."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@operator.command(
    "list",
    short_help="List operators with running and waiting tasks.",
    epilog="Example: penstock operator list",
)
@on_a_dispatcher
def list_(*, url: str, token: str | None, as_json: bool) -> None:
    """List operators: what runs, what could run, and how many tasks should run at once.

    The last is the figure for an autoscaler: what runs and waits, as far as limits allow.
    """
    answer, _ = asked(url, token, lambda client: client.operators())
    if as_json:
        show_json(answer)
        return
    rows = [
        (
            line(each.name),
            f"{each.in_flight:,}",
            "" if each.in_flight_max is None else f"{each.in_flight_max:,}",
            f"{each.waiting:,}",
            f"{each.desired:,}",
        )
        for each in answer.operators
    ]
    if rows:
        heads = ("operator", "running", "at most", "waiting", "wanted")
        fitted(heads, rows, numbers=(1, 2, 3, 4))
    else:
        click.echo(
            "There are no operators; a DAG defines them: 'penstock dag apply FILE'.", err=True
        )


@operator.command(
    short_help="Set the concurrency limit of an operator.",
    epilog="Example: penstock operator limit five_jobs:clean 4",
)
@click.argument("name", metavar="OPERATOR", shell_complete=operators)
@click.argument("most", metavar="[NUMBER]", required=False, type=click.IntRange(1, 1_000_000))
@click.option("--none", "is_without", is_flag=True, help="Remove the limit.")
@on_a_dispatcher
def limit(
    *, name: str, most: int | None, is_without: bool, url: str, token: str | None, as_json: bool
) -> None:
    """Say how many tasks of an operator may run at a time, over all workers and jobs.

    Exit code 0: it holds from the next claim on. 1: no job has ever had this operator.
    """
    if (most is None) != is_without:
        raise click.UsageError("Give a number, or --none to remove the limit.")
    answer, _ = asked(url, token, lambda client: client.limit_operator(name, most))
    if as_json:
        show_json(answer)
    elif answer.in_flight_max is None:
        click.echo(f"{line(answer.name)} has no limit.")
    else:
        click.echo(f"At most {answer.in_flight_max:,} tasks of {line(answer.name)} run at a time.")
