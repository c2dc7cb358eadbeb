"""`penstock token`: who may read datasets, by the catalog and by queries, and nothing else."""

from __future__ import annotations

import click

from penstock.cli.completion import datasets
from penstock.cli.dispatcher_call import ago, asked, fitted, line, on_a_dispatcher, show_json
from penstock.cli.options import DURATION, Days


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
def create(
    *,
    name: str,
    named: tuple[str, ...],
    days: float | None,
    url: str,
    token: str | None,
    as_json: bool,
) -> None:
    """Make a token, and print it. It is told this once."""
    answer, _ = asked(
        url, token, lambda client: client.make_read_token(name, datasets=named, days=days)
    )
    if as_json:
        show_json(answer)
        return
    click.echo(answer.token)


@token.command("list", short_help="List the tokens.", epilog="Example: penstock token list")
@on_a_dispatcher
def list_(*, url: str, token: str | None, as_json: bool) -> None:
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
            _end(is_over=each.is_over, has_end=each.expires_at is not None),
        )
        for each in answer.tokens
    ]
    fitted(("name", "datasets", "made", "good"), rows)


@token.command(short_help="Revoke a token.", epilog="Example: penstock token remove bi")
@click.argument("name", metavar="NAME")
@on_a_dispatcher
def remove(*, name: str, url: str, token: str | None, as_json: bool) -> None:
    """Revoke a token. It is refused from now on, everywhere within five seconds."""
    answer, _ = asked(url, token, lambda client: client.remove_read_token(name))
    if as_json:
        show_json(answer)
        return
    click.echo(f"The token {line(answer.name)} is revoked.")


def _end(*, is_over: bool, has_end: bool) -> str:
    if is_over:
        return "no more"
    return "for a time" if has_end else "always"
