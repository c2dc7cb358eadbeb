"""What a worker does for the queue besides running tasks: it repairs its part, and does chores.

The owner of a shard is its monitor; where nobody owns shards, one worker is elected. Chores are
for the queue as a whole: schedules, batches that are complete, what may be forgotten. The worker
that guards the first slot does them. During a change of owners that can be two workers, or for a
while none: a chore must not mind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

from penstock.kernel.clock import Clock
from penstock.kernel.errors import StoreError, UnreadableObject
from penstock.queue.access import Access
from penstock.queue.discovery.base import Discovery
from penstock.queue.discovery.scan import Run
from penstock.queue.monitor import Monitor
from penstock.queue.running.saying import Saying

MAINTAIN_SECONDS: Final = 15.0
_GUARD_SECONDS: Final = 5.0
_AGAIN_SECONDS: Final = 30.0


class Chore(ABC):
    """Something that is done for a whole queue, every so often, by whoever guards its first slot.

    It is done by one as a rule, and sometimes by two at the same time or by none: what it does is
    conditional, or the same if it is done twice.
    """

    name: str
    """What it does, for the log: "the schedules", say."""

    @abstractmethod
    async def turn(self) -> float:
        """Do what is due; returns the seconds until the next turn. May raise `StoreError`."""

    async def release(self) -> None:  # noqa: B027 - most have nothing to let go of
        """The worker stops: let go of what others wait for. Within a bound; never fails."""


class Upkeep:
    """Maintains what one worker guards, until cancelled."""

    def __init__(
        self,
        access: Access,
        discovery: Discovery,
        monitor: Monitor,
        chores: Sequence[Chore],
        *,
        sweep_seconds: float,
        found: Callable[[], None],
    ) -> None:
        self._access = access
        self._discovery = discovery
        self._monitor = monitor
        self._chores = tuple(chores)
        self._sweep_seconds = sweep_seconds
        self._found = found
        self._clock = access.store.clock.machine
        self._say = Saying(self._clock)

    def loops(self) -> list[Coroutine[Any, Any, None]]:
        """Everything that is to run beside the worker's own search."""
        return [self._maintain(), *map(self._do, self._chores)]

    async def release(self) -> None:
        """Let the chores let go."""
        for chore in self._chores:
            await chore.release()

    async def _maintain(self) -> None:
        """Archive and repair what this worker guards."""
        period = self._sweep_seconds
        sweep_at = self._clock.monotonic() + self._access.entropy.uniform(0, period)
        swept: Sequence[Run] = ()
        while True:
            await self._clock.sleep(MAINTAIN_SECONDS)
            runs = self._discovery.guarded()
            if not runs:
                continue
            try:
                await self._monitor.clear()
                is_new = not set(runs) <= set(swept)
                if is_new or self._clock.monotonic() >= sweep_at:
                    sweep_at, swept = self._clock.monotonic() + period, runs
                    if await self._monitor.sweep(runs):
                        self._found()
            except (StoreError, UnreadableObject) as error:
                self._say(f"the queue cannot be repaired, trying again: {error}")

    def _do(self, chore: Chore) -> Coroutine[Any, Any, None]:
        return mind(chore, clock=self._clock, say=self._say, is_ours=self._is_ours)

    def _is_ours(self) -> bool:
        """Whether the chores are this worker's to do."""
        return any(first == 0 for first, _ in self._discovery.guarded())


async def mind(
    chore: Chore, *, clock: Clock, say: Callable[[str], None], is_ours: Callable[[], bool]
) -> None:
    """Do a chore again and again, whenever it is ours to do, until cancelled."""
    while True:
        if not is_ours():
            await clock.sleep(_GUARD_SECONDS)
            continue
        try:
            seconds = await chore.turn()
        except Exception as error:  # noqa: BLE001 - it must not end the worker that does it
            say(f"{chore.name} cannot be minded, trying again: {error!r}")
            seconds = _AGAIN_SECONDS
        await clock.sleep(seconds)
