"""`penstock dataset refresh`: have `current.json` say what is published."""

from __future__ import annotations

import click

from penstock.cli.calling import asked, on_a_dispatcher
from penstock.cli.completing import datasets
from penstock.cli.telling import counted, show_json
from penstock.dispatcher.client import Client
from penstock.dispatcher.wire.datasets import RefreshAnswer

_REQUESTS_MAX = 100_000


@click.command(
    short_help="Write current.json again where it does not say what is published.",
    epilog="Example: penstock dataset refresh sales",
)
@click.argument("name", metavar="DATASET", shell_complete=datasets)
@on_a_dispatcher
def refresh(*, name: str, url: str, token: str | None, as_json: bool) -> None:
    """Compare every current.json of a dataset with the database, and write those that say
    something else.

    The dispatcher keeps them up to date by itself. This is for after Postgres, or the bucket, was
    brought back from a backup. Partitions that the database does not know are left as they are.
    """
    answer, _ = asked(url, token, lambda client: _refreshed(client, name))
    if as_json:
        show_json(answer)
        return
    looked = counted(answer.looked, "partition")
    said = "all of them say what is published"
    if answer.written:
        said = f"{counted(answer.written, 'file')} said something else, and now do not"
    click.echo(f"{looked} compared: {said}.")


async def _refreshed(client: Client, name: str) -> RefreshAnswer:
    """All that was done until everything was looked at."""
    total = RefreshAnswer(looked=0, written=0, after="")
    for _ in range(_REQUESTS_MAX):
        more = await client.refresh(name, after=total.after or "")
        total = RefreshAnswer(
            looked=total.looked + more.looked,
            written=total.written + more.written,
            after=more.after,
        )
        if more.after is None:
            break
    return total
