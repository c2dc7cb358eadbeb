"""Resharding: how the number of shards changes while the queue lives.

Slots never change; a *cut* says into how many shards they are cut, and an *era* counts the
cuts. The present cut is in the queue's settings. A worker's time under one cut is a *tenure*: a
registration of its own (which names its era), leases of its own era, epochs of its own. So
`penstock.queue.shards.leases` knows one cut only; `ShardTenures` moves a worker from one tenure
to the next. Running tasks are not affected: claims are in ledgers.

The steps
1. `reshard` swaps the settings: the number of shards, and the next era.
2. An owner reads the settings every `OWNER_SECONDS`, a standby every `STANDBY_SECONDS`, and both
   before they take a shard, if their reading is older than `OWNER_SECONDS`. (A standby watches
   one owner: it finds that one gone soon after a change, and wants to take.)
3. A worker that notices begins a tenure under the present cut, and keeps the former one if it
owns
   anything in it: renewed and looked at. It offers and takes nothing there.
4. Under the present cut it takes what is free, except, for the tenure's first `patience_seconds`
   (60), shards whose first slot a live owner of another cut looks at: that one is about to move
   too, and the work stays where it was. Meanwhile it looks at all workers every 5 s.
5. A former tenure is released when each shard of the present cut that overlaps with it is in the
   projection of a live owner, its own or another's.

Invariants
- A slot that a live worker looked at before a change is looked at until its shards of the present
  cut are owned (SHARD-7). Two may look at it for a while, which costs requests and not tasks.
- A worker that dies at any point leaves registrations whose leases end by themselves: its slots
  are taken within the bound of `leases` (ttl + 120 s); that the shards were never taken in their
  era adds 10 s. Workers that never notice (of an older release, say) go on under their own cut as
  before, beside the owners of the present one.
- Leases and epochs of a shard belong to its era. They are never deleted, and going back to a
  former number of shards is a new era. Where settings are made anew by hand and an era comes
  again, its leases are there, and epochs go on from them.

Bounds. The owners of a live fleet have moved 30 s (they notice) + 60 s (patience, where one of
them does not) + 10 s (one take) after a change; standbys within 10 minutes at the latest.

Price. Idle: a GET every 30 s by the owner is $0.035 a month, and one every 10 minutes by 49
standbys $0.09. A change: a registration for each worker, and two puts for each shard that is
new.

Used by `LeasedDiscovery`: `turn` by one coroutine in a loop, `release` when that has ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, Protocol

from penstock.kernel.clock import Clock
from penstock.kernel.errors import StoreError
from penstock.queue.config import ConfigWatch
from penstock.queue.shards import allocation as decide
from penstock.queue.shards.allocation import Cut, WorkerLoad
from penstock.queue.shards.leases import ShardLeases
from penstock.queue.shards.registry import Registration
from penstock.store.metered import labelled

_log = logging.getLogger(__name__)

OWNER_SECONDS: Final = 30.0
STANDBY_SECONDS: Final = 600.0
HAND_OVER_SECONDS: Final = 5.0
"""How often all workers are looked at while a former tenure waits for its end."""
FORMER_MAX: Final = 4
"""Where the cut changes faster than a fleet moves, the oldest tenures are released at once."""


class TenureFactory(Protocol):
    """Makes the leases of a worker under one cut."""

    def __call__(
        self, cut: Cut, *, is_current: Callable[[], Awaitable[bool]], gained: asyncio.Event
    ) -> ShardLeases: ...


class ShardTenures:
    """The shards of one worker, under the present cut and those that it has not left yet."""

    def __init__(self, watch: ConfigWatch, *, begin: TenureFactory, clock: Clock) -> None:
        self._watch = watch
        self._begin = begin
        self._clock = clock
        self._read_at = self._again_at = clock.monotonic()
        self._is_released = False
        self.gained = asyncio.Event()
        """Set when there is more to look at."""
        self.present = self._begun()
        self._former: list[ShardLeases] = []

    @property
    def others(self) -> Mapping[str, Registration]:
        """The other workers of the present cut."""
        return self.present.others

    def slots(self) -> tuple[range, ...]:
        """The slots to look at now, as runs. Asks for nothing."""
        mine = [self.present.slots(), *(each.slots() for each in self._former)]
        return decide.joined(run for runs in mine for run in runs)

    async def turn(self, load: WorkerLoad) -> float:
        """Do what is due, and return the seconds until something is due again."""
        if self._is_released:
            return OWNER_SECONDS
        await self._notice()
        seconds = min(await self.present.turn(load), self._seconds_to_reading())
        for each in self._former:
            seconds = min(seconds, await each.hold())
        await self._hand_over()
        return max(0.5, seconds)

    async def release(self) -> None:
        """Give everything up, so that others can take it at once. Never takes long or fails."""
        self._is_released = True
        async with asyncio.TaskGroup() as group:
            for each in (self.present, *self._former):
                group.create_task(each.release())

    async def _notice(self) -> None:
        """Read the settings if that is due; begin anew if the cut has changed."""
        if self._seconds_to_reading() <= 0:
            try:
                await self._read()
            except StoreError as error:
                # The lease must be renewed all the same. Who cannot read does not take.
                _log.info("failed to read the queue's settings, retrying: %s", error)
                self._again_at = self._clock.monotonic() + HAND_OVER_SECONDS
        if self._watch.config.cut == self.present.cut:
            return
        self._former.append(self.present)
        self.present = self._begun()
        self.present.before = frozenset(each.worker for each in self._former)
        for each in [each for each in self._former if not each.slots()]:
            await self._leave(each)
        while len(self._former) > FORMER_MAX:
            await self._leave(self._former[0])

    async def _hand_over(self) -> None:
        """Leave what others, or the present tenure, look at by now."""
        for each in list(self._former):
            if self.present.covers(each.slots()):
                await self._leave(each)
        if self._former:
            self.present.look_again_in(HAND_OVER_SECONDS)

    async def _leave(self, former: ShardLeases) -> None:
        await former.release()
        self._former.remove(former)

    def _begun(self) -> ShardLeases:
        return self._begin(self._watch.config.cut, is_current=self._is_current, gained=self.gained)

    async def _is_current(self) -> bool:
        """Whether the present tenure is of the present cut, as of half a minute ago or later."""
        if self._clock.monotonic() >= self._read_at + OWNER_SECONDS:
            await self._read()
        return self._watch.config.cut == self.present.cut

    async def _read(self) -> None:
        with labelled("leases"):
            await self._watch.read()
        self._read_at = self._clock.monotonic()

    def _seconds_to_reading(self) -> float:
        seconds = OWNER_SECONDS if self.present.owned() else STANDBY_SECONDS
        return max(self._read_at + seconds, self._again_at) - self._clock.monotonic()
