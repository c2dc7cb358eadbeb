"""`penstock queue monitor|stats|console`: repair, counts, and pages in a browser."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import click
from click.core import ParameterSource

from penstock.cli.format import age, iso, length, notes, print_json
from penstock.cli.installation import log_format_option, settings_of, show_log, wiring
from penstock.cli.options import DURATION, Seconds, absolute_option
from penstock.cli.output import table
from penstock.cli.queue.connection import checked_store, on_a_queue, opened
from penstock.cli.queue.control import held_lines
from penstock.kernel.errors import InvalidInput
from penstock.kernel.service import stopped_by_signals
from penstock.queue import inspection
from penstock.queue.inspection import MonitorPass, Stats, run_monitor
from penstock.queue.inspection.stats import DIRECT
from penstock.queue.maintenance import PERIOD_SECONDS
from penstock.queue.worker import maintenance_tasks

if TYPE_CHECKING:
    from penstock.queue_console import QueueConsole


@click.command(
    short_help="Archive and repair a queue without leased workers.",
    epilog="Example: penstock queue monitor --once --store file:///tmp/store",
)
@click.option("--once", is_flag=True, help="Make one pass and exit.")
@click.option(
    "--period",
    metavar=DURATION,
    type=Seconds(10, 86_400),
    default=PERIOD_SECONDS,
    show_default=True,
    help="Interval between passes.",
)
@on_a_queue
def monitor(*, once: bool, period: float, store: str | None, name: str, as_json: bool) -> None:
    """Archive what is settled and repair what points to tasks, until SIGTERM or Ctrl-C.

    Submits what is due of the queue's schedules and ends its batches, too.

    Workers do this too; it is for queues whose workers are all stopped, or to have it done now.
    It does no harm beside them.

    A pass is three LISTs for a small queue and one more for every 1,000 objects; at the default
    of one every 600 s that is 7 cents a month at S3's prices, and 41 cents for a million
    settled tasks that were submitted one by one. Settled tasks may leave five minutes after
    their submit, those with a key a day after their end; a lost pointer to a task with a key is
    written again one pass after the task is a minute old.
    """
    asyncio.run(_monitored(store, name, once=once, period=period, as_json=as_json))


async def _monitored(
    store: str | None, name: str, *, once: bool, period: float, as_json: bool
) -> None:
    async with opened(store, name) as queue:
        stopping = asyncio.Event()
        access = queue.access

        def tell(made: MonitorPass) -> None:
            at = iso(access.now().middle)
            if as_json:
                click.echo(json.dumps({"at": at, **_figures(made), "notes": made.notes}))
            else:
                click.echo(f"{at}  {_sentence(made)}")
                notes(made.notes)

        if not once:
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, stopping.set)
        await run_monitor(
            access,
            tell=tell,
            stopping=stopping,
            period_seconds=period,
            passes_max=1 if once else None,
            maintenance=maintenance_tasks(access),
        )


def _figures(made: MonitorPass) -> dict[str, int]:
    return {
        "settled_seen": made.settled_seen,
        "ledgers_archived": made.ledgers_archived,
        "pointers_written": made.pointers_written,
    }


def _sentence(made: MonitorPass) -> str:
    if not made.settled_seen and not made.ledgers_archived and not made.pointers_written:
        return "nothing to do"
    return (
        f"{made.settled_seen} settled packs seen, {made.ledgers_archived} archived,"
        f" {made.pointers_written} lost pointers written again"
    )


_FAILURES_OF: Final = 50
"""So many packs that have settled are read for what of them has failed."""


@click.command(
    short_help="Count tasks; show workers and shards.",
    epilog="Example: penstock queue stats --store file:///tmp/store",
)
@absolute_option
@on_a_queue
def stats(*, store: str | None, name: str, as_json: bool) -> None:
    """Count tasks by type, and show the workers and the shards that they own.

    Counted from lists, six for a small queue, and one read a worker; for the failures the last 50
    packs that have settled are read. Tasks of a pack that is in progress all count as in progress;
    settled tasks, and those of them that failed, count until they are archived.
    """
    found = asyncio.run(_counted(store, name))
    if as_json:
        print_json(found)
        return
    _show_types(found)
    _show_workers(found)
    for line in _remarks(found):
        click.echo(line)
    notes(found.notes)


async def _counted(store: str | None, name: str) -> Stats:
    async with opened(store, name) as queue:
        return await inspection.stats(queue.access, failures_of=_FAILURES_OF)


def _show_types(found: Stats) -> None:
    if not found.types:
        click.echo(f"The queue {found.queue!r} is empty.")
        return
    rows = [
        (
            each.type,
            f"{each.ready:,}",
            f"{each.delayed:,}",
            f"{each.in_progress:,}",
            f"{each.settled_recently:,}",
            f"{each.failed_recently or 0:,}",
            "" if each.oldest_ready_at is None else age(each.oldest_ready_at, now=found.at),
        )
        for each in found.types
    ]
    heads = (
        *("type", "ready", "delayed", "in progress"),
        *("settled recently", "failed", "oldest ready since"),
    )
    table(heads, rows, numbers=(1, 2, 3, 4, 5))


def _show_workers(found: Stats) -> None:
    if not found.workers:
        return
    click.echo()
    rows = [
        (
            each.name,
            each.role,
            each.host,
            str(each.pid),
            str(each.concurrency or ""),
            str(len(each.shards)),
            " ".join(each.handles),
            f"in {length(each.ends_at - found.at)}",
        )
        for each in found.workers
    ]
    heads = ("worker", "role", "host", "pid", "at once", "shards", "handles", "expires")
    table(heads, rows, numbers=(3, 4, 5))


def _remarks(found: Stats) -> Iterator[str]:
    yield ""
    yield from held_lines(found.held, now=found.at)
    unowned = len(found.unowned)
    if all(each.role == DIRECT for each in found.workers):
        yield "No worker of the mode 'leased' is registered."
        yield "Those of the modes 'shared' and 'sampled' do not register."
    elif unowned:
        yield f"{unowned} of {found.shards} shards have no owner."
    else:
        yield f"All {found.shards} shards have an owner."
    others = sum(1 for worker in found.workers if worker.of != found.shards)
    if others:
        yield f"Of the workers, {others} have not moved to {found.shards} shards yet."
    if found.monitor:
        yield f"The monitor of the workers of the mode 'shared' is {found.monitor}."
    met = sorted({kind for worker in found.workers for kind in worker.help_wanted})
    if met:
        yield f"No handler, or more than the owners can run, of: {', '.join(met)}."
    if found.dead_letter_objects or any(each.failed_recently for each in found.types):
        yield "dead letters: 'penstock queue list --status failed' shows them."


_PORT: Final = 7075


@click.command(
    short_help="Serve a web console for queues.",
    epilog="Example: penstock queue console file:///tmp/store",
)
@click.argument("url", metavar="[URL]", required=False)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="The address; any other requires a token.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65_535),
    default=_PORT,
    show_default=True,
    help="The port; 0 for any that is free.",
)
@click.option("--read-only", is_flag=True, help="Read-only.")
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
