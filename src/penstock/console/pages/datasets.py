"""All datasets: who writes each, how much there is of it, how fresh it is, and what is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from penstock.console.pages.base import Asked, Missing, Page
from penstock.console.pages.paths import dataset_path
from penstock.dispatcher.api.parts import Parts
from penstock.dispatcher.views.partitions import DATASETS_MAX, DatasetRow, PartitionViews
from penstock.dispatcher.wire.steering import JobAnswer

_MANY: Final = 10_000
_NAME_CHARACTERS_MAX: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A dataset, as it is listed."""

    dataset: DatasetRow
    path: str
    state: str
    job: JobAnswer | None


async def _load(parts: Parts, asked: Asked) -> Mapping[str, Any] | Missing:
    text = asked.query.get("name", "").strip()[:_NAME_CHARACTERS_MAX].replace("\x00", "")
    found = await PartitionViews(parts.database).datasets(text)
    jobs = {each.name: each for each in (await parts.views.overall()).jobs}
    rows = [
        _Row(
            dataset=each,
            path=dataset_path(each.name),
            state=_state(each),
            job=jobs.get(each.job or "") if each.is_written else None,
        )
        for each in found[:DATASETS_MAX]
    ]
    return {
        "rows": rows,
        "text": text,
        "is_cut": len(found) > DATASETS_MAX,
        "datasets_max": DATASETS_MAX,
        "many": _MANY,
    }


def _state(row: DatasetRow) -> str:
    if not row.is_written:
        return "retired"
    if row.is_building:
        return "building"
    return row.state or "retired"


PAGE: Final = Page("/datasets", "datasets", _load, live=("list",), query=("name",))
