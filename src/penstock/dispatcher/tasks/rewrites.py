"""Files that are rewritten in place: other files with the same rows, and no news for anybody.

A task that maintains a dataset is one of the job that writes it, made by
`penstock.dispatcher.datasets.maintainer`; what it is for stands in its payload, under `maintain`.
It is claimed, fenced, retried and given up as every other, and gives way to them (`bulk`). Whoever
claims it is told to run the operator `maintain` instead of the job's: a worker of an earlier
release does not know that, and hands it back.

| when it is claimed | what is published has | and it is given |
|---|---|---|
| | the revision that it was made for | that, to be rewritten |
| | another one, or it was removed | nothing: it completes with no output |

| when it completes | what is published has | the outcome |
|---|---|---|
| | the revision that was rewritten, and as many rows | `rewritten`: location, manifest, files and |
| | | bytes are those of the new files |
| | that revision, and another number of rows | it is refused, and the attempt has failed |
| | another revision, or it was removed | `superseded`: its files are swept |

The revision stays (PUBLISH-10), and so do the task, the attempt, the time and the rows of the
publication, since all of these say what the rows are. So there is no event and no task downstream;
`read: changes`, lookbacks, rebuilds and coverage see nothing; and a merge that has read the files
of before is published all the same, for it was merged with these very rows. What is published by a
task always has another revision, and wins. What is counted instead is `rewrites`. A revision and
its rewrites together are the edition, which is what `current.json` is known by, so readers without
Postgres follow, and the folder that was left is swept when nobody can be reading it.

Of a partition that is appended to, a task rewrites a run of parts that are consecutive by their
revisions, `first` to `revision` in its payload, as one (`compacted` in the schema). Each part has
the revision that it came with, by which `read: changes` knows it, and its row stays, by which it is
known that its task has appended it and what a rebuild has to make again. A run is given whole: to
those that have consumed nothing of it. Nobody has consumed some of it only (PUBLISH-11):

- no position, of a consumer or of a task of one that runs, is within a run when it is chosen, nor
  when it is put in place (`penstock_cuts`);
- who is given changes after the choice is given all up to the latest revision, and so all of the
  run or what is after it too (`penstock.dispatcher.datasets.maintainer`).

| when it completes, of its partition | the outcome |
|---|---|
| nothing was rewritten since, and the parts have as many rows | `rewritten` |
| more was appended meanwhile | the same: it is after the run, and stays as it is |
| another run was rewritten, or it was removed | `superseded` |

So what is compared here is the number of rewritings, which the parts are given with as their
revision; the rows of the publication itself are locked first, as by those that append. The files of
the parts, and those of an earlier run that is part of this one, are swept as any others.

Nothing is half: until the transaction that ends the attempt the new files are nobody's. Called by
`lifecycle` and `completion` of this package, in their transactions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from psycopg.types.json import Jsonb

from penstock.dispatcher.dag.model import UpdateMode
from penstock.dispatcher.database.pool import Connection, query
from penstock.dispatcher.tasks.model import ClaimedTask, Completion, PublishedOutput, PublishOutcome
from penstock.runtimes.base import MAINTAIN

_SHAPING: Final = ("sort_by", "cluster_by", "target_file_bytes")
"""What a job's config says of how its files are cut."""
_OWN: Final = ("partition_key", "start", "end")
_NOT_ASKED: Final = "The task rewrites one partition, and this is not what was made of it."


def maintained(payload: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What a task maintains, by its payload; None if it is any other."""
    found = payload.get(MAINTAIN)
    return found if isinstance(found, Mapping) else None


async def with_rewrites(
    connection: Connection, claimed: Sequence[ClaimedTask]
) -> tuple[ClaimedTask, ...]:
    """Attempts that are about to begin, those that maintain with what they are to rewrite."""
    tasks = [each.task_id for each in claimed if maintained(each.payload) is not None]
    if not tasks:
        return tuple(claimed)
    found = await connection.execute(query("maintained_parts"), {"tasks": tasks})
    parts = {row["task_id"]: row["parts"] for row in await found.fetchall()}
    return tuple(
        each
        if (about := maintained(each.payload)) is None
        else _rewriting(each, about, parts.get(each.task_id, ()))
        for each in claimed
    )


async def refuse_unlike(
    connection: Connection, completions: Sequence[Completion]
) -> Mapping[int, str]:
    """Of completions of tasks that maintain, those whose files are not the same rows, and why."""
    tasks = [each.fence.task_id for each in completions if each.outputs]
    if not tasks:
        return {}
    found = await connection.execute(query("rewritten_partitions"), {"tasks": tasks})
    rows = {row["task_id"]: row for row in await found.fetchall()}
    refused = {
        each.fence.task_id: _unlike(each, rows.get(each.fence.task_id))
        for each in completions
        if each.outputs
    }
    return {task_id: why for task_id, why in refused.items() if why}


async def rewrite(
    connection: Connection, outputs: Sequence[Mapping[str, Any]]
) -> Mapping[int, PublishedOutput]:
    """Put files in the place of those that they were made of: what became of each, by task."""
    whole = [each for each in outputs if each["mode"] != UpdateMode.APPEND]
    runs = [each for each in outputs if each["mode"] == UpdateMode.APPEND]
    rows: list[Mapping[str, Any]] = []
    if whole:
        rows += await _asked(connection, "rewrite", whole)
    if runs:
        # A statement of its own: the next sees all that was appended until it had the locks.
        await connection.execute(query("hold_rewritten"), {"outputs": Jsonb(runs)})
        rows += await _asked(connection, "rewrite_runs", runs)
    return {
        row["task_id"]: PublishedOutput(
            row["dataset"],
            row["partition_key"],
            PublishOutcome(row["outcome"]),
            row["revision"],
            None,
        )
        for row in rows
    }


def _rewriting(
    claimed: ClaimedTask, about: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]
) -> ClaimedTask:
    """The attempt as its worker is given it: another operator, on what is published."""
    name, definition = about["dataset"], claimed.definition
    said = {key: value for key, value in definition.items() if key not in ("secrets", "untrusted")}
    outputs = [
        {key: each[key] for key in ("name", "dataset") if key in each}
        for each in definition.get("outputs") or ()
        if each.get("dataset", each["name"]) == name
    ]
    config = definition.get("config") or {}
    shaping = {key: config[key] for key in _SHAPING if key in config}
    if about.get("cluster"):
        shaping.pop("sort_by", None)
        shaping["cluster_by"] = about["cluster"]
    return replace(
        claimed,
        definition={
            **said,
            "operator": MAINTAIN,
            "config": shaping,
            "inputs": [],
            "outputs": outputs,
        },
        payload={
            key: value for key, value in (parts[0] if parts else about).items() if key in _OWN
        },
        inputs={},
        current={name: list(parts)},
    )


def _unlike(completion: Completion, row: Mapping[str, Any] | None) -> str:
    output, *more = completion.outputs
    if (
        more
        or row is None
        or output.base_revision is None
        or output.facts is None
        or (output.dataset, output.partition_key or "") != (row["dataset"], row["partition_key"])
    ):
        return _NOT_ASKED
    if output.base_revision == row["revision"] and output.facts.rows != row["rows"]:
        return (
            f"The files that were rewritten have {output.facts.rows or 0:,} rows, and what is"
            f" published has {row['rows'] or 0:,}; it stays as it is."
        )
    return ""


async def _asked(
    connection: Connection, statement: str, outputs: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    found = await connection.execute(query(statement), {"outputs": Jsonb(list(outputs))})
    return await found.fetchall()
