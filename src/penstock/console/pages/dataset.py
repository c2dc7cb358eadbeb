"""One dataset: its generations and partitions, what is missing and why, columns and lineage.

The page itself is small, and so is what is sent when it changes: sums, a digest of what the heat
map shows, and the last few publications. The cells of the map are on the page of its partitions,
which is asked for with `cells=1` by the script that draws them: once, and again when the digest has
changed, every few seconds at most. So a dataset of ten thousand partitions costs those who look at
it one large answer when they come, and a second of the dispatcher costs it a few short questions.

The page of the partitions is a page too: the table is the way without the map.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from penstock.console.drawing.cells import arranged
from penstock.console.drawing.lineage import SIZES, around
from penstock.console.pages.acting import act, asked_as
from penstock.console.pages.base import Action, Asked, Done, Missing, Page
from penstock.console.pages.paths import (
    dataset_path,
    generation_of,
    partition_path,
    partitions_path,
)
from penstock.dispatcher.api.deploying import cut_over
from penstock.dispatcher.api.parts import Parts
from penstock.dispatcher.views.partitions import (
    CELLS_MAX,
    COUNTED_MAX,
    LOOKED_MAX,
    MISSING_MAX,
    Blocking,
    Cell,
    Lacking,
    PartitionViews,
    Place,
    Sums,
    Work,
)
from penstock.dispatcher.wire.asking import NameParams
from penstock.dispatcher.wire.dags import CutOverAsk

_RECENT: Final = 10
_BLOCKING_SHOWN: Final = 8
_TABLE_ROWS: Final = 100
_MISSING_SHOWN: Final = 200
_MANY: Final = 10_000


async def placed(parts: Parts, asked: Asked) -> Place | Missing:
    """The dataset and the generation that a request is about."""
    name, wanted = asked.path["name"], asked.query.get("generation", "")
    generation = generation_of(wanted)
    if wanted and generation is None:
        return Missing("That is not a generation.", f"Look at the dataset {name!r} as it is now.")
    place = None
    if "\x00" not in name:
        place = await PartitionViews(parts.database).place(name, generation)
    if place is None:
        return Missing(
            f"There is no dataset {name!r}.", "All that there are: penstock dataset list"
        )
    if place.generation is None:
        return Missing(f"The dataset {name!r} has no such generation.")
    return place


async def _load(parts: Parts, asked: Asked) -> Mapping[str, Any] | Missing:
    place = await placed(parts, asked)
    if isinstance(place, Missing):
        return place
    views = PartitionViews(parts.database)
    sums = await views.sums(place)
    work = await views.work(place)
    wanted = asked.query.get("generation") or None
    lineage = around(await views.lineage(), place.name)
    return {
        "place": place,
        "wanted": wanted,
        "sums": sums,
        "is_counted": sums.partitions < COUNTED_MAX,
        "work": {each.status: each.tasks for each in work},
        "digest": digest_of(sums, work),
        "generations": await views.generations(place),
        "recent": await views.recent(place, limit=_RECENT),
        "blocking": (await views.blocking(place, limit=_BLOCKING_SHOWN))[:_BLOCKING_SHOWN],
        "columns": await views.columns(place),
        "about": await views.about(place.name),
        "lineage": lineage,
        "sizes": SIZES,
        "why": why_blocking,
        "many": _MANY,
        "paths": _paths(place.name, wanted),
    }


def digest_of(sums: Sums, work: Sequence[Work]) -> str:
    """Something that changes whenever the heat map would."""
    said = repr((sums, sorted((each.status, each.tasks, each.latest) for each in work)))
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def _paths(name: str, generation: str | None) -> dict[str, Any]:
    """Where the pages are that this one leads to."""
    return {
        "dataset": lambda version=None: dataset_path(name, generation=version),
        "partition": lambda key: partition_path(name, key, generation=generation),
        "partitions": partitions_path(name, generation=generation),
        "after": lambda key: partitions_path(name, generation=generation, after=key),
    }


async def _load_partitions(parts: Parts, asked: Asked) -> Mapping[str, Any] | Missing:
    place = await placed(parts, asked)
    if isinstance(place, Missing):
        return place
    views = PartitionViews(parts.database)
    wanted = asked.query.get("generation") or None
    blocking = await views.blocking(place)
    lacking = await views.lacking(place)
    cells: dict[str, Any] | None = None
    found: Sequence[Cell] = ()
    if asked.query.get("cells") or place.is_told:
        found = await views.cells(place)
    if asked.query.get("cells"):
        cells = arranged(found, blocking, lacking, now=await parts.views.now()).data()
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


def why_lacking(place: Place, lacking: Lacking) -> str:
    """Why there is no task for a partition that inputs have."""
    if lacking.inputs and place.is_all:
        waited = " and ".join(lacking.inputs)
        return f"{place.job} waits for {waited}, which has nothing for it yet."
    return "It has no task. If that stays so, a backfill makes one."


def why_blocking(task: Blocking) -> str:
    """What is with a task, in words."""
    match task.status:
        case "dead":
            return f"Its task is dead after attempt {task.attempt}: {task.reason or ''}"
        case "running":
            return f"Attempt {task.attempt} is running."
        case "retrying":
            return f"Attempt {task.attempt} has failed, and the next waits: {task.reason or ''}"
        case _:
            return "Its task waits for a worker."


async def _cut_over(parts: Parts, asked: Asked, to: str) -> Done:
    name = asked.path["name"]
    return await act(
        parts,
        cut_over,
        to,
        ask=CutOverAsk(
            force=asked.query.get("force") == "yes", keep=asked.query.get("keep") == "yes"
        ),
        params=asked_as(NameParams, {"name": name}, names={"name": "The name"}),
        told=(
            f"What could not be built anew of {name} is part of the new generation; readers get"
            " that when all is built that is computed of it."
            if asked.query.get("keep") == "yes"
            else f"Readers of {name} now read the generation that was being built."
        ),
    )


PAGE: Final = Page(
    "/datasets/{name:path}",
    "dataset",
    _load,
    live=("figures", "map", "blocked", "generations", "recent"),
    section="datasets",
    query=("generation",),
)
PARTITIONS: Final = Page(
    "/datasets/{name}/partitions",
    "partitions",
    _load_partitions,
    section="datasets",
    query=("generation", "cells", "after"),
)
ACTIONS: Final = (Action("/datasets/{name}/cut-over", _cut_over, fields=("force", "keep")),)
