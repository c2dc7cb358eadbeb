"""What the checks of a contract suite are made of."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from penstock.kernel.errors import PenstockError
from penstock.store.base import Object, ObjectStore

OpenClient = Callable[[], Awaitable[ObjectStore]]


class Check(Protocol):
    """One promise, tried on one store."""

    __name__: str

    async def __call__(self, open_client: OpenClient, /) -> None: ...


@contextmanager
def refused(*expected: type[PenstockError], what: str) -> Iterator[None]:
    """The block must raise one of these errors."""
    try:
        yield
    except expected:
        return
    names = " or ".join(error.__name__ for error in expected)
    raise AssertionError(f"{what} must raise {names}")


async def read(store: ObjectStore, key: str) -> Object:
    """The object, which must be there."""
    found = await store.get(key)
    assert found is not None
    return found
