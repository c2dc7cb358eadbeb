"""Hooks: functions of the user that are told what a worker does, and can change nothing of it.

    @worker.on("failure")
    async def page_somebody(event): ...

| event | when |
|---|---|
| start, stop | the worker begins to look for work; it has let go of everything |
| attempt | a handler is called now |
| success, failure | a task is settled so, and that is in the bucket |
| retry | an attempt failed, another will follow, and that is in the bucket |
| settled | a task is settled, in whatever way: also cancelled, and expired |

- A hook is told of one event after the other, in order, beside everything else: a slow one delays
  itself only. It has `HOOK_SECONDS` for each; then it is interrupted, as a handler would be. `async
  def` hooks run on the loop, plain ones in a thread.
- What a hook raises is logged. One that is stuck `STUCK_MAX` times is called no more.
- At most `EVENTS_MAX` events wait for a hook; what comes on top is dropped, and that is logged. A
  worker that stops waits `HOOK_SECONDS` for its hooks. So hooks are for watching: what must not be
  missed belongs into a handler. A worker that is killed tells nobody; and of what another worker
  has settled, this one knows nothing.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from penstock.kernel.errors import InvalidInput
from penstock.queue.running.threads import HandlerThread

HOOK_SECONDS: Final = 5.0
EVENTS_MAX: Final = 1000
STUCK_MAX: Final = 3
EVENTS: Final = ("start", "stop", "attempt", "success", "retry", "failure", "settled")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEvent:
    """What a hook is told. Of `start` and `stop`, only the worker."""

    what: str
    """The name of the event."""
    worker: str = ""
    task: str = ""
    """The id of the task."""
    type: str = ""
    attempt: int = 0
    status: str = ""
    """Where the task is now, in the words of `TaskView.status`."""
    error: str = ""
    message: str = ""
    seconds: float = 0.0
    """How long the handler has run."""


Hook = Callable[[WorkerEvent], Any]


class Hooks:
    """The hooks of one worker."""

    def __init__(self) -> None:
        self._hooks: list[tuple[str, Hook]] = []
        self._lines: list[tuple[str, _Line]] = []

    def add(self, event: str, hook: Hook) -> None:
        """Register a hook."""
        self.check(event)
        if not callable(hook):
            raise InvalidInput(f"The hook for {event!r} cannot be called: {hook!r}.")
        self._hooks.append((event, hook))

    def again(self, adapt: Callable[[Hook], Hook] | None = None) -> Hooks:
        """The same hooks for another worker, changed by `adapt`."""
        other = Hooks()
        for event, hook in self._hooks:
            other.add(event, adapt(hook) if adapt else hook)
        return other

    def check(self, event: str) -> None:
        """Raises `InvalidInput` for an event that never comes."""
        if event not in EVENTS:
            raise InvalidInput(
                f"{event!r} is not an event of a worker.",
                hint=f"Events are {', '.join(EVENTS)}.",
            )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Hooks are told of events only inside of this."""
        loop = asyncio.get_running_loop()
        self._lines = [(event, _Line(event, hook)) for event, hook in self._hooks]
        tasks = [loop.create_task(line.serve()) for _, line in self._lines]
        try:
            yield
        finally:
            for _, line in self._lines:
                line.close()
            if tasks:
                await asyncio.wait(tasks, timeout=HOOK_SECONDS)
            for task in tasks:
                task.cancel()
            self._lines = []

    def is_told(self, event: str) -> bool:
        """Whether anybody is told of this event now."""
        return any(name == event for name, _ in self._lines)

    def tell(self, event: WorkerEvent) -> None:
        """Have the hooks of this event called, soon."""
        for name, line in self._lines:
            if name == event.what:
                line.put(event)


class _Line:
    """The events that wait for one hook."""

    def __init__(self, event: str, hook: Hook) -> None:
        self._name = f"the hook {getattr(hook, '__qualname__', hook)!s} for {event!r}"
        self._hook = hook
        self._waiting: asyncio.Queue[WorkerEvent | None] = asyncio.Queue(EVENTS_MAX)
        self._dropped = 0
        self._stuck: set[asyncio.Future[Any]] = set()
        self._is_closed = False

    def put(self, event: WorkerEvent) -> None:
        if self._is_closed or self._waiting.full():
            self._dropped += 1
            if self._dropped == 1:
                _log.warning("%s is too slow: events are dropped", self._name)
        else:
            self._waiting.put_nowait(event)

    def close(self) -> None:
        """There will be no more."""
        self._is_closed = True
        if self._waiting.full():
            self._waiting.get_nowait()
        self._waiting.put_nowait(None)

    async def serve(self) -> None:
        """Call the hook for one event after the other, to the last."""
        while (event := await self._waiting.get()) is not None:
            if len(self._stuck) < STUCK_MAX:
                await self._call(event)

    async def _call(self, event: WorkerEvent) -> None:
        loop = asyncio.get_running_loop()
        thread = None
        if inspect.iscoroutinefunction(self._hook):
            body = loop.create_task(self._await(event))
        else:
            thread = HandlerThread(lambda: self._plain(event), nothing=None)
            body = loop.create_task(thread.run())
        try:
            await asyncio.wait((body,), timeout=HOOK_SECONDS)
        finally:
            if not body.done():
                self._interrupt(body, thread)

    def _interrupt(self, body: asyncio.Task[None], thread: HandlerThread[None] | None) -> None:
        _log.error("%s did not end within %g s", self._name, HOOK_SECONDS)
        if thread is None:
            body.cancel()
        else:
            thread.tell(TimeoutError)
        self._stuck.add(body)
        body.add_done_callback(self._stuck.discard)
        if len(self._stuck) >= STUCK_MAX:
            _log.error("%s is stuck, and is called no more", self._name)

    async def _await(self, event: WorkerEvent) -> None:
        try:
            await self._hook(event)
        except Exception:  # noqa: BLE001 - it may raise anything, and changes nothing
            _log.exception("%s failed", self._name)

    def _plain(self, event: WorkerEvent) -> None:
        try:
            self._hook(event)
        except TimeoutError:
            _log.warning("%s was interrupted", self._name)
        except Exception:  # noqa: BLE001 - it may raise anything, and changes nothing
            _log.exception("%s failed", self._name)
