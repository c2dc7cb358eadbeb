"""`penstock queue pause|resume|drain|purge|reshard|config`: what changes a queue as a whole."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import click

from penstock.cli.format import fields, notes, plain, print_json, since
from penstock.cli.options import DURATION, Seconds
from penstock.cli.output import ProgressBar
from penstock.cli.queue.connection import on_a_queue, opened
from penstock.kernel.errors import InvalidInput
from penstock.kernel.units import duration_text
from penstock.queue.config import EVERY_TYPE, QueueConfig, read_config
from penstock.queue.control import PRODUCER_SECONDS, WORKER_SECONDS, HeldType
from penstock.queue.ids import check_name
from penstock.queue.inspection import list_tasks
from penstock.queue.inspection.task_search import LIMIT_MAX
from penstock.queue.retention import SETTLED, PurgeArguments, PurgeResult
from penstock.queue.shards.allocation import check_shards
from penstock.queue.survey import RemainingTasks, wait_until_empty
from penstock.queue.task_views import STATES

type_option = click.option("--type", metavar="TYPE", help="Only tasks of this type.")


@click.command(
    short_help="Pause a queue: start no new tasks.",
    epilog='Example: penstock queue pause --type resize --reason "disk full"'
    " --store file:///tmp/store",
)
@type_option
@click.option("--reason", default="", help="The reason; shown in worker logs and stats.")
@on_a_queue
def pause(*, type: str | None, reason: str, store: str | None, name: str, as_json: bool) -> None:
    """Start nothing more, of a type or at all, until it is resumed.

    Workers notice within 10 seconds. Running tasks continue, claimed tasks that have not started
    are released, and submits are accepted.
    """
    held, now = asyncio.run(_paused(store, name, type, reason))
    show_held(held, now=now, as_json=as_json)
    if not as_json:
        click.echo(f"Workers notice within {WORKER_SECONDS:.0f} s.")


async def _paused(
    store: str | None, name: str, type: str | None, reason: str
) -> tuple[tuple[HeldType, ...], float]:
    async with opened(store, name) as queue:
        held = await queue.pause(type, reason)
        return held, queue.access.now().middle


def show_held(held: Sequence[HeldType], *, now: float, as_json: bool) -> None:
    """Everything that is paused or drained."""
    if as_json:
        print_json({"held": plain(list(held))})
        return
    for line in held_lines(held, now=now):
        click.echo(line)
    if not held:
        click.echo("Nothing is paused or drained.")


def held_lines(held: Sequence[HeldType], *, now: float) -> Iterator[str]:
    """One sentence for everything that is paused or drained."""
    for each in held:
        what = "The queue" if each.type is None else f"The type {each.type!r}"
        if each.paused_at is not None:
            reason = f": {each.reason}" if each.reason else "."
            yield f"{what} is paused since {since(each.paused_at, now=now)}{reason}"
        if each.drained_at is not None:
            begun = since(each.drained_at, now=now)
            yield f"{what} is drained (submits are refused) since {begun}."


@click.command(
    short_help="Lift a pause or a drain.",
    epilog="Example: penstock queue resume --store file:///tmp/store",
)
@type_option
@on_a_queue
def resume(*, type: str | None, store: str | None, name: str, as_json: bool) -> None:
    """Lift pause and drain from a type, or from the queue as a whole.

    A type that was paused or drained by itself stays so until it is resumed with --type. Prints
    what is still held. Exit code 0, also if there was nothing to lift, which is then said.
    """
    before, held, now = asyncio.run(_resumed(store, name, type))
    what = "queue as a whole" if type is None else f"type {type!r}"
    if all(each.type != type for each in before):
        notes([f"the {what} was neither paused nor drained; there was nothing to lift."])
    elif not as_json:
        click.echo(f"The {what} goes on.")
    if held or as_json:
        show_held(held, now=now, as_json=as_json)


async def _resumed(
    store: str | None, name: str, type: str | None
) -> tuple[tuple[HeldType, ...], tuple[HeldType, ...], float]:
    """What was held before, what is after, and the store's time then."""
    async with opened(store, name) as queue:
        if type is not None:
            check_name(type, what="type")
        before = await queue.control.state()
        held = await queue.resume(type)
        return before, held, queue.access.now().middle


@click.command(
    short_help="Drain a queue: refuse submits; --wait until empty.",
    epilog="Example: penstock queue drain --wait --store file:///tmp/store",
)
@type_option
@click.option("--wait", "is_waited", is_flag=True, help="Wait until the queue is empty.")
@click.option("--timeout", metavar=DURATION, type=Seconds(), help="Timeout of --wait.")
@on_a_queue
@click.pass_context
def drain(
    context: click.Context,
    *,
    type: str | None,
    is_waited: bool,
    timeout: float | None,
    store: str | None,
    name: str,
    as_json: bool,
) -> None:
    """Refuse submits, of a type or at all, until it is resumed; workers go on.

    Producers notice within 30 seconds. With --wait, returns when no task is ready, delayed or
    running, and at least 30 seconds have passed since the drain began.

    Exit code 0: drained, and with --wait empty. 1: tasks were left at the timeout.
    """
    if timeout is not None and not is_waited:
        raise InvalidInput("--timeout says how long to --wait.", hint="Give --wait with it.")
    if timeout is not None and timeout <= 0:
        raise InvalidInput(f"--timeout must be positive, not {timeout:g} s.")
    held, now, is_empty = asyncio.run(
        _drained(store, name, type, is_waited=is_waited, seconds=timeout)
    )
    if not is_waited:
        show_held(held, now=now, as_json=as_json)
        if not as_json:
            click.echo(f"Producers notice within {PRODUCER_SECONDS:.0f} s.")
    elif as_json:
        print_json({"held": plain(list(held)), "is_empty": is_empty})
    else:
        click.echo(
            "The queue is empty."
            if is_empty
            else "Within the timeout there were tasks left, or producers that may not have noticed"
            f" yet: they notice within {PRODUCER_SECONDS:.0f} s."
        )
    context.exit(0 if is_empty or not is_waited else 1)


async def _drained(
    store: str | None, name: str, type: str | None, *, is_waited: bool, seconds: float | None
) -> tuple[tuple[HeldType, ...], float, bool]:
    async with opened(store, name) as queue:
        held = await queue.drain(type)
        now = queue.access.now().middle
        if not is_waited:
            return held, now, False
        paused = [each for each in held if each.paused_at and each.type in (None, type)]
        if paused:
            notes(["It is paused, so what waits does not start: 'penstock queue resume' lifts it."])
        with _Progress() as progress:
            is_empty = await wait_until_empty(queue.access, type, seconds=seconds, tell=progress)
        return held, now, is_empty


class _Progress(ProgressBar):
    """Says how much is left, as a part of the most that there was."""

    _most = 0

    def __call__(self, left: RemainingTasks) -> None:
        self._most = max(self._most, left.tasks)
        more = "" if left.is_whole else " at least"
        text = f"{left.tasks:,}{more} left"
        if not left.tasks:
            text += "; waiting for producers to notice"
        self.show(text, done=self._most - left.tasks, of=self._most)


@click.command(
    short_help="Cancel waiting tasks and delete ended ones.",
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
    "--older-than",
    metavar=DURATION,
    type=Seconds(),
    help="Submitted longer ago than 15m, 12h or 30d.",
)
@click.option("--all", "everything", is_flag=True, help="All tasks of the queue.")
@click.option("--dry-run", is_flag=True, help="Dry run: show what would be done.")
@click.option("--yes", is_flag=True, help="Skip the confirmation.")
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
            "Select tasks with --type, --status, --older-than, or --all.",
            hint="--dry-run shows what would be done.",
        )
    choice = PurgeArguments(older_than=older_than or 0.0, dry_run=dry_run)
    if types:
        choice["types"] = types
    if statuses:
        choice["statuses"] = statuses
    if not yes and not dry_run:
        _confirm(_meant(name, types, statuses, older_than))
    purged, young = asyncio.run(_purged(store, name, choice))
    if as_json:
        print_json({**plain(purged), "too_young": young})
    else:
        click.echo(_sentence(purged, dry_run=dry_run))
        notes([*purged.notes, *_too_young(young)])


async def _purged(store: str | None, name: str, choice: PurgeArguments) -> tuple[PurgeResult, int]:
    """What was done, and how many tasks have ended too recently to be deleted."""
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
    return [f"{have} ended too recently to be deleted: {later}"]


def _meant(
    name: str, types: tuple[str, ...], statuses: tuple[str, ...], older_than: float | None
) -> str:
    words = [" or ".join(statuses)] if statuses else []
    words += [f"of type {' or '.join(types)}"] if types else []
    words += (
        [f"submitted more than {duration_text(round(older_than * 1000))} ago"] if older_than else []
    )
    which = f"Tasks of {name!r} that are {', '.join(words)}" if words else f"All tasks of {name!r}"
    return f"{which} will be cancelled, or deleted for good if they have ended."


def _confirm(what: str) -> None:
    if not sys.stdin.isatty():
        raise InvalidInput(what, hint="Nothing was done; confirm with --yes.")
    click.confirm(f"{what} Continue?", abort=True, err=True)


def _sentence(purged: PurgeResult, *, dry_run: bool) -> str:
    kept = ""
    if purged.tasks_kept:
        kept = f" {purged.tasks_kept} kept: their packs have other tasks that are not selected."
    would = "would be " if dry_run else ""
    done = (
        f"{_counted(purged.cancelled, 'task')} {would}cancelled",
        f"{purged.asked_to_stop:,} {would}asked to stop",
        f"{purged.tasks_forgotten:,} {would}deleted",
    )
    return f"{', '.join(done)}, with {_counted(purged.payloads_deleted, 'payload')}.{kept}"


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


_MOVED_SECONDS: Final = 100


@click.command(
    short_help="Change the number of shards while workers run.",
    epilog="Example: penstock queue reshard --shards 128 --store file:///tmp/store",
)
@click.option("--shards", type=int, required=True, help="A power of two from 1 to 4096.")
@on_a_queue
def reshard(*, shards: int, store: str | None, name: str, as_json: bool) -> None:
    """Change the number of shards: at most so many workers look for tasks in the mode 'leased'.

    Workers notice within 30 seconds, go on with what they do, and share out the new shards among
    themselves. Nothing has to be stopped, and no task is moved.
    """
    check_shards(shards)
    before, after = asyncio.run(_resharded(store, name, shards))
    if as_json:
        print_json({"before": before, "shards": after.shards, "era": after.era})
    elif before == after.shards:
        click.echo(f"The queue has {before} shards already.")
    else:
        click.echo(
            f"The queue has {after.shards} shards now; before it had {before}."
            f" Workers move to them within {_MOVED_SECONDS} s; 'penstock queue stats' shows them."
        )


async def _resharded(store: str | None, name: str, shards: int) -> tuple[int, QueueConfig]:
    async with opened(store, name) as queue:
        found = await read_config(queue.access.store, queue.access.layout)
        before = (found or queue.access.config).shards
        await queue.reshard(shards)
        return before, queue.access.config


NOTHING: Final = "none"
_FOREVER: Final = "for ever"


@click.group(
    short_help="Show or change the settings of a queue.",
    invoke_without_command=True,
    epilog="Example: penstock queue config show --store file:///tmp/store",
)
@click.pass_context
def config(context: click.Context) -> None:
    """Show or change what all who use a queue must agree on."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@config.command(
    short_help="Show the settings of a queue.",
    epilog="Example: penstock queue config show --store file:///tmp/store",
)
@on_a_queue
def show(*, store: str | None, name: str, as_json: bool) -> None:
    """Show the settings of a queue, as they are in the bucket now."""
    _show(asyncio.run(_read(store, name)), as_json=as_json)


@config.command(
    name="set",
    short_help="Change the settings of a queue.",
    epilog="Example: penstock queue config set --direct resize --store file:///tmp/store",
)
@click.option(
    "--direct",
    metavar="TYPE",
    multiple=True,
    help=f"All types that are direct; '{EVERY_TYPE}' for every, '{NOTHING}' for no"
    " type. May be repeated.",
)
@click.option(
    "--key-seconds", metavar=DURATION, type=Seconds(), help="How long keys are deduplicated."
)
@click.option(
    "--schema",
    "schemas",
    metavar="TYPE=FILE",
    multiple=True,
    help=f"The JSON schema of a type; TYPE={NOTHING} for none. May be repeated.",
)
@on_a_queue
def set_(
    *,
    direct: tuple[str, ...],
    key_seconds: float | None,
    schemas: tuple[str, ...],
    store: str | None,
    name: str,
    as_json: bool,
) -> None:
    """Change settings of a queue while it is in use; what is not named stays.

    Producers and workers that run keep what they have read: they follow when they open the queue
    the next time. Until all have, tasks of a type that is newly direct, or no longer, may be found
    later, and none is lost. A key keeps the time that its submit gave it. A schema is checked when
    a task is submitted, by producers that have opened the queue since; workers check nothing.

    The number of shards is changed by 'penstock queue reshard', how long the archive is kept by
    'penstock queue archive retain'.
    """
    changes: dict[str, Any] = {}
    if direct:
        if NOTHING in direct and len(direct) > 1:
            raise InvalidInput(f"--direct {NOTHING} stands alone.")
        changes["direct"] = () if direct == (NOTHING,) else direct
    if key_seconds is not None:
        changes["key_seconds"] = int(key_seconds)
    if schemas:
        changes["schemas"] = dict(map(_schema, schemas))
    if not changes:
        raise InvalidInput("Nothing to change. Give --direct, --key-seconds or --schema.")
    _show(asyncio.run(_changed(store, name, changes)), as_json=as_json)


def _schema(text: str) -> tuple[str, object]:
    """The type and the schema of TYPE=FILE."""
    type_, equals, file = text.partition("=")
    if not equals or not file:
        raise InvalidInput(f"{text[:60]!r} is not TYPE=FILE.", hint="Write resize=resize.json.")
    if file == NOTHING:
        return type_, None
    try:
        return type_, json.loads(Path(file).read_bytes())
    except OSError as error:
        raise InvalidInput(f"{file} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{file} is not JSON: {error}.") from error


async def _read(store: str | None, name: str) -> QueueConfig:
    async with opened(store, name) as queue:
        return await queue.config()


async def _changed(store: str | None, name: str, changes: dict[str, Any]) -> QueueConfig:
    async with opened(store, name) as queue:
        return await queue.configure(**changes)


def _show(found: QueueConfig, *, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "shards": found.shards,
                "key_seconds": found.key_seconds,
                "direct": found.direct,
                "archive_days": found.archive_days,
                "dead_letter_days": found.dead_letter_days,
                "schemas": {each: json.loads(bytes(raw)) for each, raw in found.schemas.items()},
                "revision": found.revision,
            }
        )
        return
    kept = [
        f"{days} days" if days is not None else _FOREVER
        for days in (found.archive_days, found.dead_letter_days)
    ]
    fields(
        [
            ("shards", str(found.shards)),
            ("keys are kept", duration_text(found.key_seconds * 1000)),
            ("direct types", ", ".join(found.direct) or NOTHING),
            ("types with a schema", ", ".join(sorted(found.schemas)) or NOTHING),
            ("archive is kept", kept[0]),
            ("dead letters are kept", kept[1]),
        ]
    )
