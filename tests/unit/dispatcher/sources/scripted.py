"""A dispatcher that sources talk to, in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from penstock.kernel.errors import PenstockError
from penstock.protocol.events import (
    EventAsk,
    EventResult,
    EventsAnswer,
    EventsAsk,
    RefusalAsk,
    RefusalsAnswer,
    RefusalsAsk,
    SourceAnswer,
    SourcesAnswer,
)

BEGIN = datetime(2030, 1, 1, tzinfo=UTC)


def cron_source(job: str = "hourly", cron: str = "0 * * * *", **fields: Any) -> SourceAnswer:
    values: dict[str, Any] = {"datasets": {"ticks": "u1"}, "cron": cron, **fields}
    return SourceAnswer(job=job, kind="cron", **values)


def webhook_source(job: str = "orders", path: str = "/orders", **fields: Any) -> SourceAnswer:
    values: dict[str, Any] = {"datasets": {"orders": "u2"}, "path": path, **fields}
    return SourceAnswer(job=job, kind="webhook", **values)


@dataclass
class ScriptedDispatcher:
    """Keeps the events that it is sent. `passed` is how many seconds have passed."""

    sources_: list[SourceAnswer]
    passed: Callable[[], float] = lambda: 0.0
    begin: datetime = BEGIN
    kept: list[EventAsk] = field(default_factory=list)
    asked: int = 0
    failures: list[PenstockError] = field(default_factory=list)
    """Raised by the next calls, one each."""
    sent: Callable[[EventsAsk], None] = lambda ask: None
    """Called with what is sent, before it is kept; it may raise."""
    is_open: bool = True
    noted: list[RefusalAsk] = field(default_factory=list)
    paused: str | None = None
    refused: str | None = None

    @property
    def now(self) -> datetime:
        return self.begin + timedelta(seconds=self.passed())

    @property
    def ids(self) -> list[str]:
        return [each.event_id for each in self.kept]

    async def sources(self) -> SourcesAnswer:
        self.asked += 1
        if self.failures:
            raise self.failures.pop(0)
        return SourcesAnswer(sources=self.sources_, now=self.now, is_open=self.is_open)

    async def events(self, ask: EventsAsk, /) -> EventsAnswer:
        self.sent(ask)
        if self.failures:
            raise self.failures.pop(0)
        if self.refused:
            return EventsAnswer(
                results=[EventResult(outcome="refused", why=self.refused) for _ in ask.events]
            )
        results = []
        for each in ask.events:
            known = {(one.event_id, one.dataset) for one in self.kept}
            is_new = (each.event_id, each.dataset) not in known
            if is_new:
                self.kept.append(each)
            outcome = "new" if is_new else "duplicate"
            results.append(EventResult(outcome=outcome, seq=1, paused=self.paused))
        return EventsAnswer(results=results)

    async def webhook_refusals(self, ask: RefusalsAsk, /) -> RefusalsAnswer:
        if self.failures:
            raise self.failures.pop(0)
        self.noted += ask.refusals
        return RefusalsAnswer(noted=len(ask.refusals))
