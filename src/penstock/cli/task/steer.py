"""`penstock task cancel` and `penstock task replay`: of tasks by number, or of all of some kind.

All of some kind are found first, page by page, and counted; somebody says yes, and then they are
steered in pages too. One that has moved on meanwhile is refused, alone.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

import click

from penstock.cli.calling import asked, on_a_dispatcher
from penstock.cli.completing import jobs, tasks
from penstock.cli.telling import counted, line, show_json
from penstock.dispatcher.client import Client
from penstock.dispatcher.wire.work import ResultsAnswer, TaskResult
from penstock.kernel.errors import InvalidInput

Verb = TypeVar("Verb", bound=Callable[..., Any])

_PAGE: Final = 1000
_FOUND_MAX: Final = 1_000_000
_REFUSED_SHOWN: Final = 10
_OPEN: Final = ("running", "retrying", "queued")
Steer = Callable[[Client, Sequence[int]], Awaitable[ResultsAnswer]]


def _of_tasks(*statuses: str) -> Callable[[Verb], Verb]:
    """Give a verb the ways to say which tasks are meant."""
    likely = tasks(status=statuses[0] if len(statuses) == 1 else None)
    options = (
        click.argument(
            "ids", metavar="[ID...]", nargs=-1, type=click.IntRange(min=1), shell_complete=likely
        ),
        click.option(
            "--job",
            metavar="NAME",
            shell_complete=jobs,
            help="Instead of numbers: all of this job.",
        ),
        click.option("--status", type=click.Choice(statuses), help="Of those, only these."),
        click.option("--partition", metavar="KEY", help="Of those, only of this partition."),
        click.option("--yes", is_flag=True, help="Do not ask whether all of them are meant."),
    )

    def decorate(verb: Verb) -> Verb:
        for option in reversed(options):
            verb = option(verb)
        return verb

    return decorate


@click.command(
    short_help="Cancel tasks, or ask those that run to stop.",
    epilog="Example: penstock task cancel 42 43 --reason 'Wrong day.'",
)
@_of_tasks(*_OPEN)
@click.option("--reason", metavar="TEXT", help="What is noted at the tasks.")
@on_a_dispatcher
@click.pass_context
def cancel(
    context: click.Context, /, *, reason: str | None, url: str, token: str | None, **said: Any
) -> None:
    """Cancel tasks that wait; ask those that run to stop, which they hear with a heartbeat.

    With --job instead of numbers, all of a job that have not ended; they are counted first.

    Exit code 0: all of them. 1: one was refused, the others are cancelled all the same.
    """

    async def steer(client: Client, ids: Sequence[int]) -> ResultsAnswer:
        return await client.cancel(ids, reason=reason)

    context.exit(_steer(url, token, steer, done="cancelled", statuses=_OPEN, **said))


@click.command(
    short_help="Run dead tasks again.",
    epilog="Example: penstock task replay 42",
)
@_of_tasks("dead")
@on_a_dispatcher
@click.pass_context
def replay(context: click.Context, /, *, url: str, token: str | None, **said: Any) -> None:
    """Queue dead tasks again, with as many attempts more as their job has.

    With --job instead of numbers, all dead ones of a job; they are counted first.

    Exit code 0: all of them. 1: one was refused, the others are queued all the same.
    """

    async def steer(client: Client, ids: Sequence[int]) -> ResultsAnswer:
        return await client.replay(ids)

    context.exit(_steer(url, token, steer, done="queued again", statuses=("dead",), **said))


def _steer(
    url: str,
    token: str | None,
    steer: Steer,
    *,
    done: str,
    statuses: Sequence[str],
    ids: tuple[int, ...],
    job: str | None,
    status: str | None,
    partition: str | None,
    yes: bool,
    as_json: bool,
) -> int:
    """Steer the tasks that are meant, say what became of them, and return the exit code."""
    if bool(ids) == bool(job):
        raise InvalidInput("Give the numbers of tasks, or --job for all of a job.")
    if ids and (status or partition):
        raise InvalidInput("--status and --partition are about the tasks of --job.")
    if ids:
        # Each of them once: a call about one task twice would be refused.
        wanted = list(dict.fromkeys(ids))
        answer, _ = asked(url, token, lambda client: steer(client, wanted))
        return _show(answer, done, as_json=as_json)
    wanted_statuses = (status,) if status else statuses
    found, _ = asked(
        url,
        token,
        lambda client: _found(client, wanted_statuses, job=str(job), partition=partition),
    )
    if found and not yes:
        _confirm(f"{counted(len(found), 'task')} of {job} will be {done}.")
    answer, _ = asked(url, token, lambda client: steer(client, found))
    return _show_all(answer, done, as_json=as_json)


async def _found(
    client: Client, statuses: Sequence[str], *, job: str, partition: str | None
) -> list[int]:
    """All tasks of a job that are in one of these statuses now."""
    found: dict[int, None] = {}
    for status in statuses:
        before: int | None = None
        while len(found) < _FOUND_MAX:
            page = await client.tasks(
                job=job, status=status, partition_key=partition, limit=_PAGE, before=before
            )
            found.update(dict.fromkeys(each.id for each in page.tasks))
            before = page.before
            if before is None:
                break
    return list(found)


def _confirm(what: str) -> None:
    if not sys.stdin.isatty():
        raise InvalidInput(what, hint="Nothing was done: say --yes if all of them are meant.")
    click.confirm(f"{what} Go on?", abort=True, err=True)


def _show(answer: ResultsAnswer, done: str, *, as_json: bool) -> int:
    """Say what became of each, and return the exit code."""
    refused = [each for each in answer.results if each.status >= 400]
    if as_json:
        show_json(answer)
    else:
        for each in answer.results:
            if each.status < 400:
                click.echo(f"{each.task_id}  {_words(each, done)}")
    for each in refused:
        click.echo(f"penstock: {_why(each)}", err=True)
    return 1 if refused else 0


def _show_all(answer: ResultsAnswer, done: str, *, as_json: bool) -> int:
    """Say how many were steered, and why some were not."""
    refused = [each for each in answer.results if each.status >= 400]
    well = [each for each in answer.results if each.status < 400]
    if as_json:
        show_json(answer)
    else:
        running = sum(_words(each, done) != done for each in well)
        click.echo(f"{counted(len(well) - running, 'task')} {done}.")
        if running:
            verb = "runs" if running == 1 else "run"
            click.echo(f"{counted(running, 'task')} {verb}, asked to stop.")
    for each in refused[:_REFUSED_SHOWN]:
        click.echo(f"penstock: {_why(each)}", err=True)
    if len(refused) > _REFUSED_SHOWN:
        click.echo(f"penstock: and {len(refused) - _REFUSED_SHOWN:,} more like these.", err=True)
    return 1 if refused else 0


def _words(result: TaskResult, done: str) -> str:
    state = result.state
    if result.cancel_asked or (state is not None and state.cancel_asked):
        return "is running and was asked to stop"
    return done


def _why(result: TaskResult) -> str:
    return line(result.detail) or f"Task {result.task_id} was refused: {line(result.why)}."
