"""What people ask of datasets as files: to see, to sweep, to refresh and to maintain them.

The handlers, and their part of the table of the public listener.
"""

from __future__ import annotations

import re
from typing import Final

from penstock.datasets.sweeping import Swept
from penstock.dispatcher.api.endpoints import Call, Endpoint
from penstock.dispatcher.api.parts import Parts
from penstock.dispatcher.api.problems import conflict, malformed, unknown
from penstock.dispatcher.datasets.maintainer import Maintainer
from penstock.dispatcher.datasets.refreshing import At, Refreshing
from penstock.dispatcher.wire.asking import NameParams
from penstock.dispatcher.wire.base import Answer
from penstock.dispatcher.wire.datasets import (
    SNAPSHOT_PARTS_MAX,
    DatasetDetail,
    MaintainAnswer,
    MaintainAsk,
    RefreshAnswer,
    RefreshAsk,
    SnapshotAnswer,
    SnapshotParams,
    SweepAnswer,
    SweepAsk,
)
from penstock.kernel.errors import StoreError

_SWEEP_SECONDS_MAX: Final = 60.0
_AFTER: Final = re.compile(r"([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})/(.*)", re.DOTALL)


async def show(parts: Parts, call: Call) -> Answer:
    """Everything about one dataset."""
    params: NameParams = call.params
    found = await parts.datasets.show(params.name)
    return found if found is not None else unknown(f"There is no dataset {params.name!r}.")


async def snapshot(parts: Parts, call: Call) -> Answer:
    """All that is published of a generation, of one moment."""
    params: SnapshotParams = call.params
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


async def sweep_dataset(parts: Parts, call: Call) -> Answer:
    """Remove what nobody can be reading of one dataset."""
    params: NameParams = call.params
    if not await parts.datasets.exists(params.name):
        return unknown(f"There is no dataset {params.name!r}.")
    return await _sweep(parts, call, params.name)


async def sweep(parts: Parts, call: Call) -> Answer:
    """Remove what nobody can be reading."""
    return await _sweep(parts, call, None)


async def _sweep(parts: Parts, call: Call, name: str | None) -> Answer:
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


async def refresh(parts: Parts, call: Call) -> Answer:
    """Have every `current.json` of a dataset say what is published."""
    params: NameParams = call.params
    ask: RefreshAsk = call.ask
    after = _AFTER.fullmatch(ask.after)
    if ask.after and after is None:
        return malformed("`after` is not what an answer has said.", field="after")
    found = await parts.datasets.show(params.name)
    if found is None:
        return unknown(f"There is no dataset {params.name!r}.")
    if parts.store is None:
        return conflict("no store", "This dispatcher has no store to write to.")
    refreshing = Refreshing(parts.database, parts.store)
    at = None if after is None else At(generation=after[1], partition_key=after[2])
    try:
        done = await refreshing.refresh(params.name, uuid=found.uuid, after=at)
    except StoreError as error:
        return conflict("store", error.message, detail=error.hint)
    more = None if done.at is None else f"{done.at.generation}/{done.at.partition_key}"
    return RefreshAnswer(looked=done.looked, written=done.written, after=more)


async def maintain(parts: Parts, call: Call) -> Answer:
    """Make tasks that rewrite the files of a dataset."""
    params: NameParams = call.params
    ask: MaintainAsk = call.ask
    if not await parts.datasets.exists(params.name):
        return unknown(f"There is no dataset {params.name!r}.")
    made = await Maintainer(parts.database).ask(params.name, partition_key=ask.partition_key)
    if made is None:
        title = f"The dataset {params.name!r} is not maintained now."
        detail = (
            "Say `maintain` at its output and apply the DAG; if it is there, wait until the"
            " generation that is being built is cut over."
        )
        return conflict("not maintained", title, detail=detail)
    if made.tasks:
        parts.kick()
    return MaintainAnswer(tasks=list(made.tasks), is_all=made.is_all)


ENDPOINTS: Final = (
    Endpoint(
        "GET",
        "/v1/datasets/{name}",
        "Everything about one dataset",
        show,
        params=NameParams,
        answer=DatasetDetail,
        problems=(404,),
    ),
    Endpoint(
        "GET",
        "/v1/datasets/{name}/snapshot",
        "All that is published of a dataset at one moment",
        snapshot,
        params=SnapshotParams,
        answer=SnapshotAnswer,
        problems=(404, 409),
    ),
    Endpoint(
        "POST",
        "/v1/datasets/{name}/refresh",
        "Have every current.json of a dataset say what is published",
        refresh,
        ask=RefreshAsk,
        params=NameParams,
        answer=RefreshAnswer,
        problems=(404, 409),
        may_omit_body=True,
        request_seconds_max=_SWEEP_SECONDS_MAX,
    ),
    Endpoint(
        "POST",
        "/v1/datasets/{name}/maintain",
        "Rewrite the files of a dataset now",
        maintain,
        ask=MaintainAsk,
        params=NameParams,
        answer=MaintainAnswer,
        problems=(404, 409),
        may_omit_body=True,
    ),
    *(
        Endpoint(
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
            ("/v1/sweep", "Remove files that nobody can be reading", sweep, None),
            (
                "/v1/datasets/{name}/sweep",
                "Remove those of one dataset",
                sweep_dataset,
                NameParams,
            ),
        )
    ),
)
