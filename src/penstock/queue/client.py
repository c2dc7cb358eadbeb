"""The queue as its users see it: submit tasks, ask for them, wait for them, cancel them.

    queue = await Queue.open("s3://bucket/root", name="images")
    task = await queue.submit("resize", {"n": 1}, key="once-per-n", delay=30)
    print(await task.result(timeout=60))

A queue is made by the first who opens it. `Queue(url, name=...)` without `open` connects when it is
first used with `async with`, or by a `Worker` that runs it: for modules that are imported before
there is an event loop. One object is used by one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Final, Self

from penstock.kernel.entropy import Entropy, new_id
from penstock.kernel.errors import (
    InvalidInput,
    NotFound,
    NotSettled,
    TaskCancelled,
    TaskFailed,
    TaskNotFound,
    Throttled,
    Unavailable,
)
from penstock.kernel.wire import decode
from penstock.queue import archive
from penstock.queue.access import Access
from penstock.queue.cancelling import PackToCancel
from penstock.queue.config import QueueConfig, checked, make_queue, no_such_queue, read_config
from penstock.queue.layout import PackAt, QueueLayout, TaskId, task_at
from penstock.queue.ledger import Ledger, check_ledger
from penstock.queue.pack import Pack, check_pack, is_void
from penstock.queue.replays import replay
from penstock.queue.submission import Submitter
from penstock.queue.transitions import Claim
from penstock.queue.views import (
    CANCELLER,
    TaskEvent,
    TaskView,
    events_of,
    view_of_ledger,
    view_of_pack,
)
from penstock.queue.watching import Watch
from penstock.store.base import ObjectStore, find
from penstock.store.metered import labelled
from penstock.store.opening import Opening, open_store

_log = logging.getLogger(__name__)

_LOOKS_MAX: Final = 2
_CANCEL_LEASE_MS: Final = 30_000
_RESULT_SECONDS_MIN: Final = 0.1
_RESULT_SECONDS_MAX: Final = 5.0


@dataclass(frozen=True, slots=True)
class _Found:
    """What the bucket says of a pack."""

    pack: Pack | None
    ledger: Ledger | None


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
        self._watch: Watch | None = None
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
            raise InvalidInput(
                f"The queue {self.name!r} is not open.",
                hint="Use 'await Queue.open(...)', or 'async with queue:'.",
            )
        return self._access

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
        self._watch = Watch(store, self._layout)

    async def close(self) -> None:
        """Close the connection."""
        access, self._access = self._access, None
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
        self, type: str, input: object = None, *, key: str | None = None, delay: float = 0.0
    ) -> Task:
        """Submit one task, to start `delay` seconds from now.

        With a `key`, a second submit of the same type and key is the same task, as long as the
        first is not settled and for the queue's `key_seconds` after that.
        """
        submitter = self._submitter()
        if key is None:
            (task,) = await submitter.submit_many(type, [input], delay=delay)
        else:
            task = await submitter.submit_keyed(
                type, input, key=key, key_seconds=self.access.config.key_seconds, delay=delay
            )
        return Task(self, task)

    async def submit_many(
        self, type: str, inputs: Sequence[object], *, delay: float = 0.0
    ) -> list[Task]:
        """Submit one task an input, up to 1,000 in one object: much cheaper than one by one.

        Nothing is submitted if an input is wrong. Raises `NotAllSubmitted` if a part failed.
        """
        ids = await self._submitter().submit_many(type, inputs, delay=delay)
        return [Task(self, each) for each in ids]

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
            found = await self._find(at)
            return await self._view(at, place, found)

    async def history(self, id: str) -> list[TaskEvent]:
        """What has happened to a task, oldest first. Raises `TaskNotFound`."""
        at, place = task_at(id)
        with labelled("get"):
            found = await self._find(at)
            return events_of(await self._view(at, place, found), found.ledger, place)

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
        raise _not_found(at)

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

    async def result(
        self,
        id: str,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - users' word
    ) -> Any:
        """Wait for a task to end, and return what its handler returned."""
        at, place = task_at(id)
        clock = self.access.store.clock.machine
        began = clock.monotonic()
        pause = _RESULT_SECONDS_MIN
        while True:
            left = None if timeout is None else max(0.0, began + timeout - clock.monotonic())
            view = None
            try:
                # Once at least, also without a timeout that would allow it.
                async with asyncio.timeout(None if left is None else max(left, 1.0)):
                    view = await self._settled(at, place, seconds=pause / 2)
            except TimeoutError:
                pass
            except (Throttled, Unavailable) as error:
                # To wait is what was asked for.
                _log.warning("waiting for task %s, the store is away: %s", id, error)
            if view is not None:
                return _outcome(view)
            left = None if timeout is None else began + timeout - clock.monotonic()
            if left is not None and left <= 0:
                raise NotSettled(f"The task {id!r} has not ended in {timeout} s.", task=id)
            await clock.sleep(pause if left is None else min(pause, left))
            pause = min(_RESULT_SECONDS_MAX, pause * 1.5)

    async def _settled(self, at: PackAt, place: int, *, seconds: float) -> TaskView | None:
        """The task if it is settled. Those of one pack share a reading that is recent enough."""
        assert self._watch is not None, "a queue that is open has one"
        with labelled("get"):
            if at.submitted_ms is None:
                # A key may have been used again: the pack tells.
                view = await self._view(at, place, await self._find(at))
                return view if view.is_settled else None
            try:
                ledger = await self._watch.ledger(at, seconds=seconds)
            except NotFound as error:
                raise _not_found(at) from error
        settled = ledger is not None and ledger.tasks[place].status.settled
        return view_of_ledger(at, place, ledger, None) if ledger and settled else None

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


def _not_found(at: PackAt) -> TaskNotFound:
    return TaskNotFound(
        f"Nothing is known of the task {at.task(0)!r}.",
        task=at.task(0),
        hint="Is it another queue's? Tasks with a key are forgotten when their key is free.",
    )


def _outcome(view: TaskView) -> Any:
    match view.status:
        case "succeeded":
            return view.result
        case "cancelled":
            raise TaskCancelled(f"The task {view.id!r} was cancelled.", task=view.id)
    raise TaskFailed(
        f"The task {view.id!r} failed: {view.error}: {view.message}",
        task=view.id,
        error=view.error,
    )
