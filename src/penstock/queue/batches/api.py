"""Batches as users see them.

    batch = await queue.batch("resize", inputs, then=("zip", {"name": "images.zip"}))
    print(await batch.wait(timeout=600))

    async with queue.new_batch(then="zip") as batch:
        await batch.submit_many("resize", some)
        await batch.submit("index", {"all": True})

A batch is sealed when its `async with` block ends without an error: then it has all its tasks, and
can end. One whose block fails is never sealed: what was submitted runs, and nothing comes then. A
submit that raises has not added what it could not surely submit; catch the error and submit again,
if the batch is to go on.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Final, Self, TypedDict, Unpack

import msgspec

from penstock.kernel.errors import (
    BatchNotFound,
    InvalidInput,
    NotSettled,
    StoreError,
    Throttled,
    Unavailable,
)
from penstock.queue.access import Access
from penstock.queue.batches import showing
from penstock.queue.batches.documents import (
    PACKS_MAX,
    BatchView,
    OpenBatch,
    Then,
    new_batch,
    then_task,
)
from penstock.queue.batches.ending import Ender
from penstock.queue.bell import ring
from penstock.queue.inputs import held_input
from penstock.queue.layout import check_batch
from penstock.queue.options import Options
from penstock.queue.places import PackAt, TaskId, check_name, task_at
from penstock.queue.submission import NotAllSubmitted, Submitter
from penstock.store.base import pages
from penstock.store.metered import labelled

_log = logging.getLogger(__name__)

SHOWN_MAX: Final = 100
_SECONDS_MIN: Final = 0.1
_SECONDS_MAX: Final = 5.0
_ASKED_SECONDS: Final = 60.0
"""So often who waits asks whether there is such a batch at all."""

WhatThen = str | tuple[str, object] | None
"""The type of the task that comes when all have ended, alone or with an input; or none."""


class How(TypedDict, total=False):
    """How tasks are submitted; as for `Queue.submit_many`."""

    delay: float
    priority: int
    limit: str
    expires: float | None
    tags: Mapping[str, str]
    affinity: str


class Batch:
    """A batch. Made by `Queue.batch`, `Queue.new_batch` and `Batches.get`."""

    def __init__(
        self, batches: Batches, id: str | None, then: Then | None, *, is_own: bool
    ) -> None:
        self._batches = batches
        self._access = batches.access
        self._id = id
        self._then = then
        self._is_own = is_own
        self._is_sealed = False
        self._packs: dict[PackAt, None] = {}

    def __repr__(self) -> str:
        return f"Batch({self._id!r})"

    @property
    def id(self) -> str:
        """Its id, by which any process finds it: `queue.batches.get(id)`."""
        if self._id is None:
            raise InvalidInput(
                "The batch has not begun.", hint="Use 'async with queue.new_batch() as batch:'."
            )
        return self._id

    @property
    def then_task(self) -> TaskId | None:
        """The id that the task will have that comes when all have ended, if this made the batch."""
        return then_task(self.id, self._then)

    async def __aenter__(self) -> Self:
        if not self._is_own or self._id is not None:
            raise InvalidInput("A batch is begun once.", hint="Make another: queue.new_batch().")
        access = self._access
        with labelled("batches"):
            now_ms = int((await access.store.now()).latest * 1000)
            batch = new_batch(now_ms, access.entropy)
            new = OpenBatch(made_ms=now_ms, then=self._then)
            await Ender(access).cell(batch).update(lambda present: present or new)
            await ring(access)
        self._id = batch
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            await self.seal()

    async def submit(self, type: str, input: object = None, **how: Unpack[How]) -> TaskId:
        """Submit one task that belongs to the batch."""
        (task,) = await self.submit_many(type, [input], **how)
        return task

    async def submit_many(
        self, type: str, inputs: Sequence[object], **how: Unpack[How]
    ) -> list[TaskId]:
        """Submit one task an input; all of them belong to the batch."""
        if not self._is_own or self._is_sealed:
            raise InvalidInput(
                f"The batch {self.id!r} takes no more tasks"
                f"{': it is sealed' if self._is_sealed else ' here'}.",
                hint="A batch is filled by the process that made it, until it is sealed.",
            )
        if len(self._packs) >= PACKS_MAX:
            raise InvalidInput(
                f"A batch has at most {PACKS_MAX:,} objects with tasks.",
                hint="Submit with submit_many, up to 1,000 tasks an object.",
            )
        options = Options(**how, batch=self.id)
        await self._batches.check_door(type)
        try:
            tasks = await self._batches.submitter.submit_many(type, inputs, options)
        except NotAllSubmitted as error:
            self._note([each for each in error.tasks if isinstance(each, str)])
            raise
        self._note(tasks)
        return tasks

    def _note(self, tasks: Sequence[TaskId]) -> None:
        self._packs.update(dict.fromkeys(task_at(each)[0] for each in tasks))

    async def seal(self) -> None:
        """Say that all tasks are submitted. To seal twice is to seal once."""
        now_ms = int((await self._access.store.now()).latest * 1000)
        packs = tuple(at.path for at in self._packs)

        def change(present: OpenBatch | None) -> OpenBatch | None:
            if present is None or present.sealed_ms:
                return present
            return msgspec.structs.replace(present, sealed_ms=now_ms, packs=packs)

        ender = Ender(self._access)
        with labelled("batches"):
            cell = ender.cell(self.id)
            if await cell.update(change) is None:
                # Raises, unless it was sealed and has ended by now.
                await showing.ended_unless_open(self._access, self.id)
            self._is_sealed = True
            try:
                await ender.try_to_end(self.id, cell)
            except StoreError as error:
                _log.warning("the end of the batch %s is left to the workers: %s", self.id, error)

    async def progress(self) -> BatchView:
        """How far it is. Raises `BatchNotFound`."""
        own = () if self._is_sealed else tuple(self._packs)
        with labelled("batches"):
            return await showing.view(self._access, self.id, own=own)

    async def wait(self, timeout: float | None = None) -> BatchView:  # noqa: ASYNC109 - users' word
        """Wait until all of it has ended; returns how. Never fails because tasks have failed.

        Raises `NotSettled`, a `TimeoutError`, if that takes longer than `timeout` seconds, and
        `BatchNotFound`. A GET each time it asks: at first every tenth of a second, then more and
        more rarely, up to five seconds.
        """
        clock = self._access.store.clock.machine
        began = ask_at = clock.monotonic()
        pause = _SECONDS_MIN
        while True:
            try:
                with labelled("batches"):
                    found = await showing.ended_view(self._access, self.id)
                    if found is None and clock.monotonic() >= ask_at:
                        found = await showing.ended_unless_open(self._access, self.id)
                        ask_at = clock.monotonic() + _ASKED_SECONDS
                if found is not None:
                    return found
            except (Throttled, Unavailable) as error:
                _log.warning("waiting for the batch %s, the store is away: %s", self.id, error)
            left = None if timeout is None else began + timeout - clock.monotonic()
            if left is not None and left <= 0:
                raise NotSettled(
                    f"The batch {self.id!r} has not ended in {timeout} s.",
                    hint="'penstock queue batch ID' shows how far it is.",
                )
            await clock.sleep(pause if left is None else min(pause, left))
            pause = min(_SECONDS_MAX, pause * 1.5)


class Batches:
    """The batches of one queue."""

    def __init__(
        self, access: Access, submitter: Submitter, check_door: Callable[[str], Awaitable[None]]
    ) -> None:
        self.access = access
        self.submitter = submitter
        self.check_door = check_door

    def new(self, *, then: WhatThen = None) -> Batch:
        """A batch to be filled, in `async with`."""
        return Batch(self, None, _then(then), is_own=True)

    async def submit(
        self,
        type: str,
        inputs: Sequence[object],
        *,
        then: WhatThen = None,
        **how: Unpack[How],
    ) -> Batch:
        """A batch with one task an input, sealed at once."""
        async with self.new(then=then) as batch:
            await batch.submit_many(type, inputs, **how)
        return batch

    def get(self, id: str) -> Batch:
        """The batch of an id, without asking whether there is one."""
        return Batch(self, check_batch(id), None, is_own=False)

    async def list(
        self, *, limit: int = SHOWN_MAX, reads_max: int = showing.READS_MAX
    ) -> tuple[BatchView, ...]:
        """The last batches, the newest first: those that have not ended, then those that have.

        Two LISTs and, for each of up to `limit` of each kind, what `progress` costs; of each at
        most `reads_max` packs are read.
        """
        layout, views = self.access.layout, list[BatchView]()
        with labelled("batches"):
            for prefix in (layout.open_batches, layout.ended_batches):
                ids: dict[str, None] = {}
                async for page in pages(self.access.store, prefix):
                    read = (layout.read_batch_id(entry.key) for entry in page.entries)
                    ids.update({batch: None for batch in read if batch is not None})
                for batch in sorted(ids, reverse=True)[:limit]:
                    with suppress(BatchNotFound):
                        if batch not in (view.id for view in views):
                            views.append(
                                await showing.view(self.access, batch, reads_max=reads_max)
                            )
        return tuple(views)


def _then(given: WhatThen) -> Then | None:
    if given is None:
        return None
    name, value = (given, None) if isinstance(given, str) else given
    what = f"The input of the task {name!r} that comes then"
    return Then(check_name(name, what="type"), held_input(value, what=what, levels=1))
