"""What a virtual loop is made of: steps, timers and tasks, how they are named, and what ends it.

A `Step` is one callback that will run once: asyncio's handle, kept lean because millions of them
are made. `Timers` holds the steps that are due later. A `VirtualTask` is asyncio's task with a
number of its own loop. The names of steps and tasks hold no address and no count of the process,
so that a trace is the same wherever and however often it is made.

The errors that end a simulation, other than those of the simulated code itself, are raised by
`penstock.testing.virtual.loop` to the caller of `simulate`:

```
SimulationError
├── Deadlock        nothing can run any more, and something is still awaited
├── Exhausted       a bound on virtual seconds or on steps was reached
├── Unhandled       an exception that nobody caught or looked at
└── NotSimulated    a socket, process, signal or thread was asked for
```
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextvars import Context
from heapq import heapify, heappop, heappush
from pathlib import PurePath
from types import FrameType
from typing import Any, TypeVar

from penstock.kernel.errors import PenstockError

Result = TypeVar("Result")

# Fewer dropped timers than this are left where they are, however few others there are.
_COMPACT_AT_LEAST = 64
_TASKS_SHOWN_MAX = 20
_FRAMES_SHOWN_MAX = 12


def _nothing() -> None:
    """What a cancelled step would run."""


class Step(asyncio.TimerHandle):
    """One callback that is ready or due later; what `call_soon` and `call_at` return.

    It keeps its own fields and does without those of asyncio's handle, whose construction
    would take half of the time of a step.
    """

    __slots__ = ("args", "callback", "context", "follower", "instant", "is_cancelled", "timers")

    def __init__(
        self,
        callback: Callable[..., object],
        args: tuple[object, ...],
        context: Context,
        instant: float,
    ) -> None:
        self.callback = callback
        self.args = args
        self.context = context
        self.instant = instant
        self.is_cancelled = False
        self.follower: Step | None = None
        """The step that becomes ready when this one has run."""
        self.timers: Timers | None = None
        """Where this step waits for its instant, as long as it does."""

    def cancel(self) -> None:
        if self.is_cancelled:
            return
        self.is_cancelled = True
        # What the callback holds is let go now, not when the instant comes.
        self.callback = _nothing
        self.args = ()
        if self.timers is not None:
            self.timers.note_cancelled()

    def cancelled(self) -> bool:
        return self.is_cancelled

    def when(self) -> float:
        return self.instant

    def get_context(self) -> Context:
        return self.context

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        state = " cancelled" if self.is_cancelled else ""
        return f"<Step {step_name(self)} at {self.instant:.9f}{state}>"


class Timers:
    """The steps that are due later, by instant. Cancelled ones never outnumber the others much."""

    __slots__ = ("_cancelled", "_heap", "_sequence")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Step]] = []
        self._sequence = 0
        self._cancelled = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, step: Step) -> None:
        step.timers = self
        self._sequence = sequence = self._sequence + 1
        heappush(self._heap, (step.instant, sequence, step))

    def next_instant(self) -> float | None:
        """When the next step is due; None if there is none."""
        heap = self._heap
        while heap and heap[0][2].is_cancelled:
            heappop(heap)
            self._cancelled -= 1
        return heap[0][0] if heap else None

    def take(self, instant: float) -> Iterator[Step]:
        """Remove and return the steps due at this instant, which is the next, as they were set."""
        heap = self._heap
        while heap and heap[0][0] == instant:
            step = heappop(heap)[2]
            step.timers = None
            if step.is_cancelled:
                self._cancelled -= 1
            else:
                yield step

    def note_cancelled(self) -> None:
        self._cancelled += 1
        if self._cancelled > _COMPACT_AT_LEAST and 2 * self._cancelled > len(self._heap):
            self._heap = [entry for entry in self._heap if not entry[2].is_cancelled]
            heapify(self._heap)
            self._cancelled = 0

    def clear(self) -> None:
        self._heap = []
        self._cancelled = 0


class VirtualTask(asyncio.Task[Result]):
    """A task that is numbered by its loop.

    Its hash is the number. asyncio keeps tasks in sets and goes through them, to cancel them
    for one; with the hash of an address, the order would differ from run to run.
    """

    __slots__ = ("number",)

    def __init__(
        self,
        coro: Coroutine[Any, Any, Result],
        *,
        loop: asyncio.AbstractEventLoop,
        number: int,
        name: str | None,
        context: Context | None,
    ) -> None:
        self.number = number
        super().__init__(coro, loop=loop, name=name or f"Task-{number}", context=context)

    def __hash__(self) -> int:
        return self.number


def tasks_of(loop: asyncio.AbstractEventLoop) -> list[VirtualTask[Any]]:
    """The tasks of the loop that are not done, in the order of their making."""
    tasks = (task for task in asyncio.all_tasks(loop) if isinstance(task, VirtualTask))
    return sorted(tasks, key=lambda task: task.number)


def step_name(step: Step) -> str:
    """What the step runs, in words that are the same in every process."""
    callback = step.callback
    while isinstance(callback, functools.partial):
        callback = callback.func
    owner = getattr(callback, "__self__", None)
    # A task's own step and wake-up are bound to it, but cannot be found on it by name.
    if isinstance(owner, asyncio.Task) and not hasattr(type(owner), _plain_name(callback)):
        return f"task {task_name(owner)}"
    name = getattr(callback, "__qualname__", type(callback).__qualname__)
    return f"call {name}"


def _plain_name(callback: object) -> str:
    return str(getattr(callback, "__name__", ""))


def task_name(task: asyncio.Task[Any]) -> str:
    """The task's name and what it runs."""
    coroutine = task.get_coro()
    runs = getattr(coroutine, "__qualname__", type(coroutine).__qualname__)
    return f"{task.get_name()} {runs}"


def waiting(tasks: Sequence[asyncio.Task[Any]]) -> str:
    """Where each of the tasks waits, a line each."""
    lines = [f"  {task.get_name()}: {_place(task)}" for task in tasks[:_TASKS_SHOWN_MAX]]
    if len(tasks) > _TASKS_SHOWN_MAX:
        lines.append(f"  and {len(tasks) - _TASKS_SHOWN_MAX} more")
    return "\n".join(lines) or "  no task; a future is awaited that nobody will set"


def _place(task: asyncio.Task[Any]) -> str:
    frames: list[str] = []
    awaited: object = task.get_coro()
    while awaited is not None and len(frames) < _FRAMES_SHOWN_MAX:
        frame = _first(awaited, "cr_frame", "gi_frame", "ag_frame")
        if isinstance(frame, FrameType):
            code = frame.f_code
            frames.append(
                f"{code.co_qualname} ({PurePath(code.co_filename).name}:{frame.f_lineno})"
            )
        awaited = _first(awaited, "cr_await", "gi_yieldfrom", "ag_await")
    return " > ".join(frames) or task_name(task)


def _first(thing: object, *names: str) -> object:
    values = (getattr(thing, name, None) for name in names)
    return next((value for value in values if value is not None), None)


class SimulationError(PenstockError):
    """A simulation could not go on, or must not be believed."""


class Deadlock(SimulationError):
    """No callback is ready, no timer is set, and something is still awaited."""


class Exhausted(SimulationError):
    """The simulation reached its bound on virtual seconds or on steps."""


class Unhandled(SimulationError):
    """A callback raised, or a task failed and nobody looked; the cause is that exception."""


class NotSimulated(SimulationError, NotImplementedError):
    """The real world was asked for.

    It is a `NotImplementedError` as well, which is what asyncio's own loops raise where a
    platform lacks something: code that can live without, say, signals goes on without them.
    """
