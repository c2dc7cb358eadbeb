"""One partition: what is published of it and by whom, what it is made of, and its tasks.

What is in its files is a page of its own, which a script puts into this one: it asks the store, and
may take seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from penstock.console.drawing.lineage import around
from penstock.console.pages.base import Asked, Missing, Page
from penstock.console.pages.dataset import placed
from penstock.console.pages.paths import (
    contents_path,
    dataset_path,
    partition_path,
    partitions_path,
)
from penstock.console.previewing import FILES_SHOWN, ROWS_MAX, contents
from penstock.console.rendering import line
from penstock.dispatcher.api.parts import Parts
from penstock.dispatcher.views.partitions import (
    InputNow,
    OnePartition,
    PartitionViews,
    Place,
    TaskRow,
)

_KEY_BYTES_MAX: Final = 500
_INPUTS_SHOWN: Final = 50
_NO_KEY: Final = Missing("That is no key of a partition.", "A key has 500 bytes at most.")


async def _load(parts: Parts, asked: Asked) -> Mapping[str, Any] | Missing:
    place = await placed(parts, asked)
    if isinstance(place, Missing):
        return place
    key = _key(asked)
    if key is None:
        return _NO_KEY
    views = PartitionViews(parts.database)
    found = await views.one(place, key)
    if not (found.publication or found.history or found.inputs or place.is_told):
        return Missing(f"The dataset {place.name!r} has no partition {key!r}.")
    wanted = asked.query.get("generation") or None
    lineage = around(await views.lineage(), place.name)
    return {
        "place": place,
        "key": key,
        "found": found,
        "why": "" if found.publication else why_not(place, found),
        "is_moved": found.publication is not None and is_moved(found),
        "below": lineage.below,
        "about_input": about_input,
        "paths": {
            "dataset": dataset_path(place.name, generation=wanted),
            "partitions": partitions_path(place.name, generation=wanted),
            "contents": contents_path(place.name, key, generation=wanted),
            "partition": partition_path,
        },
    }


async def _load_contents(parts: Parts, asked: Asked) -> Mapping[str, Any] | Missing:
    place = await placed(parts, asked)
    if isinstance(place, Missing):
        return place
    key = _key(asked)
    if key is None:
        return _NO_KEY
    found = await PartitionViews(parts.database).one(place, key)
    wanted = asked.query.get("generation") or None
    if found.publication is None:
        return Missing(f"The dataset {place.name!r} has no partition {key!r}.")
    # Of what is appended to, the last part.
    latest = found.pieces[0] if found.pieces else found.publication
    shown = await contents(
        parts.store, root=parts.root, location=latest.location, manifest=latest.manifest
    )
    return {
        "place": place,
        "key": key,
        "shown": shown,
        "is_piece": bool(found.pieces),
        "rows_max": ROWS_MAX,
        "files_shown": FILES_SHOWN,
        "inputs": shown.manifest.inputs[:_INPUTS_SHOWN] if shown.manifest else (),
        "inputs_count": shown.manifest.inputs_count if shown.manifest else 0,
        "to": partition_path(place.name, key, generation=wanted),
        "partition_path": partition_path,
    }


def _key(asked: Asked) -> str | None:
    """The key that is asked for; empty is the dataset without partitions."""
    key = asked.path.get("key", asked.query.get("key", ""))
    is_good = len(key.encode("utf-8", "replace")) <= _KEY_BYTES_MAX and "\x00" not in key
    return key if is_good else None


def why_not(place: Place, found: OnePartition) -> str:
    """Why a partition is not published."""
    tasks = [each for each in found.history if each.is_shown]
    if place.is_told:
        return "A source tells of its partitions, and publishes nothing itself."
    if tasks:
        return _why_of(tasks[0])
    if found.removed_at is not None:
        return "It was removed, because that is how much of the dataset is kept."
    triggers = [each for each in found.inputs if each.is_trigger]
    refused = [each.dataset for each in triggers if not each.is_passed]
    absent = [each.dataset for each in triggers if not _is_there(each)]
    if refused:
        return f"The filter of {' and '.join(refused)} does not let it pass."
    if absent:
        return f"It waits for {' and '.join(absent)}, which has nothing for it."
    return "It has no task: its event is not routed yet, or its task was removed."


def _why_of(task: TaskRow) -> str:
    attempt, reason = f"attempt {task.attempt}", line(task.reason)
    match task.status:
        case "queued":
            return f"Its task {task.id} waits for a worker."
        case "running":
            return f"Its task {task.id} is running: {attempt}."
        case "retrying":
            return f"Its task {task.id} will be tried again after {attempt}: {reason}"
        case "dead":
            return f"Its task {task.id} is dead after {attempt}: {reason}"
        case "cancelled":
            return f"Its task {task.id} was cancelled: {reason}"
        case _:
            return f"Its task {task.id} has completed, and published something else."


def _is_there(each: InputNow) -> bool:
    return bool(each.parts) or each.is_told or each.reads != "partition"


def is_moved(found: OnePartition) -> bool:
    """Whether a task waits or runs that will publish it again."""
    return any(
        each.is_shown and each.status in ("queued", "running", "retrying") for each in found.history
    )


def about_input(each: InputNow) -> str:
    """What a task would read of an input now, in words."""
    if each.reads == "all":
        return "all partitions that there are"
    if each.reads == "changes":
        return "what has changed since the job has read it"
    if each.parts:
        one = "one part" if each.parts == 1 else f"{each.parts} parts"
        return f"{one}, revision {each.revision}" if each.revision is not None else one
    return "an event, and no data" if each.is_told else "nothing"


PAGE: Final = Page(
    "/datasets/{name}/partitions/{key:path}",
    "partition",
    _load,
    live=("state", "inputs", "tasks"),
    section="datasets",
    query=("generation",),
)
ODD: Final = Page(
    "/datasets/{name}/partition",
    "partition",
    _load,
    live=("state", "inputs", "tasks"),
    section="datasets",
    query=("generation", "key"),
)
CONTENTS: Final = Page(
    "/datasets/{name}/contents",
    "contents",
    _load_contents,
    section="datasets",
    query=("generation", "key"),
)
