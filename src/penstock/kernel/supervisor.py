"""Keeps services running: one that ends by itself, or is killed, is started again.

A `Supervisor` starts its services in order, watches them, and stops them in the reverse order;
those that need nothing of each other at the same time. A stop that takes long is reported, with
the names that it waits for. A service that has ended is started again, with a backoff that
grows while it keeps ending soon after its start and is reset once it has run for a while. Each
has a task of its own that watches it, and no error of one ends the others or keeps them from
being stopped. Called by `penstock up`, for its processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.service import Service

_log = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 0.2
_PAUSE_SECONDS_MIN: Final = 0.2
_PAUSE_SECONDS_MAX: Final = 10.0
_STEADY_SECONDS: Final = 20.0
_SILENT_SECONDS_MAX: Final = 3.0
"""How long a stop may take before it is told what is waited for."""


class Supervised(Protocol):
    """A service that can tell whether it runs."""

    @property
    def running(self) -> bool: ...

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


@dataclass(slots=True)
class _Kept:
    name: str
    make: Callable[[], Supervised]
    service: Supervised | None = None
    started_at: float = 0.0
    pause_seconds: float = 0.0
    due_at: float = 0.0


class Supervisor(Service):
    """Keeps services running, from `start` to `stop`."""

    def __init__(
        self,
        services: Sequence[tuple[str, Callable[[], Supervised]]],
        *,
        clock: Clock | None = None,
        changed: Callable[[str, str], None] | None = None,
        why_ended: Callable[[str], str] | None = None,
        together: Collection[str] = (),
        waiting: Callable[[Sequence[str]], None] | None = None,
    ) -> None:
        """Those of `together` that follow each other are stopped at once. `waiting` is told who
        has not ended yet, where that takes long, and again when they are fewer. `why_ended` is
        asked of one that has ended by itself, for a sentence; it may have none.
        """
        self._kept = [_Kept(name, make) for name, make in services]
        self._together = frozenset(together)
        self._waiting = waiting or (lambda _names: None)
        self._ending: list[str] = []
        self._clock = clock or SystemClock()
        self._changed = changed or (lambda _name, _what: None)
        self._why_ended = why_ended or (lambda _name: "")
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        for kept in self._kept:
            await self._begin(kept)
        self._watch = asyncio.get_running_loop().create_task(self._look_after())

    async def stop(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
            self._watch = None
        async with asyncio.TaskGroup() as telling:
            watch = telling.create_task(self._tell_of_waiting())
            for some in self._endings():
                self._ending = [kept.name for kept in some if kept.service is not None]
                async with asyncio.TaskGroup() as group:
                    for kept in some:
                        group.create_task(self._end(kept))
            watch.cancel()

    def _endings(self) -> list[list[_Kept]]:
        """Who is stopped, one after the other, and who of them at the same time."""
        found: list[list[_Kept]] = []
        for kept in reversed(self._kept):
            if found and self._together.issuperset({kept.name, found[-1][0].name}):
                found[-1].append(kept)
            else:
                found.append([kept])
        return found

    async def _tell_of_waiting(self) -> None:
        await self._clock.sleep(_SILENT_SECONDS_MAX)
        told: list[str] = []
        while True:
            if self._ending and self._ending != told:
                told = list(self._ending)
                self._waiting(told)
            await self._clock.sleep(_LOOK_SECONDS)

    async def _end(self, kept: _Kept) -> None:
        """Stop it, if it is there; an error is told and leaves the others alone."""
        if kept.service is None:
            return
        try:
            await kept.service.stop()
        except Exception:  # noqa: BLE001 - it is told, and the others have to be stopped
            _log.exception("%s failed to stop", kept.name)
        kept.service = None
        if kept.name in self._ending:
            self._ending.remove(kept.name)

    async def _begin(self, kept: _Kept) -> None:
        service = kept.make()
        try:
            await service.start()
        except BaseException:
            await service.stop()
            raise
        kept.service = service
        kept.started_at = self._clock.monotonic()
        self._changed(kept.name, "started")

    async def _look_after(self) -> None:
        async with asyncio.TaskGroup() as group:
            for kept in self._kept:
                group.create_task(self._keep(kept))

    async def _keep(self, kept: _Kept) -> None:
        while True:
            await self._clock.sleep(_LOOK_SECONDS)
            await self._look_at(kept)

    async def _look_at(self, kept: _Kept) -> None:
        now = self._clock.monotonic()
        if kept.service is not None and kept.service.running:
            if now - kept.started_at > _STEADY_SECONDS:
                kept.pause_seconds = 0.0
            return
        if kept.service is not None:
            # It has ended. What is left of it goes before the next one comes.
            why = self._why_ended(kept.name)
            said = f" It says: {why}" if why else ""
            _log.warning("%s exited and is restarted.%s", kept.name, said)
            self._changed(kept.name, "ended")
            await self._end(kept)
            kept.due_at = now + kept.pause_seconds
            grown = max(_PAUSE_SECONDS_MIN, 2 * kept.pause_seconds)
            kept.pause_seconds = min(_PAUSE_SECONDS_MAX, grown)
        if now < kept.due_at:
            return
        try:
            await self._begin(kept)
        except Exception as error:  # noqa: BLE001 - it is tried again, and the others go on
            _log.warning("%s failed to start: %s", kept.name, error)
            kept.due_at = self._clock.monotonic() + kept.pause_seconds
            kept.pause_seconds = min(_PAUSE_SECONDS_MAX, 2 * kept.pause_seconds)
