"""One job: how it is doing and why, what it is, reads and writes, what has ended, what has failed.

What is wrong stands on top, with what can be done about it; a job that does what it should says
only what it waits for. Plots are of the last hour, in slices that stand still. A look costs a dozen
short statements, most of them of a few rows; what has ended is read of the newest attempts of all
jobs, and where that does not reach back an hour the page says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import quote, urlencode

from penstock.console.drawing.plots import Plot, stacked
from penstock.console.pages.base import Asked, Missing, Page
from penstock.console.pages.defined import defined
from penstock.console.pages.job_state import BY_PEOPLE, MANY, remarks, waits_for, word_of
from penstock.console.rendering import length, number
from penstock.dispatcher.api.parts import Parts
from penstock.dispatcher.views.jobs import (
    LENGTHS,
    SLICE_SECONDS,
    WINDOW,
    AboutJob,
    Ended,
    JobViews,
)
from penstock.dispatcher.views.pipeline import PipelineViews

_SLICES: Final = 30
_SERIES: Final = ("completed", "failed", "expired")
_LISTED_MAX: Final = 5
_NAME_CHARACTERS_MAX: Final = 200
_LENGTHS_MIN: Final = 5
"""How many lengths are shown at least, so that one of them is not as wide as the plot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lately:
    """What has ended in the last hour, drawn."""

    total: Ended | None
    by_time: Plot
    by_length: Plot
    told: str
    """How long attempts take, in a sentence."""
    cut_at: datetime | None
    """Where what was looked at begins, if that is within the hour."""

    @property
    def has_any(self) -> bool:
        return self.total is not None

    @property
    def failures(self) -> int:
        return self.total.failed + self.total.expired if self.total is not None else 0


async def _load(parts: Parts, asked: Asked) -> Mapping[str, Any] | Missing:
    # Postgres has no NUL in a text.
    name = asked.path["name"].replace("\x00", "")[:_NAME_CHARACTERS_MAX]
    about = await JobViews(parts.database).about(name)
    if about is None:
        return Missing(f"There is no job {name[:100]}.", "The list of jobs has all of them.")
    pauses = await parts.views.pauses(name)
    pressures = await parts.pressures.answer()
    pressure = next((each for each in pressures.jobs if each.job == name), None)
    is_pressed = pressure is not None and pressure.pressed
    endings = await PipelineViews(parts.database).endings()
    plans = await parts.backfills.list(limit=100)
    tasks = {
        status: (
            await parts.views.tasks(
                job_id=about.job_id, status=status, before=None, limit=_LISTED_MAX
            )
        ).tasks
        for status in ("dead", "running")
        if getattr(about.counts, status)
    }
    return {
        "about": about,
        "counts": about.counts,
        "word": word_of(about, pauses, endings.get(name), is_pressed=is_pressed),
        "remarks": remarks(about, pauses, pressure),
        "waits_for": waits_for(about),
        "is_paused_by_people": any(each.cause == BY_PEOPLE for each in pauses),
        "is_source": about.body.get("activation") == "source",
        "definition": defined(about),
        "reads": _by_name(about, "inputs", "as", "from"),
        "writes": _by_name(about, "outputs", "dataset", "name"),
        "lately": _lately(about),
        "dead": tasks.get("dead", []),
        "running": tasks.get("running", []),
        "backfills": [
            each
            for each in plans.backfills
            if each.job == name and each.state in ("running", "paused")
        ],
        "paths": _Paths(name),
        "many": MANY,
        "window": WINDOW,
    }


@dataclass(frozen=True, slots=True)
class _Paths:
    """Where the page leads to."""

    name: str

    @property
    def trigger(self) -> str:
        return f"/operations/sources/{quote(self.name, safe='')}#trigger"

    @property
    def backfill(self) -> str:
        return f"/operations/backfills/new?{urlencode({'job': self.name})}"

    def tasks(self, status: str = "") -> str:
        """The list of its tasks."""
        said = {"job": self.name, **({"status": status} if status else {})}
        return f"/tasks?{urlencode(said)}"


def _by_name(about: AboutJob, side: str, *names: str) -> Mapping[str, Mapping[str, Any]]:
    """What the job's definition says of its inputs or outputs, by the first name that one has."""
    told = about.body.get(side) or ()
    return {str(next(each[name] for name in names if name in each)): each for each in told}


def _lately(about: AboutJob) -> _Lately:
    total = next((each for each in about.ended if each.slice is None and each.length is None), None)
    # Of nothing there is a row of the whole too.
    if total is not None and not (total.completed or total.failed or total.expired):
        total = None
    told = _lengths_told(total) if total is not None else ""
    cut_at = total.reaches_to if total is not None and total.looked_at >= WINDOW else None
    return _Lately(
        total=total,
        by_time=_by_time(about),
        by_length=_by_length(about, told),
        told=told,
        cut_at=cut_at,
    )


def _lengths_told(total: Ended) -> str:
    if total.completed + total.failed + total.expired == 1:
        return f"It took {length(total.longest_seconds)}."
    return (
        f"Half of them took {length(total.middle_seconds)} or less, nineteen of twenty"
        f" {length(total.most_seconds)} or less, the longest {length(total.longest_seconds)}."
    )


def _by_time(about: AboutJob) -> Plot:
    last = int(about.now.timestamp()) // SLICE_SECONDS
    found = {each.slice: each for each in about.ended if each.slice is not None}
    places = [
        (
            f"{datetime.fromtimestamp(place * SLICE_SECONDS, UTC):%H:%M}",
            _outcomes(found[place]) if place in found else {},
        )
        for place in range(last - _SLICES + 1, last + 1)
    ]
    told = f"Attempts that ended in the last hour, by {SLICE_SECONDS // 60} minutes: " + _summed(
        [*found.values()]
    )
    return stacked(places, told=told, series=_used(found.values()), is_whole=True)


def _by_length(about: AboutJob, told: str) -> Plot:
    found = {each.length: each for each in about.ended if each.length is not None}
    first, last = min(found, default=0), max(found, default=0)
    # A few more on both sides, as far as there are some.
    while last - first + 1 < _LENGTHS_MIN:
        first, last = max(0, first - 1), min(len(LENGTHS), last + 1)
    places = [
        (_length_name(place), _outcomes(found[place]) if place in found else {})
        for place in range(first, last + 1)
    ]
    return stacked(
        places,
        told=f"How long the attempts of the last hour took. {told}".strip(),
        series=_used(found.values()),
        is_whole=True,
    )


def _length_name(place: int) -> str:
    if place == 0:
        return f"< {length(LENGTHS[0])}"
    return f"{length(LENGTHS[place - 1]).replace('.0 ', ' ')} +"


def _outcomes(ended: Ended) -> Mapping[str, float]:
    return {name: float(getattr(ended, name)) for name in _SERIES}


def _used(found: Iterable[Ended]) -> Sequence[str]:
    """The outcomes that there are; of none, what there might be."""
    ended = list(found)
    used = [name for name in _SERIES if any(getattr(each, name) for each in ended)]
    return used or _SERIES[:1]


def _summed(found: Sequence[Ended]) -> str:
    sums = {name: sum(getattr(each, name) for each in found) for name in _SERIES}
    return ", ".join(f"{number(count)} {name}" for name, count in sums.items() if count) or "none"


PAGE: Final = Page(
    "/jobs/{name:path}",
    "job",
    _load,
    live=("head", "remarks", "figures", "lately", "tasks", "edges"),
    section="pipeline",
)
