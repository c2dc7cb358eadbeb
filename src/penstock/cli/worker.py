"""`penstock worker`: run one pipeline worker."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.installation import begun, set_by, wiring
from penstock.kernel.signals import stopped_by_signals
from penstock.settings import Settings

if TYPE_CHECKING:
    from penstock.worker.worker import PipelineWorker


@click.command(
    short_help="Run a worker of the pipeline.",
    epilog="Example: penstock worker --dispatcher http://10.0.0.5:7071 --concurrency 8",
)
@click.option(
    "--name", metavar="NAME", help="What it is called.  [default: the machine and a number]"
)
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
    asyncio.run(_run(name, begun(given)))


async def _run(name: str | None, settings: Settings) -> None:
    made: PipelineWorker | None = None
    asked = 0

    def stop() -> None:
        nonlocal asked
        asked += 1
        if made is not None:
            made.stop()

    # From before the wiring is imported, which takes its time: who is told to stop then, stops.
    with stopped_by_signals(stop):
        made = wiring().make_worker(settings, name=name)
        for _ in range(asked):
            made.stop()
        click.echo(f"Working for {', '.join(settings.dispatcher_urls)}; Ctrl-C stops.", err=True)
        async with wiring().make_log_pruning(settings):
            await made.run()
    click.echo("Stopped; nothing is held any more.", err=True)
