"""The canonical form of a DAG: how it is stored, hashed, compared and shown.

The canonical form is JSON with sorted keys that says what the YAML says, in one way: durations
and filters in their shortest text, references as datasets, and nothing that has its default. It
is also valid YAML, so `parser.parse` reads a stored version back as it was.

Two hashes of a job. The *definition* covers what decides which data the job writes (`DEFINING`)
and nothing of how it is scheduled, timed or retried, so that a longer timeout rebuilds no data.
The *lineage* is the definition with the lineage of everything upstream: a job whose lineage is
the same in two versions keeps its generation. A job's own name is in neither: the datasets are.

A query is defined by its tokens. An edit of its comments or its layout alone
is no new definition: `with_sql_of` puts the text that a job was defined by in the place of such an
edit before hashes are computed. So hashes are of texts, and those that are stored stay as they are.

`diff` matches jobs by name: a job keeps its generation if its lineage is the same, else it is
rebuilt in a new one. `show` prints each job once, below one that it reads from; `render` writes
the YAML of a stored version, which parses to the same DAG.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import yaml

from penstock.dispatcher.dag.filters import where_text
from penstock.dispatcher.dag.model import (
    SQL_OPERATOR,
    AlwaysOnSource,
    CronSource,
    Dag,
    Emits,
    Graph,
    InputSpec,
    Job,
    KeepSpec,
    MaintainSpec,
    ManualSource,
    OutputSpec,
    OutputStorage,
    Priority,
    ReadMode,
    RetryPolicy,
    Source,
    WebhookAuth,
    WebhookSource,
)
from penstock.dispatcher.dag.yaml_reader import scalar_value
from penstock.kernel.units import bytes_text, duration_text
from penstock.runtimes.spark.job_config import sql_tokens

DEFINING: Final = (
    *("activation", "runtime", "operator", "config", "inputs", "outputs", "execution", "when"),
    *("update", "unique_key", "version_by", "delete_when"),
)
"""The fields, as in YAML, that decide which data a job writes."""

# JSON allows these raw, YAML does not, or folds them as ends of lines.
ESCAPED_IN_YAML = re.compile("[\x7f-\xa0\u2028\u2029\ufeff\ufffe\uffff]")

Plain = dict[str, Any]
"""What `json` and `yaml` write: dicts, lists, texts, numbers, booleans and None."""


def plain(dag: Dag) -> Plain:
    """A DAG as the YAML says it, without what has its default."""
    return {"jobs": {job.name: plain_job(job) for job in dag.jobs}}


def plain_job(job: Job) -> Plain:
    """A job as the YAML says it, without its name and without what has its default."""
    default = Job(name=job.name)
    every: Plain = {
        "activation": job.activation.value,
        "source": _source(job.source, job.name),
        "runtime": job.runtime,
        "operator": job.operator,
        "config": job.config,
        "inputs": [_input(each) for each in job.inputs],
        "outputs": [_output(each) for each in job.outputs],
        "execution": job.execution.value,
        "when": job.when.value,
        "update": job.update.value,
        "unique_key": list(job.unique_key),
        "version_by": job.version_by,
        "delete_when": job.delete_when,
        "priority": job.priority.value,
        "mode": job.mode.value,
        "max_queue_depth": job.max_queue_depth,
        "resume_queue_depth": job.resume_queue_depth,
        "max_queue_age": _duration(job.max_queue_age_ms),
        "resume_queue_age": _duration(job.resume_queue_age_ms),
        "max_concurrency": job.max_concurrency,
        "timeout": duration_text(job.timeout_ms),
        "heartbeat_timeout": duration_text(job.heartbeat_timeout_ms),
        "max_attempts": job.max_attempts,
        "retry": _retry(job.retry),
        "merge_updates": job.merge_updates,
        "coalesce": job.coalesce,
        "untrusted": job.untrusted,
        "secrets": job.secrets,
        "buffers": list(job.buffers),
        "resources": job.resources,
    }
    attributes = {name: f"{name}_ms" for name in _DURATIONS}
    return {
        name: value
        for name, value in every.items()
        if getattr(job, attributes.get(name, name)) != getattr(default, attributes.get(name, name))
    }


_DURATIONS: Final = ("max_queue_age", "resume_queue_age", "timeout", "heartbeat_timeout")


def canonical(dag: Dag) -> bytes:
    """The bytes that are stored and hashed: equal for equal DAGs, and readable as YAML."""
    return encoded(plain(dag))


def content_hash(dag: Dag) -> str:
    """What names a version of a DAG."""
    return _hash(plain(dag))


def definition_hash(job: Job) -> str:
    """What decides which data a job writes, as 64 hexadecimal digits."""
    said = plain_job(_bare(job))
    defining = {name: said[name] for name in DEFINING if name in said}
    return _hash({"job": defining, "source": _defining_source(job.source)})


def _bare(job: Job) -> Job:
    """A job without what changes none of its rows: how much is kept, how its files are looked
    after, which columns they may have and where else they are, what a file is called."""
    outputs = tuple(
        replace(each, keep=None, maintain=None, columns=(), storage=OutputStorage.FILES)
        for each in job.outputs
    )
    # What a sink has accepted cannot be accepted anew: how it judges rows counts from now on.
    config = {} if job.is_sink else job.config
    if job.operator == SQL_OPERATOR and "sql" in config:
        config = {name: value for name, value in config.items() if name != "sql_file"}
    return replace(job, outputs=outputs, config=config)


def with_sql_of(dag: Dag, known: Iterable[tuple[str, str]]) -> Dag:
    """The DAG with the first of these queries, by job, that has the tokens of the job's own."""
    jobs = {job.name: job for job in dag.jobs}
    tokens = {name: sql_tokens(defining_sql(job) or "") for name, job in jobs.items()}
    for name, sql in known:
        if tokens.get(name) and sql_tokens(sql) == tokens[name]:
            del tokens[name]
            jobs[name] = replace(jobs[name], config={**jobs[name].config, "sql": sql})
    return replace(dag, jobs=tuple(jobs.values()))


def defining_sql(job: Job) -> str | None:
    """The text of a job's query; None if it has none."""
    sql = job.config.get("sql") if job.operator == SQL_OPERATOR else None
    return sql if isinstance(sql, str) else None


def queries(dag: Dag) -> list[tuple[str, str]]:
    """The jobs that run a query, with its text."""
    return [(job.name, sql) for job in dag.jobs if (sql := defining_sql(job)) is not None]


def lineage_hashes(dag: Dag) -> Mapping[str, str]:
    """The lineage of every job, by name."""
    graph = Graph(dag)
    jobs = {job.name: job for job in dag.jobs}
    found: dict[str, str] = {}
    for name in graph.order():
        inputs = [(each.name, found[graph.writers[each.dataset]]) for each in jobs[name].inputs]
        found[name] = _hash({"definition": definition_hash(jobs[name]), "inputs": inputs})
    return found


def lineage_hash(dag: Dag, job: str) -> str:
    """The definition of a job together with that of everything upstream of it."""
    return lineage_hashes(dag)[job]


def encoded(value: object) -> bytes:
    """A part of a canonical form: equal for what is the same, and 1, 1.0 and true are not."""
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return ESCAPED_IN_YAML.sub(lambda found: f"\\u{ord(found[0]):04x}", text).encode()


def _hash(value: Plain) -> str:
    return hashlib.sha256(encoded(value)).hexdigest()


def _input(edge: InputSpec) -> Plain:
    said: Plain = {"from": edge.dataset}
    if edge.name != edge.dataset:
        said["as"] = edge.name
    if edge.where is not None:
        said["where"] = where_text(edge.where)
    if not edge.is_trigger:
        said["trigger"] = False
    if edge.reads is not ReadMode.PARTITION:
        said["read"] = edge.reads.value
    if edge.lookback_ms is not None:
        said["lookback"] = duration_text(edge.lookback_ms)
    return said


def _output(output: OutputSpec) -> Plain:
    said: Plain = {"name": output.name}
    if output.name != output.dataset:
        said["dataset"] = output.dataset
    if output.keep is not None:
        said["keep"] = _keep(output.keep)
    if output.partition_by:
        said["partition_by"] = output.partition_by
    if output.maintain is not None:
        said["maintain"] = _maintain(output.maintain)
    if output.columns:
        # A list, for the order of a mapping is nobody's: not JSON's, and not that of Postgres.
        said["columns"] = [{each.name: each.type} for each in output.columns]
    if output.storage is not OutputStorage.FILES:
        said["storage"] = output.storage.value
    if output.buffered:
        said["buffered"] = True
    return said


def _keep(keep: KeepSpec) -> Plain:
    said = {
        "partitions": keep.partitions,
        "age": _duration(keep.age_ms),
        "generations": keep.generations,
        "history": _duration(keep.history_ms),
    }
    return {name: value for name, value in said.items() if value is not None}


def _maintain(maintain: MaintainSpec) -> Plain:
    said: Plain = {"after": duration_text(maintain.after_ms)}
    if maintain.compact is not None:
        compact = maintain.compact
        said["compact"] = {"files": compact.files, "below": bytes_text(compact.below_bytes)}
    if maintain.cluster:
        said["cluster"] = list(maintain.cluster)
    return said


def _retry(retry: RetryPolicy) -> Plain:
    return {
        "first": duration_text(retry.first_ms),
        "max": duration_text(retry.max_ms),
        "backoff": retry.backoff,
    }


def _source(source: Source | None, job: str) -> Plain | None:
    match source:
        case CronSource(cron, zone, emits, catch_up):
            said: Plain = {"kind": "cron", "cron": cron.expression, "time_zone": zone}
            if emits is not Emits.CURSOR:
                said["emits"] = emits.value
            if not catch_up:
                said["catch_up"] = False
            return said
        case WebhookSource(path, auth):
            said = {"kind": "webhook", **({"path": path} if path != f"/{job}" else {})}
            return said if auth is None else {**said, "auth": _auth(auth)}
        case ManualSource():
            return {"kind": "manual"}
        case AlwaysOnSource(drain_ms):
            return {"kind": "always_on", "drain_timeout": duration_text(drain_ms)}
        case None:
            return None


def _auth(auth: WebhookAuth) -> Plain:
    default = WebhookAuth(type=auth.type, secrets=auth.secrets)
    one_or_two = auth.secrets[0] if len(auth.secrets) == 1 else list(auth.secrets)
    said: Plain = {"type": auth.type.value, "secret": one_or_two}
    if auth.tolerance_ms != default.tolerance_ms:
        said["tolerance"] = duration_text(auth.tolerance_ms)
    if auth.header != default.header:
        said["header"] = auth.header
    return said


def _defining_source(source: Source | None) -> Plain | str | None:
    """What of a source decides which data follows from it: not when it emits, but what."""
    match source:
        case None:
            return None
        case CronSource(emits=emits) if emits is not Emits.CURSOR:
            return {"kind": source.kind.value, "emits": emits.value}
        case _:
            return source.kind.value


def _duration(milliseconds: int | None) -> str | None:
    return None if milliseconds is None else duration_text(milliseconds)


@dataclass(frozen=True, slots=True)
class JobChange:
    """What is different in a job."""

    fields: tuple[str, ...]
    """The names of the fields, as in YAML, sorted."""
    keeps_generation: bool


@dataclass(frozen=True, slots=True)
class DagDiff:
    """Every job of two DAGs, in exactly one place; names are sorted."""

    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: Mapping[str, JobChange]
    rebuilt: tuple[str, ...]
    """Not changed themselves, but something upstream of them was."""
    unchanged: tuple[str, ...]

    @property
    def is_empty(self) -> bool:
        """Whether the two say the same."""
        return not (self.added or self.removed or self.changed or self.rebuilt)

    def new_generations(self) -> frozenset[str]:
        """The jobs whose datasets get a new generation."""
        edited = {name for name, change in self.changed.items() if not change.keeps_generation}
        return frozenset({*self.added, *self.rebuilt, *edited})


def diff(old: Dag, new: Dag) -> DagDiff:
    """What happens to each job on the way from one DAG to another."""
    before, after = _fields(old), _fields(new)
    old_lineage, new_lineage = lineage_hashes(old), lineage_hashes(with_sql_of(new, queries(old)))
    changed: dict[str, JobChange] = {}
    rebuilt, unchanged = [], []
    for name in sorted(before.keys() & after.keys()):
        keeps = old_lineage[name] == new_lineage[name]
        names = sorted(before[name].keys() | after[name].keys())
        fields = tuple(each for each in names if before[name].get(each) != after[name].get(each))
        if fields:
            changed[name] = JobChange(fields, keeps)
        elif keeps:
            unchanged.append(name)
        else:
            rebuilt.append(name)
    return DagDiff(
        added=tuple(sorted(after.keys() - before.keys())),
        removed=tuple(sorted(before.keys() - after.keys())),
        changed=changed,
        rebuilt=tuple(rebuilt),
        unchanged=tuple(unchanged),
    )


def _fields(dag: Dag) -> dict[str, dict[str, bytes]]:
    """What each job says, by field, in a form in which 1, 1.0 and true are different."""
    return {
        job.name: {field: encoded(value) for field, value in plain_job(job).items()}
        for job in dag.jobs
    }


def show(dag: Dag) -> str:
    """The jobs as a tree, sources first, one a line."""
    graph = Graph(dag)
    jobs = {job.name: job for job in dag.jobs}
    depths: dict[str, int] = {}
    children: dict[str, list[str]] = {name: [] for name in jobs}
    order = graph.order()
    for name in order:
        # Below the deepest of its feeders, which is the nearest in most DAGs.
        feeders = graph.feeders[name]
        if not feeders:
            depths[name] = 0
            continue
        parent = max(feeders, key=lambda each: (depths[each], each))
        depths[name] = depths[parent] + 1
        children[parent].append(name)
    lines: list[tuple[str, str]] = []
    waiting = [(name, "", "") for name in reversed(order) if not graph.feeders[name]]
    while waiting:
        name, lead, below = waiting.pop()
        lines.append((lead + name, _described(jobs[name], graph)))
        last = len(children[name]) - 1
        for number, child in reversed(list(enumerate(children[name]))):
            tee, bar = ("└─ ", "   ") if number == last else ("├─ ", "│  ")
            waiting.append((child, below + tee, below + bar))
    width = max((len(tree) for tree, _ in lines), default=0)
    return "".join(f"{tree:<{width}}  {text}".rstrip() + "\n" for tree, text in lines)


def _described(job: Job, graph: Graph) -> str:
    parts = [_what(job)]
    if len(graph.feeders[job.name]) > 1:
        parts.append(f"reads {', '.join(graph.feeders[job.name])}")
    if job.outputs:
        parts.append(f"writes {', '.join(output.dataset for output in job.outputs)}")
    if job.priority is Priority.BULK:
        parts.append("bulk")
    if job.buffers:
        parts.append(f"buffers {', '.join(job.buffers)}")
    if job.secrets:
        parts.append(f"secrets {', '.join(sorted(job.secrets))}")
    if job.untrusted:
        parts.append("untrusted")
    return "; ".join(filter(None, parts))


def _what(job: Job) -> str:
    ran = f"{job.runtime} {job.operator}".strip()
    match job.source:
        case None:
            return ran
        case CronSource(cron, zone, emits):
            intervals = ", intervals" if emits is Emits.INTERVAL else ""
            return f"cron {cron.expression} {zone}{intervals}"
        case WebhookSource(path, auth):
            return f"webhook {path} {'without auth' if auth is None else f'({auth.type})'}"
        case source:
            return f"{source.kind} {ran}".strip()


class _Dumper(yaml.SafeDumper):
    """Writes texts in quotes where a plain one would be read as something else."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 - the name is PyYAML's
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    node = dumper.represent_str(text)
    try:
        is_clear = scalar_value(node) == text
    except ValueError:
        is_clear = False
    is_clear = is_clear and not ESCAPED_IN_YAML.search(text)
    return node if is_clear else yaml.ScalarNode(node.tag, text, style='"')


_Dumper.add_representer(str, _represent_text)


def render(dag: Dag) -> str:
    """The YAML of a DAG, without what has its default."""
    return written(plain(dag))


def written(said: Plain) -> str:
    """A part of a canonical form, as YAML."""
    return yaml.dump(said, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
