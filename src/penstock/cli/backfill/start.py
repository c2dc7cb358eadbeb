"""`penstock backfill start JOB`: ask for partitions."""

from __future__ import annotations

from typing import Final, TextIO

import click

from penstock.cli.backfill.showing import ended, show_backfill
from penstock.cli.backfill.wait import exit_code, waited, with_waiting
from penstock.cli.calling import asked, on_a_dispatcher
from penstock.cli.completing import jobs
from penstock.cli.telling import counted, show_json
from penstock.dispatcher.client import Client
from penstock.dispatcher.wire.steering import BackfillAnswer
from penstock.kernel.errors import InvalidInput

KEYS_MAX: Final = 100_000
_LINE_CHARACTERS_MAX: Final = 10_000


@click.command(
    short_help="Compute a range or a list of partitions.",
    epilog="Example: penstock backfill start totals --key 2026-01-01 --key 2026-01-02 --wait",
)
@click.argument("job", metavar="JOB", shell_complete=jobs)
@click.option("--key", "keys", metavar="KEY", multiple=True, help="A partition; may be repeated.")
@click.option(
    "--keys-file",
    metavar="FILE",
    type=click.File("r", encoding="utf-8"),
    help="Partitions, one a line; '-' is standard input.",
)
@click.option("--start", type=int, help="Of a range of numbers: where it starts.")
@click.option("--end", type=int, help="Where it ends; not part of it.")
@click.option("--step", type=click.IntRange(min=1), help="How long a partition of it is.")
@click.option(
    "--concurrency",
    type=click.IntRange(1, 100_000),
    default=100,
    show_default=True,
    help="How many of its tasks wait or run at a time.",
)
@click.option("--request-id", metavar="ID", help="The same id again is the same backfill.")
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
