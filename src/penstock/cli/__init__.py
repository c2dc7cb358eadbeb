"""The command line: one file a verb.

A verb parses its words, asks the layers below to do the work, and prints. What goes wrong is one
sentence on standard error, the next step below it, and an exit code: 1 for a failure, 2 for
words that cannot be right, 128 + n when signal n ended it. SIGTERM and SIGHUP end a verb as Ctrl-C
does: what it has begun is cleaned up first. `--debug` shows the traceback instead.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from types import FrameType

import click

from penstock.cli.backfill import backfill
from penstock.cli.cost import cost
from penstock.cli.dag import dag
from penstock.cli.dataset import dataset
from penstock.cli.demo import demo
from penstock.cli.dispatcher import dispatcher
from penstock.cli.doctor import doctor
from penstock.cli.operator import operator
from penstock.cli.outbox import outbox
from penstock.cli.pause import pause, resume
from penstock.cli.pressure import pressure
from penstock.cli.queue import queue
from penstock.cli.sim import sim
from penstock.cli.source import source
from penstock.cli.status import status
from penstock.cli.task import task
from penstock.cli.trigger import trigger
from penstock.cli.up import up
from penstock.cli.worker import worker
from penstock.kernel.errors import InvalidInput, PenstockError
from penstock.kernel.signals import forget, note

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_SIGNALLED = 128


@click.group(
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="penstock", prog_name="penstock")
@click.option("--debug", is_flag=True, help="Show a traceback when something fails.")
@click.pass_context
def cli(context: click.Context, debug: bool) -> None:  # noqa: FBT001 - click passes it so
    """Event-driven data pipelines on a bucket, a Postgres and Spark."""
    context.obj = debug
    if os.environ.get("NO_COLOR"):
        context.color = False
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
        click.echo("\nWhat next? 'penstock demo' shows what there is.")


cli.add_command(demo)
cli.add_command(doctor)
cli.add_command(queue)
cli.add_command(cost)
cli.add_command(dag)
cli.add_command(sim)
# These run an installation, or a part of it.
for verb in (up, dispatcher, worker, source):
    cli.add_command(verb)
# These talk to a dispatcher.
for verb in (trigger, status, backfill, task, dataset, pressure, pause, resume, operator, outbox):
    cli.add_command(verb)


def main() -> None:
    """The entry point of the installed command."""
    sys.exit(run(sys.argv[1:]))


def run(words: list[str]) -> int:
    """Run one command line and return its exit code."""
    debug = "--debug" in words
    ended_by = _end_like_ctrl_c()
    try:
        code: int | None = cli.main(args=words, prog_name="penstock", standalone_mode=False)
    except PenstockError as error:
        if debug:
            raise
        _complain(error.message, error.hint)
        return EXIT_USAGE if isinstance(error, InvalidInput) else EXIT_FAILED
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt, asyncio.CancelledError):
        # asyncio lets the cancellation through if the signal came before its first step.
        _complain("Interrupted.", "")
        return EXIT_SIGNALLED + (ended_by[0] if ended_by else signal.SIGINT)
    except BrokenPipeError:
        # The reader of our output has left, as `head` does; there is nobody to tell.
        sys.stderr.close()
        return EXIT_FAILED
    except OSError as error:
        if debug:
            raise
        place = f" {error.filename}" if error.filename is not None else ""
        _complain(f"The system refused{place}: {error.strerror or error}.", "")
        return EXIT_FAILED
    finally:
        forget()
    return code or 0


def _end_like_ctrl_c() -> list[int]:
    """Let SIGTERM and SIGHUP interrupt as SIGINT does; returns where the signal is noted."""
    ended_by: list[int] = []

    def interrupt(number: int, _frame: FrameType | None) -> None:
        ended_by.append(number)
        # The exception may be lost, if it comes where Python ignores exceptions.
        note(number)
        signal.raise_signal(signal.SIGINT)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    return ended_by


def _complain(message: str, hint: str) -> None:
    click.echo(f"penstock: {message}", err=True)
    if hint:
        click.echo(f"  {hint}", err=True)
