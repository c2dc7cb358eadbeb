"""The definition of a job, in words that say also what has its default, and as its file has it.

What goes to a page is what the DAG says: the places of secrets, and never a value. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from penstock.console.rendering import length, number
from penstock.dispatcher.dag.show import written
from penstock.dispatcher.views.jobs import AboutJob

_ELSEWHERE: Final = ("sql", "sql_file")
_FIRST: Final = ("activation", "source", "runtime", "operator", "config", "inputs", "outputs")
"""What a definition begins with; the database has its fields in an order of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """How a definition is shown."""

    pairs: Sequence[tuple[str, str]]
    config: str
    """As YAML, without the query; empty if there is none."""
    sql: str
    sql_file: str
    whole: str
    """All of it as YAML, as it would stand in a file."""


def defined(about: AboutJob) -> Definition:
    """The definition of a job."""
    config = about.body.get("config") or {}
    sql = config.get("sql")
    file = config.get("sql_file")
    rest = {name: value for name, value in config.items() if name not in _ELSEWHERE}
    # The text of a file would stand in the YAML as one long line.
    order = [*_FIRST, *sorted(about.body.keys() - set(_FIRST))]
    shown = {name: about.body[name] for name in order if name in about.body}
    if file and sql:
        shown["config"] = {name: value for name, value in config.items() if name != "sql"}
    return Definition(
        pairs=list(_pairs(about)),
        config=written(rest) if rest else "",
        sql=str(sql or "").strip("\n"),
        sql_file=str(file or ""),
        whole=written({about.name: shown}),
    )


def _pairs(about: AboutJob) -> Iterator[tuple[str, str]]:
    body = about.body
    if (source := body.get("source")) is not None:
        yield "Source", _source(source)
    if about.runtime:
        yield "Runtime", about.runtime
    if about.operator:
        yield "Operator", about.operator
    if about.runtime:
        yield from _running(about)
    if body.get("untrusted"):
        yield "Trust", "its code is kept from everything but its own inputs and outputs"
    if secrets := body.get("secrets"):
        yield "Secrets", ", ".join(f"{name} from {place}" for name, place in secrets.items())
    if resources := body.get("resources"):
        yield "Resources", ", ".join(f"{name}: {value}" for name, value in resources.items())


def _running(about: AboutJob) -> Iterator[tuple[str, str]]:
    body = about.body
    whole = body.get("execution") == "per_update"
    yield "A task is for", "one update, whatever its partition" if whole else "one partition"
    if body.get("when") == "all":
        yield "It runs when", "all inputs that make it run have something for the partition"
    yield "What is new", _update(about)
    if body.get("merge_updates"):
        yield "Updates", "become part of a task that still waits"
    if about.priority == "bulk":
        yield "Priority", "bulk: under pressure it gives way first"
    yield "At a time", _at_a_time(about)
    if limits := _limits(body):
        yield "Queue limit", limits
    yield "Attempts", _attempts(about)
    yield "Timeout", f"{_long(about.timeout_seconds)} an attempt"
    yield (
        "Silence",
        f"an attempt that is not heard of for {_long(about.heartbeat_seconds)} is over",
    )


def _source(source: Mapping[str, Any]) -> str:
    kind = str(source.get("kind", "")).replace("_", " ")
    if "cron" in source:
        zone = source.get("time_zone", "UTC")
        emits = ", tells of intervals" if source.get("emits") == "interval" else ""
        return f"{kind}, {source['cron']} in {zone}{emits}"
    return f"{kind}, {source['path']}" if "path" in source else kind


def _update(about: AboutJob) -> str:
    if about.update_mode == "replace":
        return "replaces what was there of the partition"
    if about.update_mode == "append":
        return "is appended, once for each task"
    keys = ", ".join(map(str, about.body.get("unique_key") or ()))
    version = about.body.get("version_by")
    wins = f"the highest {version}" if version else "that of the latest task"
    delete = about.body.get("delete_when")
    deletes = f"; deleted when {delete}" if delete else ""
    return f"is merged: one row for each {keys}, {wins}{deletes}"


def _at_a_time(about: AboutJob) -> str:
    most = about.max_concurrency
    said = "as many tasks as workers take"
    if most is not None:
        said = "one task" if most == 1 else f"at most {number(most)} tasks"
    together = about.body.get("coalesce", 1)
    also = f", up to {number(together)} of them run as one" if together > 1 else ""
    of_all = f"; {number(about.operator_max)} of its operator" if about.operator_max else ""
    return f"{said}{also}{of_all}"


def _limits(body: Mapping[str, Any]) -> str:
    said = []
    if (depth := body.get("max_queue_depth")) is not None:
        said.append(f"{number(depth)} tasks that wait")
    if (age := body.get("max_queue_age")) is not None:
        said.append(f"a wait of {age}")
    return f"{' or '.join(said)}; beyond it, what feeds it is paused" if said else ""


def _attempts(about: AboutJob) -> str:
    if about.max_attempts == 1:
        return "one"
    first, most = _long(about.retry_first_seconds), _long(about.retry_max_seconds)
    said = f"{number(about.max_attempts)}, the second {first} after the first has failed"
    if about.max_attempts == 2:
        return said
    times = number(about.retry_backoff)
    return f"{said}; each pause is {times} times the last, {most} at most"


def _long(seconds: float) -> str:
    # Nobody has measured it.
    return length(seconds).replace(".0 ", " ")
