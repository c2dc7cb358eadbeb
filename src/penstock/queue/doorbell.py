"""Change signals: small objects that say "something has changed", read instead of lists.

A GET that answers "unchanged" costs a twelfth of a LIST. A writer rings after its change: a put
over whatever is there. A reader asks for the signal, and lists only if it has rung. A signal is
a hint (QUEUE-22): a ring that is lost costs time and nothing else, for lists are made at long
intervals anyway.

| object | rung | read |
|---|---|---|
| `bell.json` | after a change of schedules, and when a batch begins | by maintenance, every 30 s |
| `doorbell.json` | after a submit, by the rules below | by the owners of shards |

At one GET in `HEARD_SECONDS` an idle queue pays 86,400 a month for maintenance, 3.5 cents.

**The doorbell.** A put for every submit would cost as much as the submit. So a submit rings only
if

- it is urgent: then always, but a producer that has rung rings again after `AGAIN_SECONDS` only,
  and an owner that notices a ring looks a second time, `ECHO_SECONDS` later;
- or the doorbell says that an owner is *asleep*: an owner that finds nothing writes that into
  it,
  and from then on reads the doorbell instead of listing. A ring overwrites it, so that one is
  enough for all that follows.

A producer trusts what it read for `BELIEVED_SECONDS`: a busy one reads every few seconds and
never rings. An owner that goes to sleep lists on for as long, and a little: a submit whose
producer had read before is in these lists, and any later one rings. A list that failed does not
count: the owner reads the doorbell only after one that began late enough (QUEUE-24). In times: the
producer reads "awake" at `a`; its pack is there at `p <= a + BELIEVED`; "asleep" was written at
`s > a`; the last list begins after `s + BELIEVED > p`. No two clocks are compared.

The state is `rung`, drawn anew by each ring, and `asleep`. "Asleep" is written by a swap that
keeps `rung`, so that no ring is lost for owners who have not read it yet; if the swap fails,
someone has rung, and the owner looks. A missing doorbell means "awake", as for workers and
producers of releases that know of no doorbell: such workers never sleep, and such producers
never ring. An owner that meets a task for which nobody has rung does without the doorbell for
an hour.

Crashes. Between the pack and the ring: the next slow list of the owner finds the task. After
the ring: nothing. Between "asleep" and the last list: the next owner begins with a list, and
producers ring once for nobody.

Called by `penstock.queue.submitter` and `penstock.queue.discovery.leased`.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import ClassVar, Final

from penstock.kernel.document_format import Document, decode, encode
from penstock.kernel.entropy import Entropy, new_id
from penstock.kernel.errors import (
    AlreadyExists,
    NotFound,
    StoreError,
    UnreadableObject,
    VersionConflict,
)
from penstock.store.base import CREATE, REPLACE, ObjectStore, Swap, Version
from penstock.store.metered import labelled

HEARD_SECONDS: Final = 30.0
"""How old the answer may be that several maintenance tasks share."""
BELIEVED_SECONDS: Final = 4.0
"""How long a producer believes that nobody is asleep."""
AGAIN_SECONDS: Final = 3.5
"""A producer of urgent tasks that has rung rings again after so long."""
ECHO_SECONDS: Final = 3.8
"""Whoever has heard a ring looks a second time after so long: more than `AGAIN_SECONDS`."""
RING_SECONDS_MAX: Final = 2.0
"""A submit waits no longer for its ring."""
FAILED_SECONDS: Final = 10.0
"""After a ring that has failed no submit of the producer waits for another one, for so long."""


class DoorbellState(Document, frozen=True, kw_only=True):
    """Says nothing but that it is another one than before, and whether somebody is asleep."""

    kind: ClassVar[str] = "bell"

    nonce: str
    """Drawn anew by every ring."""
    asleep: bool = False


async def ring(store: ObjectStore, key: str, entropy: Entropy) -> None:
    """Say that something has changed. Raises `StoreError`."""
    await store.put(key, encode(DoorbellState(nonce=new_id(entropy))), REPLACE)


class ChangeSignal:
    """One process's reader of the bell, for all its maintenance tasks."""

    def __init__(self, store: ObjectStore, key: str) -> None:
        self._store = store
        self._key = key
        self._clock = store.clock.machine
        self._version: Version | None = None
        self._asked_at = float("-inf")
        self._asking = asyncio.Lock()

    async def version(self) -> Version | None:
        """Another one whenever the bell has rung; None if it never has. Raises `StoreError`."""
        async with self._asking:
            instant = self._clock.monotonic()
            # A little less than a period: who asks once in a period gets a new answer every time.
            if instant - self._asked_at >= HEARD_SECONDS * 0.9:
                await self._ask()
                self._asked_at = instant
        return self._version

    async def _ask(self) -> None:
        with labelled("chores"), suppress(NotFound):
            found = await self._store.get(self._key, unless=self._version)
            self._version = found.version if found else self._version


class DoorbellRinger:
    """The doorbell as one producer knows it."""

    def __init__(self, store: ObjectStore, key: str, entropy: Entropy) -> None:
        self._store = store
        self._key = key
        self._entropy = entropy
        self._clock = store.clock.machine
        self._seen: tuple[Version, bool] | None = None
        self._believed_at = self._rung_at = self._quiet_until = float("-inf")
        # Apart: who is urgent waits for nobody that only asks.
        self._asking, self._urging = asyncio.Lock(), asyncio.Lock()

    async def submitted(self, *, is_urgent: bool) -> None:
        """A pack was written: ring, if that is needed. Never fails, and never takes long."""
        if not self._is_wanted(self._clock.monotonic(), is_urgent=is_urgent):
            return
        try:
            async with asyncio.timeout(RING_SECONDS_MAX), self._turn(is_urgent=is_urgent):
                # Others may have done it meanwhile; if they were cancelled, they have not.
                instant = self._clock.monotonic()
                if self._is_wanted(instant, is_urgent=is_urgent):
                    await self._tell(instant, is_urgent=is_urgent)
        except (StoreError, TimeoutError):
            self._quiet_until = self._clock.monotonic() + FAILED_SECONDS  # A slow list finds it.

    def _turn(self, *, is_urgent: bool) -> asyncio.Lock:
        return self._urging if is_urgent else self._asking

    def _is_wanted(self, instant: float, *, is_urgent: bool) -> bool:
        since, seconds = (
            (self._rung_at, AGAIN_SECONDS) if is_urgent else (self._believed_at, BELIEVED_SECONDS)
        )
        return instant >= max(since + seconds, self._quiet_until)

    async def _tell(self, instant: float, *, is_urgent: bool) -> None:
        with labelled("bell"):
            is_ringing = is_urgent or await self._is_asleep()
            if is_ringing:
                await ring(self._store, self._key, self._entropy)
        self._believed_at = instant
        if is_ringing:
            self._rung_at = instant

    async def ring(self) -> None:
        """Ring in any case: something can be claimed that no submit has told of. Never fails."""
        with suppress(StoreError), labelled("bell"):
            await ring(self._store, self._key, self._entropy)

    async def _is_asleep(self) -> bool:
        try:
            found = await self._store.get(self._key, unless=self._seen[0] if self._seen else None)
        except NotFound:
            self._seen = None
            return False
        if found is not None:
            self._seen = found.version, _read(found.body, self._key).asleep
        return self._seen is not None and self._seen[1]


class DoorbellListener:
    """The doorbell as one owner of shards knows it."""

    def __init__(self, store: ObjectStore, key: str, entropy: Entropy) -> None:
        self._store = store
        self._key = key
        self._entropy = entropy
        self._version: Version | None = None
        self._said: DoorbellState | None = None

    async def has_rung(self) -> bool:
        """Whether it has rung since this was last asked, or since the last `sleep`: a GET.

        The first answer says that it has: who knows nothing has to look. Raises `StoreError`.
        """
        before = self._said
        with labelled("bell"):
            try:
                found = await self._store.get(self._key, unless=self._version)
            except NotFound:
                self._version = self._said = None
                return before is not None
        if found is None:
            return False
        self._version, self._said = found.version, _read(found.body, self._key)
        return before is None or before.nonce != self._said.nonce

    async def sleep(self) -> bool:
        """Have producers ring: a put, or nothing if they do already. False: it has just rung.

        Raises `StoreError`.
        """
        if self._said is not None and self._said.asleep:
            return True
        said = DoorbellState(
            nonce=self._said.nonce if self._said else new_id(self._entropy), asleep=True
        )
        mode = CREATE if self._version is None else Swap(self._version)
        try:
            with labelled("bell"):
                self._version = await self._store.put(self._key, encode(said), mode)
        except (AlreadyExists, NotFound, VersionConflict):
            # Another has begun to sleep, or it has rung.
            return not await self.has_rung() and self._said is not None and self._said.asleep
        self._said = said
        return True


def asleep_in(body: bytes) -> bool:
    """Whether the doorbell's body says that an owner is asleep."""
    return _read(body, "doorbell").asleep


def _read(body: bytes, key: str) -> DoorbellState:
    try:
        return decode(DoorbellState, body, where=key)
    except UnreadableObject:
        # The next ring makes it good.
        return DoorbellState(nonce="", asleep=True)
