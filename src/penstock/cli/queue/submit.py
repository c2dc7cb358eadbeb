"""`penstock queue submit TYPE [INPUT]`: one task, or one a line."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NoReturn

import click

from penstock.cli.format import print_json
from penstock.cli.options import DURATION, Seconds
from penstock.cli.queue.connection import on_a_queue, opened
from penstock.kernel.errors import InvalidInput, PenstockError
from penstock.kernel.text import shown as shown_word
from penstock.queue.submit_options import delay_until, expires_until
from penstock.queue.submitter import INPUT_BYTES_MAX, NotAllSubmitted

LINES_MAX: Final = 1_000_000
_STDIN: Final = "-"
INPUT: Final = "INPUT"
_QUOTES: Final = "Text needs double quotes inside of the shell's: '\"text\"'."
_SHOWN_MAX: Final = 10
_TIME: Final = "YYYY-MM-DDTHH:MM+01:00"
"""The form of a time with its zone. An example would age: tasks start within a year."""


@click.command(
    short_help="Submit a task, or one per line of a file.",
    epilog="Example: penstock queue submit resize '{\"n\": 1}' --store file:///tmp/store",
)
@click.argument("type", metavar="TYPE")
@click.argument("given", metavar="[INPUT]", required=False)
@click.option("--key", help="Deduplication key: submit at most once per key.")
@click.option(
    "--key-seconds", metavar=DURATION, type=Seconds(), help="How long the key is deduplicated."
)
@click.option("--same-input", is_flag=True, help="Fail if the key has a task with another input.")
@click.option(
    "--delay", metavar=DURATION, type=Seconds(), default=0.0, help="Delay before the start."
)
@click.option("--at", metavar="TIME", help=f"Start then, within a year: {_TIME}.")
@click.option(
    "--priority",
    type=click.IntRange(-9, 9),
    default=0,
    show_default=True,
    help="Higher runs first.",
)
@click.option("--limit", metavar="KEY", default="", help="The key of the limit it falls under.")
@click.option("--expires", metavar=DURATION, type=Seconds(), help="Expiry, from now.")
@click.option("--expires-at", metavar="TIME", help=f"Never start it later than then: {_TIME}.")
@click.option("--tag", "tags", metavar="NAME=VALUE", multiple=True, help="A tag; may be repeated.")
@click.option(
    "--affinity",
    metavar="TEXT",
    default="",
    help="Tasks with the same affinity go to the same worker.",
)
@click.option("--many", is_flag=True, help="INPUT is a file, or - , with one JSON value a line.")
@click.option("--batch", is_flag=True, help="With --many: as one batch, whose id is printed.")
@click.option("--then", metavar="TYPE", help="With --batch: a task to submit when all have ended.")
@on_a_queue
def submit(
    *,
    type: str,
    given: str | None,
    key: str | None,
    key_seconds: float | None,
    same_input: bool,
    delay: float,
    at: str | None,
    priority: int,
    limit: str,
    expires: float | None,
    expires_at: str | None,
    tags: tuple[str, ...],
    affinity: str,
    many: bool,
    batch: bool,
    then: str | None,
    store: str | None,
    name: str,
    as_json: bool,
) -> None:
    """Submit a task and print its id. Makes the queue if there is none.

    INPUT is the task's input as JSON text, or - to read it from standard input; without it the
    input is null. With --many, INPUT is a file with one JSON value a line (standard input if
    there is none), each becomes a task, and up to 1,000 of them share one object: much cheaper
    than one by one. If a line is wrong, nothing is submitted.

    With --batch as well, they are one batch, and its id is printed instead of theirs: 'penstock
    queue batch ID --wait' waits for all of them.
    """
    _check_batch(then, many=many, batch=batch)
    options = {
        "delay": delay,
        "at": None if at is None else _time(at),
        "priority": priority,
        "limit": limit,
        "expires": expires,
        "expires_at": None if expires_at is None else _time(expires_at),
        "tags": tags_from(tags),
        "affinity": affinity,
    }
    if many:
        if key is not None or key_seconds is not None or same_input:
            raise InvalidInput("--key is for one task; it does not go with --many.")
        lines = _lines(given or _STDIN)
        if batch:
            made, ids = asyncio.run(_submitted_batch(store, name, type, lines, options, then=then))
            _show({"batch": made, "ids": ids} if as_json else [made])
            return
        ids = asyncio.run(_submitted_many(store, name, type, lines, options))
        _show({"ids": ids} if as_json else ids)
    else:
        value = None if given is None else json_value(_text(given), where=INPUT)
        keyed = {"key": key, "key_seconds": key_seconds, "same_input": same_input}
        task = asyncio.run(_submitted(store, name, type, value, {**options, **keyed}))
        _show({"id": task} if as_json else [task])


def _check_batch(then: str | None, *, many: bool, batch: bool) -> None:
    if batch and not many:
        raise InvalidInput("--batch goes with --many.", hint="A batch has one task a line.")
    if then is not None and not batch:
        raise InvalidInput("--then goes with --batch.")


def tags_from(given: Sequence[str]) -> dict[str, str]:
    """The tags that are given as NAME=VALUE."""
    tags: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise InvalidInput(f"{shown_word(text)} is not a tag.", hint="Write NAME=VALUE.")
        if value.startswith("="):
            raise InvalidInput(
                f"{shown_word(text)} has one '=' too many.", hint=f"Write {name}{value}."
            )
        if name in tags:
            raise InvalidInput(f"The tag {shown_word(name)} is given twice.")
        tags[name] = value
    return tags


def _time(text: str) -> datetime:
    hint = f"Write {_TIME}, or Z for UTC."
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidInput(f"{shown_word(text)} is not a time.", hint=hint) from error
    if found.tzinfo is None:
        raise InvalidInput(f"The time {shown_word(text)} does not say its zone.", hint=hint)
    return found


def _show(shown: dict[str, Any] | list[str]) -> None:
    if isinstance(shown, dict):
        print_json(shown)
    elif shown:
        click.echo("\n".join(shown))


async def _submitted(
    store: str | None, name: str, type: str, value: object, options: Mapping[str, Any]
) -> str:
    async with opened(store, name, create=True) as queue:
        task = await queue.submit(type, value, **options)
        return task.id


async def _submitted_many(
    store: str | None,
    name: str,
    type: str,
    lines: dict[int, object],
    options: Mapping[str, Any],
) -> list[str]:
    async with opened(store, name, create=True) as queue:
        try:
            tasks = await queue.submit_many(type, list(lines.values()), **options)
        except NotAllSubmitted as error:
            _tell_the_rest(error, list(lines))
        return [task.id for task in tasks]


async def _submitted_batch(
    store: str | None,
    name: str,
    type: str,
    lines: dict[int, object],
    options: Mapping[str, Any],
    *,
    then: str | None,
) -> tuple[str, list[str]]:
    """The id of the batch, and those of its tasks."""
    how = dict(options)
    async with opened(store, name, create=True) as queue:
        store_ = queue.access.store
        how["delay"] = await delay_until(store_, how["delay"], how.pop("at"))
        how["expires"] = await expires_until(store_, how["expires"], how.pop("expires_at"))
        async with queue.new_batch(then=then) as batch:
            try:
                tasks = await batch.submit_many(type, list(lines.values()), **how)
            except NotAllSubmitted as error:
                # It is never sealed: what is in it runs, and it does not end.
                _tell_the_rest(error, list(lines))
        return batch.id, list(tasks)


def _tell_the_rest(error: NotAllSubmitted, lines: list[int]) -> NoReturn:
    """Print the ids that there are; raise an error that names the lines that have none."""
    failed = []
    for line, task in zip(lines, error.tasks, strict=True):
        if isinstance(task, PenstockError):
            failed.append(line)
        else:
            click.echo(task)
    raise PenstockError(
        error.message,
        hint=f"The ids above are submitted; lines {_runs(failed)} failed or are unconfirmed.",
    ) from error


def _runs(numbers: Iterable[int]) -> str:
    """Numbers as runs: 1-1000, 2001-3000."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    shown = [f"{first}-{last}" if first < last else f"{first}" for first, last in found]
    more = f" and {len(shown) - _SHOWN_MAX} more runs" if len(shown) > _SHOWN_MAX else ""
    return ", ".join(shown[:_SHOWN_MAX]) + more


def _text(given: str) -> str:
    if given != _STDIN:
        return given
    return _decoded(sys.stdin.buffer.read(), where="Standard input")


def _lines(given: str) -> dict[int, object]:
    """The JSON values of a file or of standard input, by the number of their line."""
    if given == _STDIN:
        body, where = sys.stdin.buffer.read(), "Standard input"
    else:
        try:
            body, where = Path(given).read_bytes(), given
        except OSError as error:
            raise InvalidInput(
                f"{given!r} cannot be read: {error.strerror}.",
                hint="With --many, INPUT is a file with one JSON value a line, or - .",
            ) from error
    # Only a line feed ends a line: JSON may hold other separators inside of its strings.
    rows = _decoded(body, where=where).split("\n")
    if len(rows) > LINES_MAX:
        raise InvalidInput(f"{where} has more than {LINES_MAX:,} lines.", hint="Split it.")
    return {
        number: json_value(row, where=f"Line {number}")
        for number, row in enumerate(rows, 1)
        if row.strip()
    }


def _decoded(body: bytes, *, where: str) -> str:
    try:
        return body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = body[: error.start].count(b"\n") + 1
        raise InvalidInput(f"{where} is not UTF-8: line {line} is not.") from error


def json_value(text: str, *, where: str) -> object:
    """The value of a JSON text that a queue takes; `where` names it in errors."""
    try:
        value = json.loads(text, parse_constant=_refuse)
        body = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    except json.JSONDecodeError as error:
        at = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno}"
        raise InvalidInput(
            f"{where} is not JSON: {error.msg}, at {at}.",
            hint=_QUOTES if where == INPUT else "",
        ) from error
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{where} is not JSON that can be stored: {error}.") from error
    if len(body) > INPUT_BYTES_MAX:
        raise InvalidInput(
            f"{where} has {len(body):,} bytes; at most {INPUT_BYTES_MAX:,} are taken.",
            hint="Store it in the bucket and submit its key.",
        )
    return value


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a number of JSON")
