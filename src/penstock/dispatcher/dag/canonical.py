"""The one form of a DAG that is stored and hashed, and the hashes that decide what is rebuilt.

The canonical form is JSON with sorted keys that says what the YAML says, in one way: durations and
filters in their shortest text, references as datasets, and nothing that has its default. It is also
valid YAML, so `parsing.parse` reads a stored version back as it was.

Two hashes of a job. The *definition* covers what decides which data the job writes (`DEFINING`)
and nothing of how it is scheduled, timed or retried, so that a longer timeout rebuilds no data.
The *lineage* is the definition with the lineage of everything upstream: a job whose lineage is
the same in two versions of a DAG keeps its generation. A job's own name is in neither: the
datasets are.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from penstock.dispatcher.dag.filters import where_text
from penstock.dispatcher.dag.graph import Graph
from penstock.dispatcher.dag.model import (
    SQL_OPERATOR,
    AlwaysOnSource,
    CronSource,
    Dag,
    Emits,
    Input,
    Job,
    Keep,
    Maintain,
    ManualSource,
    Output,
    Reads,
    Retry,
    Source,
    WebhookAuth,
    WebhookSource,
)
from penstock.dispatcher.dag.units import bytes_text, duration_text

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
    after, what a file is called."""
    outputs = tuple(replace(each, keep=None, maintain=None) for each in job.outputs)
    config = job.config
    if job.operator == SQL_OPERATOR and "sql" in config:
        config = {name: value for name, value in config.items() if name != "sql_file"}
    return replace(job, outputs=outputs, config=config)


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


def _input(edge: Input) -> Plain:
    said: Plain = {"from": edge.dataset}
    if edge.name != edge.dataset:
        said["as"] = edge.name
    if edge.where is not None:
        said["where"] = where_text(edge.where)
    if not edge.is_trigger:
        said["trigger"] = False
    if edge.reads is not Reads.PARTITION:
        said["read"] = edge.reads.value
    if edge.lookback_ms is not None:
        said["lookback"] = duration_text(edge.lookback_ms)
    return said


def _output(output: Output) -> Plain:
    said: Plain = {"name": output.name}
    if output.name != output.dataset:
        said["dataset"] = output.dataset
    if output.keep is not None:
        said["keep"] = _keep(output.keep)
    if output.partition_by:
        said["partition_by"] = output.partition_by
    if output.maintain is not None:
        said["maintain"] = _maintain(output.maintain)
    return said


def _keep(keep: Keep) -> Plain:
    said = {
        "partitions": keep.partitions,
        "age": _duration(keep.age_ms),
        "generations": keep.generations,
    }
    return {name: value for name, value in said.items() if value is not None}


def _maintain(maintain: Maintain) -> Plain:
    said: Plain = {"after": duration_text(maintain.after_ms)}
    if maintain.compact is not None:
        compact = maintain.compact
        said["compact"] = {"files": compact.files, "below": bytes_text(compact.below_bytes)}
    if maintain.cluster:
        said["cluster"] = list(maintain.cluster)
    return said


def _retry(retry: Retry) -> Plain:
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
