"""All jobs of the DAG in force in a table, the worst first, by state and by name.

It is the alternative of the drawing: for those who do not see it, for a phone, and for a DAG that
is too large to be drawn. A look costs four short statements; the list is cut, with a sentence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote, urlencode

from penstock.console.pages.base import Asked, Missing, Page
from penstock.console.pages.job_state import MANY, STATES, state_of
from penstock.dispatcher.api.parts import Parts
from penstock.dispatcher.views.pipeline import RECENT_MINUTES, Endings, PipelineViews
from penstock.dispatcher.wire.steering import JobAnswer

JOBS_MAX: Final = 500
_TEXT_MAX: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A job, as it is listed."""

    said: JobAnswer
    state: str
    why: str
    """What holds it back; empty if nothing does."""
    ended: Endings | None
    href: str


async def _load(parts: Parts, asked: Asked) -> Mapping[str, Any] | Missing:
    overall = await parts.views.overall()
    endings = await PipelineViews(parts.database).endings()
    pressures = await parts.pressures.answer()
    pressed = {each.job: each.reason or "" for each in pressures.jobs if each.pressed}
    rows = [_row(each, endings.get(each.name), pressed) for each in overall.jobs]
    text, state = asked.query.get("name", "").strip()[:_TEXT_MAX], asked.query.get("state", "")
    found = [each for each in rows if text.lower() in each.said.name.lower()]
    counts = Counter(each.state for each in found)
    places = list(STATES)
    shown = sorted(
        (each for each in found if state in ("", each.state)),
        key=lambda each: (places.index(each.state), each.said.name),
    )
    kept = {"name": text} if text else {}
    return {
        "rows": shown[:JOBS_MAX],
        "more": max(0, len(shown) - JOBS_MAX),
        "count": len(rows),
        "dag_version": overall.dag_version,
        "text": text,
        "state": state,
        "tabs": [
            ("All", _link(kept), "", len(found), ""),
            *(
                (each.capitalize(), _link({**kept, "state": each}), each, counts[each], told)
                for each, told in STATES.items()
                if counts[each] or each == state
            ),
        ],
        "is_filtered": bool(text or state),
        "minutes": RECENT_MINUTES,
        "many": MANY,
    }


def _row(job: JobAnswer, ended: Endings | None, pressed: Mapping[str, str]) -> _Row:
    why = [*([pressed[job.name]] if job.name in pressed else []), *job.paused]
    return _Row(
        said=job,
        state=state_of(job, ended, is_pressed=job.name in pressed),
        why=" ".join(why),
        ended=ended,
        href=f"/jobs/{quote(job.name, safe='')}",
    )


def _link(said: Mapping[str, str]) -> str:
    return f"/jobs?{urlencode(said)}" if said else "/jobs"


PAGE: Final = Page(
    "/jobs", "jobs", _load, live=("tabs", "list"), section="pipeline", query=("name", "state")
)
