"""Repeats what failed in passing, and finds out what happened to writes whose answer is lost.

Reads, lists and time samples are repeated on `Throttled` and `Unavailable`. Writes are repeated
too, also on `OutcomeUnknown`, because each of them is safe to send again:

- `REPLACE` and a delete without a version do the same thing twice. They hold no condition, so a
  send that was given up and arrives late may come over what others have done since: they are
  for keys with one writer.
- `CREATE`, `Swap`, `touch` and a conditional delete hold a condition. If an earlier send took
  effect, a later one is refused. So once a send has ended unknown, a refusal proves nothing: it
  may be our own success. Then the object is read back and decides:

| found | means |
|---|---|
| our body | our write stands: success |
| a stamped body that remembers our write | it took effect and was replaced since: `Superseded` |
| a stamped body that does not | it did not take effect: the refusal stands |
| nothing, after a delete | it is gone, which was asked for: success |
| another version, after a delete | the version named is gone: the refusal stands |
| our metadata, after a touch | our refresh stands: success |
| other metadata, after a touch | somebody has overtaken us: the refusal stands |
| anything else | `OutcomeUnknown` is raised to the caller, who alone can decide |

So bodies, and the metadata of a touch, carry something unique. What an object remembers goes when
it is deleted: where others delete and create the key again meanwhile, "the refusal stands" means
that our write is not in the past of what is there, and a `CREATE` that arrives late may still
take effect after the delete.

Tries are bounded, and the pauses between them are random up to a doubling bound, longer when the
store asks for it. When they are used up, the last error is raised as it is. After a send that
ended unknown every other error, whatever it is, is raised as `OutcomeUnknown`: it says nothing
about that send. Refreshes of the store's time are not repeated: the next one is soon enough.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from penstock.kernel.document_format import took_effect
from penstock.kernel.entropy import Entropy
from penstock.kernel.errors import (
    AlreadyExists,
    NotFound,
    OutcomeUnknown,
    StoreError,
    Superseded,
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
    Version,
    Wrapper,
)
from penstock.store.time import Interval, TimeSample

Answer = TypeVar("Answer")
_PASSING = (Throttled, Unavailable, OutcomeUnknown)


@dataclass(frozen=True, slots=True)
class Retries:
    """How often, and with which pauses. Those of the defaults add up to 12 seconds at the most.

    The first pause is up to twice `first_pause_seconds`, each further one up to twice as long.
    A store that asks for more time gets it, up to `pause_seconds_max`, before the pause begins.
    """

    tries_max: int = 8
    first_pause_seconds: float = 0.05
    pause_seconds_max: float = 5.0

    def pause(self, *, tries: int, error: StoreError, entropy: Entropy) -> float:
        """How long to wait after this many tries."""
        bound = min(self.pause_seconds_max, self.first_pause_seconds * 2.0 ** min(tries, 64))
        if isinstance(error, Throttled):
            floor = min(error.retry_after_seconds, self.pause_seconds_max)
            return floor + entropy.uniform(bound / 2, bound)
        return entropy.uniform(0, bound)


class RetryingStore(Wrapper):
    """An `ObjectStore` whose passing failures are repeated and whose unknown writes are settled."""

    def __init__(
        self, inner: ObjectStore, *, entropy: Entropy, retries: Retries | None = None
    ) -> None:
        super().__init__(inner)
        self._entropy = entropy
        self._retries = retries or Retries()

    async def get(self, key: str, *, unless: Version | None = None) -> Object | None:
        return await self.repeat(lambda: self.inner.get(key, unless=unless))

    async def head(self, key: str) -> Head:
        return await self.repeat(lambda: self.inner.head(key))

    async def list(
        self,
        prefix: str = "",
        *,
        start_after: str = "",
        delimiter: Delimiter = "",
        limit: int = PAGE_KEYS_MAX,
        cursor: str | None = None,
    ) -> Page:
        return await self.repeat(
            lambda: self.inner.list(
                prefix, start_after=start_after, delimiter=delimiter, limit=limit, cursor=cursor
            )
        )

    async def sample(self) -> TimeSample:
        return await self.repeat(self.inner.sample)

    async def now(self) -> Interval:
        return await self.clock.read(self._sample_for_clock)

    async def calibrate(self) -> Interval:
        return await self.clock.calibrate(self._sample_for_clock)

    async def _sample_for_clock(self) -> TimeSample:
        """Repeats cost requests and are badly timed: only the first sample is worth them."""
        if self.clock.estimate() is None:
            return await self.sample()
        return await self.inner.sample()

    async def put(
        self,
        key: str,
        body: bytes,
        mode: PutMode = REPLACE,
        *,
        metadata: Mapping[str, str] = NO_METADATA,
    ) -> Version:
        async def settle(refusal: StoreError) -> Version:
            found = await self._read_back(key)
            if found is None:
                # A CREATE that was refused met something that is gone by now, perhaps our own.
                raise _unknown(key) from refusal
            effect = took_effect(sent=body, found=found.body)
            if effect is None:
                raise _unknown(key) from refusal
            if not effect:
                raise refusal
            if found.body == body:
                return found.version
            raise Superseded(
                f"The write to {key!r} took effect and has been replaced since.", key=key
            )

        return await self.repeat(
            lambda: self.inner.put(key, body, mode, metadata=metadata), settle=settle
        )

    async def touch(
        self, key: str, *, version: Version, metadata: Mapping[str, str] = NO_METADATA
    ) -> Version:
        async def settle(refusal: StoreError) -> Version:
            try:
                found = await self.repeat(lambda: self.inner.head(key))
            except NotFound:
                raise refusal from None
            if not metadata:
                raise _unknown(key) from refusal
            if dict(found.metadata) == dict(metadata):
                return found.version
            raise refusal

        return await self.repeat(
            lambda: self.inner.touch(key, version=version, metadata=metadata), settle=settle
        )

    async def delete(self, key: str, *, version: Version | None = None) -> None:
        async def settle(refusal: StoreError) -> None:
            if await self._read_back(key) is not None:
                # Whether ours removed it before, or not: the version named is not there.
                raise refusal

        await self.repeat(lambda: self.inner.delete(key, version=version), settle=settle)

    async def _read_back(self, key: str) -> Object | None:
        try:
            return await self.repeat(lambda: self.inner.get(key))
        except NotFound:
            return None

    async def repeat(
        self,
        request: Callable[[], Awaitable[Answer]],
        *,
        settle: Callable[[StoreError], Awaitable[Answer]] | None = None,
    ) -> Answer:
        """Make a request that is safe to make again, until it is answered or tries are used up."""
        unknown: OutcomeUnknown | None = None
        for tries in range(1, self._retries.tries_max + 1):
            try:
                return await request()
            except (AlreadyExists, VersionConflict) as refusal:
                if unknown is None or settle is None:
                    raise
                return await self._settled(settle, refusal, unknown)
            except StoreError as error:
                if isinstance(error, OutcomeUnknown):
                    unknown = error
                if not isinstance(error, _PASSING) or tries == self._retries.tries_max:
                    if unknown is None or unknown is error:
                        raise
                    raise unknown from error
                pause = self._retries.pause(tries=tries, error=error, entropy=self._entropy)
            await self.clock.machine.sleep(pause)
        raise AssertionError("unreachable")

    async def _settled(
        self,
        settle: Callable[[StoreError], Awaitable[Answer]],
        refusal: StoreError,
        unknown: OutcomeUnknown,
    ) -> Answer:
        try:
            return await settle(refusal)
        except (AlreadyExists, VersionConflict, OutcomeUnknown):
            raise
        except StoreError as error:
            raise unknown from error


def _unknown(key: str) -> OutcomeUnknown:
    return OutcomeUnknown(
        f"Whether the write to {key!r} took effect is unknown.",
        key=key,
        hint="Read the object and decide by what it holds.",
    )
