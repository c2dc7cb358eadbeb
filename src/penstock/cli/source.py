"""`penstock source`: run the small processes that emit events."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.installation import begun, set_by, settings_of, wiring
from penstock.kernel.signals import stopped_by_signals

if TYPE_CHECKING:
    from penstock.dispatcher.sources.admission import Source


@click.group(
    invoke_without_command=True,
    short_help="Run what emits events: cron and webhooks.",
    epilog="Example: penstock source cron --dispatcher http://10.0.0.5:7071",
)
@click.pass_context
def source(context: click.Context) -> None:
    """Run the processes that emit the events of cron and webhook sources.

    `penstock up` runs both. Any number of each may run: what two of them send is one event. Cron
    proves who it is as a worker does, by PENSTOCK_WORKER_SECRET or worker.secret in the data
    folder. Webhooks, which face the internet, have a token of their own, PENSTOCK_WEBHOOK_TOKEN.

    Exit code 0 after a signal. 1: the dispatcher does not let it in, and it is said why.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@source.command(
    short_help="Emit the events of cron sources.", epilog="Example: penstock source cron"
)
@set_by("data", "dispatchers")
def cron(**given: Any) -> None:
    """Emit an event at every time that a cron source of the DAG names, until SIGTERM or Ctrl-C."""
    asyncio.run(
        _run(wiring().make_cron_source(begun(given)), "Emitting the events of cron sources")
    )


@source.command(
    short_help="Emit events for requests.",
    epilog="Example: penstock source webhook --webhook-port 80",
)
@set_by("data", "dispatchers", "webhook_host", "webhook_port")
def webhook(**given: Any) -> None:
    """Emit an event for every request to the path of a webhook source, until SIGTERM or Ctrl-C.

    On another address than loopback every source has to have an `auth` in the DAG, and this process
    PENSTOCK_WEBHOOK_TOKEN and none of the other secrets; exit code 2 if not.
    """
    settings = begun(given)
    where = f"http://{settings.webhook_host}:{settings.webhook_port}"
    asyncio.run(_run(wiring().make_webhook_source(settings), f"Taking webhooks at {where}"))


@source.command(
    short_help="Print the token of the process of webhooks.",
    epilog="Example: penstock source token",
)
@set_by("data", is_logging=False)
def token(**given: Any) -> None:
    """Print what 'penstock source webhook' is given as PENSTOCK_WEBHOOK_TOKEN.

    It is made from PENSTOCK_WORKER_SECRET, or from worker.secret in the data folder, and lets its
    holder send events of webhook sources and nothing else. A new secret makes a new token.
    """
    app = wiring()
    click.echo(app.Identities(app.secret_of_settings(settings_of(given))).webhook().token)


async def _run(service: Source, doing: str) -> None:
    stopped = asyncio.Event()
    with stopped_by_signals(stopped.set):
        async with service:
            click.echo(f"{doing}; Ctrl-C stops.", err=True)
            await service.until_let_in(stopped)
            await stopped.wait()
