"""`penstock dispatcher`: run one dispatcher."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.installation import begun, set_by, wiring
from penstock.kernel.signals import stopped_by_signals

if TYPE_CHECKING:
    from penstock.dispatching import Dispatcher


@click.command(
    short_help="Run a dispatcher.",
    epilog="Example: penstock dispatcher --postgres postgresql://db/penstock --store s3://bucket/p",
)
@set_by(
    "data",
    "postgres",
    "store",
    "profile",
    "wakeups",
    "host",
    "port",
    "internal_host",
    "internal_port",
)
def dispatcher(**given: Any) -> None:
    """Run one dispatcher: events in, tasks out, until SIGTERM or Ctrl-C.

    Any number of dispatchers may share a Postgres and a bucket; killing one loses nothing. Without
    --postgres a Postgres of its own is started in the data folder. The public listener is for
    people and programs, the internal one for workers and sources, which bring a token made from
    PENSTOCK_WORKER_SECRET, or from the file worker.secret in the data folder.

    Exit code 0 after a signal.
    """
    asyncio.run(_run(wiring("penstock.dispatching").Dispatcher(begun(given))))


async def _run(service: Dispatcher) -> None:
    stopped = asyncio.Event()
    with stopped_by_signals(stopped.set):
        async with service:
            public, internal = service.bound
            click.echo(
                f"Serving {public} for people and programs, and {internal} for workers;"
                " Ctrl-C stops.",
                err=True,
            )
            await stopped.wait()
