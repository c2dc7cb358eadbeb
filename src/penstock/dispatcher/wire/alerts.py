"""What is said of alerts, and of who was told of them."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any

from penstock.dispatcher.wire.asking import Page
from penstock.dispatcher.wire.base import Answer, Ask, TaskNumber


class AlertState(StrEnum):
    OPEN = "open"
    OVER = "over"


class NoticeState(StrEnum):
    """Where a message about an alert is."""

    DUE = "due"
    """It is sent now, or again later."""
    SENT = "sent"
    GIVEN_UP = "given up"
    """It failed for a day, and is not tried any more."""


class AlertsParams(Ask):
    state: AlertState | None = None
    """None is both."""
    limit: Page = 100
    before: TaskNumber | None = None
    """Only alerts with a lower number."""


class NoticeAnswer(Answer):
    """A message about an alert, for one destination."""

    id: str
    """What a receiver knows it by."""
    what: str
    """`opened` or `over`."""
    destination: str
    state: NoticeState
    tries: int
    last_error: str | None
    created_at: datetime
    due_at: datetime | None
    """When it is tried next; null if it is not."""
    sent_at: datetime | None
    given_up_at: datetime | None


class AlertAnswer(Answer):
    """Something that people have to look at."""

    id: int
    rule: str
    kind: str
    subject: str
    """The job or the dataset that it is about."""
    state: AlertState
    summary: str
    path: str
    """Where the console shows what it is about."""
    detail: dict[str, Any]
    opened_at: datetime
    clear_since: datetime | None
    """Of one that is open: since when it is not so any more. When that has lasted, it is over."""
    over_at: datetime | None
    over_why: str | None
    notices: list[NoticeAnswer]


class RuleAnswer(Answer):
    name: str
    words: str
    """What it is about, as a sentence."""


class AlertsAnswer(Answer):
    """Alerts, the newest first, and by what they are judged."""

    alerts: list[AlertAnswer]
    before: int | None
    """Ask with this `before` for the next page; null if there is none."""
    rules: list[RuleAnswer]
    destinations: list[str]
    """Where notices are sent: `webhook`, `mail`."""
    judged_at: datetime | None
    """When the rules were last looked at; null if nobody has yet."""
