"""`penstock task`: look at the tasks of a pipeline, follow their logs, cancel or replay them.

The rows and figures of a task that other verbs print too are defined here.
"""

from __future__ import annotations

import codecs
import io
import os
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from penstock.cli.completion import jobs, tasks
from penstock.cli.dispatcher_call import (
    ago,
    asked,
    counted,
    fitted,
    gist,
    line,
    lines,
    on_a_dispatcher,
    show_json,
)
from penstock.cli.format import compact, fields, length, notes, print_json
from penstock.cli.options import absolute_option, paged
from penstock.cli.output import harmless, unguarded
from penstock.dispatcher.client import Client
from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.errors import InvalidInput, PenstockError
from penstock.protocol.base import TaskStatus
from penstock.protocol.steering import AttemptAnswer, ConsumedAnswer, TaskAnswer, TaskSummary
from penstock.protocol.work import ResultsAnswer, TaskResult
from penstock.runtimes.base import AttemptPaths
from penstock.settings import read_settings

_SIZES: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_STEPS: Final = (("stages_done", "stages"), ("tasks_done", "tasks"))


def progress_line(said: Mapping[str, Any]) -> str:
    """How far an attempt is."""
    counts = [
        f"{said[done]:,} of {said[of]:,} {of}"
        for done, of in _STEPS
        if isinstance(said.get(done), int) and isinstance(said.get(of), int)
    ]
    if not counts:
        return compact(said)
    phase = said.get("phase")
    told = ", ".join(counts)
    return f"{line(phase)}: {told}" if isinstance(phase, str) and phase else told


def figures(metrics: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Names and values; those within others follow them, and what is nothing is left out."""
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            for inner, shown in figures(value):
                yield f"{line(name)}.{inner}", shown
        elif value is not None:
            yield line(name), _figure(name, value)


def size(count: float) -> str:
    """So many bytes, in the unit that they are best read in."""
    for unit in _SIZES[:-1]:
        if abs(count) < 1024:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} {_SIZES[-1]}"


def _figure(name: str, value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return line(value if isinstance(value, str) else compact(value))
    if name.endswith("bytes"):
        return size(value)
    if name.endswith("_seconds"):
        return f"{value:,.2f} s"
    if name.endswith("_ms"):
        return f"{value / 1000:,.2f} s"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3g}"


STATUSES: Final = tuple(each.value for each in TaskStatus)


@click.command(
    "list",
    short_help="List tasks by job, status and partition.",
    epilog="Example: penstock task list --job clean --status dead",
)
@click.option("--job", metavar="NAME", shell_complete=jobs, help="Only of this job.")
@click.option("--status", type=click.Choice(STATUSES), help="Only these.")
@click.option("--partition", metavar="KEY", help="Only of this partition.")
@paged(limit=50)
@absolute_option
@on_a_dispatcher
def list_(
    *,
    job: str | None,
    status: str | None,
    partition: str | None,
    limit: int,
    before: int | None,
    url: str,
    token: str | None,
    as_json: bool,
) -> None:
    """List tasks, the newest first."""
    answer, now = asked(
        url,
        token,
        lambda client: client.tasks(
            job=job, status=status, partition_key=partition, limit=limit, before=before
        ),
    )
    if as_json:
        show_json(answer)
        return
    if answer.tasks:
        heads = ("id", "status", "job", "partition", "attempt", "made", "worker", "note")
        fitted(heads, [_row(each, now=now) for each in answer.tasks], numbers=(0, 4), least=(6,))
    else:
        is_some = job or status or partition or before
        click.echo("No such tasks." if is_some else "No tasks.", err=True)
    if answer.before is not None:
        notes([f"there are more; continue with --before {answer.before}."])


def _row(task: TaskSummary, *, now: float) -> tuple[str, ...]:
    return (
        str(task.id),
        task.status,
        task.job,
        line(task.partition_key),
        task.attempts,
        ago(task.created_at, now=now),
        line(task.worker),
        note_of(task, now=now),
    )


def note_of(task: TaskSummary, *, now: float) -> str:
    """The one thing besides its status that is worth knowing of a task."""
    reason = gist(task.reason)
    if (
        task.status in (TaskStatus.QUEUED, TaskStatus.RETRYING)
        and task.due_at.timestamp() > now + 1
    ):
        due = f"due {ago(task.due_at, now=now)}"
        return f"{due}, after: {reason}" if reason else due
    return reason


@click.command(
    short_help="Show a task, its attempts and outputs.",
    epilog="Example: penstock task show 42",
)
@click.argument("id", metavar="ID", type=click.IntRange(min=1), shell_complete=tasks())
@absolute_option
@on_a_dispatcher
def show(*, id: int, url: str, token: str | None, as_json: bool) -> None:
    """Show where a task is, what it was given, its attempts, what the last of them took, which
    changes of its inputs it has consumed, and what it has published.
    """
    answer, now = asked(url, token, lambda client: client.task(id))
    if as_json:
        show_json(answer)
        return
    fields(_rows(answer, now=now))
    if answer.attempts:
        click.echo()
        heads = ("attempt", "status", "worker", "started", "took", "log", "reason")
        rows = [_attempt(each, now=now) for each in answer.attempts]
        fitted(heads, rows, numbers=(0,))
    for each in [each for each in answer.attempts if each.metrics][:1]:
        click.echo()
        fitted((f"attempt {each.number}", "took"), figures(each.metrics or {}), numbers=(1,))
    if answer.consumed:
        click.echo()
        rows = [_consumed(each) for each in answer.consumed]
        fitted(("changes of", "partitions", "parts", "missed", "consumed"), rows, numbers=(1, 2, 3))
    if answer.published:
        click.echo()
        rows = [
            (each.dataset, line(each.partition_key), each.outcome, str(each.revision or ""))
            for each in answer.published
        ]
        fitted(("published", "partition", "now", "revision"), rows, numbers=(3,))
        if answer.omitted:
            click.echo(f"and {answer.omitted:,} more, which are not named here")


def _rows(answer: TaskAnswer, *, now: float) -> Iterator[tuple[str, str]]:
    task = answer.task
    yield "id", str(task.id)
    yield "job", task.job
    yield "operator", line(task.operator)
    yield "status", task.status
    if task.reason:
        # A traceback has lines, and they are worth having once.
        yield "reason", lines(task.reason)
    yield "attempt", task.attempts
    if task.partition_key is not None:
        yield "partition", line(task.partition_key, characters_max=500)
    if isinstance(about := answer.payload.get("maintain"), dict):
        where = f", partition {about['partition_key']}" if about.get("partition_key") else ""
        yield "rewrites", line(f"{about.get('dataset')}{where}", characters_max=500)
    yield "priority", task.priority
    yield "generation", task.generation
    if task.worker:
        yield "worker", line(task.worker)
    yield "made", ago(task.created_at, now=now)
    if task.settled_at is not None:
        yield "ended", ago(task.settled_at, now=now)
    elif task.status != TaskStatus.RUNNING:
        yield "due", ago(task.due_at, now=now)
    running = [each.progress for each in answer.attempts if each.ended_at is None and each.progress]
    for said in running:
        yield "progress", progress_line(said)
    yield "payload", compact(answer.payload)


def _consumed(each: ConsumedAnswer) -> tuple[str, ...]:
    said = (
        f"by attempt {each.attempt}" if each.is_consumed else f"no, read by attempt {each.attempt}"
    )
    return (each.input, str(each.partitions), str(each.parts), str(each.missed), said)


def _attempt(attempt: AttemptAnswer, *, now: float) -> tuple[str, ...]:
    ends = now if attempt.ended_at is None else attempt.ended_at.timestamp()
    return (
        str(attempt.number),
        attempt.outcome or "running",
        line(attempt.worker),
        ago(attempt.started_at, now=now),
        length(ends - attempt.started_at.timestamp()),
        line(attempt.log),
        gist(attempt.reason),
    )


_PIECE_BYTES: Final = 65_536
_LOOK_SECONDS: Final = 0.5
_FOLLOWED_SECONDS_MAX: Final = 366 * 86_400.0


@click.command(
    short_help="Print the log of an attempt.",
    epilog="Example: penstock task logs 42 --follow",
)
@click.argument("id", metavar="ID", type=click.IntRange(min=1), shell_complete=tasks())
@click.option("--attempt", metavar="N", type=click.IntRange(min=1), help="[default: the last]")
@click.option("--follow", is_flag=True, help="Follow until the attempt has ended.")
@click.option("--raw", is_flag=True, help="Print raw bytes, for a file or a program.")
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
            print_json({**told, "log": str(log) if log else None, "text": said})
        elif log is None:
            notes([f"attempt {chosen.number} of task {id} has no output."])
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
        log = Path(
            AttemptPaths("file:///", folder).log(task_id=task.task.id, attempt=attempt.number)
        )
    expected = AttemptPaths("file:///", log.parent).log(
        task_id=task.task.id, attempt=attempt.number
    )
    if str(log) != expected:
        # Whoever reports an end names the file: a function, too, and it may be any file of ours.
        raise PenstockError(
            f"The log of attempt {attempt.number} of task {task.task.id} was reported as"
            f" {line(str(attempt.log))}, which is not its log, so it is not read."
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
        raise PenstockError(f"{named} has no log: its worker reported none.")
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


Verb = TypeVar("Verb", bound=Callable[..., Any])

_PAGE: Final = 1000
_FOUND_MAX: Final = 1_000_000
_REFUSED_SHOWN: Final = 10
_OPEN: Final = (TaskStatus.RUNNING.value, TaskStatus.RETRYING.value, TaskStatus.QUEUED.value)
Steer = Callable[[Client, Sequence[int]], Awaitable[ResultsAnswer]]


def _of_tasks(*statuses: str) -> Callable[[Verb], Verb]:
    """Give a verb the ways to say which tasks are meant."""
    likely = tasks(status=statuses[0] if len(statuses) == 1 else None)
    options = (
        click.argument(
            "ids", metavar="[ID...]", nargs=-1, type=click.IntRange(min=1), shell_complete=likely
        ),
        click.option(
            "--job",
            metavar="NAME",
            shell_complete=jobs,
            help="Instead of ids: all tasks of this job.",
        ),
        click.option(
            "--status", type=click.Choice(statuses), help="With --job: only with this status."
        ),
        click.option("--partition", metavar="KEY", help="With --job: only of this partition."),
        click.option("--yes", is_flag=True, help="Skip the confirmation."),
    )

    def decorate(verb: Verb) -> Verb:
        for option in reversed(options):
            verb = option(verb)
        return verb

    return decorate


@click.command(
    short_help="Cancel tasks; running ones are asked to stop.",
    epilog="Example: penstock task cancel 42 43 --reason 'Wrong day.'",
)
@_of_tasks(*_OPEN)
@click.option("--reason", metavar="TEXT", help="The reason, recorded with the tasks.")
@on_a_dispatcher
@click.pass_context
def cancel(
    context: click.Context, /, *, reason: str | None, url: str, token: str | None, **said: Any
) -> None:
    """Cancel waiting tasks; ask running ones to stop, with the answer to their next heartbeat.

    With --job instead of numbers, all of a job that have not ended; they are counted first.

    Exit code 0: all of them. 1: one was refused, the others are cancelled all the same.
    """

    async def steer(client: Client, ids: Sequence[int]) -> ResultsAnswer:
        return await client.cancel(ids, reason=reason)

    context.exit(_steer(url, token, steer, done="cancelled", statuses=_OPEN, **said))


@click.command(
    short_help="Replay dead tasks.",
    epilog="Example: penstock task replay 42",
)
@_of_tasks(TaskStatus.FAILED.value)
@on_a_dispatcher
@click.pass_context
def replay(context: click.Context, /, *, url: str, token: str | None, **said: Any) -> None:
    """Queue dead tasks again, with as many attempts more as their job has.

    With --job instead of numbers, all dead ones of a job; they are counted first.

    Exit code 0: all of them. 1: one was refused, the others are queued all the same.
    """

    async def steer(client: Client, ids: Sequence[int]) -> ResultsAnswer:
        return await client.replay(ids)

    context.exit(
        _steer(url, token, steer, done="queued again", statuses=(TaskStatus.FAILED.value,), **said)
    )


def _steer(
    url: str,
    token: str | None,
    steer: Steer,
    *,
    done: str,
    statuses: Sequence[str],
    ids: tuple[int, ...],
    job: str | None,
    status: str | None,
    partition: str | None,
    yes: bool,
    as_json: bool,
) -> int:
    """Steer the tasks that are meant, say what became of them, and return the exit code."""
    if bool(ids) == bool(job):
        raise InvalidInput("Give the numbers of tasks, or --job for all of a job.")
    if ids and (status or partition):
        raise InvalidInput("--status and --partition are about the tasks of --job.")
    if ids:
        # Each of them once: a call about one task twice would be refused.
        wanted = list(dict.fromkeys(ids))
        answer, _ = asked(url, token, lambda client: steer(client, wanted))
        return _show(answer, done, as_json=as_json)
    wanted_statuses = (status,) if status else statuses
    found, _ = asked(
        url,
        token,
        lambda client: _found(client, wanted_statuses, job=str(job), partition=partition),
    )
    if found and not yes:
        _confirm(f"{counted(len(found), 'task')} of {job} will be {done}.")
    answer, _ = asked(url, token, lambda client: steer(client, found))
    return _show_all(answer, done, as_json=as_json)


async def _found(
    client: Client, statuses: Sequence[str], *, job: str, partition: str | None
) -> list[int]:
    """All tasks of a job that are in one of these statuses now."""
    found: dict[int, None] = {}
    for status in statuses:
        before: int | None = None
        while len(found) < _FOUND_MAX:
            page = await client.tasks(
                job=job, status=status, partition_key=partition, limit=_PAGE, before=before
            )
            found.update(dict.fromkeys(each.id for each in page.tasks))
            before = page.before
            if before is None:
                break
    return list(found)


def _confirm(what: str) -> None:
    if not sys.stdin.isatty():
        raise InvalidInput(what, hint="Nothing was done; confirm with --yes.")
    click.confirm(f"{what} Continue?", abort=True, err=True)


def _show(answer: ResultsAnswer, done: str, *, as_json: bool) -> int:
    """Say what became of each, and return the exit code."""
    refused = [each for each in answer.results if each.status >= 400]
    if as_json:
        show_json(answer)
    else:
        for each in answer.results:
            if each.status < 400:
                click.echo(f"{each.task_id}  {_words(each, done)}")
    for each in refused:
        click.echo(f"penstock: {_why(each)}", err=True)
    return 1 if refused else 0


def _show_all(answer: ResultsAnswer, done: str, *, as_json: bool) -> int:
    """Say how many were steered, and why some were not."""
    refused = [each for each in answer.results if each.status >= 400]
    well = [each for each in answer.results if each.status < 400]
    if as_json:
        show_json(answer)
    else:
        running = sum(_words(each, done) != done for each in well)
        click.echo(f"{counted(len(well) - running, 'task')} {done}.")
        if running:
            verb = "runs" if running == 1 else "run"
            click.echo(f"{counted(running, 'task')} {verb}, asked to stop.")
    for each in refused[:_REFUSED_SHOWN]:
        click.echo(f"penstock: {_why(each)}", err=True)
    if len(refused) > _REFUSED_SHOWN:
        click.echo(f"penstock: and {len(refused) - _REFUSED_SHOWN:,} more like these.", err=True)
    return 1 if refused else 0


def _words(result: TaskResult, done: str) -> str:
    state = result.state
    if result.cancel_asked or (state is not None and state.cancel_asked):
        return "is running and was asked to stop"
    return done


def _why(result: TaskResult) -> str:
    return line(result.detail) or f"Task {result.task_id} was refused: {line(result.why)}."


@click.group(
    invoke_without_command=True,
    short_help="List, show, cancel and replay tasks.",
    epilog="Example: penstock task list --status dead",
)
@click.pass_context
def task(context: click.Context) -> None:
    """Look at the tasks of a pipeline, cancel them, or run dead ones again.

    These are the tasks of a dispatcher; those of a bucket queue are under 'penstock queue'.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


for verb in (list_, show, logs, cancel, replay):
    task.add_command(verb)
