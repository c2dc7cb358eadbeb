"""`penstock queue`: the bucket queue from the command line, by resource.

Every verb takes `--store`, `--queue` and `--json`. What a program reads goes to standard output;
notes and errors go to standard error. A verb is imported when it is asked for.
"""

from __future__ import annotations

from typing import Final

import click

from penstock.cli.verbs import VerbPlace, Verbs

_HERE: Final = "penstock.cli.queue"
PLACES: Final = {
    "submit": VerbPlace(f"{_HERE}.submit", "submit", "Submit a task, or one per line of a file."),
    "get": VerbPlace(f"{_HERE}.tasks", "get", "Show a task: status, input, result, error."),
    "history": VerbPlace(f"{_HERE}.tasks", "history", "Show the history of a task."),
    "list": VerbPlace(f"{_HERE}.tasks", "list_", "List tasks by status, type and tags."),
    "tail": VerbPlace(f"{_HERE}.tasks", "tail", "Follow task events."),
    "cancel": VerbPlace(
        f"{_HERE}.tasks", "cancel", "Cancel tasks; running ones are asked to stop."
    ),
    "replay": VerbPlace(f"{_HERE}.tasks", "replay", "Submit settled tasks again."),
    "stats": VerbPlace(f"{_HERE}.monitor", "stats", "Count tasks; show workers and shards."),
    "console": VerbPlace(f"{_HERE}.monitor", "console", "Serve a web console for queues."),
    "worker": VerbPlace(f"{_HERE}.worker", "worker", "Run a worker from a Python module."),
    "monitor": VerbPlace(
        f"{_HERE}.monitor", "monitor", "Archive and repair a queue without leased workers."
    ),
    "reshard": VerbPlace(
        f"{_HERE}.control", "reshard", "Change the number of shards while workers run."
    ),
    "config": VerbPlace(f"{_HERE}.control", "config", "Show or change the settings of a queue."),
    "pause": VerbPlace(f"{_HERE}.control", "pause", "Pause a queue: start no new tasks."),
    "resume": VerbPlace(f"{_HERE}.control", "resume", "Lift a pause or a drain."),
    "drain": VerbPlace(
        f"{_HERE}.control", "drain", "Drain a queue: refuse submits; --wait until empty."
    ),
    "limits": VerbPlace(
        f"{_HERE}.limits",
        "limits",
        "Manage concurrency and rate limits per key.",
    ),
    "archive": VerbPlace(f"{_HERE}.archive", "archive", "Manage the archive of settled tasks."),
    "purge": VerbPlace(f"{_HERE}.control", "purge", "Cancel waiting tasks and delete ended ones."),
    "schedule": VerbPlace(f"{_HERE}.schedule", "schedule", "Manage cron schedules."),
    "batch": VerbPlace(
        f"{_HERE}.schedule", "batch", "Show the progress of a batch, or list batches."
    ),
}


@click.group(
    cls=Verbs,
    places=PLACES,
    invoke_without_command=True,
    short_help="A task queue that needs only a bucket.",
    epilog="Example: penstock queue submit resize '{\"n\": 1}' --store file:///tmp/store",
)
@click.pass_context
def queue(context: click.Context) -> None:
    """A task queue that needs only a bucket.

    Say where it is with --store and --queue, or once for all with PENSTOCK_STORE and
    PENSTOCK_QUEUE.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
