"""Limits as their users see them: set, looked at, removed.

    await queue.limits.set("api", concurrency=5)
    await queue.limits.set("mail", rate=100, per_seconds=60, burst=10)

`set` is a GET and a PUT, `get` a GET, `list` a LIST and a GET for each limit, at most `LIMITS_MAX`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from penstock.kernel.errors import InvalidInput, NotFound, UnreadableObject, VersionConflict
from penstock.queue.access import Access
from penstock.queue.limits.definition import definition
from penstock.queue.limits.state import LimitState, level, redefined, without_ended
from penstock.queue.places import check_limit
from penstock.store.base import pages
from penstock.store.cell import Cell
from penstock.store.metered import labelled
from penstock.store.time import Interval

LIMITS_MAX: Final = 1000
_TRIES_MAX: Final = 20


@dataclass(frozen=True, slots=True)
class Holder:
    """A worker that holds or waits for something of a limit."""

    worker: str
    permits: int
    waits_for: int
    tokens: int
    ends_at: float


@dataclass(frozen=True, slots=True)
class Limit:
    """What a limit allows, and how much of that is taken, as of a moment that is over."""

    key: str
    concurrency: int | None
    rate: float | None
    """Starts in `per_seconds`."""
    per_seconds: float
    burst: int
    permits_held: int
    tokens_left: int
    holders: tuple[Holder, ...]


class Limits:
    """The limits of a queue."""

    def __init__(self, access: Access) -> None:
        self._access = access

    async def set(
        self,
        key: str,
        *,
        concurrency: int | None = None,
        rate: float | None = None,
        per_seconds: float = 1.0,
        burst: int | None = None,
    ) -> Limit:
        """Define a limit, or change it; what is held of it stays held.

        At most `concurrency` tasks of the key run at a time, and at most `rate` start in
        `per_seconds`, after `burst` at once. Workers that have met the key hear of a change within
        20 s, others when they meet it.
        """
        wanted = definition(
            concurrency=concurrency, rate=rate, per_seconds=per_seconds, burst=burst
        )
        with labelled("limits"):
            now = await self._access.store.now()
            state = await self._cell(key).update(lambda present: redefined(present, wanted, now))
        assert state is not None, "it was just written"
        return _limit(key, state, now)

    async def get(self, key: str) -> Limit | None:
        """A limit; None if the key has none and is unlimited."""
        with labelled("limits"):
            now = await self._access.store.now()
            state = await self._cell(key).read()
        return _limit(key, state, now) if state else None

    async def remove(self, key: str) -> bool:
        """Let the tasks of a key run without a limit; whether there was one.

        Workers hear of it within 20 s. What was held is forgotten.
        """
        cell = self._cell(key)
        with labelled("limits"):
            for _ in range(_TRIES_MAX):
                try:
                    head = await self._access.store.head(cell.key)
                    await self._access.store.delete(cell.key, version=head.version)
                except NotFound:
                    return False
                except VersionConflict:
                    continue  # A worker has just written.
                return True
        raise VersionConflict(
            f"The limit {key!r} is written too often to be removed now.",
            key=cell.key,
            hint="Try again, or pause what uses it first.",
        )

    async def list(self) -> tuple[Limit, ...]:
        """All limits, by their keys. What cannot be read is left out; `get` says why."""
        access = self._access
        found: list[Limit] = []
        with labelled("limits"):
            now = await access.store.now()
            async for page in pages(access.store, access.layout.limits):
                for entry in page.entries[: LIMITS_MAX - len(found)]:
                    key = _key_of(access.layout.limits, entry.key)
                    try:
                        state = await self._cell(key).read() if key else None
                    except UnreadableObject:
                        continue
                    if state is not None:
                        found.append(_limit(key, state, now))
                if len(found) >= LIMITS_MAX:
                    break
        return tuple(found)

    def _cell(self, key: str) -> Cell[LimitState]:
        access = self._access
        where = access.layout.limit(key)
        return Cell(access.store, where, LimitState, entropy=access.entropy)


def _key_of(prefix: str, where: str) -> str:
    """The key of the limit at a place; empty if it is none of ours."""
    name = where.removeprefix(prefix)
    try:
        return check_limit(name.removesuffix(".json")) if name.endswith(".json") else ""
    except InvalidInput:
        return ""


def _limit(key: str, state: LimitState, now: Interval) -> Limit:
    state = without_ended(state, now)
    holders = tuple(
        Holder(name, share.permits, share.wants, share.tokens, share.ends_ms / 1000)
        for name, share in sorted(state.shares.items())
    )
    definition = state.definition
    return Limit(
        key=key,
        concurrency=definition.concurrency,
        rate=definition.rate,
        per_seconds=definition.per_seconds,
        burst=definition.burst,
        permits_held=sum(holder.permits for holder in holders),
        tokens_left=max(0, int(level(state, now))) if definition.rate is not None else 0,
        holders=holders,
    )
