"""The fields of a job in YAML: their names, their forms, and how they become a `Job`.

What is judged here is each field by itself, and whether it has any meaning for this kind of job.
Rules between fields and between jobs are in `checks`. Defaults are those of `model.Job`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from penstock.dispatcher.dag.edges import Catalog, name, read_inputs
from penstock.dispatcher.dag.files import Files, inlined
from penstock.dispatcher.dag.model import (
    DISPATCHER_RUNTIME,
    SQL_OPERATOR,
    Activation,
    Calendar,
    Input,
    Job,
    Json,
    Output,
    PlatformOperator,
    Reads,
    Retry,
    SourceKind,
    Update,
)
from penstock.dispatcher.dag.names import OPERATOR_CHARACTERS_MAX, is_operator
from penstock.dispatcher.dag.secrets import (
    HOW,
    SECRETS_MAX,
    secret_name,
    secret_reference,
)
from penstock.dispatcher.dag.sections import Section
from penstock.dispatcher.dag.sources import read_source
from penstock.dispatcher.dag.units import bounded, count, duration_ms, duration_text
from penstock.kernel.words import shown

UNIQUE_KEY_MAX: Final = 32
COLUMN_CHARACTERS_MAX: Final = 128
PREDICATE_CHARACTERS_MAX: Final = 2_000
ATTEMPTS_MAX: Final = 100
COALESCE_MAX: Final = 1000
BACKOFF_MAX: Final = 100.0

_EVERY_JOB: Final = ("activation", "source", "inputs", "outputs", "priority")
_WHAT_RUNS: Final = (
    *(
        "runtime",
        "operator",
        "config",
        "resources",
        "update",
        "unique_key",
        "version_by",
        "delete_when",
    ),
    *("heartbeat_timeout", "retry", "untrusted", "secrets"),
)
_WHAT_IS_QUEUED: Final = (
    *("execution", "when", "merge_updates", "coalesce", "mode"),
    *("max_queue_depth", "resume_queue_depth", "max_queue_age", "resume_queue_age"),
    *("max_concurrency", "timeout", "max_attempts"),
)
JOB_FIELDS: Final = (*_EVERY_JOB, *_WHAT_RUNS, *_WHAT_IS_QUEUED)
_RETRY_FIELDS: Final = ("first", "max", "backoff")
_RANGE_FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    PlatformOperator.RANGE_AGGREGATE: ("size", "step"),
    PlatformOperator.RANGE_SPLIT: ("size",),
}


def read_job(
    job: str,
    section: Section,
    *,
    outputs: tuple[Output, ...],
    catalog: Catalog,
    files: Files | None = None,
) -> Job:
    """The job that a section describes, with defaults where the section is wrong."""
    default = Job(name=job)
    source = section.get("source")
    operator = section.read("operator", _operator, "")
    runtime = section.read("runtime", name, "")
    merge_updates, coalesce = _merging(section)
    inputs = read_inputs(section.get("inputs"), catalog)
    update = section.choice("update", default.update)
    return Job(
        name=job,
        activation=section.choice("activation", default.activation),
        runtime=runtime,
        operator=operator,
        config=_config(section, runtime=runtime, operator=operator, files=files),
        inputs=inputs,
        outputs=outputs,
        execution=section.choice("execution", default.execution),
        when=section.choice("when", default.when),
        update=update,
        unique_key=_unique_key(section, update),
        version_by=section.read("version_by", _column, default.version_by),
        delete_when=section.read("delete_when", _predicate, default.delete_when),
        source=read_source(source, job=job) if source is not None else None,
        priority=section.choice("priority", default.priority),
        mode=section.choice("mode", default.mode),
        max_queue_depth=section.read("max_queue_depth", _COUNT_FROM_1, None),
        resume_queue_depth=section.read("resume_queue_depth", count, None),
        max_queue_age_ms=section.read("max_queue_age", _DURATION_FROM_1S, None),
        resume_queue_age_ms=section.read("resume_queue_age", duration_ms, None),
        max_concurrency=section.read("max_concurrency", _COUNT_FROM_1, _at_once(inputs)),
        timeout_ms=section.read("timeout", _DURATION_FROM_1S, default.timeout_ms),
        heartbeat_timeout_ms=section.read(
            "heartbeat_timeout", _DURATION_FROM_1S, default.heartbeat_timeout_ms
        ),
        max_attempts=section.read("max_attempts", _ATTEMPTS, default.max_attempts),
        retry=_retry(section),
        # What several late days change of a partition is made once.
        merge_updates=merge_updates or any(each.lookback_ms for each in inputs),
        coalesce=coalesce,
        untrusted=_untrusted(section),
        secrets=_secrets(section),
        resources=_resources(section),
    )


def note_misplaced(job: Job, section: Section) -> None:
    """Note the fields that have no meaning for this kind of job."""
    if job.activation is Activation.REACTIVE or job.source is None:
        return
    kind = job.source.kind
    has_task = kind is SourceKind.ALWAYS_ON
    why = "has no queue of tasks" if has_task else "only emits events and runs nothing"
    for field in _WHAT_IS_QUEUED if has_task else (*_WHAT_RUNS, *_WHAT_IS_QUEUED):
        given = section.get(field)
        if given is not None:
            given.wrong(
                f"A source of kind {kind} {why}; take `{field}` out,"
                " or write it in a job that reads this source."
            )


def _operator(text: str) -> str:
    if not is_operator(text):
        raise ValueError(
            "is not an operator; write its name or module:function, in letters, digits,"
            f" _ . : and -, at most {OPERATOR_CHARACTERS_MAX} characters"
        )
    return text


def _decimal(text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", text):
        raise ValueError("is not a number; write it as 2 or 1.5")
    return float(text)


_COUNT_FROM_1 = bounded(count, least=1, show=str)
_DURATION_FROM_1S = bounded(duration_ms, least=1000, show=duration_text)
_COALESCE = bounded(count, least=1, most=COALESCE_MAX, show=str)
_ATTEMPTS = bounded(count, least=1, most=ATTEMPTS_MAX, show=str)
_BACKOFF = bounded(_decimal, least=1.0, most=BACKOFF_MAX, show="{:g}".format)


def _at_once(inputs: Sequence[Input]) -> int | None:
    """How many tasks may run: of those that read changes one, or two would consume the same."""
    return 1 if any(each.reads is Reads.CHANGES for each in inputs) else None


def _merging(section: Section) -> tuple[bool, int]:
    """`merge_updates` and `coalesce`, which had the meaning of the first before there was both."""
    merging, given = section.get("merge_updates"), section.get("coalesce")
    is_merging = merging is not None and merging.flag() is True
    if given is None:
        return is_merging, Job(name="").coalesce
    is_old = given.is_plain and given.text() in ("true", "false")
    if is_old and section.findings.is_stored:
        return is_merging or given.flag() is True, Job(name="").coalesce
    return is_merging, section.read("coalesce", _coalesced, Job(name="").coalesce)


def _coalesced(text: str) -> int:
    if text in ("true", "false"):
        raise ValueError(
            "is not a count: `coalesce` is how many tasks run as one, as in 50; that updates of a"
            f" task that waits become part of it is merge_updates: {text} now"
        )
    return _COALESCE(text)


def _retry(section: Section) -> Retry:
    default = Retry()
    given = section.get("retry")
    if given is None:
        return default
    inner = given.section(_RETRY_FIELDS)
    return Retry(
        first_ms=inner.read("first", duration_ms, default.first_ms),
        max_ms=inner.read("max", duration_ms, default.max_ms),
        backoff=inner.read("backoff", _BACKOFF, default.backoff),
    )


def _unique_key(section: Section, update: Update) -> tuple[str, ...]:
    given = section.get("unique_key")
    if given is not None and update is Update.APPEND and not section.findings.is_stored:
        # Earlier releases asked for one, and did nothing with it.
        given.wrong(
            "What is appended has no key: all rows of every task are added, once. Take it out, or"
            " write update: merge, which has one row for each key."
        )
    columns: dict[str, None] = {}
    for item in given.items(most=UNIQUE_KEY_MAX) if given is not None else ():
        column = item.read(_column)
        if column is not None and column in columns:
            item.wrong(f"The column {column} is named twice; take one out.")
        if column is not None:
            columns[column] = None
    return tuple(columns)


def _predicate(text: str) -> str:
    if not text.strip() or len(text) > PREDICATE_CHARACTERS_MAX:
        raise ValueError(
            f"cannot be a predicate; write 1 to {PREDICATE_CHARACTERS_MAX} characters of SQL, as in"
            " op = 'delete'"
        )
    return text


def _column(text: str) -> str:
    if not text or len(text) > COLUMN_CHARACTERS_MAX or not text.isprintable():
        raise ValueError(
            f"cannot be a column; write 1 to {COLUMN_CHARACTERS_MAX} printable characters"
        )
    return text


def _config(
    section: Section, *, runtime: str, operator: str, files: Files | None
) -> Mapping[str, Json]:
    """The operator's own settings; those of platform operators are known, and read as counts."""
    if runtime != DISPATCHER_RUNTIME or operator not in _RANGE_FIELDS:
        config: Mapping[str, Json] = section.mapping("config")
        if operator == SQL_OPERATOR and not section.findings.is_broken(f"{section.path}.config"):
            config, problem = inlined(config, files)
            if problem:
                section.note("config.sql_file", problem)
        return config
    given = section.need("config", "write how long the ranges are, as in config: {size: 10k}")
    if given is None:
        return {}
    inner = given.section(_RANGE_FIELDS[operator])
    sized = inner.need("size", "write how long the ranges are, as in size: 10k")
    if operator == PlatformOperator.RANGE_SPLIT:
        size = sized.read(_COUNT_FROM_1) if sized is not None else None
        return {} if size is None else {"size": size}
    long = sized.read(_size) if sized is not None else None
    if isinstance(long, Calendar):
        if inner.get("step") is not None:
            inner.note("step", "Parts of the calendar lie end to end; take it out.")
        return {"size": long.value}
    size = long
    if size is None:
        return {}
    step = inner.read("step", _COUNT_FROM_1, size)
    if step > size:
        inner.note(
            "step", f"A step of {step} leaves gaps between ranges of {size}; make it smaller."
        )
    return {"size": size, "step": step}


def _size(text: str) -> int | Calendar:
    if text in list(Calendar):
        return Calendar(text)
    if text[:1].isdigit():
        return _COUNT_FROM_1(text)
    raise ValueError("is neither a count nor day, week, month or year; write one, as in 10k")


def _resources(section: Section) -> Mapping[str, Json]:
    """What they mean is the runtime's business, and so is what is wrong with one."""
    given = section.get("resources")
    return {each: value.json() for each, value in given.entries()} if given is not None else {}


def _untrusted(section: Section) -> bool:
    given = section.get("untrusted")
    return given is not None and given.flag() is True


def _secrets(section: Section) -> Mapping[str, str]:
    """Where secrets are, by name. What stands there may be a secret by mistake: not repeated."""
    given = section.get("secrets")
    found: dict[str, str] = {}
    for each, value in given.entries() if given is not None else ():
        if not value.is_scalar:
            value.wrong(f"It is not where a secret is; {HOW}.")
            continue
        text = value.text()
        if text is None:
            continue
        try:
            secret_name(each)
        except ValueError as error:
            value.wrong(f"{shown(each)} {error}.")
            continue
        try:
            found[each] = str(secret_reference(text))
        except ValueError as error:
            value.wrong(f"It {error}.")
    if given is not None and len(found) > SECRETS_MAX:
        given.wrong(f"There are {len(found)} secrets; a job may have {SECRETS_MAX}.")
    return found
