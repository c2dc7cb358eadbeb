"""`penstock queue archive`: the files of settled tasks, and how long they are kept."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Sequence
from pathlib import Path

import click

from penstock.cli.format import iso, notes, plain, print_json
from penstock.cli.options import DURATION
from penstock.cli.output import ProgressBar, table
from penstock.cli.queue.connection import on_a_queue, opened
from penstock.kernel.errors import InvalidInput, PenstockError
from penstock.kernel.units import DAY_MS, in_units
from penstock.queue.archive_api import ArchivedBatch
from penstock.queue.config import DAYS_MAX
from penstock.queue.inspection import MonitorPass
from penstock.queue.retention import RetentionResult

_FOREVER = "forever"


@click.group(
    invoke_without_command=True,
    short_help="Manage the archive of settled tasks.",
    epilog="Example: penstock queue archive fetch --to /tmp/tasks --store file:///tmp/store",
)
@click.pass_context
def archive(context: click.Context) -> None:
    """Archived tasks: files of gzipped JSON Lines, one row per settled task.

    Spark and pandas read the files as they are.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@archive.command(
    "list",
    short_help="List the files, oldest first.",
    epilog="Example: penstock queue archive list --store file:///tmp/store",
)
@click.option("--dead", is_flag=True, help="Only files with dead letters.")
@click.option(
    "--limit",
    type=click.IntRange(1, 100_000),
    default=50,
    show_default=True,
    help="Number of last lines.",
)
@on_a_queue
def list_(*, dead: bool, limit: int, store: str | None, name: str, as_json: bool) -> None:
    """List the files, oldest first.

    One LIST request for every 1,000 files.
    """
    found = asyncio.run(_listed(store, name, dead=dead))
    shown = found[-limit:]
    if as_json:
        print_json(shown)
        return
    rows = [
        (
            each.key,
            "dead" if each.is_dead_letters else "",
            iso(each.first_submitted_at) or "",
            iso(each.last_submitted_at) or "",
            f"{each.bytes:,}",
        )
        for each in shown
    ]
    if rows:
        table(("file", "letters", "first submit", "last submit", "bytes"), rows, numbers=(4,))
    else:
        click.echo("Nothing is archived.", err=True)
    if len(found) > len(shown):
        notes([f"there are {len(found) - len(shown)} older ones; --limit shows more."])


async def _listed(store: str | None, name: str, *, dead: bool) -> list[ArchivedBatch]:
    async with opened(store, name) as queue:
        return await queue.archive.batches(dead_letters=True if dead else None)


@archive.command(
    short_help="Fetch files, or print their rows.",
    epilog="Example: penstock queue archive fetch --to tasks --store s3://BUCKET/ROOT",
)
@click.argument("keys", metavar="[FILE...]", nargs=-1)
@click.option(
    "--to",
    "folder",
    metavar="FOLDER",
    type=click.Path(file_okay=False, path_type=Path),
    help="Target folder; without it, rows go to standard output.",
)
@click.option("--dead", is_flag=True, help="Only files with dead letters.")
@on_a_queue
def fetch(
    *,
    keys: tuple[str, ...],
    folder: Path | None,
    dead: bool,
    store: str | None,
    name: str,
    as_json: bool,
) -> None:
    """Fetch files of the archive, all or those that are named as 'archive list' shows them.

    They go into the folders 'archive' and 'dead', the dead letters, below that of --to. Files that
    are there already are not fetched again. Without --to, the rows are printed,
    one JSON object a line.
    """
    if as_json and folder is None:
        raise InvalidInput(
            "--json says which files were written, and needs --to.",
            hint="Without both, every line that is printed is JSON.",
        )
    written = asyncio.run(_fetched(store, name, keys, folder, dead=dead))
    if folder is not None:
        if as_json:
            print_json({"files": [str(path) for path in written]})
        else:
            click.echo(f"{len(written)} files are new in {folder}.")


async def _fetched(
    store: str | None, name: str, keys: Sequence[str], folder: Path | None, *, dead: bool
) -> list[Path]:
    written: list[Path] = []
    async with opened(store, name) as queue:
        found = await queue.archive.batches(dead_letters=True if dead else None)
        if keys:
            known = {each.key: each for each in found}
            missing = [key for key in keys if key not in known]
            if missing:
                raise PenstockError(
                    f"{missing[0][:200]!r} is not a file of this queue's archive.",
                    hint="'penstock queue archive list' shows them.",
                )
            found = [known[key] for key in dict.fromkeys(keys)]
        if folder is None:
            for each in found:
                body = await queue.archive.fetch(each.key)
                click.echo(gzip.decompress(body).decode(), nl=False)
            return written
        with ProgressBar() as bar:
            for number, each in enumerate(found):
                bar.show(f"{number:,} of {len(found):,} files", done=number, of=len(found))
                path = folder / ("dead" if each.is_dead_letters else "archive") / each.name
                if not path.exists():
                    _write(path, await queue.archive.fetch(each.key))
                    written.append(path)
    return written


def _write(path: Path, body: bytes) -> None:
    """Write a file that is there whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        half = path.with_name(f".{path.name}.part")
        half.write_bytes(body)
        half.rename(path)
    except OSError as error:
        raise InvalidInput(f"{path} cannot be written: {error.strerror or error}.") from error


@archive.command(
    short_help="Archive settled tasks now.",
    epilog="Example: penstock queue archive flush --store file:///tmp/store",
)
@on_a_queue
def flush(*, store: str | None, name: str, as_json: bool) -> None:
    """Archive now what is settled and may leave, without waiting for a worker.

    Tasks may leave five minutes after their end, those with a key when their key is free.
    """
    made = asyncio.run(_flushed(store, name))
    if as_json:
        print_json({"archived": made.ledgers_archived, "settled_seen": made.settled_seen})
    else:
        stay = max(0, made.settled_seen - made.ledgers_archived)
        more = f" {stay} more may not leave yet." if stay else ""
        click.echo(f"{made.ledgers_archived} packs were archived.{more}")
    notes(made.notes)


async def _flushed(store: str | None, name: str) -> MonitorPass:
    async with opened(store, name) as queue:
        return await queue.archive.flush()


@archive.command(
    short_help="Set the retention of settled tasks.",
    epilog="Example: penstock queue archive retain --days 30 --dead-days forever",
)
@click.option("--days", metavar=DURATION, help="Retention of records in days, or 'forever'.")
@click.option(
    "--dead-days", metavar=DURATION, help="Retention of dead letters in days, or 'forever'."
)
@on_a_queue
def retain(
    *, days: str | None, dead_days: str | None, store: str | None, name: str, as_json: bool
) -> None:
    """Say for how long settled tasks are kept, and forget now what is older.

    What is not named stays as it is; without options, what holds is shown and carried out. Workers
    carry it out once a day. Large inputs and results go with --days, when no record needs them.
    """
    wanted = (_days(days), _days(dead_days))
    held, retained = asyncio.run(_retained(store, name, wanted))
    if as_json:
        days_held = {"archive_days": held[0], "dead_letter_days": held[1]}
        print_json({**days_held, "removed": plain(retained)})
        return
    click.echo(f"Records are kept {_words(held[0])}, dead letters {_words(held[1])}.")
    click.echo(
        f"Removed: {retained.batches} files, {retained.dead_letter_batches} of dead letters,"
        f" {retained.payloads} payloads." + ("" if retained.is_whole else " There is more.")
    )


Days = tuple[int | None, int | None]


async def _retained(
    store: str | None, name: str, wanted: tuple[int | str | None, int | str | None]
) -> tuple[Days, RetentionResult]:
    async with opened(store, name) as queue:
        present = await queue.archive.retention()
        after = [
            held if said is None else None if isinstance(said, str) else said
            for said, held in zip(wanted, present, strict=True)
        ]
        retained = await queue.archive.retain(archive_days=after[0], dead_letter_days=after[1])
        return (after[0], after[1]), retained


def _days(text: str | None) -> int | str | None:
    if text is None or text == _FOREVER:
        return text
    try:
        days = in_units(text, unit_ms=DAY_MS)
    except ValueError:
        days = 0.0
    if not (1 <= days <= DAYS_MAX and days.is_integer()):
        raise InvalidInput(
            f"{text[:50]!r} is not a number of days from 1 to {DAYS_MAX:,}.",
            hint=f"Give a whole number, 30 or 30d say, or '{_FOREVER}'.",
        )
    return int(days)


def _words(days: int | None) -> str:
    return "for ever" if days is None else f"for {days} days"
