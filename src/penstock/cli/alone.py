"""What `penstock` by itself says: how things are here, and what one can do next.

It looks at the settings file and, for at most `LOOK_SECONDS`, at the dispatcher that they name, and
puts first what fits: to try it where nothing runs, to look at it where something does. It imports
nothing that takes its time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import click

from penstock.cli.addresses import Address, address, likely_address
from penstock.cli.glancing import Glance, glance
from penstock.kernel.errors import InvalidInput
from penstock.settings import DEFAULT_FILE, settings_file, variables

LOOK_SECONDS: Final = 0.3
_UNAUTHORIZED: Final = (401, 403)
_OK: Final = 200

Example = tuple[str, str]
EXAMPLES: Final[Mapping[str, Sequence[Example]]] = {
    "Try it": (
        ("penstock demo", "a pipeline on Spark, in a minute"),
        ("penstock demo queue", "the queue and the store below it"),
    ),
    "Run it": (
        ("penstock up pipeline.yaml", "everything, on this machine"),
        ("penstock dag check pipeline.yaml", "what is wrong with a DAG"),
        ("penstock worker --concurrency 8", "one more worker"),
    ),
    "Look at it": (
        ("penstock status", "jobs, queues, workers, backfills"),
        ("penstock task list --status dead", "what failed for good, and why"),
        ("penstock dataset preview sales", "rows of what is published"),
        ("penstock logs --follow", "what the processes say"),
    ),
    "Steer it": (
        ("penstock trigger ingest --partition 2026-06", "tell that there is news"),
        ("penstock backfill start totals --key 2026-06", "compute it anew"),
        ("penstock pause clean", "let a job start nothing for now"),
        ("penstock task replay 42", "run a dead task again"),
    ),
    "The queue alone": (
        ("penstock queue submit resize '{\"n\": 1}'", "a task, with PENSTOCK_STORE set"),
        ("penstock queue worker tasks:worker", "run the worker of your module"),
        ("penstock queue stats", "tasks, workers and shards"),
    ),
    "Look after it": (
        ("penstock doctor s3://bucket/prefix", "whether a bucket can be trusted"),
        ("penstock settings", "what is set, and what set it"),
        ("penstock cost --tasks-per-day 1000000", "what a queue costs a month"),
        ("penstock completion bash", "have the shell complete words"),
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


def _dispatcher(meant: Address, seen: Glance | None) -> Iterator[tuple[str, bool]]:
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
        return "No DAG is in force yet; 'penstock dag apply FILE' puts one."
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
