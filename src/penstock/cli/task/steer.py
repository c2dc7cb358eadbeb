"""`penstock task cancel ID...` and `penstock task replay ID...`."""

from __future__ import annotations

from collections.abc import Sequence

import click

from penstock.cli.calling import asked, on_a_dispatcher
from penstock.cli.telling import line, show_json
from penstock.dispatcher.wire.work import ResultsAnswer, TaskResult

_ids_argument = click.argument(
    "ids", metavar="ID...", nargs=-1, required=True, type=click.IntRange(min=1)
)


@click.command(
    short_help="Cancel tasks, or ask those that run to stop.",
    epilog="Example: penstock task cancel 42 43 --reason 'Wrong day.'",
)
@_ids_argument
@click.option("--reason", metavar="TEXT", help="What is noted at the tasks.")
@on_a_dispatcher
@click.pass_context
def cancel(
    context: click.Context,
    *,
    ids: tuple[int, ...],
    reason: str | None,
    url: str,
    token: str | None,
    as_json: bool,
) -> None:
    """Cancel tasks that wait; ask those that run to stop, which they hear with a heartbeat.

    Exit code 0: all of them. 1: one was refused, the others are cancelled all the same.
    """
    wanted = _once(ids)
    answer, _ = asked(url, token, lambda client: client.cancel(wanted, reason=reason))
    context.exit(_show(answer, "cancelled", as_json=as_json))


@click.command(
    short_help="Run dead tasks again.",
    epilog="Example: penstock task replay 42",
)
@_ids_argument
@on_a_dispatcher
@click.pass_context
def replay(
    context: click.Context, *, ids: tuple[int, ...], url: str, token: str | None, as_json: bool
) -> None:
    """Queue dead tasks again, with as many attempts more as their job has.

    Exit code 0: all of them. 1: one was refused, the others are queued all the same.
    """
    wanted = _once(ids)
    answer, _ = asked(url, token, lambda client: client.replay(wanted))
    context.exit(_show(answer, "queued again", as_json=as_json))


def _once(ids: Sequence[int]) -> list[int]:
    """Each of them once: a call about one task twice would be refused."""
    return list(dict.fromkeys(ids))


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


def _words(result: TaskResult, done: str) -> str:
    state = result.state
    if result.cancel_asked or (state is not None and state.cancel_asked):
        return "is running and was asked to stop"
    return done


def _why(result: TaskResult) -> str:
    return line(result.detail) or f"Task {result.task_id} was refused: {line(result.why)}."
