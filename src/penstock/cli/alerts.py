"""`penstock alerts`: what is the matter, what was, and who was told."""

from __future__ import annotations

import click

from penstock.cli.dispatcher_call import (
    ago,
    asked,
    counted,
    fitted,
    line,
    on_a_dispatcher,
    show_json,
)
from penstock.cli.options import absolute_option, paged
from penstock.protocol.steering import AlertAnswer, AlertsAnswer, AlertState, NoticeState

EXIT_OPEN = 1


@click.command(
    short_help="Show alerts.",
    epilog="Example: penstock alerts --all",
)
@click.option("--all", "is_all", is_flag=True, help="Include resolved alerts.")
@click.option("--rules", "is_rules", is_flag=True, help="Show the rules and the destinations.")
@click.option(
    "--check", is_flag=True, help="Exit with 1 if an alert is open, for scripts and health checks."
)
@paged(limit=100)
@absolute_option
@on_a_dispatcher
def alerts(
    *,
    is_all: bool,
    is_rules: bool,
    check: bool,
    limit: int,
    before: int | None,
    url: str,
    token: str | None,
    as_json: bool,
) -> int:
    """Show the alerts that are open: what a rule of the settings finds to be the matter.

    An alert is over a minute after its cause is gone. Rules, and where notices are sent, are
    settings; see docs/alerts.md.

    Exit code 0: here they are; with --check, none is open. 1: with --check, one is open, or the
    dispatcher cannot be asked.
    """
    state = None if is_all else AlertState.OPEN
    answer, now = asked(
        url, token, lambda client: client.alerts(state=state, limit=limit, before=before)
    )
    if as_json:
        show_json(answer)
    elif is_rules:
        _show_rules(answer)
    else:
        _show(answer, is_all=is_all, now=now)
    is_open = any(each.state is AlertState.OPEN for each in answer.alerts)
    return EXIT_OPEN if check and is_open else 0


def _show(answer: AlertsAnswer, *, is_all: bool, now: float) -> None:
    if answer.alerts:
        rows = [
            (
                str(each.id),
                each.state.value,
                ago(each.opened_at, now=now),
                ago(each.over_at or each.clear_since, now=now),
                each.rule,
                _told(each),
                line(each.summary),
            )
            for each in answer.alerts
        ]
        fitted(("id", "status", "since", "until", "rule", "told", "what"), rows, numbers=(0,))
    elif answer.judged_at is None:
        click.echo("The rules were not evaluated yet.", err=True)
    else:
        click.echo("There are no alerts." if is_all else "No alert is open.", err=True)
    if answer.before is not None:
        click.echo(f"There may be more: --before {answer.before}", err=True)


def _told(alert: AlertAnswer) -> str:
    """Who was told, and who was not."""
    late = [each for each in alert.notices if each.state is not NoticeState.SENT]
    if not late:
        return ", ".join(sorted({each.destination for each in alert.notices}))
    return ", ".join(sorted({f"{each.destination}: {each.state.value}" for each in late}))


def _show_rules(answer: AlertsAnswer) -> None:
    if not answer.rules:
        click.echo("No rule is enabled.", err=True)
        return
    fitted(("rule", "holds if"), [(each.name, each.words) for each in answer.rules])
    told = " and ".join(answer.destinations) or "nobody"
    click.echo(f"\n{counted(len(answer.rules), 'rule')}; notices go to: {told}.")
