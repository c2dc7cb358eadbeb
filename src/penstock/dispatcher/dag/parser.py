"""The DAG parser: a YAML text becomes a `Dag`, or one `DagError` with everything that is wrong.

`parse` never raises anything but `DagError`, whatever the text. It reads the tree of nodes
within bounds, the outputs of all jobs, each job, then applies the rules between jobs
(`checks`). A text that is no YAML ends the reading at once; every other problem is noted and
the reading goes on.

The fields of jobs and sources, and how each becomes a value, are here; those of inputs and
outputs are in `edges`. A field is judged by itself, and by whether it has a meaning for this
kind of job. Defaults are those of `model.Job`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from penstock.dispatcher.dag.canonical import canonical, plain
from penstock.dispatcher.dag.checks import complaints
from penstock.dispatcher.dag.edges import DatasetIndex, name, read_buffers, read_inputs
from penstock.dispatcher.dag.files import Files, inlined
from penstock.dispatcher.dag.model import (
    DISPATCHER_RUNTIME,
    OPERATOR_CHARACTERS_MAX,
    SQL_OPERATOR,
    Activation,
    AlwaysOnSource,
    AuthType,
    Calendar,
    CronSource,
    Dag,
    Emits,
    InputSpec,
    Job,
    Json,
    ManualSource,
    OutputSpec,
    PlatformOperator,
    ReadMode,
    RetryPolicy,
    Runtimes,
    Source,
    SourceKind,
    UpdateMode,
    WebhookAuth,
    WebhookSource,
    is_operator,
)
from penstock.dispatcher.dag.secrets import HOW, SECRETS_MAX, secret_name, secret_reference
from penstock.dispatcher.dag.yaml_reader import (
    BYTES_MAX,
    NODES_MAX,
    Field,
    FieldProblems,
    Section,
    UnreadableYaml,
    compose,
)
from penstock.kernel.cron import is_time_zone, parse_cron, time_zones
from penstock.kernel.text import shown
from penstock.kernel.units import bounded, count, duration_ms, duration_text
from penstock.protocol.problem import DagDiagnostic, DagError

PATH_CHARACTERS_MAX: Final = 200
AUTH_SECRETS_MAX: Final = 2
TOLERANCE_MS_MAX: Final = 3_600_000

_PATH = re.compile(r"(?:/[a-z0-9_-]+)+")
_HEADER = re.compile(r"[A-Za-z0-9-]{1,64}")
_AUTH_FIELDS: Final = ("type", "secret", "tolerance", "header")
_FIELDS: Final = {
    "kind": tuple(SourceKind),
    "cron": (SourceKind.CRON,),
    "time_zone": (SourceKind.CRON,),
    "emits": (SourceKind.CRON,),
    "catch_up": (SourceKind.CRON,),
    "path": (SourceKind.WEBHOOK,),
    "auth": (SourceKind.WEBHOOK,),
    "drain_timeout": (SourceKind.ALWAYS_ON,),
}


def read_source(field: Field, *, job: str) -> Source | None:
    """What a source is; None, with a problem noted, if that cannot be said."""
    section = field.section(_FIELDS)
    kinds = " or ".join(SourceKind)
    named = section.need("kind", f"write {kinds}")
    kind = named.choice(SourceKind) if named is not None else None
    if kind is None:
        return None
    for key, owners in _FIELDS.items():
        given = section.get(key)
        if given is not None and kind not in owners:
            given.wrong(f"It is for {owners[0]} sources, and this one is {kind}; take it out.")
    match kind:
        case SourceKind.CRON:
            return _cron(section)
        case SourceKind.WEBHOOK:
            given = section.get("auth")
            auth = _auth(given) if given is not None else None
            return WebhookSource(section.read("path", _path, f"/{job}"), auth)
        case SourceKind.MANUAL:
            return ManualSource()
        case SourceKind.ALWAYS_ON:
            default = AlwaysOnSource().drain_timeout_ms
            return AlwaysOnSource(section.read("drain_timeout", duration_ms, default))


def _cron(section: Section) -> CronSource | None:
    given = section.need("cron", "write when it fires, as in cron: 0 6 * * mon-fri")
    cron = given.read(parse_cron) if given is not None else None
    zone = "UTC"
    named = section.get("time_zone")
    text = named.text() if named is not None else None
    if named is not None and text is not None:
        if is_time_zone(text):
            zone = text
        else:
            ask = named.findings.meant(text, time_zones())
            named.wrong(f"There is no time zone {shown(text)}; write one as Europe/Zurich.{ask}")
    emits = section.choice("emits", Emits.CURSOR)
    said = section.get("catch_up")
    catch_up = said.flag() if said is not None else None
    # What is not said, or not as it should be, is as by default.
    return None if cron is None else CronSource(cron, zone, emits, catch_up is not False)


def _path(text: str) -> str:
    if len(text) > PATH_CHARACTERS_MAX or not _PATH.fullmatch(text):
        raise ValueError("is not a path; write it as /orders or /shop/orders, in a-z, 0-9, _ and -")
    return text


def _auth(field: Field) -> WebhookAuth | None:
    """What requests have to show; None, with a problem noted, if that cannot be said."""
    section = field.section(_AUTH_FIELDS)
    named = section.need("type", f"write {' or '.join(AuthType)}")
    kind = named.choice(AuthType) if named is not None else None
    given = section.need("secret", HOW)
    secrets = _auth_secrets(given) if given is not None else ()
    if kind is None or not secrets:
        return None
    default = WebhookAuth(type=kind, secrets=secrets)
    if (said := section.get("tolerance")) is not None and not kind.is_dated:
        said.wrong(f"It is for stripe and slack, which sign the time, and not {kind}; take it out.")
    if (said := section.get("header")) is not None and kind is not AuthType.HMAC:
        said.wrong(f"It is for hmac, and {kind} has a header of its own; take it out.")
    return WebhookAuth(
        type=kind,
        secrets=secrets,
        tolerance_ms=section.read("tolerance", _tolerance_ms, default.tolerance_ms),
        header=section.read("header", _header, default.header),
    )


def _auth_secrets(field: Field) -> tuple[str, ...]:
    """Where secrets are. What stands there may be a secret by mistake: it is not repeated."""
    found: list[str] = []
    for each in field.items(most=AUTH_SECRETS_MAX):
        if not each.is_scalar:
            each.wrong(f"It is not where a secret is; {HOW}.")
        elif (text := each.text()) is not None:
            try:
                found.append(str(secret_reference(text)))
            except ValueError as error:
                each.wrong(f"It {error}.")
    if len(set(found)) < len(found):
        field.wrong("It names one place twice; take one out.")
    if not found and not field.findings.is_broken(field.path):
        field.wrong(f"It is empty; {HOW}.")
    return tuple(found)


def _tolerance_ms(text: str) -> int:
    found = duration_ms(text)
    if not 1000 <= found <= TOLERANCE_MS_MAX:
        raise ValueError("is not between 1s and 1h, as old as a request may be")
    return found


def _header(text: str) -> str:
    if not _HEADER.fullmatch(text):
        raise ValueError("cannot be a header; write its name in letters, digits and -")
    return text


UNIQUE_KEY_MAX: Final = 32
COLUMN_CHARACTERS_MAX: Final = 128
PREDICATE_CHARACTERS_MAX: Final = 2_000
ATTEMPTS_MAX: Final = 100
COALESCE_MAX: Final = 1000
BACKOFF_MAX: Final = 100.0
BATCHES_WAITING_MAX: Final = 10_000
"""How many batches wait for a sink before its writers are held back, unless the DAG says more."""

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
    *("heartbeat_timeout", "retry", "untrusted", "secrets", "buffers"),
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
    outputs: tuple[OutputSpec, ...],
    catalog: DatasetIndex,
    files: Files | None = None,
) -> Job:
    """The job that a section describes, with defaults where the section is wrong."""
    default = Job(name=job)
    source = section.get("source")
    operator = section.read("operator", _operator, "")
    runtime = section.read("runtime", name, "")
    inputs = read_inputs(section.get("inputs"), catalog)
    merge_updates, coalesce = _merging(section, inputs)
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
        max_queue_depth=section.read("max_queue_depth", _COUNT_FROM_1, _depth_max(outputs)),
        resume_queue_depth=section.read("resume_queue_depth", count, None),
        max_queue_age_ms=section.read("max_queue_age", _FROM_1S, None),
        resume_queue_age_ms=section.read("resume_queue_age", duration_ms, None),
        max_concurrency=section.read("max_concurrency", _COUNT_FROM_1, _at_once(inputs)),
        timeout_ms=section.read("timeout", _FROM_1S, default.timeout_ms),
        heartbeat_timeout_ms=section.read(
            "heartbeat_timeout", _FROM_1S, default.heartbeat_timeout_ms
        ),
        max_attempts=section.read("max_attempts", _ATTEMPTS, default.max_attempts),
        retry=_retry(section),
        merge_updates=merge_updates,
        coalesce=coalesce,
        untrusted=_untrusted(section),
        secrets=_secrets(section),
        buffers=read_buffers(section.get("buffers"), catalog),
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
_FROM_1S = bounded(duration_ms, least=1000, show=duration_text)
_COALESCE = bounded(count, least=1, most=COALESCE_MAX, show=str)
_ATTEMPTS = bounded(count, least=1, most=ATTEMPTS_MAX, show=str)
_BACKOFF = bounded(_decimal, least=1.0, most=BACKOFF_MAX, show="{:g}".format)


def _at_once(inputs: Sequence[InputSpec]) -> int | None:
    """How many tasks may run: of those that read changes one, or two would consume the same."""
    return 1 if any(each.reads is ReadMode.CHANGES for each in inputs) else None


def _depth_max(outputs: Sequence[OutputSpec]) -> int | None:
    """A sink is never without a bound: whoever publishes is held back by it."""
    return BATCHES_WAITING_MAX if any(each.buffered for each in outputs) else None


def _merging(section: Section, inputs: Sequence[InputSpec]) -> tuple[bool, int]:
    """`merge_updates` and `coalesce`, which had the meaning of the first before there was both."""
    merging, given = section.get("merge_updates"), section.get("coalesce")
    is_merging = merging is not None and merging.flag() is True
    # What several late days change of a partition is made once.
    is_merging |= any(each.lookback_ms for each in inputs)
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


def _retry(section: Section) -> RetryPolicy:
    default = RetryPolicy()
    given = section.get("retry")
    if given is None:
        return default
    inner = given.section(_RETRY_FIELDS)
    return RetryPolicy(
        first_ms=inner.read("first", duration_ms, default.first_ms),
        max_ms=inner.read("max", duration_ms, default.max_ms),
        backoff=inner.read("backoff", _BACKOFF, default.backoff),
    )


def _unique_key(section: Section, update: UpdateMode) -> tuple[str, ...]:
    given = section.get("unique_key")
    if given is not None and update is UpdateMode.APPEND and not section.findings.is_stored:
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


JOBS_MAX: Final = 1000


def parse(
    text: str, where: str, *, runtimes: Runtimes | None = None, files: Files | None = None
) -> Dag:
    """The DAG that a text describes; `where` names the file in errors.

    Without `runtimes` it is not judged whether the runtimes exist and what they accept. `files` are
    the texts that `files.references` says it needs.
    """
    return _parse(text, where, runtimes, files, FieldProblems())


def parse_stored(text: str, where: str, *, files: Files | None = None) -> Dag:
    """The DAG of a version that was in force, also if an earlier release has read it.

    What has a new name since then is read by its old one.
    """
    return _parse(text, where, None, files, FieldProblems(is_stored=True))


def _parse(
    text: str, where: str, runtimes: Runtimes | None, files: Files | None, findings: FieldProblems
) -> Dag:
    try:
        tree = compose(text)
    except UnreadableYaml as error:
        problem = DagDiagnostic(error.line, error.column, "", error.message)
        raise DagError([problem], where=where) from error
    jobs: tuple[Job, ...] = ()
    if tree is None:
        findings.add("", "It is empty; write `jobs:` and a job below it.")
    else:
        jobs = _read_jobs(Field(tree, "", findings), files)
    dag = Dag(jobs)
    _note_complaints(dag, runtimes, findings)
    if not findings.problems:
        _note_size(dag, findings)
    if findings.problems:
        raise DagError(findings.problems, where=where)
    return dag


def _note_size(dag: Dag, findings: FieldProblems) -> None:
    """Note if the canonical form, which says all in full, could not be read back."""
    if len(canonical(dag)) > BYTES_MAX or _nodes(plain(dag)) > NODES_MAX:
        findings.add(
            "", "It becomes too large when it is written in full; make several DAGs of it."
        )


def _nodes(value: object) -> int:
    if isinstance(value, dict):
        return 1 + sum(1 + _nodes(each) for each in value.values())
    return 1 + sum(map(_nodes, value)) if isinstance(value, list) else 1


def _read_jobs(root: Field, files: Files | None) -> tuple[Job, ...]:
    top = root.section(("jobs",))
    field = top.need("jobs", "write `jobs:` and a job below it")
    if field is None:
        return ()
    entries = list(field.entries())
    if field.is_mapping and not entries:
        field.wrong("There are no jobs; write one.")
    if len(entries) > JOBS_MAX:
        field.wrong(f"There are {len(entries)} jobs; at most {JOBS_MAX} are allowed.")
        return ()
    catalog = DatasetIndex(root.findings)
    sections: dict[str, Section] = {}
    for job, value in entries:
        try:
            name(job)
        except ValueError as error:
            root.findings.add(value.path, f"{shown(job)} {error}.")
        sections[job] = value.section(JOB_FIELDS)
        if not value.is_mapping:
            for each in JOB_FIELDS:
                root.findings.distrust(f"{value.path}.{each}")
    outputs = {job: catalog.add(job, one.get("outputs")) for job, one in sections.items()}
    jobs = []
    for job, section in sorted(sections.items()):
        found = read_job(job, section, outputs=outputs[job], catalog=catalog, files=files)
        note_misplaced(found, section)
        jobs.append(found)
    return tuple(jobs)


def _note_complaints(dag: Dag, runtimes: Runtimes | None, findings: FieldProblems) -> None:
    """Note which rules are broken, but not on the word of a field that could not be read."""
    # Noted at the end, so that one complaint does not hide another.
    broken = {
        field
        for field in ("inputs", "outputs")
        if any(findings.is_broken(f"jobs.{job.name}.{field}") for job in dag.jobs)
    }
    found = [
        each
        for each in complaints(dag, runtimes)
        if not any(findings.is_broken(f"jobs.{each.job}.{read}") for read in each.reads)
        and broken.isdisjoint(each.reads_of_all)
    ]
    for each in found:
        findings.add(f"jobs.{each.job}.{each.field}", each.message)
