"""How attempts end: completed, failed, released, or given up by the reaper; and what follows.

One transaction ends the attempts, publishes what they have made, writes the events, has them routed
and writes the wake-ups. Of several attempts in one call, each has its own answer: one that is
refused changes nothing and costs the others nothing; one that has to merge again goes on, see
`merging`. Of a call that has published very many partitions the events are left pending, and
routers make their tasks in windows: whoever publishes for the same readers waits for a router's
window, never for all of it. The order of locks is consumers of changes, tasks by id, then schemas,
then partitions by name. What has moved is told to readers without Postgres by the relay: triggers
of the schema put it into the outbox, in the same transaction.

A release hands the task back: the attempt does not count against `max_attempts`, and its number is
never used again. A task is handed back `RELEASES_MAX` times without being counted; further releases
are failures, so that nothing goes round for ever.

An attempt whose process has died beside others is released with `runs_alone`, which the task keeps:
it runs in no batch again, and every worker runs it with nothing beside it. That is had once: a
second release of this kind is a failure. Who dies alone has failed, and is to run alone as well.
Called by `penstock.dispatcher.tasks.lifecycle`, which opens the transaction.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Container,
    Hashable,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, fields, replace
from typing import Any, Final, TypeVar

import msgspec
from psycopg.types.json import Jsonb

from penstock.dispatcher.database.pool import Connection
from penstock.dispatcher.database.queries import query
from penstock.dispatcher.tasks.consuming import consume, refuse_overtaken
from penstock.dispatcher.tasks.merging import Moved, end_turns, refuse_moved
from penstock.dispatcher.tasks.rewrites import refuse_unlike, rewrite
from penstock.dispatcher.tasks.rows import (
    SAYING_BYTES_MAX,
    announce,
    fence_arrays,
    refusal,
    storable,
    storable_json,
    task_states,
)
from penstock.dispatcher.tasks.schemas import output_arrays, refuse_misfits, written
from penstock.dispatcher.tasks.values import (
    Completion,
    Ended,
    Failure,
    Measured,
    Output,
    Published,
    Publishing,
    Reaped,
    Reaping,
    Refusal,
    Release,
    Status,
    Why,
)
from penstock.runtimes.base import Facts

Route = Callable[[Connection, Sequence[int]], Awaitable[None]]
"""Called with the numbers of new events, in the transaction that made them."""
Saying = Completion | Failure | Release
Place = TypeVar("Place", bound=Hashable)

ROUTED_MAX: Final = 1_000
"""How many events are routed in the transaction that has made them, at most."""
RELEASES_MAX: Final = 20
"""How often a task is handed back without that being counted, until it is replayed."""
_RELEASE_FIRST_MS: Final = 1_000
_RELEASE_MAX_MS: Final = 60_000
"""The pause after a delayed release doubles from one to the other."""
_STEADY_SECONDS: Final = 600.0
"""An always-on source that has run for so long is not being handed round: its count begins anew."""
_RELEASED_OUT: Final = (
    f" It was handed back {RELEASES_MAX} times before; this time counts as a failure."
)

_DIED_BEFORE: Final = (
    " Its process has died before, which was not counted; this time counts as a failure."
)
_WORDS: Final = tuple(each.name for each in fields(Output) if each.name != "facts")
_UUID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


async def no_route(connection: Connection, events: Sequence[int]) -> None:
    """Leave events pending."""


async def end(
    connection: Connection, sayings: Sequence[Saying], *, route: Route
) -> tuple[tuple[Ended | Refusal, ...], tuple[Measured, ...]]:
    """End attempts as their workers say: the answer to each in its place, and what has ended."""
    judged = await _judged(connection, sayings)
    allowed = judged.allowed
    rows = await _end_tasks(connection, allowed)
    published = await _publish(connection, allowed, rows)
    ended = {
        task_id: Ended(
            task_id,
            row["attempt"],
            Status(row["status"]),
            row["due_at"],
            tuple(published.get(task_id, ())),
        )
        for task_id, row in rows.items()
    }
    await consume(connection, _completions(allowed, among=judged.consuming), ended)
    await _close(connection, [each for each in allowed if each.fence.task_id in ended], ended, rows)
    events = [one.event_seq for each in ended.values() for one in each.published if one.event_seq]
    if 0 < len(events) <= ROUTED_MAX:
        await route(connection, events)
    await announce(connection, [row["task_id"] for row in rows.values() if row["due_at"]])
    await _wake_freed(connection, [row["task_id"] for row in rows.values() if row["is_limited"]])
    left = [each for each in sayings if each.fence.task_id not in ended]
    bounded = {task_id: each.bounded() for task_id, each in ended.items()}
    answers = {**bounded, **await _answer_again(connection, left, judged.refused)}
    answers |= _told_to_merge(answers, judged.moved)
    measured = tuple(
        _measured(each, ended[task_id], rows[task_id])
        for each in allowed
        if (task_id := each.fence.task_id) in ended
    )
    return tuple(answers[each.fence.task_id] for each in sayings), measured


@dataclass(frozen=True, slots=True)
class _Judged:
    """Which attempts may end as it is said of them, and why the others may not."""

    allowed: Sequence[Saying]
    refused: Mapping[int, tuple[Why, str]]
    moved: Mapping[int, Moved | str]
    consuming: Collection[int]


async def _judged(connection: Connection, sayings: Sequence[Saying]) -> _Judged:
    refused = {
        each.fence.task_id: (Why.OUTPUTS, told)
        for each in sayings
        if (told := _outputs_problem(each))
    }
    sound = [each for each in sayings if each.fence.task_id not in refused]
    refused |= await _refuse_doubles(connection, _completions(sound))
    sound = [each for each in sound if each.fence.task_id not in refused]
    rows = await held_outputs(connection, _completions(sound))
    guarded = {row["task_id"]: row for row in rows[0]["guarded"] or ()} if rows else {}
    consuming = {task_id for task_id, row in guarded.items() if row["is_consuming"]}
    overtaken = await refuse_overtaken(connection, _completions(sound, among=consuming))
    refused |= {task_id: (Why.STALE, told) for task_id, told in overtaken.items()}
    sound = [each for each in sound if each.fence.task_id not in overtaken]
    fences = [each.fence for each in sound]
    misfits = await refuse_misfits(connection, _completions(sound), written(rows), held=fences)
    refused |= {task_id: (Why.SCHEMA, told) for task_id, told in misfits.items()}
    sound = [each for each in sound if each.fence.task_id not in misfits]
    maintaining = {task_id for task_id, row in guarded.items() if row["is_maintaining"]}
    unlike = await refuse_unlike(connection, _completions(sound, among=maintaining))
    refused |= {task_id: (Why.OUTPUTS, told) for task_id, told in unlike.items()}
    sound = [each for each in sound if each.fence.task_id not in unlike]
    merged = {task_id: row["written"] for task_id, row in guarded.items() if row["is_merging"]}
    moved = await refuse_moved(connection, _completions(sound, among=merged), merged, held=fences)
    refused |= {
        task_id: (Why.OUTPUTS, told) for task_id, told in moved.items() if isinstance(told, str)
    }
    allowed = [each for each in sound if each.fence.task_id not in moved]
    return _Judged(allowed, refused, moved, consuming)


def _told_to_merge(
    answers: Mapping[int, Ended | Refusal], moved: Mapping[int, Moved | str]
) -> dict[int, Refusal]:
    """What those are told whose attempts go on, because they are to merge again."""
    return {
        task_id: replace(answer, why=Why.MOVED, current=told.current)
        for task_id, told in moved.items()
        if isinstance(told, Moved) and isinstance(answer := answers[task_id], Refusal)
    }


async def reap(connection: Connection, *, limit: int, outage_seconds: float) -> Reaping:
    """End attempts whose leases are over, unless reapers hold still after an outage."""
    watched = await connection.execute(query("watch_reaper"), {"outage_seconds": outage_seconds})
    watch = await watched.fetchone()
    assert watch is not None, "the schema has the one row"
    if watch["is_quiet"]:
        return Reaping((), quiet_until=watch["quiet_until"])
    found = await connection.execute(query("reap"), {"limit": limit})
    rows = await found.fetchall()
    if rows:
        closing: dict[str, Any] = {
            "tasks": [row["task_id"] for row in rows],
            "attempts": [row["attempt"] for row in rows],
            "outcomes": ["expired" for _ in rows],
            "reasons": [row["reason"] for row in rows],
            "said": [None for _ in rows],
            "answers": [None for _ in rows],
            "logs": [None for _ in rows],
            "metrics": [None for _ in rows],
            "bytes_max": SAYING_BYTES_MAX,
        }
        await connection.execute(query("close_attempts"), closing)
        await announce(connection, closing["tasks"])
        await _wake_freed(connection, closing["tasks"])
    return Reaping(
        tuple(
            Reaped(row["task_id"], row["attempt"], row["worker"], Status(row["status"]))
            for row in rows
        ),
        tuple(
            Measured(job=row["job"], outcome="expired", seconds=row["ran_seconds"]) for row in rows
        ),
    )


async def _refuse_doubles(
    connection: Connection, completions: Sequence[Completion]
) -> Mapping[int, tuple[Why, str]]:
    """Those that would replace a partition twice, of which one would be lost."""
    doubles = {
        each.fence.task_id: twice[0]
        for each in completions
        if (twice := _more_than_once((one.dataset, one.partition_key) for one in each.outputs))
    }
    if not doubles:
        return {}
    found = await connection.execute(query("replacing_tasks"), {"tasks": list(doubles)})
    told = "Dataset {} has the same partition twice, and its job replaces partitions."
    return {
        row["task_id"]: (Why.OUTPUTS, told.format(doubles[row["task_id"]][0]))
        for row in await found.fetchall()
    }


async def held_outputs(
    connection: Connection, completions: Sequence[Completion]
) -> Sequence[Mapping[str, Any]]:
    """What is looked at before completions are judged, in one statement."""
    if not completions:
        return ()
    asked = {
        **fence_arrays(each.fence for each in completions),
        **output_arrays(completions),
    }
    return await (await connection.execute(query("hold_outputs"), asked)).fetchall()


async def _end_tasks(
    connection: Connection, sayings: Sequence[Saying]
) -> Mapping[int, Mapping[str, Any]]:
    if not sayings:
        return {}
    asked = {
        **fence_arrays(each.fence for each in sayings),
        "succeeded": [isinstance(each, Completion) for each in sayings],
        "retried": [
            isinstance(each, Release) or (isinstance(each, Failure) and each.is_retried)
            for each in sayings
        ],
        "released": [isinstance(each, Release) for each in sayings],
        "delayed": [isinstance(each, Release) and each.is_delayed for each in sayings],
        "alone": [not isinstance(each, Completion) and each.runs_alone for each in sayings],
        "reasons": [_reason(each) for each in sayings],
        "releases_max": RELEASES_MAX,
        "released_out": _RELEASED_OUT,
        "died_before": _DIED_BEFORE,
        "release_first_ms": _RELEASE_FIRST_MS,
        "release_max_ms": _RELEASE_MAX_MS,
        "steady_seconds": _STEADY_SECONDS,
        **output_arrays(_completions(sayings)),
    }
    found = await connection.execute(query("end_tasks"), asked)
    return {row["task_id"]: row for row in await found.fetchall()}


async def _publish(
    connection: Connection, sayings: Sequence[Saying], rows: Mapping[int, Mapping[str, Any]]
) -> Mapping[int, Sequence[Published]]:
    outputs = [
        _output_row(output, place=place, row=row)
        for each in sayings
        if isinstance(each, Completion)
        and (row := rows.get(each.fence.task_id)) is not None
        and row["status"] == Status.COMPLETED
        for place, output in enumerate(each.outputs)
    ]
    rewritten = [each for each in outputs if rows[each["task_id"]]["is_maintaining"]]
    published = {task_id: [one] for task_id, one in (await rewrite(connection, rewritten)).items()}
    outputs = [each for each in outputs if not rows[each["task_id"]]["is_maintaining"]]
    if not outputs:
        return published
    found = await connection.execute(query("publish"), {"outputs": Jsonb(outputs)})
    await end_turns(
        connection, sorted({each["task_id"] for each in outputs if each["mode"] == "merge"})
    )
    for row in await found.fetchall():
        one = Published(
            row["dataset"],
            row["partition_key"],
            Publishing(row["outcome"]),
            row["revision"],
            row["event_seq"],
        )
        published.setdefault(row["task_id"], []).append(one)
    return published


async def _close(
    connection: Connection,
    sayings: Sequence[Saying],
    ended: Mapping[int, Ended],
    rows: Mapping[int, Mapping[str, Any]],
) -> None:
    if not sayings:
        return
    answers = [ended[each.fence.task_id] for each in sayings]
    asked = {
        "tasks": [each.fence.task_id for each in sayings],
        "attempts": [each.fence.attempt for each in sayings],
        "outcomes": [_outcome(each, answer) for each, answer in zip(sayings, answers, strict=True)],
        "reasons": [rows[each.fence.task_id]["told"] for each in sayings],
        "said": [_digest(each) for each in sayings],
        "answers": [Jsonb(msgspec.to_builtins(each.bounded())) for each in answers],
        "logs": [each.log and storable(each.log) for each in sayings],
        "metrics": [storable_json(each.metrics) if each.metrics else None for each in sayings],
        "bytes_max": SAYING_BYTES_MAX,
    }
    await connection.execute(query("close_attempts"), asked)


async def _answer_again(
    connection: Connection, sayings: Sequence[Saying], refused: Mapping[int, tuple[Why, str]]
) -> Mapping[int, Ended | Refusal]:
    """What to tell those whose attempt was not ended now."""
    if not sayings:
        return {}
    found = await connection.execute(
        query("earlier_answers"), fence_arrays(each.fence for each in sayings)
    )
    earlier = {row["task_id"]: row for row in await found.fetchall()}
    sound = [each for each in _completions(sayings) if each.fence.task_id not in refused]
    found = await connection.execute(query("misplaced_outputs"), output_arrays(sound))
    misplaced = {
        row["task_id"]: (Why.OUTPUTS, f"Dataset {row['dataset']} is not an output of this task.")
        for row in await found.fetchall()
    }
    refused = {**refused, **misplaced}
    states = await task_states(connection, [each.fence.task_id for each in sayings])
    answers: dict[int, Ended | Refusal] = {}
    for each in sayings:
        task_id = each.fence.task_id
        before, row = earlier.get(task_id), states.get(task_id)
        if before is not None and before["said"] == _digest(each):
            answers[task_id] = msgspec.convert(before["answer"], Ended)
        elif before is not None and row is not None:
            answers[task_id] = Refusal(task_id, Why.DIFFERENT, row.state)
        elif task_id in refused and row is not None:
            why, told = refused[task_id]
            answers[task_id] = Refusal(task_id, why, row.state, told)
        else:
            answers[task_id] = refusal(task_id, row)
    return answers


async def _wake_freed(connection: Connection, task_ids: Iterable[int]) -> None:
    if tasks := list(task_ids):
        await connection.execute(query("wake_freed"), {"tasks": tasks})


def _outputs_problem(saying: Saying) -> str:
    if not isinstance(saying, Completion):
        return ""
    if saying.why_not:
        return saying.why_not
    places = ((each.dataset, each.partition_key, each.append_key) for each in saying.outputs)
    if twice := _more_than_once(places):
        return f"Dataset {twice[0][0]} has the same output twice."
    for each in saying.outputs:
        is_range = each.start is not None and each.end is not None and each.start < each.end
        if (each.start is not None or each.end is not None) and not is_range:
            return "A range needs a start that is lower than its end."
        if each.partition_key is None and each.start is not None:
            return "A range needs the key of its partition."
        if each.partition_key is not None and each.cursor is not None:
            return "An output has a partition or a cursor, not both."
        if problem := _text_problem(each):
            return problem
    return ""


def _more_than_once(places: Iterable[Place]) -> list[Place]:
    return [place for place, count in Counter(places).items() if count > 1]


def _text_problem(output: Output) -> str:
    if not _UUID.fullmatch(output.dataset):
        return "A dataset is named by its uuid."
    for what, text, bytes_max in (
        ("The key of a partition", output.partition_key, 500),
        ("A key to append by", output.append_key, 1000),
        ("A location", output.location, 10_000),
    ):
        if text is not None and (
            storable(text) != text or not 1 <= len(text.encode()) <= bytes_max
        ):
            return f"{what} has 1 to {bytes_max} bytes that can be stored."
    numbers = (output.start, output.end, output.cursor)
    if any(number is not None and not -(2**63) <= number < 2**63 for number in numbers):
        return "A range or a cursor is a number of 64 bits."
    return ""


def _completions(
    sayings: Iterable[Saying], *, among: Container[int] | None = None
) -> list[Completion]:
    return [
        each
        for each in sayings
        if isinstance(each, Completion) and (among is None or each.fence.task_id in among)
    ]


def _output_row(output: Output, *, place: int, row: Mapping[str, Any]) -> Mapping[str, Any]:
    start, end = output.start, output.end
    if start is None and row["own_key"] is not None and row["own_key"] == output.partition_key:
        # The task's own partition is its own range, whether or not its function has said so.
        start, end = row["own_start"], row["own_end"]
    return {
        "task_id": row["task_id"],
        "place": place,
        "attempt": row["attempt"],
        "dataset_id": output.dataset,
        "generation": row["generation"],
        "mode": row["update_mode"],
        "partition_key": output.partition_key,
        "range_start": start,
        "range_end": end,
        "cursor": output.cursor,
        "append_key": output.append_key or f"task:{row['task_id']}",
        "location": output.location,
        "news": row["dedupe_key"],
        "base_revision": output.base_revision,
        **_facts(output.facts),
    }


def _facts(facts: Facts | None) -> Mapping[str, Any]:
    if facts is None:
        return {}
    return {
        "files": facts.files,
        "rows": facts.rows,
        "bytes": facts.bytes,
        "manifest": facts.manifest,
    }


def _outcome(saying: Saying, ended: Ended) -> str:
    if ended.status is Status.CANCELLED:
        return "cancelled"
    if isinstance(saying, Completion):
        return "completed"
    return "released" if ended.status is Status.QUEUED else "failed"


def _measured(saying: Saying, ended: Ended, row: Mapping[str, Any]) -> Measured:
    outputs = saying.outputs if isinstance(saying, Completion) else ()
    # What was not published, because the attempt was cancelled, has no answer for its outputs.
    facts = [
        output.facts
        for output, one in zip(outputs, ended.published, strict=False)
        if one.outcome is Publishing.PUBLISHED and output.facts is not None
    ]
    return Measured(
        job=row["job"],
        outcome=_outcome(saying, ended),
        seconds=row["ran_seconds"],
        published_rows=sum(each.rows or 0 for each in facts),
        published_bytes=sum(each.bytes for each in facts),
    )


def _reason(saying: Saying) -> str | None:
    return None if isinstance(saying, Completion) else storable(saying.reason)


def _digest(saying: Saying) -> str:
    """What tells one saying of an attempt from another."""
    if isinstance(saying, Completion):
        body: Mapping[str, Any] = {"outputs": [_words(each) for each in saying.outputs]}
    elif isinstance(saying, Release):
        body = {"reason": saying.reason, "is_delayed": saying.is_delayed}
    else:
        body = {"reason": saying.reason, "is_retried": saying.is_retried}
    # In ASCII, so that no text is too strange to be told from another. Where the log is, and what
    # it took, say nothing of what the attempt has done.
    return hashlib.sha256(json.dumps([type(saying).__name__, body]).encode()).hexdigest()


def _words(output: Output) -> Mapping[str, Any]:
    # The sum of its manifest stands for all that it says. What has none is as it always was.
    words = {name: getattr(output, name) for name in _WORDS}
    if output.base_revision is None:
        del words["base_revision"]
    return words if output.facts is None else {**words, "manifest": output.facts.manifest}
