"""`penstock queue worker MODULE:WORKER`: run a worker of the user's own module."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import traceback
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NoReturn

import click

from penstock.cli.format import notes
from penstock.cli.installation import log_format_option, show_log
from penstock.cli.options import json_option
from penstock.kernel.errors import InvalidInput, PenstockError
from penstock.queue.client import Queue
from penstock.queue.metrics import MetricsServer, statsd_address
from penstock.queue.settings import DiscoveryMode
from penstock.queue.worker import CONCURRENCY_MAX, Worker

_FORM: Final = "Write MODULE:WORKER, for example tasks:worker for 'worker' in tasks.py."


@click.command(
    short_help="Run a worker from a Python module.",
    epilog="Example: penstock queue worker tasks:worker --concurrency 8",
)
@click.argument("target", metavar="MODULE:WORKER")
@click.option("--concurrency", type=click.IntRange(1, CONCURRENCY_MAX), help="Concurrency.")
@click.option(
    "--mode", type=click.Choice([str(mode) for mode in DiscoveryMode]), help="How to find tasks."
)
@click.option(
    "--name", "called", metavar="NAME", help="Worker name; must be unique in mode direct."
)
@click.option("--max-tasks", type=click.IntRange(1), help="Stop after this many tasks.")
@click.option(
    "--until-empty", is_flag=True, help="Stop when no task of its types is ready or in progress."
)
@click.option("--store", metavar="URL", help="Override the store of the module.")
@click.option("--queue", "name", metavar="NAME", help="Override the queue of the module.")
@click.option(
    "--metrics-port",
    type=click.IntRange(0, 65535),
    help="Serve Prometheus metrics on this port at /metrics.",
)
@click.option(
    "--metrics-host",
    default="127.0.0.1",
    show_default=True,
    help="Listen address of the metrics; 0.0.0.0 for all.",
)
@click.option("--statsd", metavar="HOST:PORT", help="Send StatsD metrics there every ten seconds.")
@log_format_option
@json_option
def worker(
    *,
    target: str,
    concurrency: int | None,
    mode: str | None,
    called: str | None,
    max_tasks: int | None,
    until_empty: bool,
    store: str | None,
    name: str | None,
    metrics_port: int | None,
    metrics_host: str,
    statsd: str | None,
    log_format: str | None,
    as_json: bool,
) -> None:
    """Run the worker that a module of yours has, until SIGTERM or Ctrl-C.

    Or until it is done: with --max-tasks when so many tasks have run, with --until-empty when none
    of its types is ready, running or waiting for a retry. Tasks that are delayed are left.

    The module is imported from the current directory, and has a queue, a worker and handlers:

    \b
        queue = Queue("file:///tmp/store", name="images")
        worker = Worker(queue, concurrency=8)
        @worker.handler("resize")
        def resize(task): return {"ok": task.input["n"]}

    The options go over what the module says; PENSTOCK_STORE and PENSTOCK_QUEUE do not. The log
    goes to standard error, as text on a terminal and else as JSON, one object a line.

    The first signal lets what runs end, for as long as the worker's stop_seconds, and gives the
    rest back; the second gives back at once. Exit code 0 after either.
    """
    pushed_to = None if statsd is None else statsd_address(statsd, option="--statsd")
    found = _found(target)
    if concurrency is not None:
        found.concurrency = concurrency
    if mode is not None:
        found.mode = DiscoveryMode(mode)
    if called is not None:
        found.call(called)
    if pushed_to is not None:
        found.statsd = pushed_to
    if store is not None or name is not None:
        found.queue = Queue(store or found.queue.url, name=name or found.queue.name)
    show_log(log_format)
    if found.queue.url.startswith("memory:"):
        notes(["a memory:// queue is this process's own: only the module itself can submit to it."])
    _tell(found, "started", as_json=as_json)
    try:
        work = found.run(max_tasks=max_tasks, until_empty=until_empty)
        asyncio.run(_run(found, work, metrics_host, metrics_port))
    except BaseExceptionGroup as group:
        _raise_first(group)
    _tell(found, "stopped", as_json=as_json)


async def _run(
    found: Worker,
    work: Coroutine[Any, Any, None],
    host: str,
    port: int | None,
) -> None:
    async with AsyncExitStack() as stack:
        # Where something before it fails, it is never awaited.
        stack.callback(work.close)
        if port is not None:
            door = MetricsServer(found.metrics, host=host, port=port)
            await stack.enter_async_context(door)
            notes([f"metrics are at http://{host}:{door.port}/metrics."])
        await work


def _found(target: str) -> Worker:
    name, separator, attribute = target.partition(":")
    parts = (*name.split("."), attribute)
    if not separator or not all(map(str.isidentifier, parts)) or name.endswith(".py"):
        raise InvalidInput(f"{target!r} does not name a worker.", hint=_FORM)
    module = _imported(name)
    workers = [key for key, value in vars(module).items() if isinstance(value, Worker)]
    known = f"It has: {', '.join(workers)}." if workers else "There is no Worker in it."
    if not hasattr(module, attribute):
        raise InvalidInput(f"The module {name!r} has no {attribute!r}.", hint=known)
    found = getattr(module, attribute)
    if not isinstance(found, Worker):
        kind = type(found).__name__
        raise InvalidInput(f"{target!r} is of type {kind}, not a Worker.", hint=known)
    return found


def _imported(name: str) -> ModuleType:
    """The user's module, from the current directory. Whatever it raises is one sentence."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise InvalidInput(
                f"There is no module {error.name!r} in {here}.", hint=_FORM
            ) from error
        _refuse(name, error)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the module may raise anything
        _refuse(name, error)


def _refuse(name: str, error: BaseException) -> NoReturn:
    if isinstance(error, InvalidInput):
        raise InvalidInput(f"In the module {name!r}: {error.message}", hint=error.hint) from error
    said = f"{type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if Path(frame.filename).is_relative_to(Path.cwd())]
    # The message of a syntax error says itself where it is.
    where = f" ({Path(theirs[-1].filename).name}, line {theirs[-1].lineno})" if theirs else ""
    raise PenstockError(
        f"The module {name!r} cannot be imported: {said}{where}",
        hint="'penstock --debug queue worker ...' shows the traceback.",
    ) from error


def _raise_first(group: BaseExceptionGroup[BaseException]) -> NoReturn:
    """One sentence for what ended a worker, if it is an error that has one."""
    known, others = group.split(PenstockError)
    first: BaseException | None = known
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    if others is not None or first is None:
        raise group
    raise first from group


def _tell(found: Worker, event: str, *, as_json: bool) -> None:
    queue = found.queue
    if as_json:
        told = {
            "event": event,
            "queue": queue.name,
            "types": found.types,
            "concurrency": found.concurrency,
            "mode": str(found.mode),
        }
        click.echo(json.dumps(told))
    elif event == "started":
        click.echo(
            f"Working on {', '.join(found.types) or 'nothing'} of the queue {queue.name!r},"
            f" {found.concurrency} at a time, in mode {found.mode}; Ctrl-C stops.",
            err=True,
        )
    else:
        click.echo("Stopped; all leases are released.", err=True)
