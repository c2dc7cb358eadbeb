"""When a task is to start: a delay, or a time that knows its zone."""

from __future__ import annotations

from datetime import datetime

from penstock.kernel.errors import InvalidInput
from penstock.store.base import ObjectStore


async def delay_until(store: ObjectStore, delay: float, at: datetime | None) -> float:
    """How long from now a task is to start, by the store's clock, if it is to start at a time."""
    if at is None:
        return delay
    if delay or at.tzinfo is None:
        raise InvalidInput(
            "A task starts at a time that knows its zone, or after a delay.",
            hint="Write at=datetime(2030, 1, 31, 6, tzinfo=ZoneInfo('Europe/Paris')).",
        )
    return max(0.0, at.timestamp() - (await store.now()).latest)
