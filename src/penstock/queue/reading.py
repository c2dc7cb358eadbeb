"""What the bucket says of one task: its pack, its ledger, or its record in the archive.

Used by the client for `get` and `history`, and by who waits for a result. Reads only. A pack and
its ledger are two objects: what is seen between two changes is read again, at most `_LOOKS_MAX`
times, before the archive is asked.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Final

from penstock.kernel.errors import PayloadLost, TaskNotFound
from penstock.kernel.wire import decode
from penstock.queue import archive
from penstock.queue.access import Access
from penstock.queue.ledger import Ledger, check_ledger
from penstock.queue.pack import Pack, check_pack, is_void
from penstock.queue.payloads import Payloads
from penstock.queue.places import PackAt
from penstock.queue.views import TaskEvent, TaskView, events_of, view_of_ledger, view_of_pack
from penstock.store.base import find

_LOOKS_MAX: Final = 2


@dataclass(frozen=True, slots=True)
class _Found:
    """What the bucket says of a pack."""

    pack: Pack | None
    ledger: Ledger | None


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads the tasks of one queue."""

    access: Access

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
        f"Nothing is known of the task {at.task(0)!r}.",
        task=at.task(0),
        hint="Is it another queue's? Tasks with a key are forgotten when their key is free.",
    )
