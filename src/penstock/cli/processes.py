"""`penstock dispatcher|worker|sink|source`: run one process of an installation until it stops."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.installation import begun, set_by, settings_of, wiring
from penstock.kernel.service import Services, stopped_by_signals
from penstock.settings import LISTEN_VARIABLE, Settings

if TYPE_CHECKING:
    from penstock.dispatcher.sources.client import SourceProcess
    from penstock.dispatcher_app import Dispatcher
    from penstock.worker.worker import PipelineWorker


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
@click.option(
    "--cron", is_flag=True, help="Emit the events of cron sources too, as 'penstock source cron'."
)
def dispatcher(*, cron: bool, **given: Any) -> None:
    """Run one dispatcher: events in, tasks out, until SIGTERM or Ctrl-C.

    Any number of dispatchers may share a Postgres and a bucket; killing one loses nothing. Without
    --postgres a Postgres of its own is started in the data folder. The public listener is for
    people and programs, the internal one for workers and sources, which bring a token made from
    PENSTOCK_WORKER_SECRET, or from the file worker.secret in the data folder.

    Exit code 0 after a signal.
    """
    asyncio.run(
        _run_dispatcher(wiring("penstock.dispatcher_app").Dispatcher(begun(given), emits_cron=cron))
    )


async def _run_dispatcher(service: Dispatcher) -> None:
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


@click.command(
    short_help="Run a worker of the pipeline.",
    epilog="Example: penstock worker --dispatcher http://10.0.0.5:7071 --concurrency 8",
)
@click.option("--name", metavar="NAME", help="Worker name.  [default: the machine and a number]")
@set_by("data", "store", "profile", "wakeups", "dispatchers", "concurrency", "queues", "spark")
def worker(*, name: str | None, **given: Any) -> None:
    """Run one worker: it claims tasks of the DAG's jobs and runs them, until SIGTERM or Ctrl-C.

    Functions of jobs are imported from the current directory. The worker proves who it is by a
    token made from PENSTOCK_WORKER_SECRET, or from the file worker.secret in the data folder.

    The first signal lets what runs end, for as long as stop_seconds, and gives the rest back; the
    second gives back at once. Exit code 0 after either.
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    asyncio.run(_run_worker(name, begun(given)))


@click.command(
    short_help="Run a sink of buffered datasets.",
    epilog="Example: penstock sink --dispatcher http://10.0.0.5:7071 --concurrency 2",
)
@click.option("--name", metavar="NAME", help="Worker name.  [default: the machine and a number]")
@set_by("data", "store", "profile", "wakeups", "dispatchers", "concurrency", "queues")
def sink(*, name: str | None, **given: Any) -> None:
    """Run a worker of sinks alone: it writes what is published into buffered datasets.

    Every worker runs sinks too, so this is for a machine of their own. Any number may run. It needs
    pyarrow (penstock[query]) and proves who it is as a worker does.

    The first signal lets what runs end, for as long as stop_seconds; the second gives back at once.
    Exit code 0 after either. 2: pyarrow is not installed.
    """
    asyncio.run(_run_worker(name, begun(given), only_sinks=True))


async def _run_worker(name: str | None, settings: Settings, *, only_sinks: bool = False) -> None:
    made: PipelineWorker | None = None
    asked = 0

    def stop() -> None:
        nonlocal asked
        asked += 1
        if made is not None:
            made.stop()

    # From before the wiring is imported, which takes its time: who is told to stop then, stops.
    with stopped_by_signals(stop):
        made = wiring().make_worker(settings, name=name, only_sinks=only_sinks)
        for _ in range(asked):
            made.stop()
        click.echo(f"Working for {', '.join(settings.dispatcher_urls)}; Ctrl-C stops.", err=True)
        async with wiring().make_log_pruning(settings):
            await made.run()
    click.echo("Stopped; all leases are released.", err=True)


@click.group(
    invoke_without_command=True,
    short_help="Run event sources: cron and webhooks.",
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
        _run_source(wiring().make_cron_source(begun(given)), "Emitting the events of cron sources")
    )


@source.command(
    short_help="Serve webhooks and emit their events.",
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
    asyncio.run(_run_source(wiring().make_webhook_source(settings), f"Taking webhooks at {where}"))


@source.command(
    short_help="Print the token of the webhook process.",
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


@click.command(
    short_help="Run a query service.",
    epilog="Example: penstock query-service --dispatcher http://10.0.0.5:7071",
)
@set_by("data", "store", "dispatchers", "query_host", "query_port")
def query_service(**given: Any) -> None:
    """Run SQL over published datasets for people and tasks, until SIGTERM or Ctrl-C.

    Needs penstock[query]. Each query has a process of its own, which can reach nothing but the
    files that it was given. As root on Linux each is a user of its own too; elsewhere only callers
    who may read everything are served. The service holds no key of the installation; it reads the
    store as its environment lets it.

    Exit code 0 after a signal. 2: a package that it needs is not installed.
    """
    settings = begun(given)
    said = os.environ.get(LISTEN_VARIABLE, "")
    service = wiring().make_query_service(settings, descriptor=int(said) if said else None)
    asyncio.run(_run_query_service(service, settings))


async def _run_query_service(service: Services, settings: Settings) -> None:
    stopped = asyncio.Event()
    with stopped_by_signals(stopped.set):
        async with service:
            where = f"http://{settings.query_host}:{settings.query_port}"
            click.echo(f"Serving queries at {where}; Ctrl-C stops.", err=True)
            await stopped.wait()


async def _run_source(service: SourceProcess, doing: str) -> None:
    stopped = asyncio.Event()
    with stopped_by_signals(stopped.set):
        async with service:
            click.echo(f"{doing}; Ctrl-C stops.", err=True)
            await service.until_let_in(stopped)
            await stopped.wait()
