"""Counts requests and prices them, by kind and by what they were for.

`MeteredStore` stands next to the backend, inside of `RetryingStore`, so that every request that
is sent is counted, repeats included. What a request was for is the caller's `label`, taken from
the context it runs in:

    with labelled("claim"):
        await store.put(...)

Requests that the store refuses by a condition are billed like others. Requests that it answers
with "slow down" or an error of its own, and those that get no answer, also because nobody waits
for it any more, are counted as unbilled. What is wrong before it is sent is not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from penstock.kernel.errors import (
    InvalidInput,
    OutcomeUnknown,
    StoreError,
    Throttled,
    Unavailable,
)
from penstock.store.base import Answer, ObjectStore, StoreOperation, Wrapper

_UNBILLED = (Throttled, Unavailable, OutcomeUnknown)


class Kind(StrEnum):
    """The kinds of requests that a store prices differently."""

    PUT = "put"
    COPY = "copy"
    LIST = "list"
    GET = "get"
    HEAD = "head"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class Prices:
    """Dollars per 1,000 requests. The defaults are those of S3 Standard."""

    put: float = 0.005
    copy: float = 0.005
    list: float = 0.005
    get: float = 0.0004
    head: float = 0.0004
    delete: float = 0.0

    def of(self, kind: Kind) -> float:
        """Dollars for one request."""
        match kind:
            case Kind.PUT:
                return self.put / 1000
            case Kind.COPY:
                return self.copy / 1000
            case Kind.LIST:
                return self.list / 1000
            case Kind.GET:
                return self.get / 1000
            case Kind.HEAD:
                return self.head / 1000
            case Kind.DELETE:
                return self.delete / 1000


_label: ContextVar[str] = ContextVar("penstock_request_label", default="other")


@contextmanager
def labelled(label: str) -> Iterator[None]:
    """Count the requests made inside under this label."""
    token = _label.set(label)
    try:
        yield
    finally:
        _label.reset(token)


class Meter:
    """Counts of requests by label and kind. Several stores may share one."""

    def __init__(self, prices: Prices | None = None) -> None:
        self.prices = prices or Prices()
        self.billed: Counter[tuple[str, Kind]] = Counter()
        self.unbilled: Counter[tuple[str, Kind]] = Counter()

    def requests(self, *, label: str | None = None, kind: Kind | None = None) -> int:
        """How many requests were sent, of this label and this kind if they are given."""
        return sum(
            count
            for counts in (self.billed, self.unbilled)
            for (its_label, its_kind), count in counts.items()
            if label in (None, its_label) and kind in (None, its_kind)
        )

    def dollars(self, *, label: str | None = None) -> float:
        """What they cost."""
        return sum(
            count * self.prices.of(kind)
            for (its_label, kind), count in self.billed.items()
            if label in (None, its_label)
        )

    def labels(self) -> list[str]:
        """The labels that were seen."""
        return sorted({label for counts in (self.billed, self.unbilled) for label, _ in counts})


_KINDS: Final = {
    StoreOperation.GET: Kind.GET,
    StoreOperation.HEAD: Kind.HEAD,
    StoreOperation.CREATE: Kind.PUT,
    StoreOperation.REPLACE: Kind.PUT,
    StoreOperation.SWAP: Kind.PUT,
    StoreOperation.TOUCH: Kind.COPY,
    StoreOperation.DELETE: Kind.DELETE,
    StoreOperation.LIST: Kind.LIST,
    StoreOperation.SAMPLE: Kind.HEAD,
}
"""As what each is billed."""


class MeteredStore(Wrapper):
    """An `ObjectStore` whose requests are counted on a meter."""

    def __init__(self, inner: ObjectStore, meter: Meter) -> None:
        super().__init__(inner)
        self.meter = meter

    async def request(
        self, operation: StoreOperation, key: str, ask: Callable[[], Awaitable[Answer]]
    ) -> Answer:
        del key
        label = "time" if operation is StoreOperation.SAMPLE else _label.get()
        slot = (label, _KINDS[operation])
        try:
            answer = await ask()
        except InvalidInput:
            raise
        except BaseException as error:
            refused = isinstance(error, StoreError) and not isinstance(error, _UNBILLED)
            (self.meter.billed if refused else self.meter.unbilled)[slot] += 1
            raise
        self.meter.billed[slot] += 1
        return answer
