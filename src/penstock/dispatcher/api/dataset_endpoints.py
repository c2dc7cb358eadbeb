"""The dataset endpoints: inspect, sweep, refresh and maintain datasets; tokens for reading."""

from __future__ import annotations

import re
from typing import Final

import msgspec
from msgspec.structs import replace

from penstock.datasets.sweeper import Swept
from penstock.dispatcher.api.context import ApiContext
from penstock.dispatcher.api.endpoints import ApiCall, ApiEndpoint
from penstock.dispatcher.api.problems import conflict, malformed, unknown
from penstock.dispatcher.catalog.purging import Purging
from penstock.dispatcher.datasets.maintainer import Maintainer
from penstock.dispatcher.datasets.projector import ProjectionRefresher, RefreshPosition
from penstock.kernel.errors import StoreError
from penstock.protocol.base import Answer, NameParams
from penstock.protocol.datasets import (
    SNAPSHOT_PARTS_MAX,
    ChangesParams,
    DatasetChangesAnswer,
    DatasetDetail,
    MaintainAnswer,
    MaintainAsk,
    PurgeAnswer,
    PurgeAsk,
    ReadTokenAnswer,
    ReadTokenAsk,
    ReadTokenRow,
    ReadTokensAnswer,
    RebuildTableAnswer,
    RefreshAnswer,
    RefreshAsk,
    RemoveTokenAnswer,
    RemoveTokenAsk,
    SnapshotAnswer,
    SnapshotParams,
    SnapshotsAnswer,
    SweepAnswer,
    SweepAsk,
)

_SWEEP_SECONDS_MAX: Final = 60.0
_AFTER: Final = re.compile(r"([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})/(.*)", re.DOTALL)


async def show(parts: ApiContext, call: ApiCall) -> Answer:
    """Everything about one dataset."""
    params: NameParams = call.params
    found = await parts.datasets.show(params.name)
    if found is None:
        return unknown(f"There is no dataset {params.name!r}.")
    if found.table is None:
        return found
    return replace(found, table=replace(found.table, url=parts.hot_url))


async def snapshot(parts: ApiContext, call: ApiCall) -> Answer:
    """All that is published of a generation, of one moment."""
    params: SnapshotParams = call.params
    if params.at is not None:
        return await _then(parts, params)
    found = await parts.datasets.snapshot(
        params.name, generation=params.generation, partition_key=params.partition_key
    )
    if found is None:
        which = f"has no generation {params.generation}" if params.generation else "is not there"
        return unknown(f"The dataset {params.name!r} {which}.")
    if params.partition_key is not None and not found.parts:
        title = f"The dataset {params.name!r} has no partition {params.partition_key!r}."
        return unknown(title)
    if len(found.parts) > SNAPSHOT_PARTS_MAX:
        title = f"The dataset {params.name!r} has more than {SNAPSHOT_PARTS_MAX:,} parts."
        return conflict("too many", title, detail="Ask for its partitions one by one.")
    return found


async def _then(parts: ApiContext, params: SnapshotParams) -> Answer:
    assert params.at is not None, "looked at by the caller"
    if params.generation is not None:
        return malformed("`at` says which generation it is; leave `generation` out.", field="at")
    if not await parts.datasets.exists(params.name):
        return unknown(f"There is no dataset {params.name!r}.")
    found = await parts.history.at(params.name, params.at, partition_key=params.partition_key)
    if len(found.parts) > SNAPSHOT_PARTS_MAX:
        title = f"The dataset {params.name!r} has more than {SNAPSHOT_PARTS_MAX:,} parts."
        return conflict("too many", title, detail="Ask for its partitions one by one.")
    return found


async def snapshots(parts: ApiContext, call: ApiCall) -> Answer:
    """The snapshots of a dataset that are kept."""
    params: NameParams = call.params
    found = await parts.datasets.show(params.name)
    if found is None:
        return unknown(f"There is no dataset {params.name!r}.")
    return await parts.history.listed(params.name, uuid=found.uuid)


async def changes(parts: ApiContext, call: ApiCall) -> Answer:
    """What has changed from one snapshot to another."""
    params: ChangesParams = call.params
    if not await parts.datasets.exists(params.name):
        return unknown(f"There is no dataset {params.name!r}.")
    return await parts.history.changes(params.name, since=params.since, until=params.until)


async def make_token(parts: ApiContext, call: ApiCall) -> Answer:
    """Make a token for reading tables."""
    ask: ReadTokenAsk = call.ask
    for name in ask.datasets:
        if not await parts.datasets.exists(name):
            return unknown(f"There is no dataset {name!r}.")
    seconds = None if ask.days is None else ask.days * 86_400
    token = await parts.readers.make(ask.name, datasets=ask.datasets, seconds=seconds)
    if token is None:
        title = f"A token {ask.name!r} already exists."
        return conflict("taken", title, detail="Remove it first, or choose another name.")
    note = {"name": ask.name, "datasets": len(ask.datasets)}
    parts.audit.note(
        what=call.what, outcome="allowed", address=call.address, reason="read token", detail=note
    )
    return ReadTokenAnswer(name=ask.name, token=token)


async def tokens(parts: ApiContext, call: ApiCall) -> Answer:
    """The tokens for reading tables."""
    del call
    rows = await parts.readers.every()
    return ReadTokensAnswer(tokens=msgspec.convert(rows, list[ReadTokenRow]))


async def remove_token(parts: ApiContext, call: ApiCall) -> Answer:
    """Take a token for reading tables back."""
    ask: RemoveTokenAsk = call.ask
    if not await parts.readers.remove(ask.name):
        return unknown(f"There is no token {ask.name!r}.")
    parts.audit.note(
        what=call.what,
        outcome="allowed",
        address=call.address,
        reason="read token removed",
        detail={"name": ask.name},
    )
    return RemoveTokenAnswer(name=ask.name)


async def sweep_dataset(parts: ApiContext, call: ApiCall) -> Answer:
    """Remove what nobody can be reading of one dataset."""
    params: NameParams = call.params
    if not await parts.datasets.exists(params.name):
        return unknown(f"There is no dataset {params.name!r}.")
    return await _sweep(parts, call, params.name)


async def sweep(parts: ApiContext, call: ApiCall) -> Answer:
    """Remove what nobody can be reading."""
    return await _sweep(parts, call, None)


async def _sweep(parts: ApiContext, call: ApiCall, name: str | None) -> Answer:
    ask: SweepAsk = call.ask
    if parts.sweeping is None:
        return conflict("no store", "This dispatcher has no store to sweep.")
    try:
        swept = await parts.sweeping.sweep(
            name, grace_seconds=ask.grace_seconds, dry_run=ask.dry_run
        )
    except StoreError as error:
        return conflict("store", error.message, detail=error.hint)
    return _answer(swept)


def _answer(swept: Swept) -> SweepAnswer:
    return SweepAnswer(
        attempts=swept.attempts,
        files=swept.files,
        bytes=swept.bytes,
        left=swept.left,
        is_over=swept.is_round_over,
    )


async def refresh(parts: ApiContext, call: ApiCall) -> Answer:
    """Rewrite every `current.json` of a dataset that is not up to date."""
    params: NameParams = call.params
    ask: RefreshAsk = call.ask
    after = _AFTER.fullmatch(ask.after)
    if ask.after and after is None:
        return malformed("`after` is not a value from an earlier answer.", field="after")
    found = await parts.datasets.show(params.name)
    if found is None:
        return unknown(f"There is no dataset {params.name!r}.")
    if parts.store is None:
        return conflict("no store", "This dispatcher has no store to write to.")
    refreshing = ProjectionRefresher(parts.database, parts.store)
    at = None if after is None else RefreshPosition(generation=after[1], partition_key=after[2])
    try:
        done = await refreshing.refresh(params.name, uuid=found.uuid, after=at)
    except StoreError as error:
        return conflict("store", error.message, detail=error.hint)
    more = None if done.at is None else f"{done.at.generation}/{done.at.partition_key}"
    return RefreshAnswer(looked=done.looked, written=done.written, after=more)


async def rebuild_table(parts: ApiContext, call: ApiCall) -> Answer:
    """Load the table of a dataset anew from what is published."""
    params: NameParams = call.params
    found = await parts.datasets.show(params.name)
    if found is None:
        return unknown(f"There is no dataset {params.name!r}.")
    rows = await parts.database.fetch("load_anew", {"dataset": found.uuid})
    if not rows:
        title = f"The dataset {params.name!r} has no table in Postgres."
        return conflict("no table", title, detail="Write storage: postgres at its output.")
    parts.kick()
    return RebuildTableAnswer(partitions=rows[0]["partitions"])


async def purge(parts: ApiContext, call: ApiCall) -> Answer:
    """Purge old generations of a dataset, or some partitions of it."""
    params: NameParams = call.params
    ask: PurgeAsk = call.ask
    if ask.is_current and not ask.partition_keys:
        return malformed(
            "The current generation can only be purged by partition: name `partition_keys`.",
            field="is_current",
        )
    found = await parts.datasets.show(params.name)
    if found is None:
        return unknown(f"There is no dataset {params.name!r}.")
    purged = await Purging(parts.database).purge(
        found.uuid, keys=ask.partition_keys or None, is_current=ask.is_current
    )
    note = {
        "dataset": params.name,
        "partitions": len(ask.partition_keys),
        "is_current": ask.is_current,
    }
    parts.audit.note(
        what=call.what, outcome="allowed", address=call.address, reason="purged", detail=note
    )
    if purged is None:
        title = f"{params.name!r} is too busy: publications hold its locks."
        return conflict("busy", title, detail="Retry: what was already purged stays purged.")
    parts.kick()
    return PurgeAnswer(
        snapshots=purged.snapshots,
        publications=purged.publications,
        generations=purged.generations,
        generations_left=purged.generations_left,
    )


async def maintain(parts: ApiContext, call: ApiCall) -> Answer:
    """Make tasks that rewrite the files of a dataset."""
    params: NameParams = call.params
    ask: MaintainAsk = call.ask
    if not await parts.datasets.exists(params.name):
        return unknown(f"There is no dataset {params.name!r}.")
    made = await Maintainer(parts.database).ask(params.name, partition_key=ask.partition_key)
    if made is None:
        title = f"The dataset {params.name!r} is not maintained now."
        detail = (
            "Set `maintain` at its output and apply the DAG; if it is there, wait until the"
            " generation that is being built is cut over."
        )
        return conflict("not maintained", title, detail=detail)
    if made.tasks:
        parts.kick()
    return MaintainAnswer(tasks=list(made.tasks), is_all=made.is_all)


ENDPOINTS: Final = (
    ApiEndpoint(
        "GET",
        "/v1/datasets/{name}",
        "Get a dataset",
        show,
        params=NameParams,
        answer=DatasetDetail,
        problems=(404,),
    ),
    ApiEndpoint(
        "GET",
        "/v1/datasets/{name}/snapshot",
        "Get a consistent snapshot of the published partitions",
        snapshot,
        params=SnapshotParams,
        answer=SnapshotAnswer,
        problems=(404, 409),
    ),
    ApiEndpoint(
        "GET",
        "/v1/datasets/{name}/snapshots",
        "List the retained snapshots of a dataset",
        snapshots,
        params=NameParams,
        answer=SnapshotsAnswer,
        problems=(404,),
    ),
    ApiEndpoint(
        "GET",
        "/v1/datasets/{name}/changes",
        "List the changes between two snapshots",
        changes,
        params=ChangesParams,
        answer=DatasetChangesAnswer,
        problems=(404,),
    ),
    ApiEndpoint(
        "POST",
        "/v1/read-tokens",
        "Create a read token",
        make_token,
        ask=ReadTokenAsk,
        answer=ReadTokenAnswer,
        problems=(404, 409),
    ),
    ApiEndpoint(
        "GET",
        "/v1/read-tokens",
        "List read tokens",
        tokens,
        answer=ReadTokensAnswer,
    ),
    ApiEndpoint(
        "POST",
        "/v1/read-tokens/remove",
        "Revoke a read token",
        remove_token,
        ask=RemoveTokenAsk,
        answer=RemoveTokenAnswer,
        problems=(404,),
    ),
    ApiEndpoint(
        "POST",
        "/v1/datasets/{name}/refresh",
        "Rewrite every current.json of a dataset",
        refresh,
        ask=RefreshAsk,
        params=NameParams,
        answer=RefreshAnswer,
        problems=(404, 409),
        may_omit_body=True,
        request_seconds_max=_SWEEP_SECONDS_MAX,
    ),
    ApiEndpoint(
        "POST",
        "/v1/datasets/{name}/rebuild-table",
        "Load the table of a dataset anew from what is published",
        rebuild_table,
        params=NameParams,
        answer=RebuildTableAnswer,
        problems=(404, 409),
    ),
    ApiEndpoint(
        "POST",
        "/v1/datasets/{name}/purge",
        "Purge old generations of a dataset, or some partitions",
        purge,
        ask=PurgeAsk,
        params=NameParams,
        answer=PurgeAnswer,
        problems=(404, 409),
        may_omit_body=True,
    ),
    ApiEndpoint(
        "POST",
        "/v1/datasets/{name}/maintain",
        "Compact or cluster the files of a dataset now",
        maintain,
        ask=MaintainAsk,
        params=NameParams,
        answer=MaintainAnswer,
        problems=(404, 409),
        may_omit_body=True,
    ),
    *(
        ApiEndpoint(
            "POST",
            path,
            summary,
            handler,
            ask=SweepAsk,
            params=params,
            answer=SweepAnswer,
            problems=(404, 409) if params is not None else (409,),
            may_omit_body=True,
            request_seconds_max=_SWEEP_SECONDS_MAX,
        )
        for path, summary, handler, params in (
            ("/v1/sweep", "Sweep orphaned files of all datasets", sweep, None),
            (
                "/v1/datasets/{name}/sweep",
                "Sweep orphaned files of one dataset",
                sweep_dataset,
                NameParams,
            ),
        )
    ),
)
