"""The hosts of each profile: jobs whose settings are the same share them. Imports no Spark.

Most work runs with the settings of the runtime itself, whose hosts are always there. For every
other profile (`profiles`) hosts are made when its first bundle comes, and ended when it has had
none for `idle_seconds`. At most `profiles_max` of them are there at once, since each has a JVM:
a bundle of one more waits until another has nothing to do, which is then ended for it. `parallel`
is that of each.

A bundle is *waiting* here, then its hosts' own. One that is dropped while it waits costs nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.errors import WorkFailed
from penstock.kernel.service import Service
from penstock.runtimes.spark.bundles import Bundle, Ticket
from penstock.runtimes.spark.hosts import Hosts, stopped
from penstock.runtimes.spark.profiles import profile
from penstock.runtimes.spark.settings import SparkSettings

_LOOK_SECONDS: Final = 1.0


@dataclass(eq=False, slots=True)
class _Pool:
    hosts: Hosts
    used_at: float


class Pools(Service):
    """The hosts of one runtime."""

    def __init__(self, settings: SparkSettings, *, engine: str, clock: Clock | None = None) -> None:
        self._settings = settings
        self._engine = engine
        self._given = clock
        self._clock = clock or SystemClock()
        self.base = Hosts(settings, engine=engine, clock=clock)
        self._pools: dict[bytes, _Pool] = {}
        self._waiting: deque[tuple[SparkSettings, Bundle]] = deque()
        self._looking: asyncio.Task[None] | None = None
        self._look_now = asyncio.Event()
        self._is_stopped = True

    @property
    def every(self) -> tuple[Hosts, ...]:
        """Those of all profiles."""
        return (self.base, *(pool.hosts for pool in self._pools.values()))

    async def start(self) -> None:
        self._is_stopped = False
        await self.base.start()

    async def stop(self) -> None:
        self._is_stopped = True
        self._look_now.set()
        if self._looking is not None:
            await self._looking
        waiting, self._waiting = self._waiting, deque()
        for _, bundle in waiting:
            bundle.fail(stopped())
        await asyncio.gather(*(hosts.stop() for hosts in self.every))

    def submit(self, bundle: Bundle) -> None:
        """Have a bundle run where the settings are those of its job."""
        work = next(iter(bundle.tickets.values())).work
        try:
            settings = profile(self._settings, work.resources)
        except WorkFailed as error:
            bundle.fail(error)
            return
        pool = self._pools.get(settings.digest)
        if settings == self._settings or self._is_stopped:
            self.base.submit(bundle)
        elif pool is not None:
            pool.used_at = self._clock.monotonic()
            pool.hosts.submit(bundle)
        else:
            self._waiting.append((settings, bundle))
            self._look_after()

    async def drop(self, bundle: Bundle, ticket: Ticket) -> None:
        """Nobody waits for this ticket. Returns when nothing of it runs."""
        entry = next((each for each in self._waiting if each[1] is bundle), None)
        if entry is not None:
            bundle.tickets.pop(ticket.work.task_id, None)
            if not bundle.tickets:
                self._waiting.remove(entry)
            return
        hosts = next((each for each in self.every if each.has(bundle)), self.base)
        await hosts.drop(bundle, ticket)

    def _look_after(self) -> None:
        self._look_now.set()
        if self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().create_task(self._look())

    async def _look(self) -> None:
        """Make hosts for what waits, and end those that nobody needs, while there are any."""
        while (self._waiting or self._pools) and not self._is_stopped:
            self._look_now.clear()
            now = self._clock.monotonic()
            for pool in self._pools.values():
                if pool.hosts.is_busy:
                    pool.used_at = now
            while self._waiting and await self._has_room():
                await self._serve_next()
            for key, pool in tuple(self._pools.items()):
                if now - pool.used_at >= self._settings.idle_seconds and not pool.hosts.is_busy:
                    await self._end(key)
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_SECONDS):
                    await self._look_now.wait()

    async def _serve_next(self) -> None:
        """Make the hosts that the first of what waits needs, for all that needs the same."""
        if not self._waiting:
            return  # it was dropped meanwhile
        settings, _ = self._waiting[0]
        hosts = Hosts(settings, engine=self._engine, clock=self._given)
        problem: WorkFailed | None = None
        try:
            await hosts.start()
            self._pools[settings.digest] = _Pool(hosts, self._clock.monotonic())
        except OSError as error:
            problem = WorkFailed(f"The folder of Spark cannot be used: {error}.")
        for entry in [each for each in self._waiting if each[0] == settings]:
            self._waiting.remove(entry)
            if problem is None:
                hosts.submit(entry[1])
            else:
                entry[1].fail(problem)

    async def _has_room(self) -> bool:
        """Whether one more may be made; what has nothing to do is ended for it."""
        if len(self._pools) < self._settings.profiles_max:
            return True
        idle = [key for key, pool in self._pools.items() if not pool.hosts.is_busy]
        if not idle:
            return False
        await self._end(min(idle, key=lambda key: self._pools[key].used_at))
        return True

    async def _end(self, key: bytes) -> None:
        # Out of the way first: what comes now gets hosts that live.
        pool = self._pools.pop(key)
        await pool.hosts.stop()
