"""The command line: one module a resource.

A verb parses its words, asks the layers below to do the work, and prints. What goes wrong is one
sentence on standard error, the next step below it, and an exit code: 1 for a failure, 2 for
words that cannot be right, 128 + n when signal n ended it. SIGTERM and SIGHUP end a verb as Ctrl-C
does: what it has begun is cleaned up first. `--debug`, before or after the verb, shows the
traceback instead. What is printed goes through `terminal`, which lets nobody's text do anything.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import traceback
from types import FrameType, TracebackType
from typing import Final

import click

from penstock.cli.output import guarded, harmless
from penstock.cli.start_page import show_what_next
from penstock.cli.verbs import PLACES, Verbs
from penstock.kernel.errors import InvalidInput, PenstockError
from penstock.kernel.service import forget, note

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_SIGNALLED = 128
_DEBUG: Final = "--debug"
_RANGES: Final = {"valid integer range": "valid integer", "valid float range": "valid number"}
"""What click calls a number that has bounds, and what people call it."""
_interrupted: Final = threading.Event()


@click.group(
    cls=Verbs,
    places=PLACES,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Example: penstock demo",
)
@click.version_option(package_name="penstock", prog_name="penstock")
@click.option(_DEBUG, is_flag=True, help="Show tracebacks on errors.")
@click.pass_context
def cli(context: click.Context, debug: bool) -> None:  # noqa: FBT001 - click passes it so
    """Event-driven data pipelines on a bucket, a Postgres and Spark.

    'penstock' alone says what one can do next.
    """
    context.obj = debug
    if os.environ.get("NO_COLOR"):
        context.color = False
    if context.invoked_subcommand is None:
        show_what_next()


def main() -> None:
    """The entry point of the installed command."""
    sys.unraisablehook = _complain_unless_interrupted
    sys.excepthook = _show_traceback
    sys.exit(run(sys.argv[1:]))


def run(words: list[str]) -> int:
    """Run one command line and return its exit code."""
    with guarded():
        return _run(words)


def _run(words: list[str]) -> int:
    debug, words = _debugged(words)
    ended_by = _end_like_ctrl_c()
    try:
        code: int | None = cli.main(args=words, prog_name="penstock", standalone_mode=False)
    except PenstockError as error:
        if debug:
            raise
        _complain(error.message, error.hint)
        return EXIT_USAGE if isinstance(error, InvalidInput) else EXIT_FAILED
    except click.ClickException as error:
        _complain(*_usage(error))
        return error.exit_code
    except (click.Abort, KeyboardInterrupt, asyncio.CancelledError):
        # asyncio lets the cancellation through if the signal came before its first step.
        _interrupted.set()
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
    except Exception as error:
        if debug:
            raise
        return _confess(_only(error))
    finally:
        forget()
    return code or 0


def _show_traceback(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """What --debug lets through: its message may be of a task, a worker or a bucket, too."""
    with guarded():
        sys.__excepthook__(kind, error, trace)


def _complain_unless_interrupted(problem: sys.UnraisableHookArgs) -> None:
    """What Python cannot raise is shown; not what an interrupt has left half done to be dropped.

    A simulation has thousands of coroutines that end so, with a traceback each.
    """
    if not _interrupted.is_set():
        sys.__unraisablehook__(problem)


def _debugged(words: list[str]) -> tuple[bool, list[str]]:
    """Whether a traceback is wanted, and the words without that, wherever it stood."""
    end = words.index("--") if "--" in words else len(words)
    options = [each for each in words[:end] if each != _DEBUG]
    return len(options) < end, [*options, *words[end:]]


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
    click.echo(f"penstock: {harmless(message)}", err=True)
    if hint:
        click.echo(f"  {harmless(hint)}", err=True)


def _usage(error: click.ClickException) -> tuple[str, str]:
    """What click finds wrong with the words, and where it is told what would be right."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    hint = f"'{context.command_path} --help' shows what it takes." if context is not None else ""
    # It has lines where it lists choices.
    message = " ".join(error.format_message().split())
    for theirs, ours in _RANGES.items():
        message = message.replace(f"is not a {theirs}.", f"is not a {ours}.")
    if context is not None and isinstance(error, click.NoSuchOption):
        word = error.option_name.lstrip("-").upper()
        if any(word == (each.metavar or "").strip("[].") for each in context.command.params):
            message = f"There is no option {error.option_name}: {word} is given without a name."
            _options, *pieces = context.command.collect_usage_pieces(context)
            hint = f"Write {' '.join([context.command_path, *pieces])}"
    return message, hint


def _only(error: Exception) -> Exception:
    """What a group of one is about; tasks that run side by side fail in groups."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _confess(error: Exception) -> int:
    """What nobody has foreseen. A process that keeps a log keeps the traceback in it."""
    if isinstance(error, PenstockError):
        _complain(error.message, error.hint)
        return EXIT_USAGE if isinstance(error, InvalidInput) else EXIT_FAILED
    if any(type(each) is logging.StreamHandler for each in logging.getLogger().handlers):
        traceback.print_exception(error)
    said = str(error).strip().partition("\n")[0]
    _complain(
        f"Internal error: {type(error).__name__}{f': {said}' if said else ''}.",
        "Run again with --debug for the traceback, and report it.",
    )
    return EXIT_FAILED
