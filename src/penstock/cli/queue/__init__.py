"""`penstock queue`: the bucket queue from the command line, one file a verb.

Every verb takes `--store`, `--queue` and `--json`. What a program reads goes to standard output;
notes and errors go to standard error.
"""

from __future__ import annotations

import click

from penstock.cli.queue.archive import archive
from penstock.cli.queue.batch import batch
from penstock.cli.queue.cancel import cancel
from penstock.cli.queue.drain import drain
from penstock.cli.queue.get import get
from penstock.cli.queue.history import history
from penstock.cli.queue.limits import limits
from penstock.cli.queue.listing import list_
from penstock.cli.queue.monitor import monitor
from penstock.cli.queue.pause import pause
from penstock.cli.queue.purge import purge
from penstock.cli.queue.replay import replay
from penstock.cli.queue.reshard import reshard
from penstock.cli.queue.resume import resume
from penstock.cli.queue.schedule import schedule
from penstock.cli.queue.stats import stats
from penstock.cli.queue.submit import submit
from penstock.cli.queue.tail import tail
from penstock.cli.queue.worker import worker


@click.group(
    invoke_without_command=True,
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


for verb in (submit, get, history, list_, tail, cancel, replay, stats, worker, monitor, reshard):
    queue.add_command(verb)
for verb in (pause, resume, drain, limits):
    queue.add_command(verb)
for verb in (archive, purge):
    queue.add_command(verb)
for verb in (schedule, batch):
    queue.add_command(verb)
