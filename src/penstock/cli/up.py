"""`penstock up`: everything in one command, on one data folder."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from penstock.cli.installation import begun, set_by, wiring
from penstock.dispatcher.client import Client
from penstock.kernel.clock import SystemClock
from penstock.kernel.errors import DispatcherUnavailable, PenstockError
from penstock.kernel.signals import stopped_by_signals

if TYPE_CHECKING:
    from penstock.app import Installation

_START_SECONDS_MAX: Final = 60.0
_LOOK_SECONDS: Final = 0.1


@click.command(
    short_help="Run everything, on one data folder.",
    epilog="Example: penstock up examples/five_jobs.yaml",
)
@click.argument(
    "file", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@set_by(
    "data",
    "postgres",
    "store",
    "profile",
    "wakeups",
    "host",
    "port",
    "internal_port",
    "webhook_port",
    "concurrency",
)
def up(*, file: Path | None, **given: Any) -> None:
    """Run a Postgres, a dispatcher, a worker and the sources, until Ctrl-C or SIGTERM.

    FILE, if given, is a DAG that is put in force first. Everything that is kept is in the data
    folder, with a log of every process in its folder logs/. A process that ends or is killed is
    started again; whatever is killed, starting again goes on where it was.

    Functions of jobs are imported from the folder of FILE, or from the current directory.
    """
    settings = begun(given)
    code = file.absolute().parent if file is not None else Path.cwd()
    asyncio.run(_run(wiring().Installation(settings, code=code), file))


async def _run(installation: Installation, file: Path | None) -> None:
    stopped = asyncio.Event()
    with stopped_by_signals(stopped.set):
        async with installation:
            async with Client(installation.public_url, token=installation.api_token) as client:
                await _until_ready(client, installation, stopped)
                if file is not None and not stopped.is_set():
                    applied = await client.apply(file)
                    said = "is in force" if applied.is_changed else "was in force already"
                    click.echo(f"{file} {said}, as version {applied.version}.", err=True)
            if not stopped.is_set():
                click.echo(
                    f"Penstock is up at {installation.public_url}, with everything in"
                    f" {installation.data}; Ctrl-C stops.",
                    err=True,
                )
                await stopped.wait()
                click.echo("Stopping ...", err=True)
    click.echo("Stopped; 'penstock up' goes on from here.", err=True)


async def _until_ready(client: Client, installation: Installation, stopped: asyncio.Event) -> None:
    clock = SystemClock()
    deadline = clock.monotonic() + _START_SECONDS_MAX
    while not stopped.is_set():
        try:
            await client.status()
        except DispatcherUnavailable:
            if clock.monotonic() > deadline:
                raise PenstockError(
                    f"The dispatcher did not start in {_START_SECONDS_MAX:.0f} s.",
                    hint=f"Its log is {installation.log_of('dispatcher')}.",
                ) from None
            await clock.sleep(_LOOK_SECONDS)
        else:
            return
