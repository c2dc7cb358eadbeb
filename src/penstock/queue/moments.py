"""When a task is to start, or expires: so long from now, or at a time that knows its zone."""

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


async def expires_until(
    store: ObjectStore, expires: float | None, expires_at: datetime | None
) -> float | None:
    """How long from now a task may begin, by the store's clock, if that ends at a time."""
    if expires_at is None:
        return expires
    if expires is not None or expires_at.tzinfo is None:
        raise InvalidInput(
            "A task expires at a time that knows its zone, or so long after its submit.",
            hint="Give one of expires=SECONDS and expires_at=datetime(..., tzinfo=UTC).",
        )
    found = expires_at.timestamp() - (await store.now()).latest
    if found <= 0:
        raise InvalidInput(
            f"{expires_at.isoformat()} is over: the task would never start.",
            hint="'await queue.now()' is the store's time.",
        )
    return found
