"""What sources need of a dispatcher: which sources there are, and a place for their events.

The worker's client has both. Each raises `DispatcherUnavailable` if no dispatcher answers, and
`DispatcherRefused` if one says no; events may be sent again, for their ids make them one.
"""

from __future__ import annotations

from typing import Final, Protocol

from penstock.dispatcher.wire.events import (
    EventResult,
    EventsAnswer,
    EventsAsk,
    RefusalsAnswer,
    RefusalsAsk,
    SourcesAnswer,
)

REFUSED: Final = "refused"
"""The outcome of an event that was not kept."""


class SourceClient(Protocol):
    """A dispatcher, as a source sees it."""

    async def sources(self) -> SourcesAnswer:
        """The sources of the DAG in force."""
        ...

    async def events(self, ask: EventsAsk, /) -> EventsAnswer:
        """Send events."""
        ...


class WebhookClient(SourceClient, Protocol):
    """A dispatcher, as the process of webhooks sees it."""

    async def webhook_refusals(self, ask: RefusalsAsk, /) -> RefusalsAnswer:
        """Have it noted that requests were refused."""
        ...


def why_refused(results: list[EventResult]) -> str:
    """Why events were not kept; empty if all were."""
    return " ".join(sorted({each.why or "" for each in results if each.outcome == REFUSED}))


def why_paused(results: list[EventResult]) -> str:
    """Why the source should send nothing more for now; empty if it may."""
    return " ".join(sorted({each.paused for each in results if each.paused}))
