"""`penstock keys revoke`: end a key at once."""

from __future__ import annotations

import sys

import click

from penstock.cli.calling import asked, on_a_dispatcher
from penstock.cli.telling import show_json
from penstock.kernel.errors import InvalidInput


@click.command(
    short_help="End a key at once.",
    epilog="Example: penstock keys revoke KID",
)
@click.argument("kid", metavar="KID")
@click.option("--yes", is_flag=True, help="Do not ask.")
@on_a_dispatcher
def revoke(*, kid: str, yes: bool, url: str, token: str | None, as_json: bool) -> None:
    """End a key at once: if somebody else may have it.

    What it has signed proves nothing from now on, and others who verify tokens are told of it no
    more. If it signs, its dispatcher makes a new one, which signs at once. Attempts that run have a
    new token by their next heartbeat. A key of KMS that signs has to be rotated away first.

    To change keys without a reason to mistrust them there is 'penstock keys rotate'.

    Exit code 0: it is revoked. 1: there is no such key, or no dispatcher could be asked. 2: it is
    the key of KMS that signs, or nobody has said yes.
    """
    if not yes:
        what = f"What the key {kid} has signed will prove nothing any more."
        if not sys.stdin.isatty():
            raise InvalidInput(what, hint="Nothing was done: say --yes if it is meant.")
        click.confirm(f"{what} Go on?", abort=True, err=True)
    answer, _ = asked(url, token, lambda client: client.revoke_key(kid))
    if as_json:
        show_json(answer)
    elif answer.is_new:
        click.echo(f"{kid} is revoked: see 'penstock keys list'.")
    else:
        click.echo(f"{kid} was revoked before.")
