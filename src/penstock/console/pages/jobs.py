"""The pages of jobs: the table of all jobs, and one job with its state, definition and history.

The table lists the jobs of the current DAG, the worst first, by state and by name. It is the
alternative to the drawing: for those who do not see it, for a phone, and for a DAG that is too
large to be drawn. It costs four short statements; the list is cut, with a sentence.

The page of a job has what is wrong on top, with what can be done about it; a healthy job says
only what it waits for. Its definition names the places of secrets, and never a value. Plots are
of the last hour, in fixed slices. It costs a dozen short statements, most of them of a few
rows; what has ended is read from the newest attempts of all jobs, and where that does not reach
back an hour the page says so.

The state of a job as one word and as remarks: what holds it back, what it waits for. Pure.

The word is the worst that is true, in the order of `STATES`. Remarks answer why nothing happens:
each says what is the matter and, where a person can do something about it, what.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import quote, urlencode

from penstock.console.charts import Plot, stacked_bars
from penstock.console.pages.base import ConsolePage, PageNotFound, PageRequest
from penstock.console.renderer import length, number
from penstock.dispatcher.api.context import ApiContext
from penstock.dispatcher.dag.canonical import written
from penstock.dispatcher.views.jobs import (
    LENGTHS,
    RECENT_MINUTES,
    SLICE_SECONDS,
    WINDOW,
    AboutJob,
    AttemptOutcomes,
    JobViews,
    PipelineViews,
    RecentOutcomes,
)
from penstock.protocol.base import TaskStatus
from penstock.protocol.steering import JobAnswer, PauseAnswer, PressureAnswer

STATES: Final = {
    "dead": "has failed tasks that will not be retried automatically",
    "pressed": "its queue exceeds its limit",
    "paused": "starts no new tasks",
    "running": "tasks are running",
    "waiting": "tasks are waiting",
    "ok": f"has completed tasks in the last {RECENT_MINUTES} minutes",
    "idle": "has no tasks",
}
MANY: Final = 10_000
BY_PEOPLE: Final = "operator"
_PRESSURE: Final = "pressure:"
_NEEDS_NO_WORKER: Final = ("", "dispatcher", "lambda")


def state_of(job: JobAnswer, ended: RecentOutcomes | None, *, is_pressed: bool) -> str:
    """The word for a job."""
    if job.dead:
        return "dead"
    if is_pressed:
        return "pressed"
    if job.paused:
        return "paused"
    if job.running:
        return "running"
    if job.queued:
        return "waiting"
    return "ok" if ended is not None and ended.completed else "idle"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRemark:
    """A note on top of the page of a job."""

    tone: str
    """Its class: `bad`, `warn`, `paused`, or nothing."""
    told: str
    since: datetime | None = None
    job: str = ""
    """Another job that it is about."""
    tasks: str = ""
    """The status of the tasks to look at."""


def word_of(
    about: AboutJob,
    pauses: Sequence[PauseAnswer],
    ended: RecentOutcomes | None,
    *,
    is_pressed: bool,
) -> str:
    """The word for a job, by all that is known of it."""
    counts = about.counts
    if not about.is_in_force:
        return "retired"
    if counts.dead:
        return "dead"
    if is_pressed:
        return "pressed"
    if pauses:
        return "paused"
    if counts.running:
        return "running"
    if counts.waiting:
        return "waiting"
    return "ok" if ended is not None and ended.completed else "idle"


def remarks(
    about: AboutJob, pauses: Sequence[PauseAnswer], pressure: PressureAnswer | None
) -> list[JobRemark]:
    """What has to be said of a job, the worst first; nothing of one that does what it should."""
    said: list[JobRemark] = []
    if not about.is_in_force:
        told = f"The DAG in force has no such job. This is what version {about.version} had."
        said.append(JobRemark(tone="warn", told=told))
    if dead := about.counts.dead:
        which = "1 task has" if dead == 1 else f"{number(dead, most=MANY)} tasks have"
        told = f"{which} failed and will not be retried automatically."
        said.append(JobRemark(tone="bad", told=told, tasks=TaskStatus.FAILED))
    said += [_pause(each) for each in pauses]
    if pressure is not None and pressure.pressed:
        said.append(_pressed(pressure))
    if about.generation_state == "building":
        told = "A new generation of its outputs is being built; readers still see the old one."
        said.append(JobRemark(tone="", told=told))
    return said + _waiting(about, is_paused=bool(pauses))


def _pause(pause: PauseAnswer) -> JobRemark:
    what = "Its bulk tasks are" if pause.scope == "bulk" else "It is"
    if pause.cause == BY_PEOPLE:
        return JobRemark(tone="paused", told=f"{what} paused: {pause.reason}", since=pause.since)
    job = pause.cause.removeprefix(_PRESSURE)
    told = f"{what} paused by backpressure until the queue of {job} is shorter: {pause.reason}"
    return JobRemark(tone="warn", told=told, since=pause.since, job=job)


def _pressed(pressure: PressureAnswer) -> JobRemark:
    told = f"The queue exceeds its limit: {pressure.reason or ''}".strip()
    if pressure.pauses:
        told = f"{told} Paused until it is shorter: {_listed(pressure.pauses)}."
    return JobRemark(tone="warn", told=told, since=pressure.since)


def _waiting(about: AboutJob, *, is_paused: bool) -> list[JobRemark]:
    """Why what waits is not run, if anything waits."""
    counts = about.counts
    if not counts.waiting:
        return []
    said = []
    if not about.workers and about.runtime not in _NEEDS_NO_WORKER:
        told = (
            f"{_tasks(counts.waiting)}, and no worker that serves {about.operator} was seen in"
            " the last minute: start one with `penstock worker`."
        )
        said.append(JobRemark(tone="warn", told=told))
    if about.is_job_full:
        told = f"The job is at its concurrency limit of {about.max_concurrency}; other tasks wait."
        said.append(JobRemark(tone="", told=told))
    elif about.is_operator_full:
        told = (
            f"{about.operator} is at its concurrency limit of {about.operator_max} over all jobs;"
            " other tasks wait."
        )
        said.append(JobRemark(tone="", told=told))
    if not said and not is_paused and not counts.running:
        if counts.oldest_seconds:
            told = f"{_tasks(counts.waiting)} for {length(counts.oldest_seconds)}."
            said.append(JobRemark(tone="", told=told, tasks=TaskStatus.QUEUED))
        else:
            told = f"{_tasks(counts.waiting)} for a retry."
            said.append(
                JobRemark(tone="", told=told, since=counts.next_due_at, tasks=TaskStatus.RETRYING)
            )
    return said


def waits_for(about: AboutJob) -> str:
    """What makes a job run that has nothing to do."""
    if about.body.get("activation") == "source":
        return {
            "cron": "Waits for its next scheduled time.",
            "webhook": "Waits for a webhook request.",
            "manual": "Waits to be triggered.",
            "always_on": "Its task runs continuously.",
        }.get(str(about.body.get("source", {}).get("kind")), "")
    wanted = [each.dataset for each in about.inputs if each.is_trigger]
    if not wanted:
        return ""
    every = about.body.get("when") == "all" and len(wanted) > 1
    listed = _listed(wanted, last="and" if every else "or")
    return f"Runs on new data of {listed}{' for a partition' if every else ''}."


def _tasks(count: int) -> str:
    return "1 task waits" if count == 1 else f"{number(count, most=MANY)} tasks wait"


def _listed(names: Sequence[str], *, last: str = "and") -> str:
    if len(names) > 5:
        return f"{', '.join(names[:4])} {last} {len(names) - 4} more"
    return f" {last} ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]


JOBS_MAX: Final = 500
_TEXT_MAX: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A job, as it is listed."""

    said: JobAnswer
    state: str
    why: str
    """What holds it back; empty if nothing does."""
    ended: RecentOutcomes | None
    href: str


async def _load(parts: ApiContext, asked: PageRequest) -> Mapping[str, Any] | PageNotFound:
    overall = await parts.views.overall()
    endings = await PipelineViews(parts.database).endings()
    pressures = await parts.pressures.answer()
    pressed = {each.job: each.reason or "" for each in pressures.jobs if each.pressed}
    rows = [_row(each, endings.get(each.name), pressed) for each in overall.jobs]
    text, state = asked.query.get("name", "").strip()[:_TEXT_MAX], asked.query.get("state", "")
    found = [each for each in rows if text.lower() in each.said.name.lower()]
    counts = Counter(each.state for each in found)
    places = list(STATES)
    shown = sorted(
        (each for each in found if state in ("", each.state)),
        key=lambda each: (places.index(each.state), each.said.name),
    )
    kept = {"name": text} if text else {}
    return {
        "rows": shown[:JOBS_MAX],
        "more": max(0, len(shown) - JOBS_MAX),
        "count": len(rows),
        "dag_version": overall.dag_version,
        "text": text,
        "state": state,
        "tabs": [
            ("All", _link(kept), "", len(found), ""),
            *(
                (each.capitalize(), _link({**kept, "state": each}), each, counts[each], told)
                for each, told in STATES.items()
                if counts[each] or each == state
            ),
        ],
        "is_filtered": bool(text or state),
        "minutes": RECENT_MINUTES,
        "many": MANY,
    }


def _row(job: JobAnswer, ended: RecentOutcomes | None, pressed: Mapping[str, str]) -> _Row:
    why = [*([pressed[job.name]] if job.name in pressed else []), *job.paused]
    return _Row(
        said=job,
        state=state_of(job, ended, is_pressed=job.name in pressed),
        why=" ".join(why),
        ended=ended,
        href=f"/jobs/{quote(job.name, safe='')}",
    )


def _link(said: Mapping[str, str]) -> str:
    return f"/jobs?{urlencode(said)}" if said else "/jobs"


PAGE: Final = ConsolePage(
    "/jobs", "jobs", _load, live=("tabs", "list"), section="pipeline", query=("name", "state")
)


_ELSEWHERE: Final = ("sql", "sql_file")
_FIRST: Final = ("activation", "source", "runtime", "operator", "config", "inputs", "outputs")
"""What a definition begins with; the database has its fields in an order of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDefinition:
    """How a definition is shown."""

    pairs: Sequence[tuple[str, str]]
    config: str
    """As YAML, without the query; empty if there is none."""
    sql: str
    sql_file: str
    whole: str
    """All of it as YAML, as it would stand in a file."""


def job_definition(about: AboutJob) -> JobDefinition:
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
    return JobDefinition(
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
        yield "Trust", "its code can access only its own inputs and outputs"
    if secrets := body.get("secrets"):
        yield "Secrets", ", ".join(f"{name} from {place}" for name, place in secrets.items())
    if resources := body.get("resources"):
        yield "Resources", ", ".join(f"{name}: {value}" for name, value in resources.items())


def _running(about: AboutJob) -> Iterator[tuple[str, str]]:
    body = about.body
    whole = body.get("execution") == "per_update"
    yield "A task covers", "one update, of any partition" if whole else "one partition"
    if body.get("when") == "all":
        yield "Triggered when", "all trigger inputs have published the partition"
    yield "New events", _update(about)
    if body.get("merge_updates"):
        yield "Updates", "are merged into a waiting task"
    if about.priority == "bulk":
        yield "Priority", "bulk: paused first under backpressure"
    yield "Concurrency", _at_a_time(about)
    if limits := _limits(body):
        yield "Queue limit", limits
    yield "Attempts", _attempts(about)
    yield "Timeout", f"{_long(about.timeout_seconds)} per attempt"
    yield (
        "Silence",
        f"an attempt without a heartbeat for {_long(about.heartbeat_seconds)} expires",
    )


def _source(source: Mapping[str, Any]) -> str:
    kind = str(source.get("kind", "")).replace("_", " ")
    if "cron" in source:
        zone = source.get("time_zone", "UTC")
        emits = ", emits intervals" if source.get("emits") == "interval" else ""
        return f"{kind}, {source['cron']} in {zone}{emits}"
    return f"{kind}, {source['path']}" if "path" in source else kind


def _update(about: AboutJob) -> str:
    if about.update_mode == "replace":
        return "replaces the partition"
    if about.update_mode == "append":
        return "is appended, once per task"
    keys = ", ".join(map(str, about.body.get("unique_key") or ()))
    version = about.body.get("version_by")
    wins = f"the highest {version}" if version else "that of the latest task"
    delete = about.body.get("delete_when")
    deletes = f"; deleted when {delete}" if delete else ""
    return f"is merged: one row for each {keys}, {wins}{deletes}"


def _at_a_time(about: AboutJob) -> str:
    most = about.max_concurrency
    said = "unlimited"
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
    return f"{' or '.join(said)}; beyond it, upstream jobs are paused" if said else ""


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


_SLICES: Final = 30
_SERIES: Final = ("completed", "failed", "expired")
_LISTED_MAX: Final = 5
_NAME_CHARACTERS_MAX: Final = 200
_LENGTHS_MIN: Final = 5
"""How many lengths are shown at least, so that one of them is not as wide as the plot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lately:
    """What has ended in the last hour, drawn."""

    total: AttemptOutcomes | None
    by_time: Plot
    by_length: Plot
    told: str
    """How long attempts take, in a sentence."""
    cut_at: datetime | None
    """Where what was looked at begins, if that is within the hour."""

    @property
    def has_any(self) -> bool:
        return self.total is not None

    @property
    def failures(self) -> int:
        return self.total.failed + self.total.expired if self.total is not None else 0


async def _load_job(parts: ApiContext, asked: PageRequest) -> Mapping[str, Any] | PageNotFound:
    # Postgres has no NUL in a text.
    name = asked.path["name"].replace("\x00", "")[:_NAME_CHARACTERS_MAX]
    about = await JobViews(parts.database).about(name)
    if about is None:
        return PageNotFound(f"There is no job {name[:100]}.", "The list of jobs shows all of them.")
    pauses = await parts.views.pauses(name)
    pressures = await parts.pressures.answer()
    pressure = next((each for each in pressures.jobs if each.job == name), None)
    is_pressed = pressure is not None and pressure.pressed
    endings = await PipelineViews(parts.database).endings()
    plans = await parts.backfills.list(limit=100)
    tasks = {
        status: (
            await parts.views.tasks(
                job_id=about.job_id, status=status, before=None, limit=_LISTED_MAX
            )
        ).tasks
        for status in (TaskStatus.FAILED, TaskStatus.RUNNING)
        if getattr(about.counts, status)
    }
    return {
        "about": about,
        "counts": about.counts,
        "word": word_of(about, pauses, endings.get(name), is_pressed=is_pressed),
        "remarks": remarks(about, pauses, pressure),
        "waits_for": waits_for(about),
        "is_paused_by_people": any(each.cause == BY_PEOPLE for each in pauses),
        "is_source": about.body.get("activation") == "source",
        "definition": job_definition(about),
        "reads": _by_name(about, "inputs", "as", "from"),
        "writes": _by_name(about, "outputs", "dataset", "name"),
        "lately": _lately(about),
        "dead": tasks.get(TaskStatus.FAILED, []),
        "running": tasks.get(TaskStatus.RUNNING, []),
        "backfills": [
            each
            for each in plans.backfills
            if each.job == name and each.state in ("running", "paused")
        ],
        "paths": _Paths(name),
        "many": MANY,
        "window": WINDOW,
    }


@dataclass(frozen=True, slots=True)
class _Paths:
    """Where the page leads to."""

    name: str

    @property
    def trigger(self) -> str:
        return f"/operations/sources/{quote(self.name, safe='')}#trigger"

    @property
    def backfill(self) -> str:
        return f"/operations/backfills/new?{urlencode({'job': self.name})}"

    def tasks(self, status: str = "") -> str:
        """The list of its tasks."""
        said = {"job": self.name, **({"status": status} if status else {})}
        return f"/tasks?{urlencode(said)}"


def _by_name(about: AboutJob, side: str, *names: str) -> Mapping[str, Mapping[str, Any]]:
    """What the job's definition says of its inputs or outputs, by the first name that one has."""
    told = about.body.get(side) or ()
    return {str(next(each[name] for name in names if name in each)): each for each in told}


def _lately(about: AboutJob) -> _Lately:
    total = next((each for each in about.ended if each.slice is None and each.length is None), None)
    # Of nothing there is a row of the whole too.
    if total is not None and not (total.completed or total.failed or total.expired):
        total = None
    told = _lengths_told(total) if total is not None else ""
    cut_at = total.reaches_to if total is not None and total.looked_at >= WINDOW else None
    return _Lately(
        total=total,
        by_time=_by_time(about),
        by_length=_by_length(about, told),
        told=told,
        cut_at=cut_at,
    )


def _lengths_told(total: AttemptOutcomes) -> str:
    if total.completed + total.failed + total.expired == 1:
        return f"Duration: {length(total.longest_seconds)}."
    return (
        f"p50 {length(total.middle_seconds)}, p95 {length(total.most_seconds)},"
        f" max {length(total.longest_seconds)}."
    )


def _by_time(about: AboutJob) -> Plot:
    last = int(about.now.timestamp()) // SLICE_SECONDS
    found = {each.slice: each for each in about.ended if each.slice is not None}
    places = [
        (
            f"{datetime.fromtimestamp(place * SLICE_SECONDS, UTC):%H:%M}",
            _outcomes(found[place]) if place in found else {},
        )
        for place in range(last - _SLICES + 1, last + 1)
    ]
    told = f"Attempts that ended in the last hour, by {SLICE_SECONDS // 60} minutes: " + _summed(
        [*found.values()]
    )
    return stacked_bars(places, told=told, series=_used(found.values()), is_whole=True)


def _by_length(about: AboutJob, told: str) -> Plot:
    found = {each.length: each for each in about.ended if each.length is not None}
    first, last = min(found, default=0), max(found, default=0)
    # A few more on both sides, as far as there are some.
    while last - first + 1 < _LENGTHS_MIN:
        first, last = max(0, first - 1), min(len(LENGTHS), last + 1)
    places = [
        (_length_name(place), _outcomes(found[place]) if place in found else {})
        for place in range(first, last + 1)
    ]
    return stacked_bars(
        places,
        told=f"Durations of the attempts of the last hour. {told}".strip(),
        series=_used(found.values()),
        is_whole=True,
    )


def _length_name(place: int) -> str:
    if place == 0:
        return f"< {length(LENGTHS[0])}"
    return f"{length(LENGTHS[place - 1]).replace('.0 ', ' ')} +"


def _outcomes(ended: AttemptOutcomes) -> Mapping[str, float]:
    return {name: float(getattr(ended, name)) for name in _SERIES}


def _used(found: Iterable[AttemptOutcomes]) -> Sequence[str]:
    """The outcomes that there are; of none, what there might be."""
    ended = list(found)
    used = [name for name in _SERIES if any(getattr(each, name) for each in ended)]
    return used or _SERIES[:1]


def _summed(found: Sequence[AttemptOutcomes]) -> str:
    sums = {name: sum(getattr(each, name) for each in found) for name in _SERIES}
    return ", ".join(f"{number(count)} {name}" for name, count in sums.items() if count) or "none"


JOB_PAGE: Final = ConsolePage(
    "/jobs/{name:path}",
    "job",
    _load_job,
    live=("head", "remarks", "figures", "lately", "tasks", "edges"),
    section="pipeline",
)
