"""One object, updated by compare-and-swap.

`Cell.update` takes a pure function from the present document to the next one, and makes it the
present one exactly once, whoever else is writing:

1. Read, unless what was read or written last is still at hand.
2. Apply the function, stamp the result with a fresh write id, and put it: `CREATE` if there was
   nothing, else `Swap` from the version read.
3. On success that is the new present. On a refusal or an unknown outcome, read again. If the
   object remembers one of our write ids, the update is done; otherwise go to 2.

An earlier put of ours that is still on its way can not do harm: it is conditional on a version
that is gone as soon as a later one succeeds, and if it wins instead, its write id is found. So
the function may be applied often, and takes effect once. Returning the present document itself,
or None, means "leave it": nothing is written.

A process that dies inside leaves the object before or after the update.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from penstock.kernel.entropy import Entropy, new_id
from penstock.kernel.errors import AlreadyExists, NotFound, OutcomeUnknown, VersionConflict
from penstock.kernel.wire import Stamped, decode, encode
from penstock.store.base import CREATE, ObjectStore, PutMode, Swap, Version

TRIES_MAX: Final = 100
PAUSE_SECONDS_MAX: Final = 2.0

State = TypeVar("State", bound=Stamped)


@dataclass(frozen=True, slots=True)
class Snapshot(Generic[State]):
    """The document, None if there is no object, and the version it was read or written in."""

    state: State | None
    version: Version | None


class Cell(Generic[State]):
    """One writer's handle on one object. A second handle is a second writer."""

    def __init__(
        self, store: ObjectStore, key: str, kind: type[State], *, entropy: Entropy
    ) -> None:
        self.key = key
        self._store = store
        self._kind = kind
        self._entropy = entropy
        self._writer = new_id(entropy, characters=12)
        self._last: Snapshot[State] | None = None
        self._busy = asyncio.Lock()

    async def read(self) -> State | None:
        """The present document; None if there is no object."""
        async with self._busy:
            return (await self._fetch()).state

    async def update(self, change: Callable[[State | None], State | None]) -> State | None:
        """Make `change(present)` the present document, once, and return it.

        Returns the document that a later writer left if ours took effect and was replaced
        before its answer came. Raises `VersionConflict` if the object is too contended.
        """
        async with self._busy:
            sent: set[str] = set()
            present = self._last or await self._fetch()
            fresh = self._last is None
            for tries in range(TRIES_MAX):
                following = change(present.state)
                if following is present.state or following is None:
                    if fresh:
                        return present.state
                    # Not to write is a decision too, and must not rest on an old reading.
                    present, fresh = await self._fetch(), True
                    continue
                done = await self._write(present, following, sent)
                if done is not None:
                    return done
                await self._pause(tries)
                present, fresh = await self._fetch(), True
                if present.state and present.state.writes.get(self._writer) in sent:
                    return present.state
            raise VersionConflict(
                f"The object {self.key!r} was changed by others in each of {TRIES_MAX} tries.",
                key=self.key,
            )

    async def _write(
        self, present: Snapshot[State], following: State, sent: set[str]
    ) -> State | None:
        write = new_id(self._entropy, characters=16)
        sent.add(write)
        state = following.stamped(writer=self._writer, write=write)
        mode: PutMode = CREATE if present.version is None else Swap(present.version)
        try:
            version = await self._store.put(self.key, encode(state), mode)
        except (AlreadyExists, VersionConflict, OutcomeUnknown):
            return None
        self._last = Snapshot(state, version)
        return state

    async def _fetch(self) -> Snapshot[State]:
        known = self._last
        try:
            found = await self._store.get(self.key, unless=known.version if known else None)
        except NotFound:
            self._last = Snapshot(None, None)
            return self._last
        if found is not None:
            state = decode(self._kind, found.body, where=self.key)
            self._last = Snapshot(state, found.version)
        assert self._last is not None
        return self._last

    async def _pause(self, tries: int) -> None:
        bound = min(PAUSE_SECONDS_MAX, 0.01 * 2 ** min(tries, 10))
        await self._store.clock.machine.sleep(self._entropy.uniform(0, bound))
