"""`penstock pause JOB` and `penstock resume JOB`: let a job start nothing for a while."""

from __future__ import annotations

import click

from penstock.cli.calling import asked, on_a_dispatcher
from penstock.cli.completing import jobs
from penstock.cli.telling import line, show_json
from penstock.dispatcher.wire.steering import JobPausesAnswer, PauseAnswer


@click.command(
    short_help="Let a job start nothing for now.",
    epilog="Example: penstock pause clean --reason 'The bucket is being moved.'",
)
@click.argument("job", metavar="JOB", shell_complete=jobs)
@click.option("--reason", metavar="TEXT", help="What others are told.")
@on_a_dispatcher
def pause(*, job: str, reason: str | None, url: str, token: str | None, as_json: bool) -> None:
    """Let a job start nothing until it is resumed. What runs goes on; what comes waits.

    Exit code 0: it is paused. 1: there is no such job, or the dispatcher cannot be asked.
    """
    answer, _ = asked(url, token, lambda client: client.pause(job, reason=reason))
    _show(answer, as_json=as_json)


@click.command(
    short_help="Let a paused job go on.",
    epilog="Example: penstock resume clean",
)
@click.argument("job", metavar="JOB", shell_complete=jobs)
@on_a_dispatcher
def resume(*, job: str, url: str, token: str | None, as_json: bool) -> None:
    """Take back what 'penstock pause' did. A pause because of pressure ends by itself.

    Exit code 0: nobody pauses it. 1: there is no such job, or the dispatcher cannot be asked.
    """
    answer, _ = asked(url, token, lambda client: client.resume(job))
    _show(answer, as_json=as_json)


def _show(answer: JobPausesAnswer, *, as_json: bool) -> None:
    """Why a job is paused now, whoever did it."""
    if as_json:
        show_json(answer)
    elif answer.pauses:
        click.echo(f"{answer.job} is paused: {'; '.join(map(_words, answer.pauses))}")
    else:
        click.echo(f"{answer.job} is not paused.")


def _words(pause: PauseAnswer) -> str:
    return f"bulk tasks only, {line(pause.reason)}" if pause.scope == "bulk" else line(pause.reason)
