"""The queue as its users see it: submit tasks, read them, wait for them, cancel them.

    queue = await Queue.open("s3://bucket/root", name="images")
    task = await queue.submit("resize", {"n": 1}, key="once-per-n", delay=30)
    print(await task.result(timeout=60))

The first process that opens a queue creates it. `Queue(url, name=...)` without `open` connects
when it is first used with `async with`, or by a `Worker` that runs it: for modules that are
imported before there is an event loop. It can be closed and connected again; a store that was
handed in stays the caller's to close. One object is used by one event loop.

To open costs a GET of the settings, or two requests where the queue is created, and what the
store needs to know the time. `QueueConnection` is that part, `Queue` adds the operations.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

import msgspec

from penstock.kernel.entropy import Entropy
from penstock.kernel.errors import InvalidInput
from penstock.queue.archive_api import QueueArchive
from penstock.queue.batches import Batch, Batches, FollowUpArgument, SubmitArguments
from penstock.queue.canceller import CANCEL_LIMIT, cancel_found, cancel_tasks
from penstock.queue.config import (
    EVERY_TYPE,
    QueueConfig,
    change_config,
    checked,
    differences,
    make_queue,
    no_such_queue,
    read_config,
    reshard,
)
from penstock.queue.context import QueueContext
from penstock.queue.control import Control, HeldType, SubmitGuard
from penstock.queue.doorbell import DoorbellRinger
from penstock.queue.ids import TaskId, task_at
from penstock.queue.inbox_announcer import PackAnnouncer
from penstock.queue.incarnation import IncarnationLocks
from penstock.queue.inspection.task_search import TagFilters, TaskListing, find_tasks
from penstock.queue.layout import QueueLayout, is_used_once
from penstock.queue.limits import QueueLimits
from penstock.queue.replay import replay
from penstock.queue.retention import PurgeArguments, PurgeResult, purge
from penstock.queue.schedules import Schedules
from penstock.queue.settings import (
    QUEUE_SCHEMA,
    DispatchSettings,
    dispatch_from,
    is_direct_from,
)
from penstock.queue.submit_options import (
    SubmitOptions,
    changed_schemas,
    check_key_seconds,
    delay_until,
    expires_until,
)
from penstock.queue.submitter import MIXED, SubmitGatherer, Submitter, check_seconds, checked_tasks
from penstock.queue.survey import wait_until_empty
from penstock.queue.task_reader import QueueTaskReader, ResultWaiter
from penstock.queue.task_views import TaskEvent, TaskView
from penstock.store.base import ObjectStore
from penstock.store.metered import labelled
from penstock.store.opening import Opening, open_store
from penstock.store.tombstoned import declare_used_once

_log = logging.getLogger(__name__)


class QueueConnection:
    """One process's connection to one queue: open, closed, or opened when it is first used."""

    def __init__(
        self,
        url: str,
        *,
        name: str,
        config: QueueConfig | None = None,
        create: bool = True,
        opening: Opening | None = None,
        dispatch: DispatchSettings | None = None,
        gather_seconds: float | None = None,
    ) -> None:
        self.url = url
        self.name = name
        self._layout = QueueLayout(name)
        file = QUEUE_SCHEMA.file(os.environ, Path())
        is_direct = is_direct_from(os.environ, file)
        all_direct = QueueConfig(direct=(EVERY_TYPE,)) if is_direct else None
        self._wanted = checked(config or all_direct or QueueConfig())
        self._create = create
        self._opening = opening or Opening()
        self._access: QueueContext | None = None
        self._waiter: ResultWaiter | None = None
        self._guard: SubmitGuard | None = None
        self._dispatch = dispatch or dispatch_from(os.environ, file)
        self._announcer: PackAnnouncer | None = None
        self._owns_store = True
        self._gather_seconds = None if gather_seconds is None else check_seconds(gather_seconds)
        self.locks: IncarnationLocks | None = None
        """What proves that a worker's process has ended, where the queue was handed a store."""

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        name: str,
        config: QueueConfig | None = None,
        create: bool = True,
        opening: Opening | None = None,
        dispatch: DispatchSettings | None = None,
        gather_seconds: float | None = None,
    ) -> Self:
        """Connect to a queue; make it if it is not there and `create` is true.

        With `gather_seconds`, submits of that time share objects (`penstock.queue.submitter`).
        """
        queue = cls(
            url,
            name=name,
            config=config,
            create=create,
            opening=opening,
            dispatch=dispatch,
            gather_seconds=gather_seconds,
        )
        await queue._connect()
        return queue

    @classmethod
    async def on(
        cls, store: ObjectStore, *, name: str, entropy: Entropy, config: QueueConfig | None = None
    ) -> Self:
        """A queue in a store that is open already, and that stays the caller's to close."""
        queue = cls("", name=name, config=config)
        await queue.attach(store, entropy)
        return queue

    async def attach(self, store: ObjectStore, entropy: Entropy) -> None:
        """Connect this object to a store that is open already, and stays the caller's to close."""
        self._owns_store = False
        await self._use(store, entropy)

    @property
    def access(self) -> QueueContext:
        """The store, the keys and the settings, for the parts that work on the queue."""
        if self._access is None:
            raise self._not_open()
        return self._access

    def _not_open(self) -> InvalidInput:
        return InvalidInput(
            f"The queue {self.name!r} is not open.",
            hint="Use 'await Queue.open(...)', or 'async with queue:'.",
        )

    async def _connect(self) -> None:
        store = await open_store(self.url, replace(self._opening, create=self._create))
        self._owns_store = True
        try:
            await self._use(store, self._opening.entropy)
        except BaseException:
            await store.close()
            raise

    async def _use(self, store: ObjectStore, entropy: Entropy) -> None:
        declare_used_once(store, is_used_once)
        with labelled("open"):
            config = await read_config(store, self._layout)
            if config is None and not self._create:
                raise await no_such_queue(store, self._layout)
            if config is None:
                config = await make_queue(store, self._layout, self._wanted)
            await store.now()
        differing = differences(self._wanted, config)
        if differing:
            _log.warning(
                "the queue %r exists, with other settings than its config=: %s."
                " 'penstock queue config set' or queue.configure() changes it",
                self.name,
                ", ".join(differing),
            )
        ringer = DoorbellRinger(store, self._layout.doorbell, entropy)
        self._access = QueueContext(store, self._layout, config, entropy, ringer=ringer)
        self._waiter = ResultWaiter(QueueTaskReader(self._access))
        self._announcer = PackAnnouncer(self._access, self._dispatch)
        self._guard = SubmitGuard(self._access)

    def _adopt(self, config: QueueConfig) -> None:
        """The settings have changed."""
        self._access = replace(self.access, config=config)
        self._announcer = PackAnnouncer(self._access, self._dispatch)

    async def close(self) -> None:
        """Close the connection."""
        access, self._access, self._waiter = self._access, None, None
        if access is not None and self._owns_store:
            await access.store.close()

    async def __aenter__(self) -> Self:
        if self._access is None:
            await self._connect()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Self]:
        """This queue, connected: closed in the end only if it was not connected before."""
        if self._access is not None:
            yield self
        else:
            async with self:
                yield self


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


class Queue(QueueConnection):
    """One process's connection to one queue, and what can be done with it."""

    _gatherer: SubmitGatherer | None = None

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
        options = SubmitOptions(
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
        await self._check_drained(type)
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
        options = SubmitOptions(
            delay=await delay_until(self.access.store, delay, at),
            priority=priority,
            limit=limit,
            expires=await expires_until(self.access.store, expires, expires_at),
            tags=tags or {},
            affinity=affinity,
        )
        await self._check_drained(type)
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
        options = SubmitOptions(
            delay=await delay_until(self.access.store, delay, at),
            priority=priority,
            limit=limit,
            expires=await expires_until(self.access.store, expires, expires_at),
            tags=tags or {},
            affinity=affinity,
        )
        for kind in {each[0] for each in checked_tasks(tasks)}:
            await self._check_drained(kind)
        ids = await self._submitter().submit_mixed(MIXED, tasks, options)
        return [Task(self, each) for each in ids]

    def _gathering(self, seconds: float) -> SubmitGatherer:
        if self._gatherer is None:

            async def send(
                type: str, bodies: list[msgspec.Raw], options: SubmitOptions
            ) -> list[TaskId]:
                return await self._submitter().submit_encoded(type, bodies, options)

            clock = self.access.store.clock.machine
            self._gatherer = SubmitGatherer(send, seconds=seconds, clock=clock)
        return self._gatherer

    async def close(self) -> None:
        """Send what is being gathered, and close the connection."""
        gatherer, self._gatherer = self._gatherer, None
        if gatherer is not None:
            await gatherer.close()
        await super().close()

    async def _check_drained(self, type: str) -> None:
        """Raise `QueueDrained` if submits of this type are refused."""
        if self._guard is None:
            raise self._not_open()
        await self._guard.check(type)

    def _submitter(self) -> Submitter:
        access = self.access
        return Submitter.of(access, self._announcer, access.config.schemas)

    def task(self, id: str) -> Task:
        """The task of an id, without asking whether there is one."""
        at, place = task_at(id)
        return Task(self, at.task(place))

    async def get(self, id: str) -> TaskView:
        """The present state of a task. Raises `TaskNotFound`."""
        at, place = task_at(id)
        with labelled("get"):
            return await QueueTaskReader(self.access).whole(at, place)

    async def tasks(
        self,
        *,
        status: str | Iterable[str] | None = None,
        type: str | None = None,
        tags: TagFilters | None = None,
        limit: int = 50,
    ) -> TaskListing:
        """Tasks that are in the queue or have settled recently, by status, type and tags.

        `tags` is `{"env": "prod"}`, or a list of forms such as `"env!=prod"` and `"env"`. For
        people and tools: it reads up to 500 objects.
        """
        return await find_tasks(self.access, status=status, type=type, tags=tags, limit=limit)

    async def history(self, id: str) -> list[TaskEvent]:
        """What has happened to a task, oldest first. Raises `TaskNotFound`."""
        at, place = task_at(id)
        with labelled("get"):
            return await QueueTaskReader(self.access).history(at, place)

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
    ) -> TaskListing:
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
        return TaskListing(tuple(views.values()), notes=(), is_whole=True)

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
            check_key_seconds(key_seconds)
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
        await self._check_drained(view.type)
        with labelled("submit"):
            return Task(self, await replay(self.access, view))

    @property
    def archive(self) -> QueueArchive:
        """What is left of settled tasks: its files, and how long they are kept."""
        return QueueArchive(self.access)

    async def purge(self, **choice: Unpack[PurgeArguments]) -> PurgeResult:
        """Cancel what has not ended and forget what has: `types`, `statuses`, `older_than`."""
        return await purge(self.access, **choice)

    @property
    def batches(self) -> Batches:
        """Tasks that are waited for together: `queue.batches.get(id)`, `list()`."""
        return Batches(self.access, self._submitter(), self._check_drained)

    async def batch(
        self,
        type: str,
        inputs: Sequence[object],
        *,
        then: FollowUpArgument = None,
        **how: Unpack[SubmitArguments],
    ) -> Batch:
        """Submit tasks that are waited for together; when all have ended, `then` is submitted."""
        return await self.batches.submit(type, inputs, then=then, **how)

    def new_batch(self, *, then: FollowUpArgument = None) -> Batch:
        """A batch that is filled inside of `async with queue.new_batch() as batch:`."""
        return self.batches.new(then=then)

    @property
    def schedules(self) -> Schedules:
        """Tasks that are submitted at the times of a cron expression."""
        return Schedules(self.access)

    @property
    def control(self) -> Control:
        """What is paused and drained."""
        return Control(self.access, self._guard)

    @property
    def limits(self) -> QueueLimits:
        """How many tasks of a key run at a time, or start in a time."""
        return QueueLimits(self.access)

    async def pause(self, type: str | None = None, reason: str = "") -> tuple[HeldType, ...]:
        """Start nothing more, of a type or at all, until `resume`: workers hear within 10 s."""
        return await self.control.pause(type, reason)

    async def drain(self, type: str | None = None) -> tuple[HeldType, ...]:
        """Refuse submits, of a type or at all, until `resume`: producers hear within 30 s."""
        return await self.control.drain(type)

    async def resume(self, type: str | None = None) -> tuple[HeldType, ...]:
        """Lift pause and drain from a type, or from the queue as a whole; returns what is left."""
        return await self.control.resume(type)

    async def wait_until_empty(self, type: str | None = None, *, seconds: float) -> bool:
        """Wait until no task, of a type or at all, is unsettled; whether that is so in time."""
        return await wait_until_empty(self.access, type, seconds=seconds)
