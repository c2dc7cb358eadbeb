"""The queue as its users see it: submit tasks, ask for them, wait for them, cancel them.

    queue = await Queue.open("s3://bucket/root", name="images")
    task = await queue.submit("resize", {"n": 1}, key="once-per-n", delay=30)
    print(await task.result(timeout=60))

A queue is made by the first who opens it. `Queue(url, name=...)` without `open` connects when it is
first used with `async with`, or by a `Worker` that runs it: for modules that are imported before
there is an event loop. One object is used by one event loop.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import datetime
from types import TracebackType
from typing import Any, Final, Self

from penstock.kernel.entropy import Entropy, new_id
from penstock.kernel.errors import InvalidInput, NotFound
from penstock.queue.access import Access
from penstock.queue.cancelling import PackToCancel
from penstock.queue.config import QueueConfig, checked, make_queue, no_such_queue, read_config
from penstock.queue.layout import QueueLayout
from penstock.queue.options import Options
from penstock.queue.places import TaskId, task_at
from penstock.queue.reading import Reader
from penstock.queue.replays import replay
from penstock.queue.submission import Submitter
from penstock.queue.transitions import Claim
from penstock.queue.views import CANCELLER, TaskEvent, TaskView
from penstock.queue.waiting import Waiter
from penstock.store.base import ObjectStore
from penstock.store.metered import labelled
from penstock.store.opening import Opening, open_store

_CANCEL_LEASE_MS: Final = 30_000


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

    async def cancel(self) -> TaskView:
        """Cancel it."""
        return await self._queue.cancel(self.id)


class Queue:
    """One process's connection to one queue."""

    def __init__(
        self,
        url: str,
        *,
        name: str,
        config: QueueConfig | None = None,
        create: bool = True,
        opening: Opening | None = None,
    ) -> None:
        self.url = url
        self.name = name
        self._layout = QueueLayout(name)
        self._wanted = checked(config or QueueConfig())
        self._create = create
        self._opening = opening or Opening()
        self._access: Access | None = None
        self._waiter: Waiter | None = None
        self._owns_store = True

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        name: str,
        config: QueueConfig | None = None,
        create: bool = True,
        opening: Opening | None = None,
    ) -> Self:
        """Connect to a queue; make it if it is not there and `create` is true."""
        queue = cls(url, name=name, config=config, create=create, opening=opening)
        await queue._connect()
        return queue

    @classmethod
    async def on(
        cls, store: ObjectStore, *, name: str, entropy: Entropy, config: QueueConfig | None = None
    ) -> Self:
        """A queue in a store that is open already, and that stays the caller's to close."""
        queue = cls("", name=name, config=config)
        queue._owns_store = False
        await queue._use(store, entropy)
        return queue

    @property
    def access(self) -> Access:
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
        try:
            await self._use(store, self._opening.entropy)
        except BaseException:
            await store.close()
            raise

    async def _use(self, store: ObjectStore, entropy: Entropy) -> None:
        with labelled("open"):
            config = await read_config(store, self._layout)
            if config is None and not self._create:
                raise await no_such_queue(store, self._layout)
            if config is None:
                config = await make_queue(store, self._layout, self._wanted)
            await store.now()
        self._access = Access(store, self._layout, config, entropy)
        self._waiter = Waiter(Reader(self._access))

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

    async def submit(
        self,
        type: str,
        input: object = None,
        *,
        key: str | None = None,
        delay: float = 0.0,
        at: datetime | None = None,
        priority: int = 0,
        limit: str = "",
        expires: float | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> Task:
        """Submit one task, to start `delay` seconds from now, or `at` a time.

        With a `key`, a second submit of the same type and key is the same task, as long as the
        first is not settled and for the queue's `key_seconds` after that. What has a higher
        `priority`, from -9 to 9, comes first. A `limit` is the key of a limit that the task falls
        under. What has not begun after `expires` seconds never will.
        """
        options = Options(
            key=key,
            delay=await self._delay(delay, at),
            priority=priority,
            limit=limit,
            expires=expires,
            tags=tags or {},
        )
        if key is None:
            (task,) = await self._submitter().submit_many(type, [input], options)
        else:
            key_seconds = self.access.config.key_seconds
            task = await self._submitter().submit_keyed(
                type, input, options, key_seconds=key_seconds
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
        tags: Mapping[str, str] | None = None,
    ) -> list[Task]:
        """Submit one task an input, up to 1,000 in one object: much cheaper than one by one.

        Nothing is submitted if an input is wrong. Raises `NotAllSubmitted` if a part failed.
        """
        options = Options(
            delay=await self._delay(delay, at),
            priority=priority,
            limit=limit,
            expires=expires,
            tags=tags or {},
        )
        ids = await self._submitter().submit_many(type, inputs, options)
        return [Task(self, each) for each in ids]

    async def _delay(self, delay: float, at: datetime | None) -> float:
        """How long from now a task is to start, if it is to start at a time."""
        if at is None:
            return delay
        if delay or at.tzinfo is None:
            raise InvalidInput(
                "A task starts at a time that knows its zone, or after a delay.",
                hint="Write at=datetime(2030, 1, 31, 6, tzinfo=ZoneInfo('Europe/Paris')).",
            )
        return max(0.0, at.timestamp() - (await self.access.store.now()).latest)

    def _submitter(self) -> Submitter:
        access = self.access
        return Submitter(access.store, access.layout, access.entropy)

    def task(self, id: str) -> Task:
        """The task of an id, without asking whether there is one."""
        at, place = task_at(id)
        return Task(self, at.task(place))

    async def get(self, id: str) -> TaskView:
        """The present state of a task. Raises `TaskNotFound`."""
        at, place = task_at(id)
        with labelled("get"):
            return await Reader(self.access).view(at, place)

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

    async def cancel(self, id: str) -> TaskView:
        """Cancel a task that has not started; ask one that runs to stop.

        A worker hears of it when it next renews the task's lease, after ten seconds or so.
        """
        at, place = task_at(id)
        access = self.access
        hand = PackToCancel(access.store, access.layout, at, entropy=access.entropy)
        claim = Claim(
            new_id(access.entropy, characters=16), CANCELLER, _CANCEL_LEASE_MS, at.count, 2**31
        )
        with labelled("cancel"), suppress(NotFound):
            await hand.cancel(frozenset({place}), claim)
        return await self.get(id)

    async def replay(self, id: str) -> Task:
        """Submit a settled task's input again, as a new task. To replay twice is to replay once."""
        view = await self.get(id)
        if not view.is_settled:
            raise InvalidInput(
                f"The task {id!r} is {view.status}: only what has ended can be replayed."
            )
        with labelled("submit"):
            return Task(self, await replay(self.access, view))
