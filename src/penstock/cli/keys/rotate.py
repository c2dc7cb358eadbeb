"""`penstock keys rotate`: sign with new keys."""

from __future__ import annotations

import click

from penstock.cli.calling import asked, on_a_dispatcher
from penstock.cli.options import absolute_option
from penstock.cli.telling import ago, show_json


@click.command(
    short_help="Sign with new keys.",
    epilog="Example: penstock keys rotate",
)
@click.option(
    "--kms-key",
    metavar="KEY",
    help="Where AWS KMS signs: the id, ARN or alias of the key that does from now on.",
)
@absolute_option
@on_a_dispatcher
def rotate(*, kms_key: str | None, url: str, token: str | None, as_json: bool) -> None:
    """Have every dispatcher sign with a new key.

    The new keys are published at once and sign in about a minute; then the old ones are retired.
    They stay until the attempts that they have signed for are over, so nothing that runs is
    interrupted. A dispatcher that is away makes its new key when it is back. Asked again before the
    new keys sign, it is the same rotation.

    A key of KMS is not made here. Name another one, or have the alias that the dispatchers are set
    to point to another one before.

    Exit code 0: it was asked for. 1: no dispatcher could be asked. 2: KMS has no such key, or the
    dispatcher does not sign with KMS.
    """
    answer, now = asked(url, token, lambda client: client.rotate_keys(kms_key=kms_key))
    if as_json:
        show_json(answer)
        return
    if not answer.is_new:
        click.echo(f"A rotation was asked for {ago(answer.asked_at, now=now)}; this is the same.")
    click.echo(f"New keys sign {ago(answer.signs_from, now=now)}: see 'penstock keys list'.")
