"""Reading tasks: their pack, ledger or archive record, and waiting for their results.

`QueueTaskReader` serves `get` and `history`. A pack and its ledger are two objects: what changes
between the two reads is read again, at most `_LOOKS_MAX` times, before the archive is asked.

`ResultWaiter` waits for a task to end, in this process or any other. Nothing signals the end:
the bucket is polled, at first every tenth of a second and then more and more rarely. While the
store is unavailable the wait goes on. `LedgerWatcher` shares the reads among all who wait for
tasks of one pack: the ledger is read again only when the last reading is older than the caller
accepts, with a conditional GET. A failed reading fails for all who waited for it.
"""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import dataclass, field, replace
from typing import Any, Final

from penstock.kernel.document_format import decode
from penstock.kernel.errors import (
    NotFound,
    NotSettled,
    PayloadLost,
    StoreError,
    TaskCancelled,
    TaskFailed,
    TaskNotFound,
    Throttled,
    Unavailable,
)
from penstock.queue import archive
from penstock.queue.context import QueueContext
from penstock.queue.ids import PackAt, task_at
from penstock.queue.layout import QueueLayout
from penstock.queue.ledger import Ledger, QueueTaskStatus, check_ledger
from penstock.queue.pack import Pack, check_pack, is_void
from penstock.queue.payloads import Payloads
from penstock.queue.task_views import TaskEvent, TaskView, events_of, view_of_ledger, view_of_pack
from penstock.store.base import ObjectStore, Version, find
from penstock.store.metered import labelled

_LOOKS_MAX: Final = 2


@dataclass(frozen=True, slots=True)
class _Found:
    """What the bucket says of a pack."""

    pack: Pack | None
    ledger: Ledger | None


@dataclass(frozen=True, slots=True)
class QueueTaskReader:
    """Reads the tasks of one queue."""

    access: QueueContext

    async def view(self, at: PackAt, place: int) -> TaskView:
        """The present state of a task. Raises `TaskNotFound`."""
        return await self._view(at, place, await self._find(at))

    async def views(self, at: PackAt) -> list[TaskView]:
        """The present states of all tasks of a pack. Raises `TaskNotFound`."""
        found = await self._find(at)
        return [await self._view(at, place, found) for place in range(at.count)]

    async def whole(self, at: PackAt, place: int) -> TaskView:
        """The same with what is large fetched; what is gone or damaged is told in `problem`."""
        return await self.fetched(await self.view(at, place))

    async def fetched(self, view: TaskView) -> TaskView:
        """A task with its large input and result. Never raises `PayloadLost`."""
        payloads = self.payloads
        for name, ref in (("input", view.input_ref), ("result", view.result_ref)):
            if ref is None:
                continue
            try:
                value = json.loads(bytes(await payloads.fetch(ref)))
            except PayloadLost as error:
                view = replace(view, problem=" ".join(filter(None, (view.problem, error.message))))
            else:
                view = replace(view, **{name: value})
        return view

    @property
    def payloads(self) -> Payloads:
        """Where large inputs and results are."""
        return Payloads(self.access.store, self.access.layout, self.access.entropy)

    async def history(self, at: PackAt, place: int) -> list[TaskEvent]:
        """What has happened to a task, oldest first. Raises `TaskNotFound`."""
        return (await self.told(at, place))[1]

    async def told(self, at: PackAt, place: int) -> tuple[TaskView, list[TaskEvent]]:
        """The state of a task and its history, without what is large. Raises `TaskNotFound`."""
        found = await self._find(at)
        view = await self._view(at, place, found)
        return view, events_of(view, found.ledger, place)

    async def _view(self, at: PackAt, place: int, found: _Found) -> TaskView:
        if found.ledger is not None:
            return view_of_ledger(at, place, found.ledger, found.pack)
        assert found.pack is not None, "something was found"
        now = await self.access.store.now()
        return view_of_pack(at, place, found.pack, now=now.earliest)

    async def _find(self, at: PackAt) -> _Found:
        for _ in range(_LOOKS_MAX):
            ledger = await self._ledger(at)
            settled = ledger is not None and ledger.settled and ledger.key is None
            pack = None if settled else await self._pack(at)
            if ledger is not None and ledger.settled and pack is not None:
                # A key that is used again: the pack is new if it was sent after the other's end.
                is_new = pack.submitted_ms >= ledger.key_ends_ms
                return _Found(pack, None) if is_new else _Found(None, ledger)
            if pack is not None or (ledger is not None and ledger.settled):
                return _Found(pack, ledger)
            # It may have been settled between the two readings. A ledger that is not settled and
            # has no pack is void: a late write of somebody who was overtaken long ago.
        ledger = await archive.find(self.access.store, self.access.layout, at)
        if ledger is not None:
            return _Found(None, ledger)
        raise not_found(at)

    async def _ledger(self, at: PackAt) -> Ledger | None:
        found = await find(self.access.store, self.access.layout.ledger(at))
        if found is None:
            return None
        ledger = decode(Ledger, found.body, where=found.key)
        check_ledger(at, ledger)
        return ledger

    async def _pack(self, at: PackAt) -> Pack | None:
        """The pack; what is void will never run, and counts as not there."""
        found = await find(self.access.store, self.access.layout.pack(at))
        if found is None:
            return None
        pack = decode(Pack, found.body, where=found.key)
        check_pack(at, pack)
        return None if is_void(pack.submitted_ms, found.modified) else pack


def not_found(at: PackAt) -> TaskNotFound:
    """The error for a task that nothing is known of."""
    return TaskNotFound(
        f"There is no task {at.task(0)!r}.",
        task=at.task(0),
        hint="Is it another queue's? Tasks with a key are forgotten when their key is free.",
    )


PACKS_MAX: Final = 16


@dataclass(slots=True)
class _Watched:
    ledger: Ledger | None = None
    version: Version | None = None
    is_archived: bool = False
    error: StoreError | None = None
    read_at: float = float("-inf")
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)


class LedgerWatcher:
    """The packs that somebody in this process waits for; the last few are remembered."""

    def __init__(self, store: ObjectStore, layout: QueueLayout) -> None:
        self._store = store
        self._layout = layout
        self._clock = store.clock.machine
        self._watched: dict[PackAt, _Watched] = {}

    async def ledger(self, at: PackAt, *, seconds: float) -> Ledger | None:
        """The ledger as it was at most so long ago; None if nobody has begun.

        Raises `NotFound` if there is neither a pack nor a record of it.
        """
        watched = self._watched.pop(at, None) or _Watched()
        self._watched[at] = watched
        while len(self._watched) > PACKS_MAX:
            del self._watched[next(iter(self._watched))]
        async with watched.reading:
            if self._clock.monotonic() - watched.read_at > seconds:
                try:
                    watched.error = None
                    await self._read(at, watched)
                except StoreError as error:
                    watched.error = error
                watched.read_at = self._clock.monotonic()
            if watched.error is not None:
                raise watched.error
        return watched.ledger

    async def _read(self, at: PackAt, watched: _Watched) -> None:
        if watched.is_archived:
            return
        if await self._read_ledger(at, watched) and await self._is_live(watched.ledger):
            return
        try:
            await self._store.head(self._layout.pack(at))
        except NotFound:
            # It may have been claimed and settled between the two questions; otherwise a ledger
            # that is not settled is void: a late write of somebody who was overtaken long ago.
            await self._read_ledger(at, watched)
            if watched.ledger is None or not watched.ledger.settled:
                found = await archive.find(self._store, self._layout, at)
                watched.ledger, watched.is_archived = found, found is not None
                if found is None:
                    raise

    async def _is_live(self, ledger: Ledger | None) -> bool:
        """Whether there is no doubt of a ledger: it is settled, or somebody works on it."""
        now_ms = (await self._store.now()).earliest * 1000
        return ledger is not None and (
            ledger.settled or any(lease.expires_ms > now_ms for lease in ledger.leases.values())
        )

    async def _read_ledger(self, at: PackAt, watched: _Watched) -> bool:
        key = self._layout.ledger(at)
        try:
            found = await self._store.get(key, unless=watched.version)
        except NotFound:
            watched.ledger = watched.version = None
            return False
        if found is not None:
            ledger = decode(Ledger, found.body, where=key)
            check_ledger(at, ledger)
            watched.ledger, watched.version = ledger, found.version
        return True


_log = logging.getLogger(__name__)

_SECONDS_MIN: Final = 0.1
_SECONDS_MAX: Final = 5.0


class ResultWaiter:
    """Waits for the tasks of one queue."""

    def __init__(self, reader: QueueTaskReader) -> None:
        self._reader = reader
        access = reader.access
        self._clock = access.store.clock.machine
        self._watch = LedgerWatcher(access.store, access.layout)

    async def result(self, id: str, *, seconds: float | None) -> Any:
        """What the task's handler returned, once it has; raises how it ended otherwise.

        Raises `NotSettled` if that takes longer than so many seconds.
        """
        at, place = task_at(id)
        began = self._clock.monotonic()
        pause = _SECONDS_MIN
        while True:
            left = None if seconds is None else max(0.0, began + seconds - self._clock.monotonic())
            view, result = None, None
            try:
                # Once at least, also without a timeout that would allow it.
                async with asyncio.timeout(None if left is None else max(left, 1.0)):
                    view = await self._settled(at, place, seconds=pause / 2)
                # What is large may take longer to fetch than there was to wait.
                result = await self._result(view)
            except TimeoutError:
                view = None
            except (Throttled, Unavailable) as error:
                view = None
                _log.warning("waiting for task %s: read failed, retrying: %s", id, error)
            if view is not None:
                return _outcome(view, result)
            left = None if seconds is None else began + seconds - self._clock.monotonic()
            if left is not None and left <= 0:
                raise NotSettled(f"The task {id!r} has not ended in {seconds} s.", task=id)
            await self._clock.sleep(pause if left is None else min(pause, left))
            pause = min(_SECONDS_MAX, pause * 1.5)

    async def _result(self, view: TaskView | None) -> Any:
        """What a task has returned, fetched if it is large. Raises `PayloadLost`."""
        if view is None or view.result_ref is None:
            return view.result if view else None
        return json.loads(bytes(await self._reader.payloads.fetch(view.result_ref)))

    async def _settled(self, at: PackAt, place: int, *, seconds: float) -> TaskView | None:
        """The task if it is settled. Those of one pack share a reading that is recent enough."""
        with labelled("get"):
            if at.submitted_ms is None:
                # A key may have been used again: the pack tells.
                view = await self._reader.view(at, place)
                return view if view.is_settled else None
            try:
                ledger = await self._watch.ledger(at, seconds=seconds)
            except NotFound as error:
                raise not_found(at) from error
        settled = ledger is not None and ledger.tasks[place].status.settled
        return view_of_ledger(at, place, ledger, None) if ledger and settled else None


def _outcome(view: TaskView, result: Any) -> Any:
    match view.status:
        case QueueTaskStatus.SUCCEEDED.word:
            return result
        case QueueTaskStatus.CANCELLED.word:
            why = f": {view.message}" if view.message else "."
            raise TaskCancelled(f"The task {view.id!r} was cancelled{why}", task=view.id)
        case QueueTaskStatus.EXPIRED.word:
            raise TaskFailed(
                f"The task {view.id!r} expired before it started.",
                task=view.id,
                error="Expired",
            )
    raise TaskFailed(
        f"The task {view.id!r} failed: {view.error}: {view.message}",
        task=view.id,
        error=view.error,
    )
