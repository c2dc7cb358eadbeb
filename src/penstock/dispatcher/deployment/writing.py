"""Writes a version of the DAG: jobs, datasets, definitions and edges.

Definitions are immutable and shared by versions that say the same of a job. The lineage is part of
a definition's hash and of its body, so that a later move can tell whether a job keeps its
generation also if it has no output. Called by `penstock.dispatcher.deployment.moves`, inside its
transaction.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from psycopg.types.json import Jsonb

from penstock.dispatcher.dag.canonical import content_hash, encoded, plain_job
from penstock.dispatcher.dag.files import texts
from penstock.dispatcher.dag.model import Dag, Job, RangeAggregate, Update
from penstock.dispatcher.dag.names import in_queue
from penstock.dispatcher.database.pool import Connection
from penstock.dispatcher.database.queries import query
from penstock.dispatcher.deployment.plan import writers
from penstock.dispatcher.routing.filters import stored_filter
from penstock.runtimes import DEFAULT_QUEUE


async def write_version(
    connection: Connection,
    dag: Dag,
    source_text: str,
    *,
    lineages: Mapping[str, str],
    generations: Mapping[str, str],
) -> int:
    """Write a version that is new, and return its number. Both mappings are by job."""
    names = [job.name for job in dag.jobs]
    limits = [job.max_concurrency for job in dag.jobs]
    await connection.execute(query("write_jobs"), {"names": names, "limits": limits})
    written = writers(dag)
    datasets = {"datasets": list(written), "writers": list(written.values())}
    await connection.execute(query("write_datasets"), datasets)
    asked = {"hash": content_hash(dag), "source": source_text, "files": Jsonb(texts(dag))}
    row = await (await connection.execute(query("write_version"), asked)).fetchone()
    assert row is not None, "an insert returns its row"
    version: int = row["id"]
    jobs = [
        {**_definition(job, lineage=lineages[job.name]), "generation": generations[job.name]}
        for job in dag.jobs
    ]
    described = {"version": version, "jobs": Jsonb(jobs)}
    await connection.execute(query("write_definitions"), described)
    await connection.execute(query("write_dag_jobs"), described)
    edges = [
        {
            "job": job.name,
            "dataset": each.dataset,
            "input": each.name,
            "filter": stored_filter(each.where) if each.where is not None else None,
            "is_trigger": each.is_trigger,
            "reads": each.reads.value,
            "lookback": each.lookback_ms and each.lookback_ms // 1000,
        }
        for job in dag.jobs
        for each in job.inputs
    ]
    await connection.execute(query("write_edges"), {"version": version, "edges": Jsonb(edges)})
    return version


def _definition(job: Job, *, lineage: str) -> dict[str, Any]:
    body = {**plain_job(job), "lineage": lineage}
    read = {each.dataset for each in job.inputs}
    written = {each.dataset for each in job.outputs}
    return {
        "job": job.name,
        "hash": hashlib.sha256(encoded(body)).hexdigest(),
        "body": body,
        "datasets": sorted(read | written),
        "runtime": job.runtime,
        "operator": in_queue(job.operator, str(job.resources.get("queue", DEFAULT_QUEUE))),
        "priority": job.priority.value,
        "update_mode": _update_mode(job).value,
        "max_attempts": job.max_attempts,
        "timeout_ms": job.timeout_ms,
        "heartbeat_ms": job.heartbeat_timeout_ms,
        "retry_first_ms": job.retry.first_ms,
        "retry_max_ms": job.retry.max_ms,
        "retry_backoff": job.retry.backoff,
    }


def _update_mode(job: Job) -> Update:
    """How outputs are published. Ranges that say the same news again are one publication."""
    return Update.APPEND if isinstance(job.ranges, RangeAggregate) else job.update
