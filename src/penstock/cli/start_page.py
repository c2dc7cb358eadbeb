"""What `penstock` by itself says: the state of the installation here, and what one can do next.

A look at a dispatcher has a bound, needs none of the packages that its client stands on, and
never raises: there is an answer, or there is none. One that was given up is left to a thread
that ends with the process. The completion of words uses it too.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode, urlsplit

import click

from penstock.kernel.errors import InvalidInput
from penstock.kernel.settings_schema import DEFAULT_FILE, settings_file

if TYPE_CHECKING:
    from penstock.settings import SettingSource

URL: Final = "http://127.0.0.1:7070"
"""Where `penstock up` serves if nobody says otherwise."""
_EVERYWHERE: Final = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}  # noqa: S104 - nothing is bound here


@dataclass(frozen=True, slots=True)
class DispatcherAddress:
    """A dispatcher, and its token if there is one."""

    url: str
    token: str | None


def address(url: str | None = None, token: str | None = None) -> DispatcherAddress:
    """The dispatcher that is meant. Raises `InvalidInput` if the settings cannot be read."""
    url = url or os.environ.get("PENSTOCK_URL") or None
    token = token or os.environ.get("PENSTOCK_API_TOKEN") or None
    if url is not None:
        return DispatcherAddress(url, token)
    from penstock.settings import read_settings  # noqa: PLC0415 - not needed with a URL

    told = read_settings({}, environment=os.environ, folder=Path.cwd())
    return DispatcherAddress(_public(told), token or told.settings.api_token or None)


def likely_address(url: str | None = None, token: str | None = None) -> DispatcherAddress:
    """The same, for who has nobody to tell that the settings are wrong."""
    try:
        return address(url, token)
    except (InvalidInput, OSError):
        return DispatcherAddress(url or URL, token)


def _public(told: SettingSource) -> str:
    settings = told.settings
    host = _EVERYWHERE.get(settings.host, settings.host)
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    # A port of 0 is any: who has such settings says where it is.
    return f"http://{host}:{settings.port}" if settings.port else URL


_ANSWER_BYTES_MAX: Final = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Glance:
    """What a dispatcher answered: a status of HTTP, and a JSON object, empty if it was none."""

    status: int
    body: Mapping[str, Any]


def glance(
    url: str,
    path: str,
    *,
    token: str | None,
    seconds: float,
    asked: Mapping[str, str] | None = None,
) -> Glance | None:
    """What is answered within this time; None for nothing."""
    found: list[Glance] = []

    def look() -> None:
        try:
            found.append(_looked(url, f"{path}?{urlencode(asked or {})}", token, seconds=seconds))
        except (OSError, HTTPException, ValueError):
            return

    # In a thread, because names are looked up without a bound, and answers may come in drops.
    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    looking.join(seconds)
    return found[0] if found else None


def _looked(url: str, path: str, token: str | None, *, seconds: float) -> Glance:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(url)
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    connection = kind(parts.hostname, parts.port, timeout=seconds)
    headers = {"Accept": "application/json"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    try:
        connection.request("GET", parts.path.rstrip("/") + path, headers=headers)
        answer = connection.getresponse()
        body = answer.read(_ANSWER_BYTES_MAX)
    finally:
        connection.close()
    return Glance(answer.status, _object(body))


def _object(body: bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


LOOK_SECONDS: Final = 0.3
_UNAUTHORIZED: Final = (401, 403)
_OK: Final = 200

Example = tuple[str, str]
EXAMPLES: Final[Mapping[str, Sequence[Example]]] = {
    "Try it": (
        ("penstock demo", "a pipeline on Spark, in a minute"),
        ("penstock demo queue", "the queue and its store"),
    ),
    "Run it": (
        ("penstock up pipeline.yaml", "everything, on this machine"),
        ("penstock dag check pipeline.yaml", "check a DAG"),
        ("penstock worker --concurrency 8", "one more worker"),
    ),
    "Look at it": (
        ("penstock status", "jobs, queues, workers, backfills"),
        ("penstock task list --status dead", "tasks that failed permanently"),
        ("penstock dataset preview sales", "rows of a dataset"),
        ("penstock logs --follow", "logs of all processes"),
    ),
    "Steer it": (
        ("penstock trigger ingest --partition 2026-06", "ingest an event"),
        ("penstock backfill start totals --key 2026-06", "recompute partitions"),
        ("penstock pause clean", "pause a job"),
        ("penstock task replay 42", "replay a dead task"),
    ),
    "The queue alone": (
        ("penstock queue submit resize '{\"n\": 1}'", "a task, with PENSTOCK_STORE set"),
        ("penstock queue worker tasks:worker", "run a worker of a module"),
        ("penstock queue stats", "tasks, workers and shards"),
    ),
    "Look after it": (
        ("penstock doctor s3://bucket/prefix", "check a bucket"),
        ("penstock settings", "settings and their sources"),
        ("penstock cost --tasks-per-day 1000000", "estimate the monthly cost"),
        ("penstock completion bash", "shell completion"),
    ),
}
_RUNNING_FIRST: Final = ("Look at it", "Steer it")


def show_what_next() -> None:
    """Say how things are here, and what one can do."""
    click.secho(
        f"Penstock {version('penstock')}: event-driven data pipelines on a bucket, a Postgres and"
        " Spark.",
        bold=True,
    )
    click.echo()
    is_answering = False
    for sentence, answers in _situation():
        click.echo(sentence)
        is_answering = is_answering or answers
    click.echo("\nWhat next?")
    width = max(len(command) for group in EXAMPLES.values() for command, _ in group)
    for title in _order(is_answering=is_answering):
        click.secho(f"\n{title}", bold=True)
        for command, purpose in EXAMPLES[title]:
            click.echo(f"  {command:<{width}}  {purpose}")
    click.echo("\n'penstock --help' lists all verbs, 'penstock VERB --help' says more of one.")


def _order(*, is_answering: bool) -> list[str]:
    first = _RUNNING_FIRST if is_answering else ()
    return [*first, *(title for title in EXAMPLES if title not in first)]


def _situation() -> Iterator[tuple[str, bool]]:
    """Sentences, and with each whether a dispatcher answers."""
    try:
        meant = address()
    except InvalidInput as error:
        yield f"The settings are wrong: {error.message}", False
        meant = likely_address()
    from penstock.settings import variables  # noqa: PLC0415 - only the start page lists them

    file = settings_file(os.environ, Path.cwd())
    if file is None:
        named = [name for name in variables() if os.environ.get(name)]
        rest = "." if named else ": every setting has its default."
        yield f"There is no {DEFAULT_FILE} in this folder{rest}", False
        if named:
            more = f" and {len(named) - 1} more" if len(named) > 1 else ""
            yield f"Set by {named[0]}{more}: 'penstock settings --changed'.", False
    else:
        yield f"Settings are read from {file.name}; 'penstock settings' shows them.", False
    seen = glance(meant.url, "/v1/status", token=meant.token, seconds=LOOK_SECONDS)
    yield from _dispatcher(meant, seen)


def _dispatcher(meant: DispatcherAddress, seen: Glance | None) -> Iterator[tuple[str, bool]]:
    if seen is None:
        yield f"No dispatcher answers at {meant.url}; 'penstock up' starts one.", False
    elif seen.status in _UNAUTHORIZED:
        yield f"A dispatcher answers at {meant.url}, and wants a token.", True
        yield "Set PENSTOCK_API_TOKEN to it.", True
    elif seen.status != _OK or not isinstance(seen.body.get("jobs"), list):
        yield f"What answers at {meant.url} is no dispatcher, or not well.", False
        yield "Set PENSTOCK_URL to the address of one.", False
    else:
        yield f"A dispatcher answers at {meant.url}; open that for the console.", True
        yield status_line(seen.body), True


def status_line(status: Mapping[str, Any]) -> str:
    """How everything is, in one line."""
    jobs = [each for each in status["jobs"] if isinstance(each, dict)]
    in_force = _number(status.get("dag_version"))
    if not in_force:
        return "No DAG is in force yet; run 'penstock dag apply FILE'."
    waiting, running, dead = (
        sum(_number(each.get(name)) for each in jobs) for name in ("queued", "running", "dead")
    )
    paused = sum(bool(each.get("paused")) for each in jobs)
    counts = [
        _counted(len(jobs), "job"),
        f"{waiting:,} waiting",
        f"{running:,} running",
        f"{dead:,} dead",
        _counted(_number(status.get("workers")), "worker"),
    ]
    told = f"DAG version {in_force}: {', '.join(counts)}"
    return f"{told}; {_counted(paused, 'job')} paused." if paused else f"{told}."


def _number(found: object) -> int:
    """A number of an answer, which may be anybody's."""
    return found if isinstance(found, int) else 0


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
