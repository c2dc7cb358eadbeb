"""`penstock dataset sweep`: remove what nobody can be reading any more."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import click

from penstock.cli.calling import asked, on_a_dispatcher
from penstock.cli.completing import datasets
from penstock.cli.dataset.showing import size
from penstock.cli.durations import DURATION, Seconds
from penstock.cli.telling import counted, show_json
from penstock.dispatcher.client import Client
from penstock.dispatcher.wire.datasets import SweepAnswer

_REQUESTS_MAX = 100_000


@click.command(
    short_help="Remove files that nobody can be reading any more.",
    epilog="Example: penstock dataset sweep sales",
)
@click.argument("name", metavar="[DATASET]", required=False, shell_complete=datasets)
@click.option(
    "--grace",
    "grace_seconds",
    metavar=DURATION,
    type=Seconds(0, 3.2e9),
    help="Keep what was needed within that time. By default as the dispatcher is set.",
)
@click.option("--dry-run", is_flag=True, help="Remove nothing, and say what would be removed.")
@on_a_dispatcher
def sweep(
    *,
    name: str | None,
    grace_seconds: float | None,
    dry_run: bool,
    url: str,
    token: str | None,
    as_json: bool,
) -> None:
    """Remove the files of attempts that have failed or were replaced, of one dataset or of all.

    The dispatcher does that by itself, every hour. What is published, what may still be read by a
    task, and what was published within the grace is never removed. Somebody who has listed files
    and reads them may lose them with a shorter grace.
    """

    def one(client: Client) -> Awaitable[SweepAnswer]:
        return client.sweep(name, grace_seconds=grace_seconds, dry_run=dry_run)

    answer, _ = asked(url, token, lambda client: _swept(client, one))
    if as_json:
        show_json(answer)
        return
    if answer.files:
        gone, attempts = counted(answer.files, "file"), counted(answer.attempts, "attempt")
        begun = "This would remove" if dry_run else "Removed"
        click.echo(f"{begun} {gone} of {attempts}, {size(answer.bytes)}.")
    else:
        click.echo("There was nothing to remove.")
    if answer.left:
        click.echo(f"{counted(answer.left, 'file')} could not be removed now.", err=True)


async def _swept(client: Client, one: Callable[[Client], Awaitable[SweepAnswer]]) -> SweepAnswer:
    """All that was removed until everything was looked at."""
    total = SweepAnswer(attempts=0, files=0, bytes=0, left=0, is_over=False)
    for _ in range(_REQUESTS_MAX):
        more = await one(client)
        total = SweepAnswer(
            attempts=total.attempts + more.attempts,
            files=total.files + more.files,
            bytes=total.bytes + more.bytes,
            left=total.left + more.left,
            is_over=more.is_over,
        )
        if more.is_over:
            break
    return total
