"""`penstock outbox`: messages that could not be sent."""

from __future__ import annotations

import click

from penstock.cli.dispatcher_call import (
    ago,
    asked,
    counted,
    fitted,
    gist,
    line,
    on_a_dispatcher,
    show_json,
)
from penstock.cli.format import complain
from penstock.cli.options import absolute_option
from penstock.kernel.errors import PenstockError


@click.group(
    invoke_without_command=True,
    short_help="Show and retry failed outbox messages.",
    epilog="Example: penstock outbox list",
)
@click.pass_context
def outbox(context: click.Context) -> None:
    """Messages to workers and functions that could not be sent, however often it was tried.

    No task is lost by that: tasks that wait too long are announced again.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@outbox.command(
    "list",
    short_help="List messages whose retries are exhausted.",
    epilog="Example: penstock outbox list",
)
@absolute_option
@on_a_dispatcher
def list_(*, url: str, token: str | None, as_json: bool) -> None:
    """List messages that are not tried any more, the oldest first, and why."""
    answer, now = asked(url, token, lambda client: client.outbox())
    if as_json:
        show_json(answer)
        return
    rows = [
        (
            str(each.id),
            line(each.kind),
            line(each.target),
            f"{each.tries:,}",
            ago(each.created_at, now=now),
            gist(each.last_error),
        )
        for each in answer.parked
    ]
    if rows:
        fitted(("id", "kind", "target", "tries", "made", "error"), rows, numbers=(0, 3))
    else:
        click.echo("No failed messages.", err=True)


@outbox.command(
    short_help="Retry messages.",
    epilog="Example: penstock outbox retry 17 18",
)
@click.argument("ids", metavar="ID...", nargs=-1, required=True, type=click.IntRange(min=1))
@on_a_dispatcher
@click.pass_context
def retry(
    context: click.Context, *, ids: tuple[int, ...], url: str, token: str | None, as_json: bool
) -> None:
    """Try messages again that are not tried any more. Those that were sent stay sent.

    Exit code 0: all of them. 1: one is not there, or is still tried; the others are tried again
    all the same.
    """
    wanted = list(dict.fromkeys(ids))
    answer, _ = asked(url, token, lambda client: client.retry_outbox(wanted))
    if as_json:
        show_json(answer)
    else:
        click.echo(f"{counted(answer.retried, 'message')} of {len(wanted):,} will be retried.")
    if answer.retried < len(wanted):
        complain([_not_parked(len(wanted) - answer.retried)])
        context.exit(1)


def _not_parked(count: int) -> PenstockError:
    which = "One message is" if count == 1 else f"{count:,} messages are"
    return PenstockError(
        f"{which} not there, or still tried.", hint="'penstock outbox list' shows what is not."
    )
