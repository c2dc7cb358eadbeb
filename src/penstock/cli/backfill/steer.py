"""`penstock backfill pause|resume|cancel ID`."""

from __future__ import annotations

import click

from penstock.cli.calling import asked, on_a_dispatcher
from penstock.cli.completing import backfills
from penstock.cli.telling import counted, show_json
from penstock.dispatcher.wire.steering import BackfillAnswer

_id_argument = click.argument(
    "id", metavar="ID", type=click.IntRange(min=1), shell_complete=backfills
)


@click.command(
    short_help="Make no more tasks of it for now.",
    epilog="Example: penstock backfill pause 7",
)
@_id_argument
@on_a_dispatcher
def pause(*, id: int, url: str, token: str | None, as_json: bool) -> None:
    """Make no more tasks of a backfill until it is resumed; those that there are go on."""
    found, _ = asked(url, token, lambda client: client.pause_backfill(id))
    _show(found, as_json=as_json)


@click.command(
    short_help="Go on with a paused backfill.",
    epilog="Example: penstock backfill resume 7",
)
@_id_argument
@on_a_dispatcher
def resume(*, id: int, url: str, token: str | None, as_json: bool) -> None:
    """Go on with a backfill that was paused, where it was."""
    found, _ = asked(url, token, lambda client: client.resume_backfill(id))
    _show(found, as_json=as_json)


@click.command(
    short_help="End a backfill before it is done.",
    epilog="Example: penstock backfill cancel 7",
)
@_id_argument
@on_a_dispatcher
def cancel(*, id: int, url: str, token: str | None, as_json: bool) -> None:
    """End a backfill: tasks that wait are cancelled, those that run are asked to stop.

    What it has computed stays.
    """
    found, _ = asked(url, token, lambda client: client.cancel_backfill(id))
    _show(found, as_json=as_json)


def _show(found: BackfillAnswer, *, as_json: bool) -> None:
    if as_json:
        show_json(found)
        return
    still = f"; {counted(found.open, 'task')} of it not over" if found.open else ""
    click.echo(f"Backfill {found.id} of {found.job} is {found.state}{still}.")
