"""The form that triggers a source, by its kind, as what the API is asked. Pure.

| source | the form has | the event has |
|---|---|---|
| cron, of cursors | a time, or nothing for now | the time in milliseconds |
| cron, of intervals | two times | a partition named by the first, its range in seconds |
| any other | a partition or a number, or nothing for now; a range | the same |

All have a payload, which is JSON, and an id, which makes sending twice one event. Times are in UTC,
as a browser's field for them writes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

from penstock.console.pages.acting import asked_as, object_of
from penstock.dispatcher.sources.schedule import milliseconds
from penstock.dispatcher.wire.events import SourceAnswer
from penstock.dispatcher.wire.steering import TriggerAnswer, TriggerAsk
from penstock.kernel.errors import InvalidInput

FIELDS: Final = (
    *("partition_key", "cursor", "start", "end"),
    *("time", "from", "until", "payload", "event_id", "request_id"),
)
_NAMES: Final = {
    "job": "The source",
    "partition_key": "The partition",
    "cursor": "The number",
    "start": "The start",
    "end": "The end",
    "event_id": "The id",
}


def kind_of(source: SourceAnswer) -> str:
    """Which form a source has: `time`, `interval` or `any`."""
    if source.kind != "cron":
        return "any"
    return "interval" if source.emits == "interval" else "time"


def trigger_ask(job: str, fields: Mapping[str, str]) -> TriggerAsk:
    """What the API is asked; `InvalidInput` with a sentence about a field that is wrong."""
    said: dict[str, object] = {"job": job}
    for name in ("partition_key", "cursor", "start", "end", "event_id"):
        said[name] = fields.get(name, "")
    # The same form sent twice is one event.
    said["event_id"] = said["event_id"] or fields.get("request_id", "")
    if time := fields.get("time", "").strip():
        said["cursor"] = milliseconds(time_of(time, name="The time"))
    begin, end = fields.get("from", "").strip(), fields.get("until", "").strip()
    if begin or end:
        said |= _interval(begin, end)
    said["payload"] = object_of(fields.get("payload", ""), name="The payload")
    ask = asked_as(TriggerAsk, said, names=_NAMES)
    if ask.partition_key is not None and ask.cursor is not None:
        raise InvalidInput("An event has a partition or a number; leave one of them empty.")
    if ask.partition_key is None and (ask.start is not None or ask.end is not None):
        raise InvalidInput("A start and an end belong to a partition; name it too.")
    return ask


def _interval(begin: str, end: str) -> dict[str, object]:
    if not (begin and end):
        raise InvalidInput("An interval needs both its times, from and until.")
    first, last = time_of(begin, name="From"), time_of(end, name="Until")
    if first >= last:
        raise InvalidInput("An interval begins before it ends; change one of its times.")
    # As cron sources name theirs, so that one is made up for under its own name.
    return {
        "partition_key": f"{first:%Y-%m-%dT%H:%MZ}",
        "start": milliseconds(first) // 1000,
        "end": milliseconds(last) // 1000,
    }


def time_of(text: str, *, name: str) -> datetime:
    """A time as a form has it, in UTC."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidInput(f"{name} has to be a time, such as 2026-01-31T06:00.") from None
    return found.astimezone(UTC) if found.tzinfo is not None else found.replace(tzinfo=UTC)


def triggered(answer: TriggerAnswer) -> str:
    """What became of a trigger."""
    outcomes = [each.outcome for each in answer.results]
    paused = next((each.paused for each in answer.results if each.paused), None)
    also = f" The source is paused, though: {paused}" if paused else ""
    if not outcomes:
        return f"The source writes no dataset, so there was nothing to tell.{also}"
    if "new" in outcomes:
        return f"The event {answer.event_id} was taken; its tasks are made now.{also}"
    if "duplicate" in outcomes:
        return f"The event {answer.event_id} was known already, so nothing was made of it.{also}"
    why = next((each.why for each in answer.results if each.why), "")
    return f"The event {answer.event_id} was kept, and nothing is made of it. {why}{also}".strip()
