"""Wake-ups through the bucket queue: nothing to run but the bucket.

There is one queue, `wake-ups`, in which each channel is a type of task, and workers look at all
of it (mode `shared`): a wake-up waits for whoever listens to its channel and blocks no other.

- A wake-up that is still pending stands for all later ones, however many tasks there are: the
  claim of its receiver finds whatever was committed before. So a sender whose last wake-up is
  pending sends none, and a queue without listeners holds a few wake-ups a day and not one an event.
  In case it is stuck, another is sent after a while, which may double.
- A sender removes what the queue keeps of its answered wake-ups, which would make every look
  longer
  for minutes. The queue keeps it against late submits; a late wake-up does no harm.
- A listener that dies leaves a lease of some seconds; then the wake-up is delivered elsewhere.

Neither needs the bucket at start: sending fails, listening waits, and both log it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Collection, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Final

from penstock.dispatcher.dag.model import Priority
from penstock.dispatcher.wakeups.base import (
    Heard,
    TaskCounts,
    WakeUpChannel,
    WakeUpListener,
    WakeUpSender,
    channel_name,
)
from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.document_format import decode
from penstock.kernel.errors import PenstockError, UnreadableObject, VersionConflict
from penstock.queue.client import Queue
from penstock.queue.context import QueueContext
from penstock.queue.execution.handlers import TaskContext
from penstock.queue.execution.retry import Retry
from penstock.queue.ids import PackAt, task_at
from penstock.queue.ledger import Ledger
from penstock.queue.settings import DiscoveryMode, Polling, WorkerSettings
from penstock.queue.worker import Worker
from penstock.store.base import find
from penstock.store.opening import Opening

_log = logging.getLogger(__name__)

QUEUE_NAME: Final = "wake-ups"
NEAR_POLLING: Final = Polling(min_seconds=0.05, max_seconds=0.2)
"""For stores on this machine, where a look costs nothing."""
FAR_POLLING: Final = Polling(min_seconds=0.5, max_seconds=5.0)
"""For stores where every look is paid for."""

_TYPE_CHARACTERS_MAX: Final = 100
_LEASE_SECONDS: Final = 10.0
_STOP_SECONDS: Final = 5.0
_SENT_MAX: Final = 8
_STUCK_SECONDS: Final = 15.0
_STUCK_SECONDS_MAX: Final = 3600.0
_PAUSE_SECONDS_MAX: Final = 15.0
_HEARD_AGAIN: Final = Retry(attempts=1000, first_seconds=1.0, max_seconds=30.0)


def wake_up_queue(url: str, *, opening: Opening | None = None) -> Queue:
    """The queue of wake-ups in a store, not connected yet."""
    return Queue(url, name=QUEUE_NAME, opening=opening)


def polling_of(url: str) -> Polling:
    """How often to look at a store."""
    return NEAR_POLLING if url.startswith(("file:", "memory:")) else FAR_POLLING


@dataclass(slots=True)
class _Sent:
    """What this sender has sent on a channel, and may still be there; the newest last."""

    packs: deque[PackAt] = field(default_factory=lambda: deque(maxlen=_SENT_MAX))
    at: float = 0.0
    stuck_seconds: float = _STUCK_SECONDS


class BucketSender(WakeUpSender):
    """Sends wake-ups through a queue, which it connects when it is first needed."""

    def __init__(self, queue: Queue, *, clock: Clock | None = None) -> None:
        self._queue = queue
        self._clock = clock or SystemClock()
        self._sent: dict[WakeUpChannel, _Sent] = {}
        self._opened = AsyncExitStack()
        self._is_open = False
        self._opening = asyncio.Lock()

    async def start(self) -> None:
        """Nothing to do yet."""

    async def stop(self) -> None:
        self._is_open = False
        await self._opened.aclose()

    async def send(self, tasks_of: TaskCounts) -> Mapping[WakeUpChannel, str]:
        async def one(channel: WakeUpChannel) -> str:
            try:
                async with self._opening:
                    if not self._is_open:
                        await self._opened.enter_async_context(self._queue.opened())
                        self._is_open = True
                await self._send(channel)
            except PenstockError as error:
                return error.message
            return ""

        wanted = list(tasks_of)
        said = await asyncio.gather(*map(one, wanted))
        return {channel: why for channel, why in zip(wanted, said, strict=True) if why}

    async def _send(self, channel: WakeUpChannel) -> None:
        sent = self._sent.setdefault(channel, _Sent())
        is_waiting = await self._tidy(sent)
        now = self._clock.monotonic()
        if is_waiting and now < sent.at + sent.stuck_seconds:
            return
        longer = min(2 * sent.stuck_seconds, _STUCK_SECONDS_MAX)
        sent.stuck_seconds = longer if is_waiting else _STUCK_SECONDS
        task = await self._queue.submit(type_of(channel))
        sent.packs.append(task_at(task.id)[0])
        sent.at = now

    async def _tidy(self, sent: _Sent) -> bool:
        """Take away what is left of words that were answered; whether the last waits unheard."""
        is_waiting = False
        for at in list(sent.packs):
            is_waiting, is_over = await _state_of(self._queue.access, at)
            # Another send on this channel may have seen to it meanwhile.
            if is_over and at in sent.packs:
                sent.packs.remove(at)
        return is_waiting


async def _state_of(access: QueueContext, at: PackAt) -> tuple[bool, bool]:
    """Whether a word waits unheard, and whether nothing of it is left."""
    found, pack = await asyncio.gather(
        find(access.store, access.layout.ledger(at)), find(access.store, access.layout.pack(at))
    )
    if found is None:
        # Heard and settled between the two readings counts as gone: another word is sent.
        return pack is not None, pack is None
    try:
        is_settled = decode(Ledger, found.body, where=found.key).settled
    except UnreadableObject:
        return False, True
    if not is_settled or pack is not None:
        return False, False
    with suppress(VersionConflict):
        await access.store.delete(found.key, version=found.version)
    return False, True


class BucketListener(WakeUpListener):
    """Hears wake-ups with a worker of the queue, a new one whenever the operators change."""

    def __init__(
        self,
        queue: Queue,
        answer: Heard,
        *,
        name: str = "",
        polling: Polling = FAR_POLLING,
        clock: Clock | None = None,
    ) -> None:
        self._queue = queue
        self._answer = answer
        self._name = name
        self._clock = clock or SystemClock()
        self._settings = WorkerSettings(
            task_lease_seconds=_LEASE_SECONDS, stop_seconds=_STOP_SECONDS, polling=polling
        )
        self._operators: frozenset[str] = frozenset()
        self._changed = asyncio.Event()
        self._worker: Worker | None = None
        self._runner: asyncio.Task[None] | None = None
        self._is_stopping = False

    def listen_to(self, operators: Collection[str]) -> None:
        wanted = frozenset(operators)
        if wanted != self._operators:
            self._operators = wanted
            self._changed.set()
            if self._worker is not None:
                self._worker.stop()

    async def start(self) -> None:
        self._is_stopping = False
        loop = asyncio.get_running_loop()
        self._runner = loop.create_task(self._run(), name="listen for wake-ups")

    async def stop(self) -> None:
        runner, self._runner = self._runner, None
        if runner is None:
            return
        self._is_stopping = True
        self._changed.set()
        if self._worker is not None:
            self._worker.stop()
        # It lets what is being answered end, and gives the rest back, each within a bound.
        await asyncio.wait({runner}, timeout=4 * _STOP_SECONDS)
        runner.cancel()
        with suppress(asyncio.CancelledError):
            await runner

    async def _run(self) -> None:
        failures = 0
        while not self._is_stopping:
            self._changed.clear()
            if not self._operators:
                await self._changed.wait()
                continue
            try:
                await self._listen()
            except PenstockError as error:
                failures += 1
                if failures == 1:
                    _log.warning("failed to receive wake-ups; retrying: %s", error)
                seconds = min(0.5 * 2.0 ** min(failures, 10), _PAUSE_SECONDS_MAX)
                with suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await self._changed.wait()
            else:
                failures = 0

    async def _listen(self) -> None:
        """Hear the channels of the present operators, until they change."""
        channels = [
            WakeUpChannel(name, tier) for name in sorted(self._operators) for tier in Priority
        ]
        worker = self._worker = Worker(
            self._queue,
            concurrency=min(1000, 2 * len(channels)),
            mode=DiscoveryMode.SHARED,
            name=self._name,
            settings=self._settings,
        )
        for channel in channels:
            self._subscribe(worker, channel)
        if self._changed.is_set():
            worker.stop()
        try:
            await worker.run(signals=False)
        finally:
            self._worker = None

    def _subscribe(self, worker: Worker, channel: WakeUpChannel) -> None:
        @worker.handler(type_of(channel), retry=_HEARD_AGAIN)
        async def receive(_: TaskContext) -> None:
            await self._answer(channel)


def type_of(channel: WakeUpChannel) -> str:
    """The type of the tasks that are a channel's words."""
    return channel_name(channel, characters_max=_TYPE_CHARACTERS_MAX)
