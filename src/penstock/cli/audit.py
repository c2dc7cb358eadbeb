"""`penstock audit`: who was refused, and what was allowed."""

from __future__ import annotations

import click
import msgspec

from penstock.cli.dispatcher_call import ago, asked, fitted, line, on_a_dispatcher, show_json
from penstock.cli.options import absolute_option, paged
from penstock.protocol.keys import AuditNote


@click.command(
    short_help="Show the audit log.",
    epilog="Example: penstock audit --task 7",
)
@click.option("--task", metavar="N", type=click.IntRange(min=1), help="Only of this task.")
@click.option("--outcome", type=click.Choice(["allowed", "refused"]), help="Only this outcome.")
@paged(limit=100)
@absolute_option
@on_a_dispatcher
def audit(
    *,
    task: int | None,
    outcome: str | None,
    limit: int,
    before: int | None,
    url: str,
    token: str | None,
    as_json: bool,
) -> None:
    """See who was refused, and what was allowed: credentials, tokens, rotations. The newest first.

    The same again within a minute is counted in its note. What a caller says of itself without
    proof stands in the details.
    """
    answer, now = asked(
        url,
        token,
        lambda client: client.audit(task=task, outcome=outcome, limit=limit, before=before),
    )
    if as_json:
        show_json(answer)
        return
    if not answer.notes:
        click.echo("No audit records.", err=True)
        return
    rows = [
        (
            str(each.id),
            ago(each.last_at, now=now),
            each.outcome,
            f"{each.times:,}",
            line(each.what),
            _task(each),
            line(each.caller),
            line(each.address),
            line(each.reason),
            line(msgspec.json.encode(each.detail).decode()) if each.detail else "",
        )
        for each in answer.notes
    ]
    heads = ("id", "when", "outcome", "times", "what", "task", "caller", "from", "reason", "detail")
    fitted(heads, rows, numbers=(0, 3), least=(9, 7, 3, 6))
    if answer.before is not None:
        click.echo(f"There may be more: --before {answer.before}", err=True)


def _task(note: AuditNote) -> str:
    if note.task_id is None:
        return ""
    return str(note.task_id) if note.attempt is None else f"{note.task_id}, {note.attempt}"
