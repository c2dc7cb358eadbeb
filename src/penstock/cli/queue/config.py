"""`penstock queue config show|set`: what all who use a queue must agree on."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, Final

import click

from penstock.cli.durations import DURATION, Seconds
from penstock.cli.queue.connection import on_a_queue, opened
from penstock.cli.queue.showing import as_json as show_json
from penstock.cli.queue.showing import fields
from penstock.dispatcher.dag.units import duration_text
from penstock.kernel.errors import InvalidInput
from penstock.queue.config import EVERY_TYPE, QueueConfig

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
    help=f"The types that are direct, all of them; '{EVERY_TYPE}' for every, '{NOTHING}' for no"
    " type. May be repeated.",
)
@click.option("--key-seconds", metavar=DURATION, type=Seconds(), help="How long keys stay taken.")
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
        raise InvalidInput("What is to be changed? Give --direct, --key-seconds or --schema.")
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
        show_json(
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
