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
or None, means "leave it": nothing is written. To leave it, and to raise, are decisions that rest
on a reading made during the update. The memory of writes is the cell's own affair: whatever
`writes` the function returns, those of the present document are carried on.

Whenever an update ends with one of its puts unsettled, it raises `OutcomeUnknown`: when the store
does not answer, say, or when more than `WRITERS_MAX` others have written before the answer to a
lost put could be read. It never raises a milder error then. If the object is deleted meanwhile,
what it remembered is gone with it, and the update starts again from nothing.

Where the store's date of the object counts, a lease that is renewed by touching it say, `dated`
says what a document means that was read; `touch` dates it anew.

A process that dies inside leaves the object before or after the update.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

import msgspec

from penstock.kernel.document_format import Stamped, decode, encode
from penstock.kernel.entropy import Entropy, new_id, system_entropy
from penstock.kernel.errors import (
    AlreadyExists,
    NotFound,
    OutcomeUnknown,
    Superseded,
    VersionConflict,
)
from penstock.store.base import CREATE, NO_METADATA, ObjectStore, PutMode, Swap, Version

TRIES_MAX: Final = 100
PAUSE_SECONDS_MAX: Final = 2.0

State = TypeVar("State", bound=Stamped)


@dataclass(frozen=True, slots=True)
class CellSnapshot(Generic[State]):
    """The document, None if there is no object, and the version it was read or written in."""

    state: State | None
    version: Version | None
    modified: float = 0.0
    """The store's date of what was read; 0 of what was written, whose date is not known."""


Change = Callable[[State | None], State | None]


@dataclass(slots=True)
class _Sends:
    """The puts of one update."""

    ids: set[str] = field(default_factory=set)
    superseded: bool = False
    """One took effect, and was replaced since."""
    unsettled: bool = False
    """One may have taken effect, or may do so yet."""


class Cell(Generic[State]):
    """One writer's handle on one object. A second handle is a second writer."""

    def __init__(
        self,
        store: ObjectStore,
        key: str,
        kind: type[State],
        *,
        entropy: Entropy | None = None,
        check: Callable[[State], None] | None = None,
        dated: Callable[[State, float], State] | None = None,
        metadata: Callable[[State], Mapping[str, str]] | None = None,
    ) -> None:
        """`check` may refuse a document that was read, with `UnreadableObject`.

        `dated` is what a document means that was read from an object of this date: everybody sees
        that, and none what was stored. `metadata` is what the object gets with a document.
        """
        entropy = entropy or system_entropy()
        self._check = check
        self._dated = dated
        self._metadata = metadata
        self.key = key
        self._store = store
        self._kind = kind
        self._entropy = entropy
        self._writer = new_id(entropy, characters=12)
        self._last: CellSnapshot[State] | None = None
        self._busy = asyncio.Lock()

    @property
    def last(self) -> CellSnapshot[State] | None:
        """What was read or written last; others may have written since."""
        return self._last

    async def read(self) -> State | None:
        """The present document; None if there is no object."""
        async with self._busy:
            return (await self._fetch()).state

    def assume_absent(self) -> None:
        """Begin the next update as if there were no object: saves the read before a first write."""
        self._last = CellSnapshot(None, None)

    async def remove(self) -> None:
        """Delete the object in the version last read or written; raises `VersionConflict`."""
        async with self._busy:
            if self._last is not None and self._last.version is not None:
                await self._store.delete(self.key, version=self._last.version)
            self._last = None

    async def touch(self, metadata: Mapping[str, str]) -> bool:
        """Date what was read or written last anew, without sending it.

        False if others have written: what is there now has been read. The metadata should be like
        no other's, so that a lost answer can be settled.
        """
        async with self._busy:
            last = self._last
            if last is None or last.version is None:
                return False
            try:
                version = await self._store.touch(self.key, version=last.version, metadata=metadata)
            except (NotFound, VersionConflict):
                await self._fetch()
                return False
            self._last = CellSnapshot(last.state, version)
            return True

    async def update(self, change: Change[State]) -> State | None:
        """Make `change(present)` the present document, once, and return it.

        Returns the document that a later writer left if ours took effect and was replaced
        before its answer came. Raises `VersionConflict` if the object is too contended, and
        `OutcomeUnknown` if it cannot be told whether the update took effect.
        """
        async with self._busy:
            sends = _Sends()
            try:
                return await self._update(change, sends)
            except Exception as error:
                if not sends.unsettled or isinstance(error, OutcomeUnknown):
                    raise
                raise self._unknown() from error

    async def _update(self, change: Change[State], sends: _Sends) -> State | None:
        present, following = await self._first_decision(change)
        for tries in range(TRIES_MAX):
            if following is None:
                if sends.unsettled:
                    raise self._unknown()
                return present.state
            done = await self._write(present, following, sends)
            if done is not None:
                return done
            if not sends.unsettled:
                await self._pause(tries)
            before, present = present, await self._fetch()
            if self._took_effect(sends, before, present):
                return present.state
            if sends.unsettled:
                await self._pause(tries)
            following = _applied(change, present)
        raise VersionConflict(
            f"The object {self.key!r} was changed by others in each of {TRIES_MAX} tries.",
            key=self.key,
        )

    async def _first_decision(
        self, change: Change[State]
    ) -> tuple[CellSnapshot[State], State | None]:
        """What to start from and what to write: None leaves it."""
        if self._last is not None:
            # Not to write is a decision too, and must not rest on an old reading.
            with suppress(Exception):
                following = _applied(change, self._last)
                if following is not None:
                    return self._last, following
        present = await self._fetch()
        return present, _applied(change, present)

    async def _write(
        self, present: CellSnapshot[State], following: State, sends: _Sends
    ) -> State | None:
        write = new_id(self._entropy, characters=16)
        sends.ids.add(write)
        history = present.state.writes if present.state else {}
        state = msgspec.structs.replace(following, writes=history).stamped(
            writer=self._writer, write=write
        )
        mode: PutMode = CREATE if present.version is None else Swap(present.version)
        try:
            metadata = self._metadata(state) if self._metadata else NO_METADATA
            version = await self._store.put(self.key, encode(state), mode, metadata=metadata)
        except Superseded:
            sends.superseded = sends.unsettled = True
            return None
        except (AlreadyExists, VersionConflict):
            return None
        except OutcomeUnknown:
            sends.unsettled = True
            return None
        self._last = CellSnapshot(state, version)
        return state

    def _took_effect(
        self, sends: _Sends, before: CellSnapshot[State], present: CellSnapshot[State]
    ) -> bool:
        """Whether one of the puts is in the past of what was read after them."""
        if sends.superseded:
            return True
        if present.version == before.version:
            return False
        if present.state is not None:
            remembers = present.state.remembers(writer=self._writer, writes=sends.ids)
            if remembers:
                return True
            if remembers is None and sends.unsettled:
                raise self._unknown()
        # Every put was conditional on a version that is gone: none can take effect any more.
        sends.unsettled = False
        return False

    def _unknown(self) -> OutcomeUnknown:
        return OutcomeUnknown(
            f"Whether the update of {self.key!r} took effect is unknown.",
            key=self.key,
            hint="Read the object and decide by what it holds.",
        )

    async def _fetch(self) -> CellSnapshot[State]:
        # Where the date counts, "unchanged" is no answer: a touch leaves the version as it is.
        known = None if self._dated else self._last
        try:
            found = await self._store.get(self.key, unless=known.version if known else None)
        except NotFound:
            self._last = CellSnapshot(None, None)
            return self._last
        if found is None:
            assert known is not None, "only what is known can be unchanged"
            self._last = known
        else:
            state = decode(self._kind, found.body, where=self.key)
            if self._check is not None:
                self._check(state)
            if self._dated is not None:
                state = self._dated(state, found.modified)
            self._last = CellSnapshot(state, found.version, found.modified)
        return self._last

    async def _pause(self, tries: int) -> None:
        bound = min(PAUSE_SECONDS_MAX, 0.01 * 2 ** min(tries, 10))
        await self._store.clock.machine.sleep(self._entropy.uniform(0, bound))


def _applied(change: Change[State], present: CellSnapshot[State]) -> State | None:
    """What the change makes of the present; None if it leaves it."""
    following = change(present.state)
    return None if following is present.state else following
