"""The page of alerts: open and past ones, the rules, and the notices that were sent.

Open alerts are shown up to a bound; past ones a page at a time. Rules and destinations are
those of the dispatcher that evaluates alerts, which writes them down with every turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from penstock.console.pages.base import ConsolePage, PageNotFound, PageRequest
from penstock.dispatcher.api.context import ApiContext
from penstock.dispatcher.views.status import AlertViews
from penstock.protocol.steering import AlertState, NoticeAnswer, NoticeState

_OPEN_MAX: Final = 200
_PAGE: Final = 50
_BEFORE_MAX: Final = 2**63 - 1


async def _load(parts: ApiContext, asked: PageRequest) -> Mapping[str, Any] | PageNotFound:
    said = asked.query.get("before", "")
    before = int(said) if said.isascii() and said.isdecimal() and len(said) < 20 else None
    if said and (before is None or not 0 < before <= _BEFORE_MAX):
        return PageNotFound("There is no such page of alerts.", "The first page has the latest.")
    views = AlertViews(parts.database)
    found = await views.alerts(state=AlertState.OPEN, limit=_OPEN_MAX)
    past = await views.alerts(state=AlertState.OVER, before=before, limit=_PAGE)
    return {
        "open": found.alerts,
        "is_cut": found.before is not None,
        "past": past.alerts,
        "older": f"/alerts?before={past.before}" if past.before is not None else "",
        "is_first": before is None,
        "rules": found.rules,
        "destinations": found.destinations,
        "judged_at": found.judged_at,
        "told_of": {each.id: _told(each.notices) for each in (*found.alerts, *past.alerts)},
        "lost": [
            (alert, each)
            for alert in (*found.alerts, *past.alerts)
            for each in alert.notices
            if each.state is NoticeState.GIVEN_UP
        ],
    }


def _told(notices: Sequence[NoticeAnswer]) -> Sequence[tuple[str, str]]:
    """What has become of notices: words, and the class that they are shown in."""
    shown: list[tuple[str, str]] = []
    for each in notices:
        what = "" if each.what == "opened" else ", resolved"
        match each.state:
            case NoticeState.SENT:
                shown.append((f"{each.destination}{what}", "quiet"))
            case NoticeState.DUE:
                why = f": {each.last_error}" if each.last_error else ""
                shown.append((f"{each.destination}{what}: pending{why}", ""))
            case NoticeState.GIVEN_UP:
                why = each.last_error or "unknown reason"
                shown.append((f"{each.destination}{what}: failed: {why}", "wrong"))
    return shown


PAGE: Final = ConsolePage(
    "/alerts", "alerts", _load, live=("standing", "past", "rules"), query=("before",)
)
