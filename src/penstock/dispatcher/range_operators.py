"""The operators of the runtime `dispatcher`: range split and range aggregate.

`range_split` cuts the range of an event at the multiples of its size. `range_aggregate` emits
every window that all of its inputs cover: each input by the union of the ranges of its events,
in the generation that feeds the job, and that pass the edge's filter. A window is of a fixed
size, or a part of the calendar, by whose name its partition is called.

Tasks are claimed like any other, by the worker `dispatcher:{name}`, and then computed and ended
in one transaction, or in several if they make many ranges; what they publish says where the
range is, for there is no data. A crash in between is a lease that nobody renews: the reaper
ends it and the next attempt does it again.

Whoever aggregates for a job holds its lock until the end of the transaction, and looks at the
events after it, so the last of several events that complete a window sees all of them. A window
is published by the number of the newest event in it and the count of all: the same event again
is one publication, and a partition that comes again is a new one. Any number of dispatchers may
run this at once. Called by a loop in every dispatcher.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from penstock.dispatcher.dag.model import DISPATCHER_RUNTIME, Calendar, PlatformOperator
from penstock.dispatcher.database.pool import Connection, Database, query
from penstock.dispatcher.ranges import (
    FIRST,
    LAST,
    PIECES_MAX,
    Range,
    calendar_key,
    calendar_windows,
    key,
    pieces,
    windows,
)
from penstock.dispatcher.router import route_events
from penstock.dispatcher.tasks.completion import AttemptReport, Route, end
from penstock.dispatcher.tasks.lifecycle import Tasks
from penstock.dispatcher.tasks.model import (
    AttemptMeasure,
    ClaimedTask,
    Completion,
    Failure,
    Refusal,
    TaskOutput,
)

_log = logging.getLogger(__name__)

CLAIM_MAX: Final = 100
_NUMBERS: Final = (-(2**63), 2**63 - 1)


class RangeOperators:
    """Runs the tasks of the runtime `dispatcher`. `name` is that of this dispatcher."""

    def __init__(
        self, database: Database, tasks: Tasks, *, name: str, route: Route = route_events
    ) -> None:
        self._database = database
        self._tasks = tasks
        self._worker = f"dispatcher:{name}"
        self._route = route

    async def turn(self) -> float | None:
        """Claim and do what waits; at once again if there may be more."""
        is_more = False
        for operator in PlatformOperator:
            claimed = await self._tasks.claim_next(operator, worker=self._worker, limit=CLAIM_MAX)
            is_more |= len(claimed) == CLAIM_MAX
            left = list(claimed)
            for some in _batches(claimed):
                ended = await self._database.transact(functools.partial(self._run, tasks=some))
                self._tasks.counters.note_ended(ended)
                left = [each for each in left if each not in some]
                if left:
                    # Those that wait for their turn are in good hands.
                    await self._tasks.heartbeat([each.fence for each in left])
        return 0.0 if is_more else None

    async def _run(
        self, connection: Connection, tasks: Sequence[ClaimedTask]
    ) -> Sequence[AttemptMeasure]:
        """Compute and end tasks of one job and one generation; returns what has ended."""
        reports = await run(connection, tasks)
        answers, measured = await end(connection, reports, route=self._route)
        for each in answers:
            if isinstance(each, Refusal):
                # Cancelled or reaped in the meantime: nothing of it was published.
                _log.info("failed to complete task %s: %s", each.task_id, each.why)
        return measured


def _batches(tasks: Sequence[ClaimedTask]) -> Iterator[Sequence[ClaimedTask]]:
    """Tasks of one job and one generation each, and no more than may make so many ranges."""
    jobs: dict[tuple[str, str], list[ClaimedTask]] = {}
    for task in tasks:
        jobs.setdefault((task.job, task.generation), []).append(task)
    for some in jobs.values():
        batch: list[ClaimedTask] = []
        count = 0
        for task in some:
            config = task.definition.get("config", {})
            found = _ranges(task, operator=task.operator, config=config)
            more = len(found) if isinstance(found, tuple) else 0
            if batch and count + more > PIECES_MAX:
                yield batch
                batch, count = [], 0
            batch.append(task)
            count += more
        yield batch


async def run(connection: Connection, tasks: Sequence[ClaimedTask]) -> list[AttemptReport]:
    """What becomes of tasks of one job and one generation."""
    config = tasks[0].definition.get("config", {})
    operator, runtime = tasks[0].operator, tasks[0].runtime
    reports: list[AttemptReport] = []
    ranges: dict[int, tuple[Range, ...]] = {}
    for task in tasks:
        found = _ranges(task, operator=operator, config=config)
        if runtime != DISPATCHER_RUNTIME:
            found = f"{operator} is an operator of the runtime dispatcher, and not of {runtime}."
        if isinstance(found, str):
            reports.append(Failure(task.fence, found, is_retried=False))
        else:
            ranges[task.task_id] = found
    marks: Mapping[Range, str | None]
    wanted = sorted({each for found in ranges.values() for each in found})
    if operator == PlatformOperator.RANGE_AGGREGATE:
        marks = await _covered(connection, tasks[0], wanted)
    else:
        marks = dict.fromkeys(wanted)
    reports += [
        Completion(task.fence, _outputs(task, ranges[task.task_id], marks))
        for task in tasks
        if task.task_id in ranges
    ]
    return reports


def _ranges(
    task: ClaimedTask, *, operator: str, config: Mapping[str, Any]
) -> tuple[Range, ...] | str:
    """The ranges that a task may emit, or what is wrong with it."""
    start, stop = task.payload.get("start"), task.payload.get("end")
    if start is None or stop is None:
        return f"{operator} works on ranges, and what came has none; send a start and an end."
    calendar = _calendar(config)
    if operator == PlatformOperator.RANGE_SPLIT:
        found = pieces(start, stop, size=config["size"])
    elif calendar is not None:
        if start < FIRST or stop > LAST:
            return (
                f"The range {start}-{stop} is not in seconds since 1970, or outside of the"
                f" calendar; {operator} by the {calendar} needs both ends in the years 1 to 9998."
            )
        found = calendar_windows(start, stop, size=calendar)
    else:
        found = windows(start, stop, size=config["size"], step=config["step"])
    if found is None:
        return (
            f"The range {start}-{stop} makes more than {PIECES_MAX:,} ranges of"
            f" {config['size']}; make the size larger."
        )
    lowest, highest = _NUMBERS
    return tuple(each for each in found if lowest <= each[0] and each[1] <= highest)


def _calendar(config: Mapping[str, Any]) -> Calendar | None:
    """The part of the calendar that ranges are; None if their size is a number."""
    return Calendar(config["size"]) if isinstance(config.get("size"), str) else None


async def _covered(
    connection: Connection, task: ClaimedTask, wanted: Sequence[Range]
) -> Mapping[Range, str | None]:
    """The windows that every input covers, and the key that tells the news in each."""
    if not wanted:
        return {}
    asked = {"definition": task.definition_id, "generation": task.generation}
    await connection.execute(query("lock_aggregation"), asked)
    # After the lock, so that the events are seen of all who held it before.
    found = await connection.execute(
        query("covered_windows"),
        {
            **asked,
            "starts": [each[0] for each in wanted],
            "ends": [each[1] for each in wanted],
        },
    )
    return {
        (row["start"], row["end"]): f"upto:{row['seq']}:{row['count']}"
        for row in await found.fetchall()
    }


def _outputs(
    task: ClaimedTask, ranges: Iterable[Range], marks: Mapping[Range, str | None]
) -> tuple[TaskOutput, ...]:
    (output,) = task.definition["outputs"]
    name = output.get("dataset", output["name"])
    dataset = task.definition["datasets"][name]
    calendar = _calendar(task.definition.get("config", {}))
    named = {
        each: key(each) if calendar is None else calendar_key(each[0], size=calendar)
        for each in ranges
        if each in marks
    }
    return tuple(
        TaskOutput(
            dataset=dataset,
            location=f"range:{partition}",
            partition_key=partition,
            start=each[0],
            end=each[1],
            append_key=marks[each],
        )
        for each, partition in named.items()
    )
