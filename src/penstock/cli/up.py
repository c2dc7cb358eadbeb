"""`penstock up`: everything in one command, on one data folder."""

from __future__ import annotations

import asyncio
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from penstock.cli.format import complain
from penstock.cli.installation import begun, set_by, wiring
from penstock.kernel.clock import SystemClock
from penstock.kernel.errors import DispatcherUnavailable, InvalidInput, PenstockError
from penstock.kernel.service import stopped_by_signals

if TYPE_CHECKING:
    from penstock.dispatcher.client import Client
    from penstock.installation import Installation

_START_SECONDS_MAX: Final = 60.0
_LOOK_SECONDS: Final = 0.1


@click.command(
    short_help="Run a whole installation on this machine.",
    epilog="Example: penstock up examples/five_jobs.yaml",
)
@click.argument(
    "file", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.option("--force", is_flag=True, help="Apply FILE even if waiting work becomes obsolete.")
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
    "spark",
)
def up(*, file: Path | None, force: bool, **given: Any) -> None:
    """Run a Postgres, a dispatcher, a worker and the sources, until Ctrl-C or SIGTERM.

    FILE, if given, is a DAG that is put in force first. Everything that is kept is in the data
    folder, with a log of every process in its folder logs/. A process that ends or is killed is
    started again; whatever is killed, starting again goes on where it was.

    Functions of jobs are imported from the folder of FILE, or from the current directory.

    Exit code 0 after a signal. 1: a process of it does not start, or FILE would break work (see
    --force). 2: FILE or a setting is wrong; that is told before anything is started.
    """
    if force and file is None:
        raise click.UsageError("--force is about FILE, and there is none.")
    settings = begun(given)
    code = file.absolute().parent if file is not None else Path.cwd()
    installation = wiring("penstock.installation").Installation(
        settings, code=code, waiting=lambda said: click.echo(said, err=True)
    )
    if file is not None:
        # Imported here: reading YAML needs a package that not every installation has.
        reading = import_module("penstock.cli.dag.files")
        dag = reading.read_dag(str(file), runtimes=installation.runtimes)
        if not settings.is_webhook_on_loopback:
            webhook = import_module("penstock.dispatcher.dag.model").WebhookSource
            sources = [(each.name, each.source) for each in dag.jobs]
            bare = [job for job, each in sources if isinstance(each, webhook) and not each.auth]
            wiring("penstock.dispatcher.sources.webhook").check_proved(bare)
    asyncio.run(_run(installation, file, force=force))


async def _run(installation: Installation, file: Path | None, *, force: bool) -> None:
    stopped = asyncio.Event()
    with stopped_by_signals(stopped.set):
        async with installation:
            try:
                await _begin(installation, file, stopped, force=force)
            except PenstockError as error:
                # Told now: what runs may take its time to stop.
                complain([error])
                click.echo("Stopping ...", err=True)
                raise click.exceptions.Exit(2 if isinstance(error, InvalidInput) else 1) from error
            if not stopped.is_set():
                click.echo(
                    f"Penstock is up at {installation.public_url}, for webhooks at"
                    f" {installation.webhook_url}, with {_kept(installation)}; Ctrl-C stops.",
                    err=True,
                )
                await stopped.wait()
                click.echo("Stopping ...", err=True)
    click.echo("Stopped; 'penstock up' continues from here.", err=True)


def _kept(installation: Installation) -> str:
    """Where everything is. A store elsewhere may be one that was exported for something else."""
    if not installation.store:
        return f"everything in {installation.data}"
    return f"datasets and queues in {installation.store}, the rest in {installation.data}"


async def _begin(
    installation: Installation, file: Path | None, stopped: asyncio.Event, *, force: bool
) -> None:
    """Wait until everything is there, and put the DAG in force."""
    # Only now: the help of `penstock up` needs no client.
    from penstock.cli.dag.versions import told  # noqa: PLC0415
    from penstock.dispatcher.client import Client  # noqa: PLC0415

    async with Client(installation.public_url, token=installation.api_token) as client:
        await _until_ready(client, installation, stopped)
        if file is None or stopped.is_set():
            return
        applied = await client.apply(file, force=force)
        if not applied.is_changed:
            click.echo(f"{file} is already in force as version {applied.version}.", err=True)
            return
        click.echo(f"{file} is in force, as version {applied.version}.", err=True)
        for sentence in list(told(applied))[1:]:
            click.echo(f"  {sentence}", err=True)


async def _until_ready(client: Client, installation: Installation, stopped: asyncio.Event) -> None:
    """Wait until the dispatcher answers, and until it has heard of a worker."""
    clock = SystemClock()
    deadline = clock.monotonic() + _START_SECONDS_MAX
    process = "dispatcher"
    while not stopped.is_set():
        try:
            if (await client.status()).workers:
                return
        except DispatcherUnavailable:
            pass
        else:
            if process == "dispatcher":
                process, deadline = "worker", clock.monotonic() + _START_SECONDS_MAX
        if (failure := installation.failure()) is not None:
            raise failure
        if clock.monotonic() > deadline:
            raise PenstockError(
                f"The {process} did not start in {_START_SECONDS_MAX:.0f} s.",
                hint=f"Its log is {installation.log_of(process)}.",
            )
        await clock.sleep(_LOOK_SECONDS)
