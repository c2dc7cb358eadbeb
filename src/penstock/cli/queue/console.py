"""`penstock queue console`: the queues of a store in a browser, without a dispatcher."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Final

import click
from click.core import ParameterSource

from penstock.cli.installation import log_format_option, settings_of, show_log, wiring
from penstock.cli.queue.connection import checked_store, on_a_queue
from penstock.kernel.errors import InvalidInput
from penstock.kernel.signals import stopped_by_signals

if TYPE_CHECKING:
    from penstock.queue_console import QueueConsole

_PORT: Final = 7075


@click.command(
    short_help="Show queues in a browser, and steer them.",
    epilog="Example: penstock queue console file:///tmp/store",
)
@click.argument("url", metavar="[URL]", required=False)
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="The address; any other wants a token."
)
@click.option(
    "--port",
    type=click.IntRange(0, 65_535),
    default=_PORT,
    show_default=True,
    help="The port; 0 for any that is free.",
)
@click.option("--read-only", is_flag=True, help="Show everything, change nothing.")
@log_format_option
@on_a_queue
@click.pass_context
def console(
    context: click.Context,
    *,
    url: str | None,
    host: str,
    port: int,
    read_only: bool,
    log_format: str | None,
    store: str | None,
    name: str,
    as_json: bool,
) -> None:
    """Show the queues of a store in a browser until SIGTERM or Ctrl-C.

    URL is the store, as --store is. It needs no Postgres and no dispatcher. What pages show is read
    once for all who watch, and within bounds; while nobody watches nothing is read.

    Without a token it answers on this machine alone, and whoever is there may steer. Set
    PENSTOCK_API_TOKEN to make people sign in, which another --host needs, and PENSTOCK_VIEWER_TOKEN
    to let some look only; PENSTOCK_HOSTS are the names that browsers may use.
    """
    if url and context.get_parameter_source("store") is ParameterSource.COMMANDLINE:
        raise InvalidInput(
            "The store is named twice: as URL and by --store.", hint="Leave one of them out."
        )
    show_log(log_format)
    where = checked_store(url or store)
    settings = settings_of({"host": host, "port": port})
    wired = wiring("penstock.queue_console")
    asked = wired.console_for(settings, store=where, queue=name, is_read_only=read_only)
    asyncio.run(_run(wired.QueueConsole(asked), as_json=as_json))


async def _run(service: QueueConsole, *, as_json: bool) -> None:
    stopped = asyncio.Event()
    with stopped_by_signals(stopped.set):
        async with service:
            if as_json:
                click.echo(json.dumps({"url": service.url}))
            else:
                click.echo(f"The console is at {service.url} ; Ctrl-C stops.", err=True)
            await stopped.wait()
