"""A store that fails as a script says, request by request, for tests of what is built on it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import Enum, auto
from typing import TypeVar

from penstock.kernel.errors import (
    NotFound,
    OutcomeUnknown,
    Refused,
    StoreError,
    Throttled,
    Unavailable,
    VersionConflict,
)
from penstock.store.base import (
    NO_METADATA,
    PAGE_KEYS_MAX,
    REPLACE,
    Delimiter,
    Head,
    Object,
    ObjectStore,
    Page,
    PutMode,
    Swap,
    Version,
    Wrapper,
)
from penstock.store.time import TimeSample

Answer = TypeVar("Answer")


class Fault(Enum):
    """What happens to one request."""

    NONE = auto()
    THROTTLED = auto()
    UNAVAILABLE = auto()
    REFUSED = auto()
    LOST_REQUEST = auto()
    """It never arrives, and its outcome is unknown."""
    LOST_ANSWER = auto()
    """It is carried out, and its outcome is unknown."""
    LATE = auto()
    """Its outcome is unknown; it is carried out when the test calls `arrive`."""


OK = Fault.NONE
Step = Fault | StoreError | Callable[[], Awaitable[object]]
"""A fault, an error to raise, or something that somebody else does just before the request."""


class ScriptedStore(Wrapper):
    """Faults by the kind of the request, in order; what has no script is passed on."""

    def __init__(self, inner: ObjectStore, **scripts: Sequence[Step]) -> None:
        super().__init__(inner)
        self._scripts = {kind: list(steps) for kind, steps in scripts.items()}
        self._late: list[Callable[[], Awaitable[object]]] = []
        self.sent: list[str] = []

    def add(self, kind: str, *steps: Step) -> None:
        """Go on with these when the requests of this kind so far have been played."""
        self._scripts.setdefault(kind, []).extend(steps)

    @property
    def played(self) -> bool:
        """Whether every step of every script has come to pass."""
        return not any(self._scripts.values())

    async def arrive(self) -> None:
        """Carry out the late requests, oldest first."""
        late, self._late = self._late, []
        for request in late:
            try:
                await request()
            except StoreError:
                continue

    async def _meet(self, kind: str, key: str, request: Callable[[], Awaitable[Answer]]) -> Answer:
        self.sent.append(kind)
        steps = self._scripts.get(kind, [])
        while steps:
            step = steps.pop(0)
            match step:
                case Fault():
                    return await self._suffer(step, kind, key, request)
                case StoreError():
                    raise step
                case _:
                    await step()
        return await request()

    async def _suffer(
        self, fault: Fault, kind: str, key: str, request: Callable[[], Awaitable[Answer]]
    ) -> Answer:
        lost = OutcomeUnknown if kind in ("put", "touch", "delete") else Unavailable
        match fault:
            case Fault.NONE:
                return await request()
            case Fault.THROTTLED:
                raise Throttled("slow down", key=key)
            case Fault.UNAVAILABLE:
                raise Unavailable("unavailable", key=key)
            case Fault.REFUSED:
                raise Refused("not allowed", key=key)
            case Fault.LATE:
                self._late.append(request)
            case Fault.LOST_ANSWER:
                try:
                    await request()
                except StoreError:
                    raise lost("the answer was lost", key=key) from None
            case Fault.LOST_REQUEST:
                pass
        raise lost("lost", key=key)

    async def get(self, key: str, *, unless: Version | None = None) -> Object | None:
        return await self._meet("get", key, lambda: self.inner.get(key, unless=unless))

    async def head(self, key: str) -> Head:
        return await self._meet("head", key, lambda: self.inner.head(key))

    async def put(
        self,
        key: str,
        body: bytes,
        mode: PutMode = REPLACE,
        *,
        metadata: Mapping[str, str] = NO_METADATA,
    ) -> Version:
        return await self._meet(
            "put", key, lambda: self.inner.put(key, body, mode, metadata=metadata)
        )

    async def touch(
        self, key: str, *, version: Version, metadata: Mapping[str, str] = NO_METADATA
    ) -> Version:
        return await self._meet(
            "touch", key, lambda: self.inner.touch(key, version=version, metadata=metadata)
        )

    async def delete(self, key: str, *, version: Version | None = None) -> None:
        await self._meet("delete", key, lambda: self.inner.delete(key, version=version))

    async def list(
        self,
        prefix: str = "",
        *,
        start_after: str = "",
        delimiter: Delimiter = "",
        limit: int = PAGE_KEYS_MAX,
        cursor: str | None = None,
    ) -> Page:
        return await self._meet(
            "list",
            "",
            lambda: self.inner.list(
                prefix, start_after=start_after, delimiter=delimiter, limit=limit, cursor=cursor
            ),
        )

    async def sample(self) -> TimeSample:
        return await self._meet("sample", "", self.inner.sample)


class FreshVersions(Wrapper):
    """A store whose touch gives a new version, as it does on some backends."""

    async def touch(
        self, key: str, *, version: Version, metadata: Mapping[str, str] = NO_METADATA
    ) -> Version:
        try:
            found = await self.inner.get(key)
        except NotFound as error:
            raise VersionConflict("gone", key=key) from error
        assert found is not None
        # Versions follow the body, so the body has to differ in something.
        return await self.inner.put(key, found.body + b" ", Swap(version), metadata=metadata)
