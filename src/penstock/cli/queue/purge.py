"""`penstock queue purge`: cancel what waits, forget what has ended."""

from __future__ import annotations

import asyncio
import sys

import click

from penstock.cli.durations import DURATION, Seconds
from penstock.cli.queue.connection import on_a_queue, opened
from penstock.cli.queue.showing import as_json as show_json
from penstock.cli.queue.showing import notes, plain
from penstock.dispatcher.dag.units import duration_text
from penstock.kernel.errors import InvalidInput
from penstock.queue.inspection import list_tasks
from penstock.queue.inspection.tasks import LIMIT_MAX
from penstock.queue.purging import SETTLED, Choice, Purged
from penstock.queue.views import STATES


@click.command(
    short_help="Cancel what waits and forget what has ended.",
    epilog="Example: penstock queue purge --status failed --older-than 30d --store file:///tmp/store",
)
@click.option("--type", "types", multiple=True, help="Only tasks of this type; may be repeated.")
@click.option(
    "--status",
    "statuses",
    multiple=True,
    type=click.Choice(STATES),
    help="Only tasks of this status; may be repeated.",
)
@click.option(
    "--older-than", metavar=DURATION, type=Seconds(), help="Submitted longer ago: 15m, 12h, 30d."
)
@click.option("--all", "everything", is_flag=True, help="All tasks of the queue.")
@click.option("--dry-run", is_flag=True, help="Only say what would be done.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@on_a_queue
def purge(
    *,
    types: tuple[str, ...],
    statuses: tuple[str, ...],
    older_than: float | None,
    everything: bool,
    dry_run: bool,
    yes: bool,
    store: str | None,
    name: str,
    as_json: bool,
) -> None:
    """Cancel tasks that have not ended, and forget those that have.

    Tasks that wait are cancelled, those that run are asked to stop, and records of settled ones are
    removed from the archive with their payloads. A record goes if all tasks of its pack are meant.
    What settled in the last minutes, and what is cancelled now, stays until it is archived: purge
    again later, or leave it to 'archive retain'; it is said how many they are. Schedules, limits
    and settings stay.

    Reads the whole archive, or with --older-than the older part of it.
    """
    if everything == bool(types or statuses or older_than):
        raise InvalidInput(
            "Say which tasks: --type, --status, --older-than, or --all.",
            hint="--dry-run shows what would be done.",
        )
    choice = Choice(older_than=older_than or 0.0, dry_run=dry_run)
    if types:
        choice["types"] = types
    if statuses:
        choice["statuses"] = statuses
    if not yes and not dry_run:
        _confirm(_meant(name, types, statuses, older_than))
    purged, young = asyncio.run(_purged(store, name, choice))
    if as_json:
        show_json({**plain(purged), "too_young": young})
    else:
        click.echo(_sentence(purged, dry_run=dry_run))
        notes([*purged.notes, *_too_young(young)])


async def _purged(store: str | None, name: str, choice: Choice) -> tuple[Purged, int]:
    """What was done, and how many tasks have ended too recently to be forgotten."""
    async with opened(store, name) as queue:
        purged = await queue.purge(**choice)
        types, statuses = choice.get("types"), choice.get("statuses", SETTLED)
        meant = SETTLED.intersection(statuses)
        if not meant:
            return purged, 0
        before = queue.access.now().latest - choice.get("older_than", 0.0)
        # All that is settled: to name one status alone would bring what is archived as well.
        found = await list_tasks(queue.access, statuses=SETTLED, limit=LIMIT_MAX)
        young = (
            view
            for view in found
            if view.status in meant
            and view.submitted_at <= before
            and (types is None or view.type in types)
        )
        return purged, sum(1 for _ in young)


def _too_young(count: int) -> list[str]:
    if not count:
        return []
    have = "1 task has" if count == 1 else f"{count:,} tasks have"
    later = "purge again in five minutes; with a key, when the key is free."
    return [f"{have} ended too recently to be forgotten: {later}"]


def _meant(
    name: str, types: tuple[str, ...], statuses: tuple[str, ...], older_than: float | None
) -> str:
    words = [" or ".join(statuses)] if statuses else []
    words += [f"of type {' or '.join(types)}"] if types else []
    words += (
        [f"submitted more than {duration_text(round(older_than * 1000))} ago"] if older_than else []
    )
    which = f"Tasks of {name!r} that are {', '.join(words)}" if words else f"All tasks of {name!r}"
    return f"{which} will be cancelled, or forgotten for good if they have ended."


def _confirm(what: str) -> None:
    if not sys.stdin.isatty():
        raise InvalidInput(what, hint="Nothing was done: say --yes if all of them are meant.")
    click.confirm(f"{what} Go on?", abort=True, err=True)


def _sentence(purged: Purged, *, dry_run: bool) -> str:
    kept = ""
    if purged.tasks_kept:
        kept = f" {purged.tasks_kept} stay: their packs have other tasks that are not meant."
    would = "would be " if dry_run else ""
    done = (
        f"{_counted(purged.cancelled, 'task')} {would}cancelled",
        f"{purged.asked_to_stop:,} {would}asked to stop",
        f"{purged.tasks_forgotten:,} {would}forgotten",
    )
    return f"{', '.join(done)}, with {_counted(purged.payloads_deleted, 'payload')}.{kept}"


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
