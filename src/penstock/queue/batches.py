"""Batches: tasks that are waited for together, and a follow-up task for when all have ended.

    batch = await queue.batch("resize", inputs, then=("zip", {"name": "images.zip"}))
    print(await batch.wait(timeout=600))

    async with queue.new_batch(then="zip") as batch:
        await batch.submit_many("resize", some)
        await batch.submit("index", {"all": True})

A batch is sealed when its `async with` block ends without an error. One whose block fails is
never sealed: what was submitted runs, and no follow-up comes. A submit that raises has not
added what it could not surely submit; catch the error and submit again, if the batch is to go
on.

A batch has any number of packs, each of which names the batch. Besides them:

- `batches/open/{id}.json`, written by the producer before the first pack, and once more to seal
  the batch: its packs and its follow-up.
- `batches/marks/{id}/{pack}~…`, written by whoever settles a pack of it or finds one settled:
  how
  its tasks have ended. The key says it all.
- `batches/ended/{id}.json`, created once, when every pack of a sealed batch has a mark.
- The follow-up task, submitted with a key that is made from the batch's id.

States: *open* (the producer adds packs), *sealed* (the producer has written the list of its
packs, in one swap), *ended* (whoever finds all marks has created the record). Then that
process, or another, submits the follow-up, deletes the open object, and last the marks: as long
as the open object is there, the batch will be finished.

| a crash | leaves |
|---|---|
| of the producer, before it seals | an open batch: its tasks run; it never ends, and is forgotten |
| of a worker between settling and marking | no mark: written by maintenance, or before archiving |
| of whoever ends it, before the record | all marks: the next who looks ends it |
| the same, after the record | the open object: the next submits the same key again |
| the same, after the open object | orphaned marks, deleted within a day or two |

**Why the follow-up is submitted once** (QUEUE-21). As for the ticks of schedules
(`penstock.queue.schedules`): it is a submit with a key, of the moment r that was noted before
the open object was read. It has no effect if it arrives later than W (QUEUE-2), or beside the
tombstone of an earlier one (QUEUE-6), if only r < u + `KEPT_SECONDS`, where u is when the earlier
one succeeded. The record says when it was made, and nobody submits before that: so it is enough
that r is less than `KEPT_SECONDS` after it. Otherwise, when a process died and none came for a
day, the task is looked up first. Who has read the open object before it was deleted cannot use
it for longer than W, even if the record is forgotten by then. The record decides once how the
batch has ended: everybody submits the same counts.

A pack that a failed submit has perhaps written does not belong to the batch, though it says so:
only the sealed list counts.

**Cost.** The producer: 3 puts, a GET and a LIST, besides the packs. Each pack: a put for its
mark, and a GET and a LIST by the worker to see whether that was the last (each time if few are
missing, otherwise once in five seconds). The end: a put, and two for the follow-up. So a batch
of one pack costs $0.00005 more than its tasks alone. Maintenance: a GET in 15 s to two minutes
for each batch that has not ended, and a LIST if it is sealed; if there is none, the change
signal and a LIST in a quarter of an hour, 1.5 cents a month.

This module is the users' side; `penstock.queue.batch_marks` has documents and marks, and
`penstock.queue.batch_progress` follows and ends batches.
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
from penstock.queue import batch_progress
from penstock.queue.batch_marks import (
    PACKS_MAX,
    BatchFollowUp,
    BatchView,
    OpenBatch,
    new_batch,
    then_task,
)
from penstock.queue.batch_progress import BatchFinisher
from penstock.queue.context import QueueContext
from penstock.queue.ids import PackAt, TaskId, check_name, task_at
from penstock.queue.layout import check_batch
from penstock.queue.submit_options import SubmitOptions, held_input
from penstock.queue.submitter import NotAllSubmitted, Submitter
from penstock.store.base import pages
from penstock.store.metered import labelled

_log = logging.getLogger(__name__)

SHOWN_MAX: Final = 100
_SECONDS_MIN: Final = 0.1
_SECONDS_MAX: Final = 5.0
_ASKED_SECONDS: Final = 60.0
"""So often who waits asks whether there is such a batch at all."""

FollowUpArgument = str | tuple[str, object] | None
"""The type of the task that comes when all have ended, alone or with an input; or none."""


class SubmitArguments(TypedDict, total=False):
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
        self, batches: Batches, id: str | None, then: BatchFollowUp | None, *, is_own: bool
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
                "The batch is not open.",
                hint="Use 'async with queue.new_batch() as batch:'.",
            )
        return self._id

    @property
    def then_task(self) -> TaskId | None:
        """The id that the task will have that comes when all have ended, if this made the batch."""
        return then_task(self.id, self._then)

    async def __aenter__(self) -> Self:
        if not self._is_own or self._id is not None:
            raise InvalidInput("A batch is started once.", hint="Make another: queue.new_batch().")
        access = self._access
        with labelled("batches"):
            now_ms = int((await access.store.now()).latest * 1000)
            batch = new_batch(now_ms, access.entropy)
            new = OpenBatch(made_ms=now_ms, then=self._then)
            await BatchFinisher(access).cell(batch).update(lambda present: present or new)
            await access.ring_bell()
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

    async def submit(
        self, type: str, input: object = None, **how: Unpack[SubmitArguments]
    ) -> TaskId:
        """Submit one task that belongs to the batch."""
        (task,) = await self.submit_many(type, [input], **how)
        return task

    async def submit_many(
        self, type: str, inputs: Sequence[object], **how: Unpack[SubmitArguments]
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
        options = SubmitOptions(**how, batch=self.id)
        await self._batches.check_drained(type)
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

        ender = BatchFinisher(self._access)
        with labelled("batches"):
            cell = ender.cell(self.id)
            if await cell.update(change) is None:
                # Raises, unless it was sealed and has ended by now.
                await batch_progress.ended_unless_open(self._access, self.id)
            self._is_sealed = True
            try:
                await ender.try_to_end(self.id, cell)
            except StoreError as error:
                _log.warning("failed to end the batch %s, a worker will retry: %s", self.id, error)

    async def progress(self) -> BatchView:
        """How far it is. Raises `BatchNotFound`."""
        own = () if self._is_sealed else tuple(self._packs)
        with labelled("batches"):
            return await batch_progress.view(self._access, self.id, own=own)

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
                    found = await batch_progress.ended_view(self._access, self.id)
                    if found is None and clock.monotonic() >= ask_at:
                        found = await batch_progress.ended_unless_open(self._access, self.id)
                        ask_at = clock.monotonic() + _ASKED_SECONDS
                if found is not None:
                    return found
            except (Throttled, Unavailable) as error:
                _log.warning("waiting for the batch %s: read failed, retrying: %s", self.id, error)
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
        self,
        access: QueueContext,
        submitter: Submitter,
        check_drained: Callable[[str], Awaitable[None]],
    ) -> None:
        self.access = access
        self.submitter = submitter
        self.check_drained = check_drained

    def new(self, *, then: FollowUpArgument = None) -> Batch:
        """A batch to be filled, in `async with`."""
        return Batch(self, None, _then(then), is_own=True)

    async def submit(
        self,
        type: str,
        inputs: Sequence[object],
        *,
        then: FollowUpArgument = None,
        **how: Unpack[SubmitArguments],
    ) -> Batch:
        """A batch with one task an input, sealed at once."""
        async with self.new(then=then) as batch:
            await batch.submit_many(type, inputs, **how)
        return batch

    def get(self, id: str) -> Batch:
        """The batch of an id, without asking whether there is one."""
        return Batch(self, check_batch(id), None, is_own=False)

    async def list(
        self, *, limit: int = SHOWN_MAX, reads_max: int = batch_progress.READS_MAX
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
                                await batch_progress.view(self.access, batch, reads_max=reads_max)
                            )
        return tuple(views)


def _then(given: FollowUpArgument) -> BatchFollowUp | None:
    if given is None:
        return None
    name, value = (given, None) if isinstance(given, str) else given
    what = f"The input of the task {name!r} that comes then"
    return BatchFollowUp(check_name(name, what="type"), held_input(value, what=what, levels=1))
