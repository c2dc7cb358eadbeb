"""`penstock keys` and `penstock token`: what gives access.

Keys sign the tokens of tasks; tokens are for reading datasets, by the catalog and by queries.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from penstock.cli.completion import datasets
from penstock.cli.dispatcher_call import ago, asked, fitted, line, on_a_dispatcher, show_json
from penstock.cli.installation import settings_of, wiring
from penstock.cli.options import DURATION, Days, absolute_option
from penstock.kernel.errors import InvalidInput
from penstock.protocol.keys import KeyAnswer, KeyState


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
    was not seen since.
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
    fitted(("key", "state", "signer", "holder", "made", "seen", ""), rows)


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


@click.command(
    short_help="Rotate the signing keys.",
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
        click.echo(
            f"A rotation was requested {ago(answer.asked_at, now=now)}; no new one was started."
        )
    click.echo(f"New keys sign {ago(answer.signs_from, now=now)}: see 'penstock keys list'.")


@click.command(
    short_help="Revoke a key at once.",
    epilog="Example: penstock keys revoke KID",
)
@click.argument("kid", metavar="KID")
@click.option("--yes", is_flag=True, help="Skip the confirmation.")
@on_a_dispatcher
def revoke(*, kid: str, yes: bool, url: str, token: str | None, as_json: bool) -> None:
    """End a key at once, for example when it may have leaked.

    Tokens that it has signed are refused from now on, and it is no longer among the published keys
    (JWKS). If it is the signing key, its dispatcher makes a new one, which signs at once. Running
    attempts get a new token with their next heartbeat. A key of KMS that signs has to be rotated
    away first.

    For a regular change of keys use 'penstock keys rotate'.

    Exit code 0: it is revoked. 1: there is no such key, or no dispatcher could be asked. 2: it is
    the key of KMS that signs, or it was not confirmed.
    """
    if not yes:
        what = f"What the key {kid} has signed will become invalid."
        if not sys.stdin.isatty():
            raise InvalidInput(what, hint="Nothing was done; confirm with --yes.")
        click.confirm(f"{what} Continue?", abort=True, err=True)
    answer, _ = asked(url, token, lambda client: client.revoke_key(kid))
    if as_json:
        show_json(answer)
    elif answer.is_new:
        click.echo(f"{kid} is revoked: see 'penstock keys list'.")
    else:
        click.echo(f"{kid} was revoked before.")


@click.command(
    "bucket-policy",
    short_help="Print a policy for the bucket.",
    epilog="Example: penstock keys bucket-policy --store s3://lake --role ARN > policy.json",
)
@click.option("--store", metavar="URL", help="s3://BUCKET/PREFIX.  [default: PENSTOCK_STORE]")
@click.option(
    "--role",
    "task_role",
    metavar="ARN",
    help="The role whose credentials tasks are given.  [default: PENSTOCK_TASK_ROLE]",
)
@click.option(
    "--vpc-endpoint",
    metavar="ID",
    default="",
    help="The VPC endpoint that tasks have to come through, as in vpce-1a2b3c4d.",
)
@click.option("--json", "as_json", is_flag=True, help="Print it on one line.")
def bucket_policy(*, vpc_endpoint: str, as_json: bool, **given: Any) -> None:
    """Print a policy for the bucket that denies to tasks what no task is for.

    The credentials of a task are limited by a policy of their own. This one is set on the bucket,
    once, and holds even if one of those were wrong: tasks stay in the folders of datasets and of
    scratch, delete nothing, and open nothing to others. It denies, and allows nothing; merge its
    statements into the policy that the bucket has. Nothing is asked or changed here.

    Exit code 2: there is no role or no bucket.
    """
    settings = settings_of(given)
    if not settings.task_role:
        raise InvalidInput(
            "There is no role of tasks to make a policy for.",
            hint="Name it with --role, or set PENSTOCK_TASK_ROLE.",
        )
    made = wiring("penstock.dispatcher.capabilities.credentials").bucket_policy(
        store_url=settings.store_url, role=settings.task_role, vpc_endpoint=vpc_endpoint
    )
    click.echo(json.dumps(made) if as_json else json.dumps(made, indent=2))


@click.group(
    invoke_without_command=True,
    short_help="Manage the keys that sign task tokens.",
    epilog="Example: penstock keys list",
)
@click.pass_context
def keys(context: click.Context) -> None:
    """Manage the keys that sign task tokens.

    Every dispatcher has its own, in a file of its data folder, or all have one of AWS KMS. What a
    key has signed is verified by its public half, which all dispatchers know.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


for verb in (list_, rotate, revoke, bucket_policy):
    keys.add_command(verb)


@click.group(
    invoke_without_command=True,
    short_help="Manage tokens for reading datasets as tables.",
    epilog="Example: penstock token create bi --dataset sales --days 90",
)
@click.pass_context
def token(context: click.Context) -> None:
    """Tokens for reading datasets, with query engines that speak Iceberg and with queries.

    Such a token opens the catalog below /iceberg and POST /v1/query, for its datasets, and nothing
    else of a dispatcher.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@token.command(
    "create",
    short_help="Create a token.",
    epilog="Example: penstock token create bi --dataset sales --days 90",
)
@click.argument("name", metavar="NAME")
@click.option(
    "--dataset",
    "named",
    metavar="DATASET",
    multiple=True,
    shell_complete=datasets,
    help="For this dataset; may be repeated.  [default: all]",
)
@click.option(
    "--days",
    metavar=DURATION,
    type=Days(1e-6, 36_500),
    help="Lifetime, such as 12h; a number is days.  [default: until it is removed]",
)
@on_a_dispatcher
def create_token(
    *,
    name: str,
    named: tuple[str, ...],
    days: float | None,
    url: str,
    token: str | None,
    as_json: bool,
) -> None:
    """Create a token, and print it. It cannot be shown again."""
    answer, _ = asked(
        url, token, lambda client: client.make_read_token(name, datasets=named, days=days)
    )
    if as_json:
        show_json(answer)
        return
    click.echo(answer.token)


@token.command("list", short_help="List the tokens.", epilog="Example: penstock token list")
@on_a_dispatcher
def list_tokens(*, url: str, token: str | None, as_json: bool) -> None:
    """List the tokens and what they are for, without the tokens themselves."""
    answer, now = asked(url, token, lambda client: client.read_tokens())
    if as_json:
        show_json(answer)
        return
    rows = [
        (
            line(each.name),
            line(", ".join(each.datasets) or "all"),
            ago(each.created_at, now=now),
            _lifetime(is_over=each.is_over, has_end=each.expires_at is not None),
        )
        for each in answer.tokens
    ]
    fitted(("name", "datasets", "made", "good"), rows)


@token.command("remove", short_help="Revoke a token.", epilog="Example: penstock token remove bi")
@click.argument("name", metavar="NAME")
@on_a_dispatcher
def remove_token(*, name: str, url: str, token: str | None, as_json: bool) -> None:
    """Revoke a token. It is refused from now on, everywhere within five seconds."""
    answer, _ = asked(url, token, lambda client: client.remove_read_token(name))
    if as_json:
        show_json(answer)
        return
    click.echo(f"The token {line(answer.name)} is revoked.")


def _lifetime(*, is_over: bool, has_end: bool) -> str:
    if is_over:
        return "no more"
    return "for a time" if has_end else "always"
