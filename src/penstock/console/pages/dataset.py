"""The pages of datasets: the list, one dataset, its partitions, one snapshot; and all their paths.

The list has who writes each dataset, how large and how fresh it is, and what is wrong. The page
of one has its generations, what is missing and why, columns and lineage. The page of a snapshot
has what it has changed, what it shows, and the way to its rows.

The page of a dataset is small, and so is what is sent when it changes: sums, a digest of the
heat map, and the last few publications. The cells of the map are loaded from the page of its
partitions, with `cells=1`, by the script that draws them: once, and again when the digest has
changed, every few seconds at most. So a dataset of ten thousand partitions costs a viewer one
large answer at first, and then the dispatcher a few short queries a second.

The page of the partitions is a page too: the table is the way without the map. Rejected rows of a
buffered dataset have one as well, because reading them takes long; a script puts it into the page.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote, urlencode

from penstock.console.charts import heatmap_cells
from penstock.console.dag_layout import SIZES, lineage_around
from penstock.console.pages.base import (
    ActionResult,
    ConsolePage,
    FormAction,
    PageNotFound,
    PageRequest,
    call_api,
    parse_form,
    problem_sentence,
)
from penstock.dispatcher.api.buffer_endpoints import give_back, rejected_rows
from penstock.dispatcher.api.context import ApiContext
from penstock.dispatcher.api.dag_endpoints import cut_over
from penstock.dispatcher.views.datasets import (
    CELLS_MAX,
    COUNTED_MAX,
    DATASETS_MAX,
    LOOKED_MAX,
    MISSING_MAX,
    BlockingTask,
    DatasetRow,
    GenerationView,
    MissingPartition,
    PartitionCell,
    PartitionViews,
    PartitionWork,
    PublishedSums,
    SnapshotViews,
)
from penstock.protocol.base import NameParams, TaskStatus
from penstock.protocol.dags import CutOverAsk
from penstock.protocol.datasets import RejectedAsk, RejectedDoneAnswer, RejectedPlace
from penstock.protocol.problem import Problem
from penstock.protocol.steering import JobAnswer

_GENERATION: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def generation_of(text: str) -> str | None:
    """A generation as it stands in a query; None if that is none."""
    return text if _GENERATION.fullmatch(text) else None


def dataset_path(name: str, *, generation: str | None = None) -> str:
    """The page of a dataset."""
    return f"/datasets/{quote(name, safe='')}{_query(generation=generation)}"


def partitions_path(name: str, *, generation: str | None = None, after: str | None = None) -> str:
    """The table of the partitions of a dataset."""
    query = _query(generation=generation, after=after)
    return f"/datasets/{quote(name, safe='')}/partitions{query}"


def partition_path(name: str, key: str, *, generation: str | None = None) -> str:
    """The page of a partition; the empty key is the dataset without partitions."""
    base = f"/datasets/{quote(name, safe='')}"
    # What browsers take for a way to another folder, and nothing at all, cannot stand in a path.
    if key in ("", ".", ".."):
        return f"{base}/partition{_query(key=key or None, generation=generation)}"
    return f"{base}/partitions/{quote(key, safe='')}{_query(generation=generation)}"


def rejected_path(name: str) -> str:
    """The rows that the sink of a buffered dataset has rejected."""
    return f"/datasets/{quote(name, safe='')}/rejected"


def snapshot_path(name: str, snapshot: int, *, after: tuple[str, str] | None = None) -> str:
    """A snapshot of a dataset; what it shows after a part, by its partition and location."""
    key, location = (None, None) if after is None else after
    query = _query(id=str(snapshot), after=key, location=location)
    return f"/datasets/{quote(name, safe='')}/snapshot{query}"


def contents_path(
    name: str, key: str, *, generation: str | None = None, at: int | None = None
) -> str:
    """What is in the files of a partition; or was, in a snapshot."""
    query = _query(key=key or None, generation=generation, at=None if at is None else str(at))
    return f"/datasets/{quote(name, safe='')}/contents{query}"


def _query(**given: str | None) -> str:
    said = {name: value for name, value in given.items() if value is not None}
    return f"?{urlencode(said)}" if said else ""


_MANY_PARTITIONS: Final = 10_000
_NAME_CHARACTERS_MAX: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class _DatasetRow:
    """A dataset, as it is listed."""

    dataset: DatasetRow
    path: str
    state: str
    job: JobAnswer | None


async def _load_all(parts: ApiContext, asked: PageRequest) -> Mapping[str, Any] | PageNotFound:
    text = asked.query.get("name", "").strip()[:_NAME_CHARACTERS_MAX].replace("\x00", "")
    found = await PartitionViews(parts.database).datasets(text)
    jobs = {each.name: each for each in (await parts.views.overall()).jobs}
    rows = [
        _DatasetRow(
            dataset=each,
            path=dataset_path(each.name),
            state=_dataset_state(each),
            job=jobs.get(each.job or "") if each.is_written else None,
        )
        for each in found[:DATASETS_MAX]
    ]
    return {
        "rows": rows,
        "text": text,
        "is_cut": len(found) > DATASETS_MAX,
        "datasets_max": DATASETS_MAX,
        "many": _MANY_PARTITIONS,
    }


def _dataset_state(row: DatasetRow) -> str:
    if not row.is_written:
        return "retired"
    if row.is_building:
        return "building"
    return row.state or "retired"


DATASETS_PAGE: Final = ConsolePage(
    "/datasets", "datasets", _load_all, live=("list",), query=("name",)
)


_RECENT: Final = 10
_BLOCKING_SHOWN: Final = 8
_TABLE_ROWS: Final = 100
_MISSING_SHOWN: Final = 200
_MANY: Final = 10_000


async def placed(parts: ApiContext, asked: PageRequest) -> GenerationView | PageNotFound:
    """The dataset and the generation that a request is about."""
    name, wanted = asked.path["name"], asked.query.get("generation", "")
    generation = generation_of(wanted)
    if wanted and generation is None:
        return PageNotFound(
            "Not a generation.", f"Open the current generation of the dataset {name!r}."
        )
    place = None
    if "\x00" not in name:
        place = await PartitionViews(parts.database).place(name, generation)
    if place is None:
        return PageNotFound(f"There is no dataset {name!r}.", "To list all: penstock dataset list")
    if place.generation is None:
        return PageNotFound(f"The dataset {name!r} has no such generation.")
    return place


async def _load(parts: ApiContext, asked: PageRequest) -> Mapping[str, Any] | PageNotFound:
    place = await placed(parts, asked)
    if isinstance(place, PageNotFound):
        return place
    views = PartitionViews(parts.database)
    sums = await views.sums(place)
    work = await views.work(place)
    wanted = asked.query.get("generation") or None
    lineage = lineage_around(await views.lineage(), place.name)
    return {
        "place": place,
        "wanted": wanted,
        "sums": sums,
        "is_counted": sums.partitions < COUNTED_MAX,
        "work": {each.status: each.tasks for each in work},
        "digest": digest_of(sums, work),
        "generations": await views.generations(place),
        "recent": await views.recent(place, limit=_RECENT),
        "snapshots": await parts.history.latest(place.name, limit=_RECENT),
        "blocking": (await views.blocking(place, limit=_BLOCKING_SHOWN))[:_BLOCKING_SHOWN],
        "columns": await views.columns(place),
        "about": await views.about(place.name),
        "buffer": await views.buffer(place.name),
        "table": await views.table(place),
        "hot_url": parts.hot_url,
        "lineage": lineage,
        "sizes": SIZES,
        "why": why_blocking,
        "many": _MANY,
        "paths": _paths(place.name, wanted),
    }


def digest_of(sums: PublishedSums, work: Sequence[PartitionWork]) -> str:
    """Something that changes whenever the heat map would."""
    said = repr((sums, sorted((each.status, each.tasks, each.latest) for each in work)))
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def _paths(name: str, generation: str | None) -> dict[str, Any]:
    """Where the pages are that this one leads to."""
    return {
        "dataset": lambda version=None: dataset_path(name, generation=version),
        "partition": lambda key: partition_path(name, key, generation=generation),
        "snapshot": lambda each: snapshot_path(name, each),
        "partitions": partitions_path(name, generation=generation),
        "rejected": rejected_path(name),
        "after": lambda key: partitions_path(name, generation=generation, after=key),
    }


async def _load_partitions(
    parts: ApiContext, asked: PageRequest
) -> Mapping[str, Any] | PageNotFound:
    place = await placed(parts, asked)
    if isinstance(place, PageNotFound):
        return place
    views = PartitionViews(parts.database)
    wanted = asked.query.get("generation") or None
    blocking = await views.blocking(place)
    lacking = await views.lacking(place)
    cells: dict[str, Any] | None = None
    found: Sequence[PartitionCell] = ()
    if asked.query.get("cells") or place.is_told:
        found = await views.cells(place)
    if asked.query.get("cells"):
        cells = heatmap_cells(found, blocking, lacking, now=await parts.views.now()).data()
    after = asked.query.get("after", "").replace("\x00", "")
    page = await parts.views.partitions(
        place.name, generation=place.generation, after=after or None, limit=_TABLE_ROWS
    )
    assert page is not None, "The generation is there: it was just read."
    return {
        "place": place,
        "wanted": wanted,
        "cells": cells,
        "partitions": page.partitions,
        "told_of": found[:_TABLE_ROWS] if place.is_told else (),
        "next": page.after,
        "is_first": not after,
        "blocking": blocking[:_MISSING_SHOWN],
        "lacking": [(each, why_lacking(place, each)) for each in lacking[:_MISSING_SHOWN]],
        "blocking_count": len(blocking),
        "lacking_count": len(lacking),
        "lacking_max": MISSING_MAX,
        "looked_max": LOOKED_MAX,
        "cells_max": CELLS_MAX,
        "shown_max": _MISSING_SHOWN,
        "why": why_blocking,
        "paths": _paths(place.name, wanted),
    }


def why_lacking(place: GenerationView, lacking: MissingPartition) -> str:
    """Why there is no task for a partition that inputs have."""
    if lacking.inputs and place.is_all:
        waited = " and ".join(lacking.inputs)
        return f"{place.job} waits for {waited}, which has not published it yet."
    return "No task. If this persists, start a backfill."


def why_blocking(task: BlockingTask) -> str:
    """What is with a task, in words."""
    match task.status:
        case TaskStatus.FAILED:
            return f"The task is dead after attempt {task.attempt}: {task.reason or ''}"
        case TaskStatus.RUNNING:
            return f"Attempt {task.attempt} is running."
        case TaskStatus.RETRYING:
            return f"Attempt {task.attempt} failed; waiting for the retry: {task.reason or ''}"
        case _:
            return "The task waits for a worker."


async def _cut_over(parts: ApiContext, asked: PageRequest, to: str) -> ActionResult:
    name = asked.path["name"]
    return await call_api(
        parts,
        cut_over,
        to,
        ask=CutOverAsk(
            force=asked.query.get("force") == "yes", keep=asked.query.get("keep") == "yes"
        ),
        params=parse_form(NameParams, {"name": name}, names={"name": "The name"}),
        told=(
            f"Publications of {name} that cannot be rebuilt are carried over; readers are switched"
            " when all downstream datasets are built."
            if asked.query.get("keep") == "yes"
            else f"Readers of {name} are switched to the new generation."
        ),
    )


_REJECTED_SHOWN: Final = 50
_REJECTED_SECONDS: Final = 8.0
"""How long their files are read; a page may take longer."""


async def _load_rejected(parts: ApiContext, asked: PageRequest) -> Mapping[str, Any] | PageNotFound:
    place = await placed(parts, asked)
    if isinstance(place, PageNotFound):
        return place
    found = await rejected_rows(
        parts, place.name, limit=_REJECTED_SHOWN, seconds_max=_REJECTED_SECONDS
    )
    if isinstance(found, Problem):
        return PageNotFound(problem_sentence(found))
    return {"place": place, "found": found, "paths": _paths(place.name, None)}


async def _replay(parts: ApiContext, asked: PageRequest, to: str) -> ActionResult:
    return await _deal(parts, asked, to, is_dropped=False)


async def _drop(parts: ApiContext, asked: PageRequest, to: str) -> ActionResult:
    return await _deal(parts, asked, to, is_dropped=True)


async def _deal(
    parts: ApiContext, asked: PageRequest, to: str, *, is_dropped: bool
) -> ActionResult:
    fields = {each: asked.query.get(each, "") for each in ("sequence", "place")}
    row = parse_form(RejectedPlace, fields)
    named = f"Row {row.sequence}:{row.place}"

    def told(done: RejectedDoneAnswer) -> str:
        if not done.rows:
            return f"{named} was dealt with before."
        if is_dropped:
            return f"{named} is dropped."
        return f"{named} is given back as batch {done.batches[0]}; the sink judges it again."

    return await call_api(
        parts,
        give_back,
        to,
        ask=RejectedAsk(rows=[row], is_dropped=is_dropped),
        params=parse_form(NameParams, {"name": asked.path["name"]}, names={"name": "The name"}),
        told=told,
    )


PAGE: Final = ConsolePage(
    "/datasets/{name:path}",
    "dataset",
    _load,
    live=("figures", "buffer", "table", "map", "blocked", "generations", "recent", "snapshots"),
    section="datasets",
    query=("generation",),
)
PARTITIONS: Final = ConsolePage(
    "/datasets/{name}/partitions",
    "partitions",
    _load_partitions,
    section="datasets",
    query=("generation", "cells", "after"),
)
REJECTED: Final = ConsolePage(
    "/datasets/{name}/rejected", "rejected", _load_rejected, section="datasets"
)
ACTIONS: Final = (
    FormAction("/datasets/{name}/cut-over", _cut_over, fields=("force", "keep")),
    FormAction("/datasets/{name}/rejected/replay", _replay, fields=("sequence", "place")),
    FormAction("/datasets/{name}/rejected/drop", _drop, fields=("sequence", "place")),
)


_SHOWN: Final = 100
_DIGITS_MAX: Final = 18


async def _load_snapshot(parts: ApiContext, asked: PageRequest) -> Mapping[str, Any] | PageNotFound:
    place = await placed(parts, asked)
    if isinstance(place, PageNotFound):
        return place
    wanted = snapshot_of(asked.query.get("id", ""))
    views = SnapshotViews(parts.database)
    about = None if wanted is None else await views.about(place.name, wanted)
    if about is None:
        return PageNotFound(
            f"The dataset {place.name!r} has no such snapshot, or no longer keeps it.",
            f"To list its snapshots: penstock dataset snapshots {place.name}",
        )
    after = tuple(asked.query.get(name, "").replace("\x00", "") for name in ("after", "location"))
    shown = await views.shown(about, after=(after[0], after[1]), limit=_SHOWN + 1)
    last = shown[_SHOWN - 1] if len(shown) > _SHOWN else None
    return {
        "place": place,
        "about": about,
        "added": await views.added(about, limit=_SHOWN),
        "removed": await views.removed(about, limit=_SHOWN),
        "shown": shown[:_SHOWN],
        "is_first": not any(after),
        "shown_max": _SHOWN,
        "paths": {
            "dataset": dataset_path(place.name),
            "before": about.before and snapshot_path(place.name, about.before),
            "first": snapshot_path(place.name, about.id),
            "next": last
            and snapshot_path(place.name, about.id, after=(last.partition_key, last.location)),
            "contents": lambda key, at: contents_path(place.name, key, at=at),
        },
    }


def snapshot_of(text: str) -> int | None:
    """The id of a snapshot as it stands in a query; None if that is none."""
    is_id = text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX
    return int(text) if is_id else None


SNAPSHOT: Final = ConsolePage(
    "/datasets/{name}/snapshot",
    "snapshot",
    _load_snapshot,
    section="datasets",
    query=("id", "after", "location"),
)
