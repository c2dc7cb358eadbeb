"""Submits of a short while in one pack, for producers that ask for it (`gather_seconds`).

A submit waits until its pack is in the bucket, and returns its own id then, never before. Tasks
share a pack if they are of one type and are submitted alike (`_alike`); what has a key is not
gathered. A pack is sent `seconds` after its first task came, or at once when it is full.

- **An input that is wrong** is refused at once, and is in no pack.
- **A pack that fails** fails each submit in it with the same error; other packs go on.
- **A submit that is cancelled** before its pack is sent is not in it. After that its task may be
  there, as with any submit that is cancelled.
- **Bounds**: `TASKS_PER_PACK_MAX` tasks, `GATHERED_BYTES_MAX` bytes a pack; `WAITING_MAX` submits
  at a time, others wait for their turn before they are taken in.
- **`close`** sends what has been taken in, and waits for it.

Nothing is written before the pack, so a crash loses what no submit has returned for. A pack has the
span of its first submit. Used by `penstock.queue.client`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from penstock.kernel.clock import Clock
from penstock.kernel.errors import InvalidInput
from penstock.queue.options import Options
from penstock.queue.places import TASKS_PER_PACK_MAX, TaskId
from penstock.queue.submission import NotAllSubmitted

GATHERED_BYTES_MAX: Final = 512 * 1024
WAITING_MAX: Final = 10_000
SECONDS_MAX: Final = 10.0

Send = Callable[[str, list[msgspec.Raw], Options], Awaitable[list[TaskId]]]
"""Submits tasks of one type together; returns their ids in order."""


@dataclass(slots=True, eq=False)
class _Pack:
    """Tasks that will be sent together, and who waits for each."""

    type: str
    options: Options
    waiting: dict[asyncio.Future[TaskId], msgspec.Raw] = field(default_factory=dict)
    bytes: int = 0
    is_full: asyncio.Event = field(default_factory=asyncio.Event)


class Gatherer:
    """Gathers the submits of one producer."""

    def __init__(self, send: Send, *, seconds: float, clock: Clock) -> None:
        self._send = send
        self._seconds = check_seconds(seconds)
        self._clock = clock
        self._open: dict[Hashable, _Pack] = {}
        self._sending: set[asyncio.Task[None]] = set()
        self._places = asyncio.Semaphore(WAITING_MAX)

    async def submit(self, type: str, body: msgspec.Raw, options: Options) -> TaskId:
        """Submit a task whose input is checked already; returns when its pack is in the bucket."""
        async with self._places:
            waiting: asyncio.Future[TaskId] = asyncio.get_running_loop().create_future()
            pack = self._pack(type, options)
            pack.waiting[waiting] = body
            pack.bytes += memoryview(body).nbytes
            if len(pack.waiting) >= TASKS_PER_PACK_MAX or pack.bytes >= GATHERED_BYTES_MAX:
                self._shut(pack)
            try:
                return await waiting
            except asyncio.CancelledError:
                # If it was not sent yet, it will not be.
                pack.waiting.pop(waiting, None)
                raise

    async def close(self) -> None:
        """Send what was taken in, and wait until that is done."""
        for pack in list(self._open.values()):
            self._shut(pack)
        while self._sending:
            await asyncio.wait(self._sending)

    def _pack(self, type: str, options: Options) -> _Pack:
        alike = _alike(type, options)
        pack = self._open.get(alike)
        if pack is None:
            pack = self._open[alike] = _Pack(type, options)
            task = asyncio.get_running_loop().create_task(self._sent(pack))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)
        return pack

    def _shut(self, pack: _Pack) -> None:
        """Take no more into a pack: it is sent now."""
        self._open = {alike: each for alike, each in self._open.items() if each is not pack}
        pack.is_full.set()

    async def _sent(self, pack: _Pack) -> None:
        """Send a pack when it is time, and tell everybody who waits."""
        full = asyncio.get_running_loop().create_task(pack.is_full.wait())
        pause = asyncio.get_running_loop().create_task(self._clock.sleep(self._seconds))
        try:
            await asyncio.wait({full, pause}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            full.cancel()
            pause.cancel()
        self._shut(pack)
        waiting, pack.waiting = pack.waiting, {}
        if not waiting:
            return
        answers: list[TaskId | Exception]
        try:
            answers = list(await self._send(pack.type, list(waiting.values()), pack.options))
        except NotAllSubmitted as error:
            answers = list(error.tasks)
        except Exception as error:  # noqa: BLE001 - each submit raises it
            answers = [error] * len(waiting)
        for each, answer in zip(waiting, answers, strict=True):
            if each.done():
                continue
            if isinstance(answer, Exception):
                each.set_exception(answer)
            else:
                each.set_result(answer)


def check_seconds(seconds: float) -> float:
    """How long is gathered, or `InvalidInput`."""
    if not 0 < seconds <= SECONDS_MAX:
        raise InvalidInput(
            f"Submits are gathered for more than 0 and at most {SECONDS_MAX:g} s, not {seconds!r}.",
            hint="0.1 is a good choice; leave gather_seconds out to send each by itself.",
        )
    return seconds


def _alike(type: str, options: Options) -> Hashable:
    """What tasks of one pack have in common."""
    tags = tuple(sorted(options.tags.items()))
    how = (options.delay, options.priority, options.limit, options.expires, options.affinity)
    return type, tags, how
