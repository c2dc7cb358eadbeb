"""`penstock task logs ID`: what an attempt has printed.

The log of an attempt is a file of the machine that it ran on. A worker tells where when the attempt
has ended; of one that runs it is looked for in the data folder, where workers of this machine put
it. What is followed is read until its attempt has ended, and then to its end.
"""

from __future__ import annotations

import codecs
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click

from penstock.cli.calling import asked, on_a_dispatcher
from penstock.cli.completing import tasks
from penstock.cli.queue.showing import as_json as show_plain
from penstock.cli.queue.showing import notes
from penstock.cli.telling import line
from penstock.cli.terminal import harmless, unguarded
from penstock.dispatcher.client import Client
from penstock.dispatcher.wire.steering import AttemptAnswer, TaskAnswer
from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.errors import InvalidInput, PenstockError
from penstock.runtimes.places import Places
from penstock.settings import read_settings

_PIECE_BYTES: Final = 65_536
_LOOK_SECONDS: Final = 0.5
_FOLLOWED_SECONDS_MAX: Final = 366 * 86_400.0


@click.command(
    short_help="Print what an attempt has printed.",
    epilog="Example: penstock task logs 42 --follow",
)
@click.argument("id", metavar="ID", type=click.IntRange(min=1), shell_complete=tasks())
@click.option("--attempt", metavar="N", type=click.IntRange(min=1), help="[default: the last]")
@click.option("--follow", is_flag=True, help="Go on until the attempt has ended.")
@click.option("--raw", is_flag=True, help="Print its bytes as they are, for a file or a program.")
@click.option(
    "--data",
    type=click.Path(file_okay=False, path_type=Path),
    help="The data folder of the worker, for an attempt that runs.  [default: penstock-data]",
)
@on_a_dispatcher
def logs(
    *,
    id: int,
    attempt: int | None,
    follow: bool,
    raw: bool,
    data: Path | None,
    url: str,
    token: str | None,
    as_json: bool,
) -> None:
    """Print what an attempt of a task has printed, if its log is on this machine.

    Colours are left out, and characters that a terminal would obey are shown as \\u001b and the
    like, unless --raw is given.

    Exit code 0: here it is. 1: there is no such attempt, or its log is elsewhere; then it is said
    where.
    """
    if follow and as_json:
        raise InvalidInput("--follow has no end that --json could wait for; give one of them.")
    clock = SystemClock()

    async def show(client: Client) -> None:
        task = await client.task(id)
        chosen = _chosen(task, attempt)
        log = _log(task, chosen, data)
        if as_json:
            said = b"".join(_pieces(log, 0) if log else ()).decode("utf-8", "replace")
            told = {"task_id": id, "attempt": chosen.number, "worker": chosen.worker}
            show_plain({**told, "log": str(log) if log else None, "text": said})
        elif log is None:
            notes([f"attempt {chosen.number} of task {id} has printed nothing."])
        else:
            await _print(client, id, chosen, log, clock=clock if follow else None, is_raw=raw)

    asked(url, token, show)


def _chosen(task: TaskAnswer, number: int | None) -> AttemptAnswer:
    if not task.attempts:
        raise PenstockError(
            f"Task {task.task.id} has had no attempt yet; it is {task.task.status}."
        )
    if number is None:
        return task.attempts[-1]
    for each in task.attempts:
        if each.number == number:
            return each
    known = ", ".join(str(each.number) for each in task.attempts)
    raise PenstockError(
        f"Task {task.task.id} has no attempt {number} that is kept; it has {known}."
    )


def _log(task: TaskAnswer, attempt: AttemptAnswer, data: Path | None) -> Path | None:
    """The file, which is there; None if this is the machine, and the attempt printed nothing."""
    if attempt.log:
        log = Path(attempt.log)
    else:
        told = read_settings({"data": data}, environment=os.environ, folder=Path.cwd()).settings
        folder = told.data.absolute() / "logs"
        log = Path(Places("file:///", folder).log(task_id=task.task.id, attempt=attempt.number))
    expected = Places("file:///", log.parent).log(task_id=task.task.id, attempt=attempt.number)
    if str(log) != expected:
        # Whoever reports an end names the file: a function, too, and it may be any file of ours.
        raise PenstockError(
            f"The log of attempt {attempt.number} of task {task.task.id} is said to be"
            f" {line(str(attempt.log))}, which is no log of it, so it is not read."
        )
    if log.is_file() and not log.is_symlink():
        return log
    named = f"Attempt {attempt.number} of task {task.task.id}"
    where = f"the machine of worker {line(attempt.worker)}"
    if attempt.log and attempt.ended_at is not None and log.parent.is_dir():
        return None
    if attempt.log:
        raise PenstockError(f"{named} has its log on {where}: {line(attempt.log)}.")
    if attempt.ended_at is not None:
        raise PenstockError(f"{named} has no log: it ended without a word of its worker.")
    raise PenstockError(
        f"{named} runs, and {log} is not there; its log is on {where}.",
        hint="Give the data folder of the worker with --data, or look there.",
    )


async def _print(
    client: Client,
    task_id: int,
    attempt: AttemptAnswer,
    log: Path,
    *,
    clock: Clock | None,
    is_raw: bool,
) -> None:
    """Print the file; with a clock, until the attempt has ended."""
    place = 0
    decoder = io.IncrementalNewlineDecoder(
        codecs.getincrementaldecoder("utf-8")("replace"), translate=True
    )
    is_over = clock is None or attempt.ended_at is not None
    ends_at = clock.monotonic() + _FOLLOWED_SECONDS_MAX if clock is not None else 0.0
    while True:
        for piece in _pieces(log, place):
            place += len(piece)
            if is_raw:
                unguarded(sys.stdout).buffer.write(piece)
                sys.stdout.flush()
            else:
                # Without colours: they are the task's, and would be told from ours by nobody.
                click.echo(harmless(click.unstyle(decoder.decode(piece))), nl=False)
        if is_over or clock is None or clock.monotonic() > ends_at:
            return
        await clock.sleep(_LOOK_SECONDS)
        # Asked before the last look at the file: what was printed until the end is printed.
        found = (await client.task(task_id)).attempts
        is_over = all(each.ended_at is not None for each in found if each.number == attempt.number)


def _pieces(log: Path, place: int) -> Iterator[bytes]:
    """What the file has from a place on, as far as it goes now."""
    with open(os.open(log, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as opened:  # noqa: PTH123 - no link
        opened.seek(place)
        while piece := opened.read(_PIECE_BYTES):
            yield piece
