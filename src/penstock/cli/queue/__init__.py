"""`penstock queue`: the bucket queue from the command line, one file a verb.

Every verb takes `--store`, `--queue` and `--json`. What a program reads goes to standard output;
notes and errors go to standard error. A verb is imported when it is asked for.
"""

from __future__ import annotations

from typing import Final

import click

from penstock.cli.groups import Place, Verbs

_HERE: Final = "penstock.cli.queue"
PLACES: Final = {
    "submit": Place(f"{_HERE}.submit", "submit", "Submit a task, or one a line of a file."),
    "get": Place(f"{_HERE}.get", "get", "Show a task: status, input, result, error."),
    "history": Place(f"{_HERE}.history", "history", "Show what has happened to a task."),
    "list": Place(f"{_HERE}.listing", "list_", "List tasks by status, type and tags."),
    "tail": Place(f"{_HERE}.tail", "tail", "Follow what happens."),
    "cancel": Place(f"{_HERE}.cancel", "cancel", "Cancel tasks, or ask those that run to stop."),
    "replay": Place(f"{_HERE}.replay", "replay", "Submit settled tasks again."),
    "stats": Place(f"{_HERE}.stats", "stats", "Count tasks; show workers and shards."),
    "console": Place(f"{_HERE}.console", "console", "Show queues in a browser, and steer them."),
    "worker": Place(f"{_HERE}.worker", "worker", "Run the worker of your module."),
    "monitor": Place(f"{_HERE}.monitor", "monitor", "Archive and repair, where no worker does."),
    "reshard": Place(
        f"{_HERE}.reshard", "reshard", "Change the number of shards while workers run."
    ),
    "config": Place(f"{_HERE}.config", "config", "Show or change the settings of a queue."),
    "pause": Place(f"{_HERE}.pause", "pause", "Start nothing more until it is resumed."),
    "resume": Place(f"{_HERE}.resume", "resume", "Lift a pause or a drain."),
    "drain": Place(
        f"{_HERE}.drain", "drain", "Take no more tasks; with --wait, until none is left."
    ),
    "limits": Place(
        f"{_HERE}.limits",
        "limits",
        "Limit how many tasks of a key run at a time, or start in a time.",
    ),
    "archive": Place(
        f"{_HERE}.archive", "archive", "Files of settled tasks: list, fetch, flush, retain."
    ),
    "purge": Place(f"{_HERE}.purge", "purge", "Cancel what waits and forget what has ended."),
    "schedule": Place(f"{_HERE}.schedule", "schedule", "Tasks at the times of a cron line."),
    "batch": Place(f"{_HERE}.batch", "batch", "Show how far a batch is, or list batches."),
}


@click.group(
    cls=Verbs,
    places=PLACES,
    invoke_without_command=True,
    short_help="A task queue that needs a bucket and nothing else.",
    epilog="Example: penstock queue submit resize '{\"n\": 1}' --store file:///tmp/store",
)
@click.pass_context
def queue(context: click.Context) -> None:
    """A task queue that needs a bucket and nothing else.

    Say where it is with --store and --queue, or once for all with PENSTOCK_STORE and
    PENSTOCK_QUEUE.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
