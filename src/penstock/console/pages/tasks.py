"""The pages of tasks: the list by job, status and partition, and one task with its attempts and
log.

The list filters as the API does, with the same parameters. All dead tasks that match the
filters can be replayed at once, in rounds, so that one that dies again meanwhile is not
replayed twice.

The page of a task explains first why it failed or waits, what was tried, and what comes next,
for a newcomer; so the reason is given whole, as the attempt reported it. Then come the button
that replays it, its attempts on a time line, its log, and what it reads and writes. The log is
of the last attempt, or of the one that `attempt` names. A load costs seven short statements
and, for the log, at most 64 KiB of a file.

A log is a file on the machine that the attempt ran on. What a worker reports as its place is
not trusted: only `TASK-ATTEMPT.log` in the dispatcher's own folder of logs, which workers of
the same data folder write to, is opened, and only if the reported place, if any, is that file.
It has to be a plain file with no other name, and no link, so that nobody can have another file
read by it. Undecodable bytes and terminal control characters are left out or replaced.

The progress and the metrics of attempts, formatted for people. Pure.

Both are JSON objects whose names and values are the worker's or the user's. Names end in their
units (`_bytes`, `_ms`, `_seconds`); progress of a Spark job counts its stages and tasks, and a
function mostly reports `done` and `of`. Anything else is shown as it is, within bounds.

A Spark task reports what it read and wrote itself, and the metrics of Spark. If Spark ran
several tasks together, the latter cover all of them, and are shown apart.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import msgspec

from penstock.console.charts import Timeline, TimelineLane, TimelineSpan, timeline
from penstock.console.pages.base import (
    ActionResult,
    ConsolePage,
    FormAction,
    PageNotFound,
    PageRequest,
    call_api,
    parse_id,
)
from penstock.console.pages.dataset import partition_path
from penstock.console.renderer import length, line, number, size
from penstock.dispatcher.api.context import ApiContext
from penstock.dispatcher.api.control_endpoints import cancel_tasks, replay_tasks
from penstock.dispatcher.api.endpoints import ApiCall, Handler, HttpReply
from penstock.dispatcher.api.problems import not_as_declared
from penstock.dispatcher.api.read_endpoints import tasks as list_tasks
from penstock.dispatcher.views.jobs import PARTITIONS_MAX, AboutTask, PipelineViews, TaskViews
from penstock.protocol.base import TasksParams, TaskStatus
from penstock.protocol.problem import Problem
from penstock.protocol.steering import AttemptAnswer, JobAnswer, TaskAnswer, TaskIdsAsk, TasksAnswer
from penstock.protocol.work import ResultsAnswer, TaskResult
from penstock.runtimes.base import AttemptPaths

_COUNTS: Final[Sequence[tuple[str, str]]] = (
    ("stages_done", "stages"),
    ("tasks_done", "tasks"),
    ("done", "of"),
)
_FIGURES_MAX: Final = 60
_OWN: Final = {
    "rows_in": "Rows read",
    "bytes_in": "Data read",
    "rows_out": "Rows written",
    "bytes_out": "Data written",
    "files_out": "Files written",
}
_OF_SPARK: Final = {
    "reading_seconds": "Read time",
    "running_seconds": "Compute time",
    "checking_seconds": "Check time",
    "writing_seconds": "Write time",
    "jobs": "Spark jobs",
    "stages": "Spark stages",
    "tasks": "Spark tasks",
    "executor_run_ms": "Executor time, total",
    "executor_cpu_ms": "Executor CPU time",
    "gc_ms": "Executor GC time",
    "input_rows": "Spark rows read",
    "input_bytes": "Spark data read",
    "output_rows": "Spark rows written",
    "output_bytes": "Spark data written",
    "shuffle_read_bytes": "Shuffle read",
    "shuffle_write_bytes": "Shuffle written",
    "spill_memory_bytes": "Memory spilled",
    "spill_disk_bytes": "Disk spilled",
}
_SHARED: Final = ("shared_by", "batched")
"""How many tasks Spark ran together."""
_DEPTH_MAX: Final = 4
_NUMBER_MAX: Final = 10.0**15
"""Larger ones, which nobody has measured, are shown as they are written."""
_TEXT_CHARACTERS_MAX: Final = 8_000


@dataclass(frozen=True, slots=True)
class ProgressCount:
    """So much of so much."""

    name: str
    done: float
    of: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricGroup:
    """Figures that belong together."""

    title: str
    """Empty where there is but one group."""
    note: str = ""
    figures: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptProgress:
    """How far an attempt is."""

    phase: str
    counts: Sequence[ProgressCount]
    others: Sequence[tuple[str, str]]


def attempt_progress(said: Mapping[str, Any]) -> AttemptProgress:
    """What an attempt that runs says."""
    pairs = [
        (done, of)
        for done, of in _COUNTS
        if _is_counted(said.get(done)) and _is_counted(said.get(of)) and said[of] > 0
    ]
    counts = [ProgressCount("" if of == "of" else of, said[done], said[of]) for done, of in pairs]
    phase = said.get("phase")
    told = {name for pair in pairs for name in pair}
    if isinstance(phase, str):
        told.add("phase")
    others = {name: value for name, value in said.items() if name not in told}
    return AttemptProgress(
        phase=line(phase) if isinstance(phase, str) else "",
        counts=counts,
        others=figures(others),
    )


def figures(measured: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names in words, and values with their units; those within others follow them."""
    return list(islice(_figures(measured, depth=_DEPTH_MAX), _FIGURES_MAX))


def metric_groups(measured: Mapping[str, Any], *, runtime: str) -> list[MetricGroup]:
    """What an attempt took, by whether it is of this task or of all that ran with it."""
    if runtime != "spark":
        return [MetricGroup(title="", figures=figures(measured))]
    own = {name: value for name, value in measured.items() if name in _OWN}
    of_spark = {name: measured[name] for name in _OF_SPARK if name in measured}
    known = {*own, *of_spark, *_SHARED}
    others = {name: value for name, value in measured.items() if name not in known}
    together = max((_count(measured.get(name)) for name in _SHARED), default=1)
    title, note = "Spark", ""
    if together > 1:
        title = f"The batch of {number(together)} tasks"
        note = "Spark ran this task in a batch. These metrics are for the whole batch."
    found = [
        MetricGroup(title="This task", figures=[*_named(own, _OWN), *figures(others)]),
        MetricGroup(title=title, note=note, figures=_named(of_spark, _OF_SPARK)),
    ]
    return [each for each in found if each.figures]


def as_json(value: object) -> str:
    """A value as it is written, over several lines, and cut if it is very long."""
    text = json.dumps(value, indent=2, ensure_ascii=False, default=str)
    return text if len(text) <= _TEXT_CHARACTERS_MAX else f"{text[:_TEXT_CHARACTERS_MAX]}\n…"


def _figures(measured: Mapping[str, Any], *, depth: int) -> Iterator[tuple[str, str]]:
    for name, value in measured.items():
        if isinstance(value, Mapping) and depth > 1:
            for inner, shown in _figures(value, depth=depth - 1):
                yield f"{_words(name)}: {inner}", shown
        elif value is not None:
            yield _words(name), _figure(name, value)


def _named(measured: Mapping[str, Any], names: Mapping[str, str]) -> list[tuple[str, str]]:
    return [
        (shown, _figure(name, measured[name]))
        for name, shown in names.items()
        if measured.get(name) is not None
    ]


def _count(value: object) -> int:
    return int(value) if _is_counted(value) and isinstance(value, int | float) else 1


def _figure(name: str, value: object) -> str:
    if not _is_number(value):
        shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return line(shown)
    assert isinstance(value, int | float)
    if not isfinite(value) or abs(value) >= _NUMBER_MAX:
        return line(str(value), characters_max=40)
    if name.endswith("bytes") or name.startswith("bytes_"):
        return size(value)
    if name.endswith("_seconds"):
        return length(value)
    if name.endswith("_ms"):
        return length(value / 1000)
    return number(value)


def _words(name: str) -> str:
    for unit in ("_ms", "_seconds", "_bytes"):
        name = name.removesuffix(unit)
    return line(name.replace("_", " "), characters_max=60)


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    # What is too large for a figure of the machine is no figure.
    return not isinstance(value, int) or value.bit_length() <= 1_000


def _is_counted(value: object) -> bool:
    return _is_number(value) and isinstance(value, int | float) and 0 <= value < _NUMBER_MAX


TAIL_BYTES_MAX: Final = 64 * 1024

_STEERING: Final = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])"
)
_UNSEEN: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


@dataclass(frozen=True, slots=True)
class LogTail:
    """The end of a log."""

    text: str
    bytes: int
    """Of the whole file."""
    is_cut: bool
    """Whether there is more before it."""


def would_be_here(logs: Path, *, task_id: int, attempt: int, said: str | None) -> bool:
    """Whether the log would be here if its worker were on this machine and it had printed."""
    file = Path(AttemptPaths("file:///", logs).log(task_id=task_id, attempt=attempt))
    return said is None or _is_same(said, file)


def tail_of(logs: Path | None, *, task_id: int, attempt: int, said: str | None) -> LogTail | None:
    """The end of the log of an attempt; None if it is not here. `said` is what its worker says.

    Reads a file: to be called in a thread.
    """
    if logs is None:
        return None
    file = Path(AttemptPaths("file:///", logs).log(task_id=task_id, attempt=attempt))
    if said is not None and not _is_same(said, file):
        return None
    try:
        # Without waiting for whoever writes to what only looks like a file.
        opened = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        about = os.fstat(opened)
        if not stat.S_ISREG(about.st_mode) or about.st_nlink != 1:
            return None
        is_cut = about.st_size > TAIL_BYTES_MAX
        content = os.pread(opened, TAIL_BYTES_MAX, max(0, about.st_size - TAIL_BYTES_MAX))
    except OSError:
        return None
    finally:
        os.close(opened)
    if is_cut:
        # The rest of a line is no line; one that is longer than everything is shown all the same.
        content = content.partition(b"\n")[2] or content
    return LogTail(as_text(content), about.st_size, is_cut)


def as_text(content: bytes) -> str:
    """What was printed, as lines of text."""
    text = content.decode("utf-8", "replace").replace("\r\n", "\n").replace("\r", "\n")
    return _UNSEEN.sub("", _STEERING.sub("", text))


def _is_same(said: str, file: Path) -> bool:
    """Whether a worker means this file, by whatever way to its folder."""
    try:
        named = Path(said)
        return named.name == file.name and named.parent.resolve() == file.parent.resolve()
    except (OSError, ValueError, RuntimeError):
        return False


_PAGE: Final = 50
_ROUND: Final = 1000
_ROUNDS_MAX: Final = 20
_MANY: Final = 10_000
_FIELDS: Final = {"job": "job", "status": "status", "partition": "partition_key"}


async def _load(parts: ApiContext, asked: PageRequest) -> Mapping[str, Any] | PageNotFound:
    params = _params(asked, limit=_PAGE)
    if isinstance(params, Problem):
        return PageNotFound(params.title, "Clear the filters to see all tasks.")
    found = await list_tasks(parts, ApiCall(params=params))
    if not isinstance(found, TasksAnswer):
        title = found.title if isinstance(found, Problem) else "No matching tasks."
        return PageNotFound(title, "The list of all tasks shows the names of all jobs.")
    overall = await parts.views.overall()
    jobs = {each.name for each in overall.jobs}
    if params.job is not None:
        # It may be one that the DAG in force has not.
        jobs.add(params.job)
    chosen = [each for each in overall.jobs if params.job in (None, each.name)]
    kept = {name: asked.query[name] for name in _FIELDS if asked.query.get(name)}
    return {
        "tasks": found.tasks,
        "jobs": sorted(jobs),
        "job": params.job,
        "status": params.status.value if params.status is not None else "",
        "partition": params.partition_key,
        "is_first": params.before is None,
        "older": _link(kept, before=found.before) if found.before is not None else "",
        "newest": _link(kept),
        "tabs": _tabs(kept, chosen),
        "is_filtered": bool(kept),
        "page": _PAGE,
    }


def _params(asked: PageRequest, *, limit: int) -> TasksParams | Problem:
    said: dict[str, object] = {"limit": limit}
    for name, param in _FIELDS.items():
        if (value := asked.query.get(name, "")).strip():
            said[param] = value
    if before := asked.query.get("before"):
        said["before"] = before
    try:
        return msgspec.convert(said, TasksParams, strict=False)
    except msgspec.ValidationError as error:
        return not_as_declared(error, kind=TasksParams)


def _link(kept: Mapping[str, str], **more: object) -> str:
    said = {**kept, **more}
    return f"/tasks?{urlencode(said)}" if said else "/tasks"


def _tabs(kept: Mapping[str, str], jobs: list[JobAnswer]) -> list[tuple[str, str, str, str]]:
    """The statuses: the name, where it leads, the value, and how many if that is known."""
    counts = {
        "running": sum(each.running for each in jobs),
        "dead": sum(each.dead for each in jobs),
    }
    rest = {name: value for name, value in kept.items() if name != "status"}
    # What a partition has of them is not counted.
    shown = {} if "partition" in kept else counts
    return [
        ("All", _link(rest), "", ""),
        *(
            (
                each.value.capitalize(),
                _link({**rest, "status": each.value}),
                each.value,
                number(shown[each.value], most=_MANY) if shown.get(each.value) else "",
            )
            for each in TaskStatus
        ),
    ]


async def _replay(parts: ApiContext, asked: PageRequest, to: str) -> ActionResult:
    """Queue all dead tasks of a job, or of all, again."""
    params = _params(asked, limit=_ROUND)
    if isinstance(params, Problem):
        return ActionResult(params.title, to, is_well=False)
    params.status = TaskStatus.FAILED
    replayed = 0
    for _ in range(_ROUNDS_MAX):
        found = await list_tasks(parts, ApiCall(params=params))
        if not isinstance(found, TasksAnswer):
            title = found.title if isinstance(found, Problem) else "Nothing was replayed."
            return ActionResult(title, to, is_well=False)
        ids = [each.id for each in found.tasks]
        if ids:
            answer = await replay_tasks(parts, ApiCall(ask=TaskIdsAsk(tasks=ids)))
            body = answer.body if isinstance(answer, HttpReply) else answer
            if isinstance(body, ResultsAnswer):
                replayed += sum(each.status < 400 for each in body.results)
        if found.before is None:
            break
        params.before = found.before
    if not replayed:
        return ActionResult("No dead tasks; nothing was replayed.", to)
    told = "1 task is" if replayed == 1 else f"{number(replayed)} tasks are"
    return ActionResult(f"{told} queued for replay.", to)


PAGE: Final = ConsolePage(
    "/tasks",
    "tasks",
    _load,
    live=("tabs", "list"),
    query=("job", "status", "partition", "before"),
)
ACTIONS: Final = (FormAction("/tasks/replay", _replay, fields=("job", "partition")),)


_UNREAD: Final = ("retired", "abandoned")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskExplanation:
    """What stands on top of the page of a task."""

    tone: str
    """The class of the note: `bad`, `warn`, `paused`, or nothing."""
    head: str
    reason: str = ""
    """Why it has failed or is tried again: whole, in the words of the attempt."""
    further: Sequence[str] = field(default=())
    can_replay: bool = False
    can_cancel: bool = False


def explain_task(answer: TaskAnswer, about: AboutTask) -> TaskExplanation:
    """Where a task stands."""
    task = answer.task
    match task.status:
        case TaskStatus.FAILED:
            return TaskExplanation(
                tone="bad",
                head="This task failed and will not be retried automatically.",
                reason=task.reason or "",
                further=[*explain_attempts(answer), *_of_replay(about)],
                can_replay=True,
            )
        case TaskStatus.RETRYING:
            return TaskExplanation(
                tone="warn",
                head=f"Attempt {task.attempt} failed; attempt {task.attempt + 1} of at most"
                f" {task.attempt_limit} follows.",
                reason=task.reason or "",
                further=[*explain_attempts(answer), *_waiting(answer, about)],
                can_cancel=True,
            )
        case TaskStatus.QUEUED:
            return _queued(answer, about)
        case TaskStatus.RUNNING:
            return _running(answer, about)
        case TaskStatus.CANCELLED:
            return TaskExplanation(
                tone="",
                head="This task was cancelled.",
                further=[task.reason] if task.reason else [],
            )
    return TaskExplanation(tone="", head=_completed(answer))


def explain_attempts(answer: TaskAnswer) -> list[str]:
    """What the attempts that are over have in common."""
    task = answer.task
    ended = [each for each in answer.attempts if each.ended_at is not None]
    over = [each for each in ended if each.outcome != "released"]
    handed_back = len(ended) - len(over)
    said = []
    if handed_back:
        times = "once" if handed_back == 1 else f"{handed_back} times"
        said.append(f"Released {times} by workers, which does not count as an attempt.")
    if not over:
        return said
    said.append(_tried(over, task.attempt - handed_back))
    if task.status == TaskStatus.FAILED and task.attempt < task.attempt_limit:
        said.append("The last failure was not retryable.")
    if over[-1].outcome == "expired":
        said.append(
            "The attempt expired without a heartbeat: its worker was stopped, ran out of memory,"
            " or could not reach the dispatcher."
        )
    return said


def _tried(over: Sequence[AttemptAnswer], attempts: int) -> str:
    last = over[-1]
    if attempts == 1 or len(over) == 1:
        times = "once" if attempts == 1 else f"{attempts} times"
        return f"Tried {times}, on worker {line(last.worker, 60)}, for {_took(last)}."
    span = (last.ended_at or last.started_at) - over[0].started_at
    whole = f"Tried {attempts} times within {length(span.total_seconds())}"
    causes = {_cause(each) for each in over}
    if len(causes) == 1:
        return f"{whole}, and failed for the same reason each time."
    return f"{whole}; the reasons differ, see the attempts below."


def _of_replay(about: AboutTask) -> list[str]:
    """What to know before a task that is dead is replayed."""
    said = []
    if about.generation_state in _UNREAD:
        said.append(f"Its generation is {about.generation_state}: its outputs would not be read.")
    if not about.is_in_dag:
        said.append("The DAG in force no longer has this job.")
    elif not about.is_in_force:
        said.append("The job was changed since: a replay runs the task as it was created.")
    more = about.max_attempts
    said.append(
        "After fixing the cause, replay the task: it is queued at once, for"
        f" {'one more attempt' if more == 1 else f'up to {more} more attempts'}."
    )
    return said


def _queued(answer: TaskAnswer, about: AboutTask) -> TaskExplanation:
    task = answer.task
    head = "This task waits for its first attempt."
    if task.reason:
        head = f"Attempt {task.attempt} was released by its worker; another one follows."
    elif task.attempt:
        head = f"This task was replayed, and waits for attempt {task.attempt + 1}."
    further = _waiting(answer, about)
    is_warned = bool(task.reason) or (about.workers == 0 and bool(further))
    tone = "paused" if about.paused else "warn" if is_warned else ""
    return TaskExplanation(
        tone=tone, head=head, reason=task.reason or "", further=further, can_cancel=True
    )


def _running(answer: TaskAnswer, about: AboutTask) -> TaskExplanation:
    task = answer.task
    head = f"Attempt {task.attempt} of at most {task.attempt_limit} runs"
    head = f"{head} on worker {line(task.worker, 60)}." if task.worker else f"{head}."
    if task.releases:
        head = f"{head} {task.releases} released attempts are not counted."
    if task.runs_alone:
        head = f"{head} It runs alone in a process, since a process that it ran in died."
    if about.cancel_asked:
        return TaskExplanation(
            tone="warn",
            head="Cancellation requested; the worker sees it at its next heartbeat.",
            further=[task.reason] if task.reason else [],
        )
    may = f"Timeout: {length(about.timeout_seconds)}."
    return TaskExplanation(tone="", head=head, further=[may], can_cancel=True)


def _waiting(answer: TaskAnswer, about: AboutTask) -> list[str]:
    """What keeps a task from running, as far as can be said."""
    said = [f"The job is paused: {each}" for each in about.paused]
    if about.is_operator_full:
        said.append(
            f"The operator is at its concurrency limit of {about.operator_max}; the task waits."
        )
    if about.is_job_full:
        said.append(f"The job is at its concurrency limit of {about.job_max}; the task waits.")
    # Functions are invoked, and ask for no work.
    if about.workers == 0 and about.runtime not in ("lambda", "dispatcher"):
        said.append(
            "No worker that serves it was seen in the last 90 seconds: start one with"
            " `penstock worker`."
        )
    if not said and answer.task.due_at <= about.now:
        said.append("The next worker with free capacity claims it.")
    return said


def _completed(answer: TaskAnswer) -> str:
    last = answer.attempts[-1] if answer.attempts else None
    if last is None or last.ended_at is None:
        return "This task is completed."
    return f"This task was completed by attempt {last.number}, in {_took(last)}."


def _took(attempt: AttemptAnswer) -> str:
    ended = attempt.ended_at or attempt.started_at
    return length((ended - attempt.started_at).total_seconds())


def _cause(attempt: AttemptAnswer) -> str:
    return (attempt.reason or "").partition("\n")[0]


_SHOWN_MAX: Final = 25
"""How many attempts, and how many publications, are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """An attempt, as it is shown."""

    said: AttemptAnswer
    state: str
    seconds: float
    lane: TimelineLane
    told: str


async def _load_task(parts: ApiContext, asked: PageRequest) -> Mapping[str, Any] | PageNotFound:
    task_id = parse_id(asked.path["id"])
    answer = await parts.views.task(task_id) if task_id else None
    about = await TaskViews(parts.database).about(task_id) if answer is not None else None
    if answer is None or about is None:
        hint = "Settled tasks are kept for `retention_days`."
        return PageNotFound(f"There is no task {asked.path['id'][:40]}.", hint)
    chosen = _chosen(answer, asked.query.get("attempt", ""))
    tail = None
    if chosen is not None:
        tail = await asyncio.to_thread(
            tail_of, parts.logs, task_id=task_id, attempt=chosen.number, said=chosen.log
        )
    is_silent = tail is None and chosen is not None and await _is_silent(parts, task_id, chosen)
    line, rows = _attempts(answer, about)
    running = answer.attempts[-1] if answer.task.status == TaskStatus.RUNNING else None
    return {
        "task": answer.task,
        "about": about,
        "standing": explain_task(answer, about),
        "rows": rows,
        "line": line,
        "chosen": chosen,
        "tail": tail,
        "is_silent": is_silent,
        "is_over": answer.task.settled_at is not None,
        "progress": attempt_progress(running.progress) if running and running.progress else None,
        "groups": metric_groups(chosen.metrics, runtime=about.runtime)
        if chosen and chosen.metrics
        else [],
        "payload": as_json(answer.payload),
        "published": answer.published[:_SHOWN_MAX],
        "published_more": max(0, len(answer.published) - _SHOWN_MAX) + answer.omitted,
        "further": await _further(parts, answer, about),
        "partitions_max": PARTITIONS_MAX,
        "partition_path": partition_path,
    }


def _chosen(answer: TaskAnswer, number: str) -> AttemptAnswer | None:
    """The attempt whose log is shown."""
    for each in answer.attempts:
        if str(each.number) == number:
            return each
    return answer.attempts[-1] if answer.attempts else None


async def _is_silent(parts: ApiContext, task_id: int, attempt: AttemptAnswer) -> bool:
    """Whether an attempt without a log here has printed nothing, for its worker is here too."""
    if parts.logs is None or not await asyncio.to_thread(
        would_be_here, parts.logs, task_id=task_id, attempt=attempt.number, said=attempt.log
    ):
        return False
    return await TaskViews(parts.database).is_of_host(attempt.worker, platform.node())


def _attempts(answer: TaskAnswer, about: AboutTask) -> tuple[Timeline, Sequence[_Row]]:
    """The latest attempts with their lanes, the latest first."""
    shown = answer.attempts[-_SHOWN_MAX:]
    spans = [_span(each, now=about.now) for each in shown]
    is_whole = len(shown) == answer.task.attempt or not spans
    begins_at = answer.task.created_at.timestamp() if is_whole else spans[0].started_at
    ends_at = (answer.task.settled_at or about.now).timestamp()
    line = timeline(spans, begins_at=begins_at, ends_at=ends_at)
    rows = [
        _row(each, span, lane) for each, span, lane in zip(shown, spans, line.lanes, strict=True)
    ]
    return line, rows[::-1]


def _span(attempt: AttemptAnswer, *, now: datetime) -> TimelineSpan:
    ended = attempt.ended_at or max(now, attempt.started_at)
    return TimelineSpan(started_at=attempt.started_at.timestamp(), ended_at=ended.timestamp())


def _row(attempt: AttemptAnswer, span: TimelineSpan, lane: TimelineLane) -> _Row:
    state = attempt.outcome or "running"
    seconds = span.ended_at - span.started_at
    return _Row(
        said=attempt,
        state=state,
        seconds=seconds,
        lane=lane,
        told=f"Attempt {attempt.number}, {state}, on the timeline",
    )


async def _further(parts: ApiContext, answer: TaskAnswer, about: AboutTask) -> Sequence[str]:
    """The jobs that follow those that read what a dead task should have made."""
    if answer.task.status != TaskStatus.FAILED or not about.readers:
        return []
    after: dict[str, set[str]] = {}
    for each in await PipelineViews(parts.database).readings():
        after.setdefault(each.writer, set()).add(each.reader)
    near = {each.job for each in about.readers}
    found, left = set(near), list(near)
    while left:
        new = after.get(left.pop(), set()) - found
        found |= new
        left.extend(new)
    return sorted(found - near - {answer.task.job})


async def _replay_task(parts: ApiContext, asked: PageRequest, to: str) -> ActionResult:
    return await _steer(parts, asked, to, replay_tasks, lambda _: "is queued for replay")


async def _cancel(parts: ApiContext, asked: PageRequest, to: str) -> ActionResult:
    return await _steer(parts, asked, to, cancel_tasks, _cancelled)


def _cancelled(result: TaskResult) -> str:
    if result.task_status == TaskStatus.CANCELLED:
        return "is cancelled"
    return "was asked to stop; its worker sees it at the next heartbeat"


async def _steer(
    parts: ApiContext,
    asked: PageRequest,
    to: str,
    handler: Handler,
    done: Callable[[TaskResult], str],
) -> ActionResult:
    task_id = parse_id(asked.path["id"])
    if not task_id:
        return ActionResult("There is no such task.", to, is_well=False)
    ask = TaskIdsAsk(tasks=[task_id], reason="Cancelled in the console.")

    def told(answer: ResultsAnswer) -> str:
        return f"Task {task_id} {done(answer.results[0])}."

    return await call_api(parts, handler, to, ask=ask, told=told)


TASK_PAGE: Final = ConsolePage(
    "/tasks/{id:path}",
    "task",
    _load_task,
    live=("head", "standing", "attempts", "log", "beside"),
    section="tasks",
    query=("attempt",),
)
TASK_ACTIONS: Final = (
    FormAction("/tasks/{id}/replay", _replay_task),
    FormAction("/tasks/{id}/cancel", _cancel),
)
