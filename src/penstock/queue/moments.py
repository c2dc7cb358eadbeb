"""When a task is to start: a delay, or a time that knows its zone."""

from __future__ import annotations

from datetime import datetime

from penstock.kernel.errors import InvalidInput
from penstock.queue.options import DELAY_SECONDS_MAX
from penstock.store.base import ObjectStore


async def delay_until(store: ObjectStore, delay: float, at: datetime | None) -> float:
    """How long from now a task is to start, by the store's clock, if it is to start at a time."""
    if at is None:
        return delay
    if delay or at.tzinfo is None:
        raise InvalidInput(
            "A task starts at a time that knows its zone, or after a delay.",
            hint="Write at=datetime(YEAR, 1, 31, 6, tzinfo=ZoneInfo('Europe/Paris')).",
        )
    found = max(0.0, at.timestamp() - (await store.now()).latest)
    if found > DELAY_SECONDS_MAX:
        raise InvalidInput(
            f"{at.isoformat()} is more than a year from now.",
            hint="A task starts within a year: give an earlier time.",
        )
    return found
