"""`penstock keys list`: the keys, and where each is in its life."""

from __future__ import annotations

import click

from penstock.cli.calling import asked, on_a_dispatcher
from penstock.cli.options import absolute_option
from penstock.cli.telling import ago, fitted, line, show_json
from penstock.dispatcher.wire.keys import KeyAnswer, KeyState


@click.command(
    "list",
    short_help="List the keys that sign tokens.",
    epilog="Example: penstock keys list",
)
@absolute_option
@on_a_dispatcher
def list_(*, url: str, token: str | None, as_json: bool) -> None:
    """List the keys of all dispatchers, the newest first.

    A key is published, so that all who verify tokens know it; then it signs; then it is retired,
    and stays until nothing that it has signed can be shown any more. One that was revoked stays in
    the list for a year. One that signs and is of an earlier rotation belongs to a dispatcher that
    was not heard of since.
    """
    answer, now = asked(url, token, lambda client: client.keys())
    if as_json:
        show_json(answer)
        return
    rows = [
        (
            each.kid,
            _state(each),
            each.signer,
            line(each.holder if each.signer == "kms" else each.holder[:8]),
            ago(each.created_at, now=now),
            ago(each.seen_at, now=now),
            _next(each, now=now),
        )
        for each in answer.keys
    ]
    if not rows:
        click.echo("There are no keys yet; a dispatcher makes one when it starts.", err=True)
        return
    fitted(("key", "state", "signer", "holder", "made", "heard of", ""), rows)


def _state(key: KeyAnswer) -> str:
    if key.revoked_at is not None:
        return "revoked"
    is_late = key.state is KeyState.SIGNING and not key.is_rotated
    return f"{key.state.value}, to be rotated" if is_late else key.state.value


def _next(key: KeyAnswer, *, now: float) -> str:
    if key.revoked_at is not None:
        return f"revoked {ago(key.revoked_at, now=now)}"
    match key.state:
        case KeyState.PUBLISHED:
            return f"signs {ago(key.signs_from, now=now)}"
        case KeyState.RETIRED:
            return f"retired {ago(key.retired_at, now=now)}"
        case KeyState.SIGNING:
            return ""
