"""`penstock backfill`: start, watch, pause, resume and cancel backfills."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, TextIO, TypeVar

import click

from penstock.cli.completion import backfills, jobs
from penstock.cli.dispatcher_call import (
    ago,
    asked,
    counted,
    fitted,
    on_a_dispatcher,
    show_json,
    timeout_option,
)
from penstock.cli.format import fields
from penstock.cli.options import absolute_option
from penstock.cli.output import ProgressBar
from penstock.dispatcher.client import Client
from penstock.kernel.errors import InvalidInput
from penstock.protocol.steering import BackfillAnswer


def show_backfills(backfills: Iterable[BackfillAnswer], *, now: float) -> None:
    """A table of backfills."""
    rows = [
        (
            str(each.id),
            each.state,
            each.job,
            each.kind,
            _share(each),
            percent(each),
            f"{each.open:,}",
            f"{each.dead:,}",
            ago(each.created_at, now=now),
        )
        for each in backfills
    ]
    heads = ("backfill", "status", "job", "kind", "ended", "", "open", "dead", "started")
    fitted(heads, rows, numbers=(0, 4, 5, 6, 7), least=(3, 8))


def show_backfill(found: BackfillAnswer, *, now: float) -> None:
    """One backfill."""
    fields(
        [
            ("backfill", str(found.id)),
            ("job", found.job),
            ("kind", found.kind),
            ("status", found.state),
            ("partitions", f"{found.partitions:,}"),
            ("planned", f"{found.planned:,} have become tasks"),
            ("open", f"{found.open:,}, at most {found.concurrency:,} at a time"),
            ("ended", _ended(found)),
            ("started", ago(found.created_at, now=now)),
        ]
    )


def ended(found: BackfillAnswer) -> int:
    """How many partitions have a task that has ended, well or not."""
    return max(0, found.planned - found.open)


def _share(found: BackfillAnswer) -> str:
    if found.partitions:
        return f"{ended(found):,} of {found.partitions:,}"
    return "counting" if found.state == "running" else "nothing to do"


def _ended(found: BackfillAnswer) -> str:
    share = f" ({percent(found)})" if percent(found) else ""
    verb = "is" if found.dead == 1 else "are"
    dead = f"{ended(found):,}{share}, of which {found.dead:,} {verb} dead"
    if not found.cancelled:
        return dead
    return f"{dead} and {found.cancelled:,} {'was' if found.cancelled == 1 else 'were'} cancelled"


def percent(found: BackfillAnswer) -> str:
    if not found.partitions:
        # A rebuild counts as it goes: before that there is nothing to have a part of.
        return ""
    # Not rounded: what is not over is not at 100%.
    return f"{100 * ended(found) // found.partitions}%"


class BackfillProgress:
    """Says how far a backfill is, on a terminal, until it is over."""

    def __init__(self) -> None:
        self._bar = ProgressBar()

    def __call__(self, found: BackfillAnswer) -> None:
        text = (
            f"backfill {found.id} of {found.job}: {percent(found) or _share(found)},"
            f" {ended(found):,} of {found.partitions:,} ended, {found.open:,} open,"
            f" {found.dead:,} dead"
        )
        text += f", {found.cancelled:,} cancelled" if found.cancelled else ""
        text += "" if found.state in ("running", "done") else f" ({found.state})"
        self._bar.show(text, done=ended(found), of=found.partitions)

    def end(self) -> None:
        """Leave the line, so that what is said next has its own."""
        self._bar.end()


Verb = TypeVar("Verb", bound=Callable[..., Any])

_wait_option = click.option(
    "--wait", is_flag=True, help="Wait until it has ended, and show progress."
)


def with_waiting(verb: Verb) -> Verb:
    """Give a verb `wait` and `timeout_seconds`."""
    return _wait_option(timeout_option(verb))


async def waited(client: Client, id: int, *, timeout_seconds: float) -> BackfillAnswer:
    """The backfill when it is over. Its progress goes to standard error."""
    progress = BackfillProgress()
    try:
        return await client.wait(backfill=id, timeout_seconds=timeout_seconds, told=progress)
    finally:
        progress.end()


def exit_code(found: BackfillAnswer, *, wait: bool) -> int:
    """1 for a backfill that was waited for and has not computed everything."""
    return 1 if wait and (found.state == "cancelled" or found.dead or found.cancelled) else 0


@click.command(
    "list",
    short_help="List backfills and their progress.",
    epilog="Example: penstock backfill list",
)
@click.option(
    "--limit",
    type=click.IntRange(1, 1000),
    default=50,
    show_default=True,
    help="Maximum number of entries.",
)
@absolute_option
@on_a_dispatcher
def list_(*, limit: int, url: str, token: str | None, as_json: bool) -> None:
    """List the latest backfills, the newest first.

    Those of the kind 'rebuild' were made by 'penstock dag apply', for jobs that are built anew.
    """
    answer, now = asked(url, token, lambda client: client.backfills(limit=limit))
    if as_json:
        show_json(answer)
    elif answer.backfills:
        show_backfills(answer.backfills, now=now)
    else:
        click.echo("No backfills.", err=True)


@click.command(
    short_help="Show a backfill, or wait for it.",
    epilog="Example: penstock backfill show 7 --wait",
)
@click.argument("id", metavar="ID", type=click.IntRange(min=1), shell_complete=backfills)
@with_waiting
@absolute_option
@on_a_dispatcher
@click.pass_context
def show(
    context: click.Context,
    *,
    id: int,
    wait: bool,
    timeout_seconds: float,
    url: str,
    token: str | None,
    as_json: bool,
) -> None:
    """Show how far a backfill is; with --wait, when it is over.

    Exit code 0: here it is; with --wait, everything is computed. 1: there is no such backfill; with
    --wait, a task is dead, it was cancelled, or the time is up.
    """

    async def work(client: Client) -> BackfillAnswer:
        if wait:
            return await waited(client, id, timeout_seconds=timeout_seconds)
        return await client.find_backfill(id)

    found, now = asked(url, token, work)
    if as_json:
        show_json(found)
    else:
        show_backfill(found, now=now)
    context.exit(exit_code(found, wait=wait))


KEYS_MAX: Final = 100_000
_LINE_CHARACTERS_MAX: Final = 10_000


@click.command(
    short_help="Compute a range or list of partitions.",
    epilog="Example: penstock backfill start totals --key 2026-01-01 --key 2026-01-02 --wait",
)
@click.argument("job", metavar="JOB", shell_complete=jobs)
@click.option("--key", "keys", metavar="KEY", multiple=True, help="A partition; may be repeated.")
@click.option(
    "--keys-file",
    metavar="FILE",
    type=click.File("r", encoding="utf-8"),
    help="Partitions, one per line; '-' is standard input.",
)
@click.option("--start", type=int, help="Start of a range of numbers.")
@click.option("--end", type=int, help="End of the range (exclusive).")
@click.option("--step", type=click.IntRange(min=1), help="Length of a partition.")
@click.option(
    "--concurrency",
    type=click.IntRange(1, 100_000),
    default=100,
    show_default=True,
    help="Waiting or running tasks at a time.",
)
@click.option(
    "--request-id", metavar="ID", help="Idempotency key: the same id is the same backfill."
)
@with_waiting
@on_a_dispatcher
@click.pass_context
def start(
    context: click.Context,
    *,
    job: str,
    keys: tuple[str, ...],
    keys_file: TextIO | None,
    start: int | None,
    end: int | None,
    step: int | None,
    concurrency: int,
    request_id: str | None,
    wait: bool,
    timeout_seconds: float,
    url: str,
    token: str | None,
    as_json: bool,
) -> None:
    """Compute partitions of a job: those of --key and --keys-file, or a range by --step.

    Exit code 0: it is planned; with --wait, everything is computed. 1: it was refused; with --wait,
    a task is dead, it was cancelled, or the time is up, while the backfill itself goes on.
    """
    wanted = _wanted(keys, keys_file, start=start, end=end, step=step)

    async def work(client: Client) -> BackfillAnswer:
        found = await client.backfill(
            job,
            keys=wanted,
            start=start,
            end=end,
            step=step,
            concurrency=concurrency,
            request_id=request_id,
        )
        return await waited(client, found.id, timeout_seconds=timeout_seconds) if wait else found

    found, now = asked(url, token, work)
    if as_json:
        show_json(found)
    elif wait:
        show_backfill(found, now=now)
    else:
        click.echo(_planned(found))
    context.exit(exit_code(found, wait=wait))


def _wanted(
    keys: tuple[str, ...],
    file: TextIO | None,
    *,
    start: int | None,
    end: int | None,
    step: int | None,
) -> list[str]:
    """The keys; none if a range is wanted."""
    has_keys = bool(keys) or file is not None
    numbers = (start, end, step)
    if has_keys == any(each is not None for each in numbers):
        raise InvalidInput(
            "Which partitions? Give --key or --keys-file, or --start, --end, --step."
        )
    if not has_keys and None in numbers:
        raise InvalidInput("A range needs all three: --start, --end and --step.")
    wanted = list(dict.fromkeys([*keys, *(_lines(file) if file is not None else [])]))
    if has_keys and not wanted:
        raise InvalidInput("There is no key in the file.")
    return wanted


def _lines(file: TextIO) -> list[str]:
    found: list[str] = []
    try:
        while text := file.readline(_LINE_CHARACTERS_MAX):
            if text.strip():
                found.append(text.strip())
            if len(found) > KEYS_MAX:
                raise InvalidInput(
                    f"A list has {KEYS_MAX:,} partitions at most; make several of it, or a range."
                )
    except UnicodeDecodeError as error:
        raise InvalidInput("The file of keys is not UTF-8; save it as UTF-8.") from error
    return found


def _planned(found: BackfillAnswer) -> str:
    partitions = counted(found.partitions, "partition")
    if ended(found) or found.state != "running":
        return f"Backfill {found.id} of {found.job} is {found.state}: {partitions}."
    return (
        f"Backfill {found.id} of {found.job} is planned: {partitions}.\n"
        f"'penstock backfill show {found.id} --wait' says how far it is."
    )


_id_argument = click.argument(
    "id", metavar="ID", type=click.IntRange(min=1), shell_complete=backfills
)


@click.command(
    short_help="Pause a backfill: create no more tasks.",
    epilog="Example: penstock backfill pause 7",
)
@_id_argument
@on_a_dispatcher
def pause(*, id: int, url: str, token: str | None, as_json: bool) -> None:
    """Create no more tasks of a backfill until it is resumed; existing tasks continue."""
    found, _ = asked(url, token, lambda client: client.pause_backfill(id))
    _show(found, as_json=as_json)


@click.command(
    short_help="Resume a paused backfill.",
    epilog="Example: penstock backfill resume 7",
)
@_id_argument
@on_a_dispatcher
def resume(*, id: int, url: str, token: str | None, as_json: bool) -> None:
    """Go on with a backfill that was paused, where it was."""
    found, _ = asked(url, token, lambda client: client.resume_backfill(id))
    _show(found, as_json=as_json)


@click.command(
    short_help="Cancel a backfill.",
    epilog="Example: penstock backfill cancel 7",
)
@_id_argument
@on_a_dispatcher
def cancel(*, id: int, url: str, token: str | None, as_json: bool) -> None:
    """End a backfill: tasks that wait are cancelled, those that run are asked to stop.

    What it has computed stays.
    """
    found, _ = asked(url, token, lambda client: client.cancel_backfill(id))
    _show(found, as_json=as_json)


def _show(found: BackfillAnswer, *, as_json: bool) -> None:
    if as_json:
        show_json(found)
        return
    still = f"; {counted(found.open, 'task')} of it not over" if found.open else ""
    click.echo(f"Backfill {found.id} of {found.job} is {found.state}{still}.")


@click.group(
    invoke_without_command=True,
    short_help="Compute a range or list of partitions.",
    epilog="Example: penstock backfill start totals --start 0 --end 1000000 --step 1000",
)
@click.pass_context
def backfill(context: click.Context) -> None:
    """Compute partitions of a job, of any number, at the priority bulk.

    A backfill is planned at once and becomes tasks bit by bit, so that it never stands in the way
    of what is new. It survives the restart of everything.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


for verb in (start, list_, show, pause, resume, cancel):
    backfill.add_command(verb)
