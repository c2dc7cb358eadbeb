"""`penstock queue monitor`: look after a queue that no worker looks after."""

from __future__ import annotations

import asyncio
import json
import signal

import click

from penstock.cli.durations import DURATION, Seconds
from penstock.cli.queue.connection import on_a_queue, opened
from penstock.cli.queue.showing import iso, notes
from penstock.queue.chores import chores_of
from penstock.queue.inspection import MonitorPass, run_monitor
from penstock.queue.inspection.alone import PERIOD_SECONDS


@click.command(
    short_help="Archive and repair, where no worker does.",
    epilog="Example: penstock queue monitor --once --store file:///tmp/store",
)
@click.option("--once", is_flag=True, help="Make one pass and end.")
@click.option(
    "--period",
    metavar=DURATION,
    type=Seconds(10, 86_400),
    default=PERIOD_SECONDS,
    show_default=True,
    help="Make a pass so often.",
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
            chores=chores_of(access),
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
