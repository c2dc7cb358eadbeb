"""A store that takes so many requests and no more, for those who look on behalf of many.

What is beyond the bound is refused before it is sent, as if the store had said "slow down".
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

from penstock.kernel.errors import Throttled
from penstock.store.base import ObjectStore
from penstock.store.metered import Kind, Meter, MeteredStore

Answer = TypeVar("Answer")


class BoundedStore(MeteredStore):
    """An `ObjectStore` that counts its requests, and refuses those beyond a bound."""

    def __init__(self, inner: ObjectStore, *, requests_max: int) -> None:
        super().__init__(inner, Meter())
        self._requests_max = requests_max
        self._sent = 0

    async def _count(self, kind: Kind, request: Awaitable[Answer], *, label: str = "") -> Answer:
        if self._sent >= self._requests_max:
            _drop(request)
            raise Throttled(f"A look makes at most {self._requests_max} requests.")
        self._sent += 1
        return await super()._count(kind, request, label=label)


def _drop(request: Awaitable[object]) -> None:
    """End a request that was not begun, so that nobody is told that it was forgotten."""
    close = getattr(request, "close", None)
    if close is not None:
        close()
