"""Many events of one source as few requests: each within what the dispatcher reads. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec

from penstock.dispatcher.payloads import payload_fault
from penstock.dispatcher.wire.steering import TRIGGERS_MAX, TriggerEvent
from penstock.kernel.entropy import Entropy, new_id
from penstock.kernel.errors import DispatcherRefused, InvalidInput

_BYTES_MAX: Final = 4 * 2**20
"""Of one request; a dispatcher reads twice that."""
_PLACE: Final = re.compile(r"events\[(\d+)\]")


def trigger_events(
    events: Iterable[str | Mapping[str, Any]], entropy: Entropy
) -> list[TriggerEvent]:
    """Each with an id, so that it may be sent again. Raises `InvalidInput` for the first wrong."""
    return [_event(each, place, entropy) for place, each in enumerate(events, start=1)]


def _event(said: str | Mapping[str, Any], place: int, entropy: Entropy) -> TriggerEvent:
    fields = {"partition_key": said} if isinstance(said, str) else dict(said)
    try:
        found = msgspec.convert(
            {"event_id": f"trigger:{new_id(entropy)}", **fields}, type=TriggerEvent
        )
    except (msgspec.ValidationError, TypeError) as error:
        raise InvalidInput(
            f"Event {place:,} cannot be read: {error}.",
            hint="Its fields are partition_key, start, end, cursor, payload and event_id.",
        ) from error
    fault = payload_fault(found.payload) if found.payload else None
    if fault is not None:
        raise InvalidInput(f"Event {place:,}: {fault.why}")
    return found


def chunks_of(events: Iterable[TriggerEvent]) -> Iterator[list[TriggerEvent]]:
    """The same in their order, in pieces that one request may bring."""
    some: list[TriggerEvent] = []
    size = 0
    for each in events:
        bytes_ = len(msgspec.json.encode(each)) + 1
        if some and (len(some) == TRIGGERS_MAX or size + bytes_ > _BYTES_MAX):
            yield some
            some, size = [], 0
        some.append(each)
        size += bytes_
    if some:
        yield some


def refused_event(error: DispatcherRefused, *, before: int) -> DispatcherRefused:
    """The refusal with the event that it is about, if it is about one, and with what was taken."""
    found = _PLACE.match(error.field)
    told = f"Event {before + int(found[1]) + 1:,}: " if found else ""
    taken = f" The {before:,} events before that were sent first are taken." if before else ""
    message = error.message.removesuffix(f" (in {error.field})") if found else error.message
    return DispatcherRefused(
        f"{told}{message}{taken}",
        status=error.status,
        kind=error.kind,
        field=error.field,
        hint=error.hint,
    )
