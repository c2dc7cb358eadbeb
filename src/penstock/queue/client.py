"""The queue as its users see it: submit tasks, ask for them, wait for them, cancel them.

    queue = await Queue.open("s3://bucket/root", name="images")
    task = await queue.submit("resize", {"n": 1}, key="once-per-n", delay=30)
    print(await task.result(timeout=60))

A queue is made by the first who opens it. `Queue(url, name=...)` without `open` connects when it is
first used with `async with`, or by a `Worker` that runs it: for modules that are imported before
there is an event loop. One object is used by one event loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Unpack

import msgspec

from penstock.kernel.errors import InvalidInput
from penstock.queue.archived import Archive
from penstock.queue.batches.api import Batch, Batches, How, WhatThen
from penstock.queue.cancelling import CANCEL_LIMIT, cancel_found, cancel_tasks
from penstock.queue.config import (
    QueueConfig,
    change_config,
    no_such_queue,
    read_config,
    reshard,
)
from penstock.queue.connection import Connection
from penstock.queue.control import Control, Held
from penstock.queue.draining import wait_until_empty
from penstock.queue.gathering import Gatherer
from penstock.queue.inspection.filters import TagFilters
from penstock.queue.inspection.tasks import Listing, find_tasks
from penstock.queue.limits.api import Limits
from penstock.queue.moments import delay_until, expires_until
from penstock.queue.options import Options
from penstock.queue.places import TaskId, task_at
from penstock.queue.purging import Choice, Purged, purge
from penstock.queue.reading import Reader
from penstock.queue.replays import replay
from penstock.queue.schedules.api import Schedules
from penstock.queue.schemas import changed_schemas
from penstock.queue.submission import MIXED, Submitter, checked_tasks
from penstock.queue.views import TaskEvent, TaskView
from penstock.store.metered import labelled


class Task:
    """A task that was submitted, or asked for by its id."""

    __slots__ = ("_queue", "id")

    def __init__(self, queue: Queue, id: TaskId) -> None:
        self._queue = queue
        self.id = id

    def __repr__(self) -> str:
        return f"Task({self.id!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Task) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    async def result(self, timeout: float | None = None) -> Any:  # noqa: ASYNC109 - users' word
        """What its handler returned, once it has.

        Raises `TaskFailed`, `TaskCancelled`, or `NotSettled`, a `TimeoutError`, if it takes longer
        than `timeout` seconds.
        """
        return await self._queue.result(self.id, timeout=timeout)

    async def view(self) -> TaskView:
        """Its present state."""
        return await self._queue.get(self.id)

    async def cancel(self, reason: str = "") -> TaskView:
        """Cancel it."""
        return await self._queue.cancel(self.id, reason)


class Queue(Connection):
    """One process's connection to one queue, and what can be done with it."""

    _gatherer: Gatherer | None = None

    async def submit(
        self,
        type: str,
        input: object = None,
        *,
        key: str | None = None,
        key_seconds: float | None = None,
        same_input: bool = False,
        delay: float = 0.0,
        at: datetime | None = None,
        priority: int = 0,
        limit: str = "",
        expires: float | None = None,
        expires_at: datetime | None = None,
        tags: Mapping[str, str] | None = None,
        affinity: str = "",
    ) -> Task:
        """Submit one task, to start `delay` seconds from now, or `at` a time.

        With a `key`, a second submit of the same type and key is the same task, as long as the
        first is not settled and for `key_seconds` after that, the queue's if none are given; with
        `same_input`, it raises `KeyConflict` if its input is another. What has a higher
        `priority`, from -9 to 9, comes first. A `limit` is the key of a limit that the task falls
        under. What has not begun after `expires` seconds, or at `expires_at`, never will. Tasks
        of one `affinity` meet the same worker, as far as that can be.
        """
        options = Options(
            key=key,
            key_seconds=key_seconds,
            same_input=same_input,
            delay=await delay_until(self.access.store, delay, at),
            priority=priority,
            limit=limit,
            expires=await expires_until(self.access.store, expires, expires_at),
            tags=tags or {},
            affinity=affinity,
        )
        await self._check_door(type)
        if key is None and self._gather_seconds is not None:
            task = await self._gathering(self._gather_seconds).submit(
                type, self._submitter().encoded(type, input), options
            )
        elif key is None:
            (task,) = await self._submitter().submit_many(type, [input], options)
        else:
            kept_seconds = int(key_seconds or self.access.config.key_seconds)
            task = await self._submitter().submit_keyed(
                type, input, options, key_seconds=kept_seconds
            )
        return Task(self, task)

    async def submit_many(
        self,
        type: str,
        inputs: Sequence[object],
        *,
        delay: float = 0.0,
        at: datetime | None = None,
        priority: int = 0,
        limit: str = "",
        expires: float | None = None,
        expires_at: datetime | None = None,
        tags: Mapping[str, str] | None = None,
        affinity: str = "",
    ) -> list[Task]:
        """Submit one task an input, up to 1,000 in one object: much cheaper than one by one.

        Nothing is submitted if an input is wrong. Raises `NotAllSubmitted` if a part failed.
        """
        options = Options(
            delay=await delay_until(self.access.store, delay, at),
            priority=priority,
            limit=limit,
            expires=await expires_until(self.access.store, expires, expires_at),
            tags=tags or {},
            affinity=affinity,
        )
        await self._check_door(type)
        ids = await self._submitter().submit_many(type, inputs, options)
        return [Task(self, each) for each in ids]

    async def submit_mixed(
        self,
        tasks: Sequence[tuple[str, object]],
        *,
        delay: float = 0.0,
        at: datetime | None = None,
        priority: int = 0,
        limit: str = "",
        expires: float | None = None,
        expires_at: datetime | None = None,
        tags: Mapping[str, str] | None = None,
        affinity: str = "",
    ) -> list[Task]:
        """Submit tasks of several types, each a type and its input; one object a type.

        Nothing is submitted if one is wrong. Raises `NotAllSubmitted` if a part failed.
        """
        options = Options(
            delay=await delay_until(self.access.store, delay, at),
            priority=priority,
            limit=limit,
            expires=await expires_until(self.access.store, expires, expires_at),
            tags=tags or {},
            affinity=affinity,
        )
        for kind in {each[0] for each in checked_tasks(tasks)}:
            await self._check_door(kind)
        ids = await self._submitter().submit_mixed(MIXED, tasks, options)
        return [Task(self, each) for each in ids]

    def _gathering(self, seconds: float) -> Gatherer:
        if self._gatherer is None:

            async def send(type: str, bodies: list[msgspec.Raw], options: Options) -> list[TaskId]:
                return await self._submitter().submit_encoded(type, bodies, options)

            clock = self.access.store.clock.machine
            self._gatherer = Gatherer(send, seconds=seconds, clock=clock)
        return self._gatherer

    async def close(self) -> None:
        """Send what is being gathered, and close the connection."""
        gatherer, self._gatherer = self._gatherer, None
        if gatherer is not None:
            await gatherer.close()
        await super().close()

    async def _check_door(self, type: str) -> None:
        """Raise `QueueDrained` if submits of this type are refused."""
        if self._door is None:
            raise self._not_open()
        await self._door.check(type)

    def _submitter(self) -> Submitter:
        access = self.access
        return Submitter(
            access.store,
            access.layout,
            access.entropy,
            self._announcer,
            schemas=access.config.schemas,
        )

    def task(self, id: str) -> Task:
        """The task of an id, without asking whether there is one."""
        at, place = task_at(id)
        return Task(self, at.task(place))

    async def get(self, id: str) -> TaskView:
        """The present state of a task. Raises `TaskNotFound`."""
        at, place = task_at(id)
        with labelled("get"):
            return await Reader(self.access).whole(at, place)

    async def tasks(
        self,
        *,
        status: str | Iterable[str] | None = None,
        type: str | None = None,
        tags: TagFilters | None = None,
        limit: int = 50,
    ) -> Listing:
        """Tasks that are in the queue or have settled recently, by status, type and tags.

        `tags` is `{"env": "prod"}`, or a list of forms such as `"env!=prod"` and `"env"`. For
        people and tools: it reads up to 500 objects.
        """
        return await find_tasks(self.access, status=status, type=type, tags=tags, limit=limit)

    async def history(self, id: str) -> list[TaskEvent]:
        """What has happened to a task, oldest first. Raises `TaskNotFound`."""
        at, place = task_at(id)
        with labelled("get"):
            return await Reader(self.access).history(at, place)

    async def result(
        self,
        id: str,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - users' word
    ) -> Any:
        """Wait for a task to end, and return what its handler returned."""
        if self._waiter is None:
            raise self._not_open()
        return await self._waiter.result(id, seconds=timeout)

    async def cancel(self, id: str, reason: str = "") -> TaskView:
        """Cancel a task that has not started; ask one that runs to stop.

        A worker hears of it when it next renews the task's lease, after ten seconds or so. The
        `reason` is shown wherever the task is.
        """
        await cancel_tasks(self.access, [self.task(id).id], reason=reason)
        return await self.get(id)

    async def cancel_many(
        self,
        ids: Iterable[str] | None = None,
        *,
        type: str | None = None,
        tags: TagFilters | None = None,
        reason: str = "",
        limit: int = CANCEL_LIMIT,
    ) -> Listing:
        """Cancel these tasks, or up to `limit` that have not ended of a type or with such tags.

        Returns the tasks as they are then, without those that are not there; `is_whole` says
        whether there may be more. Two to four requests for all that share a pack.
        """
        if ids is None:
            return await cancel_found(self.access, type=type, tags=tags, limit=limit, reason=reason)
        if type is not None or tags:
            raise InvalidInput("Name the tasks to cancel by their ids, or by type and tags.")
        meant = [self.task(each).id for each in ids]
        views = await cancel_tasks(self.access, meant, reason=reason)
        return Listing(tuple(views.values()), notes=(), is_whole=True)

    async def now(self) -> datetime:
        """The store's time, by which everything in the queue is decided, in UTC."""
        found = await self.access.store.now()
        return datetime.fromtimestamp(found.middle, UTC)

    async def config(self) -> QueueConfig:
        """The queue's settings as they are in the bucket now."""
        access = self.access
        with labelled("open"):
            found = await read_config(access.store, access.layout)
        if found is None:
            raise await no_such_queue(access.store, access.layout)
        return found

    async def configure(
        self,
        *,
        direct: Sequence[str] | None = None,
        key_seconds: int | None = None,
        schemas: Mapping[str, object] | None = None,
    ) -> QueueConfig:
        """Change which types are direct, how long keys stay taken, or schemas of types.

        `schemas` has the JSON schema of each type that is to get one, and None for a type that is
        to have none; other types keep theirs. Returns what holds then.
        This queue object follows at once, other producers and workers when they open it again.
        """
        changes: dict[str, Any] = {}
        wanted = dict(schemas or {})
        changed_schemas({}, wanted)
        if direct is not None:
            if isinstance(direct, str):
                raise InvalidInput("The direct types are a list.", hint=f"Write [{direct!r}].")
            changes["direct"] = tuple(direct)
        if key_seconds is not None:
            changes["key_seconds"] = int(key_seconds)
        access = self.access
        with labelled("open"):
            config = await change_config(
                access.store,
                access.layout,
                lambda present: msgspec.structs.replace(
                    present, **changes, schemas=changed_schemas(present.schemas, wanted)
                ),
                entropy=access.entropy,
            )
        self._adopt(config)
        return config

    async def reshard(self, shards: int) -> None:
        """Change the number of shards, a power of two, while workers run.

        They go on with what they do, and have moved after two minutes at the latest.
        """
        access = self.access
        with labelled("reshard"):
            config = await reshard(access.store, access.layout, shards, entropy=access.entropy)
        self._adopt(config)

    async def replay(self, id: str) -> Task:
        """Submit a settled task's input again, as a new task. To replay twice is to replay once."""
        view = await self.get(id)
        if not view.is_settled:
            raise InvalidInput(
                f"The task {id!r} is {view.status}: only what has ended can be replayed."
            )
        await self._check_door(view.type)
        with labelled("submit"):
            return Task(self, await replay(self.access, view))

    @property
    def archive(self) -> Archive:
        """What is left of settled tasks: its files, and how long they are kept."""
        return Archive(self.access)

    async def purge(self, **choice: Unpack[Choice]) -> Purged:
        """Cancel what has not ended and forget what has: `types`, `statuses`, `older_than`."""
        return await purge(self.access, **choice)

    @property
    def batches(self) -> Batches:
        """Tasks that are waited for together: `queue.batches.get(id)`, `list()`."""
        return Batches(self.access, self._submitter(), self._check_door)

    async def batch(
        self,
        type: str,
        inputs: Sequence[object],
        *,
        then: WhatThen = None,
        **how: Unpack[How],
    ) -> Batch:
        """Submit tasks that are waited for together; when all have ended, `then` is submitted."""
        return await self.batches.submit(type, inputs, then=then, **how)

    def new_batch(self, *, then: WhatThen = None) -> Batch:
        """A batch that is filled inside of `async with queue.new_batch() as batch:`."""
        return self.batches.new(then=then)

    @property
    def schedules(self) -> Schedules:
        """Tasks that are submitted at the times of a cron expression."""
        return Schedules(self.access)

    @property
    def control(self) -> Control:
        """What is paused and drained."""
        return Control(self.access, self._door)

    @property
    def limits(self) -> Limits:
        """How many tasks of a key run at a time, or start in a time."""
        return Limits(self.access)

    async def pause(self, type: str | None = None, reason: str = "") -> tuple[Held, ...]:
        """Start nothing more, of a type or at all, until `resume`: workers hear within 10 s."""
        return await self.control.pause(type, reason)

    async def drain(self, type: str | None = None) -> tuple[Held, ...]:
        """Refuse submits, of a type or at all, until `resume`: producers hear within 30 s."""
        return await self.control.drain(type)

    async def resume(self, type: str | None = None) -> tuple[Held, ...]:
        """Lift pause and drain from a type, or from the queue as a whole; returns what is left."""
        return await self.control.resume(type)

    async def wait_until_empty(self, type: str | None = None, *, seconds: float) -> bool:
        """Wait until no task, of a type or at all, is unsettled; whether that is so in time."""
        return await wait_until_empty(self.access, type, seconds=seconds)
