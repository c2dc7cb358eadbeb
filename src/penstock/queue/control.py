"""Control: pause, drain and resume a queue or a type.

One cell, `control.json`, for the queue as a whole and for each type. Operators write it; workers
and producers only read it.

| | new starts | submits | what runs |
|---|---|---|---|
| running | yes | accepted | goes on |
| paused | none | accepted | goes on; what was claimed and has not started is given back |
| drained | yes, until nothing is left | refused with `QueueDrained` | goes on |

Both can hold at once, and a type is held if it or the whole queue is. `resume` lifts both marks
from what it names and nothing else: a type that was paused by itself stays paused when the queue
resumes. Every change is one swap of a pure function: concurrent operators lose nothing, and a
crash leaves the state before or after it.

When a change takes effect, while the store answers:

- A worker reads the object when it is about to claim, and while it has something to start, at
  most every `WORKER_SECONDS` (10 s). It starts nothing on a reading that is older than
  `TRUST_SECONDS` (30 s), nor if the object cannot be read (QUEUE-23;
  `penstock.queue.execution.gates`).
- A producer reads it before a submit, at most every `PRODUCER_SECONDS` (30 s); a submit that had
  begun may still arrive. A producer that cannot read it gets that error; nothing is submitted.

It costs a GET each time, mostly answered with "unchanged": $0.0035 a day for a worker that is
always busy, nothing for an idle one. `penstock.queue.survey` waits until a drained queue is
empty.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

import msgspec

from penstock.kernel.document_format import Stamped
from penstock.kernel.errors import InvalidInput, QueueDrained
from penstock.queue.context import QueueContext
from penstock.queue.ids import check_name
from penstock.store.cell import Cell
from penstock.store.metered import labelled

WORKER_SECONDS: Final = 10.0
TRUST_SECONDS: Final = 30.0
PRODUCER_SECONDS: Final = 30.0
TYPES_MAX: Final = 1000
REASON_CHARACTERS_MAX: Final = 500


class ControlMark(msgspec.Struct, frozen=True, omit_defaults=True):
    """What holds for a queue or a type, and since when, in milliseconds of the store's time."""

    paused_ms: int = 0
    reason: str = ""
    drained_ms: int = 0


RUNNING: Final = ControlMark()


class ControlState(Stamped, frozen=True, kw_only=True):
    """The object: the mark of the queue as a whole, and those of types that have one."""

    kind: ClassVar[str] = "control"

    queue: ControlMark = RUNNING
    types: dict[str, ControlMark] = msgspec.field(default_factory=dict)

    def mark(self, type: str | None) -> ControlMark:
        """What was said of a type itself, or of the whole queue."""
        return self.queue if type is None else self.types.get(type, RUNNING)

    def is_paused(self, type: str) -> bool:
        return bool(self.queue.paused_ms or self.mark(type).paused_ms)

    def is_drained(self, type: str) -> bool:
        return bool(self.queue.drained_ms or self.mark(type).drained_ms)


@dataclass(frozen=True, slots=True)
class HeldType:
    """A type, or the whole queue, that does not just run."""

    type: str | None
    """None for the queue as a whole."""
    paused_at: float | None
    drained_at: float | None
    reason: str


def held(state: ControlState | None) -> tuple[HeldType, ...]:
    """Everything that is paused or drained, the queue as a whole first."""
    if state is None:
        return ()
    marks: Mapping[str | None, ControlMark] = {
        None: state.queue,
        **dict(sorted(state.types.items())),
    }
    return tuple(
        HeldType(
            name,
            mark.paused_ms / 1000 if mark.paused_ms else None,
            mark.drained_ms / 1000 if mark.drained_ms else None,
            mark.reason,
        )
        for name, mark in marks.items()
        if mark != RUNNING
    )


class Control:
    """Pauses, drains and resumes. Two who do so at the same time do not undo each other's."""

    def __init__(self, access: QueueContext, guard: SubmitGuard | None = None) -> None:
        """`guard` is the own one, which hears at once."""
        self._access = access
        self._cell = _cell(access)
        self._guard = guard

    async def state(self) -> tuple[HeldType, ...]:
        """What is paused or drained now."""
        with labelled("control"):
            return held(await self._cell.read())

    async def pause(self, type: str | None = None, reason: str = "") -> tuple[HeldType, ...]:
        """Start nothing more, of this type or at all, until `resume`. Returns what is held."""
        if len(reason) > REASON_CHARACTERS_MAX:
            raise InvalidInput(f"A reason has at most {REASON_CHARACTERS_MAX} characters.")

        def change(mark: ControlMark, now_ms: int) -> ControlMark:
            return msgspec.structs.replace(
                mark, paused_ms=mark.paused_ms or now_ms, reason=reason or mark.reason
            )

        return await self._change(type, change)

    async def drain(self, type: str | None = None) -> tuple[HeldType, ...]:
        """Take no more submits, of this type or at all, until `resume`. Returns what is held."""

        def change(mark: ControlMark, now_ms: int) -> ControlMark:
            return msgspec.structs.replace(mark, drained_ms=mark.drained_ms or now_ms)

        return await self._change(type, change)

    async def resume(self, type: str | None = None) -> tuple[HeldType, ...]:
        """Lift both from the type, or from the queue as a whole. Returns what is held still."""
        return await self._change(type, lambda _mark, _now_ms: RUNNING)

    async def _change(
        self, type: str | None, changed: Callable[[ControlMark, int], ControlMark]
    ) -> tuple[HeldType, ...]:
        if type is not None:
            check_name(type, what="type")
        with labelled("control"):
            now_ms = int((await self._access.store.now()).latest * 1000)

            def change(present: ControlState | None) -> ControlState | None:
                return _changed(present, type, lambda mark: changed(mark, now_ms))

            after = await self._cell.update(change)
        if self._guard is not None:
            self._guard.forget()
        return held(after)


def _changed(
    present: ControlState | None, type: str | None, change: Callable[[ControlMark], ControlMark]
) -> ControlState | None:
    before = present or ControlState()
    mark = change(before.mark(type))
    if mark == before.mark(type):
        return present
    if type is None:
        return msgspec.structs.replace(before, queue=mark)
    types = {**before.types, type: mark}
    if mark == RUNNING:
        del types[type]
    if len(types) > TYPES_MAX:
        raise InvalidInput(
            f"{TYPES_MAX} types are paused or drained already.", hint="Pause the whole queue."
        )
    return msgspec.structs.replace(before, types=types)


def _cell(access: QueueContext) -> Cell[ControlState]:
    return Cell(access.store, access.layout.control, ControlState, entropy=access.entropy)


class ControlReader:
    """One process's knowledge of the object: read when it is asked for and old."""

    def __init__(self, access: QueueContext) -> None:
        self._cell = _cell(access)
        self._clock = access.store.clock.machine
        self._reading = asyncio.Lock()
        self._read_at = float("-inf")
        self._changes = 0
        self.state = ControlState()
        """As it was read last."""

    @property
    def age_seconds(self) -> float:
        """How long ago the last reading began that succeeded."""
        return self._clock.monotonic() - self._read_at

    def forget(self) -> None:
        """The next who asks reads: this process has just changed it."""
        self._read_at = float("-inf")
        self._changes += 1

    async def read(self, *, seconds: float) -> ControlState:
        """What holds, as it was at most so long ago. Raises `StoreError`, `UnreadableObject`."""
        async with self._reading:
            if self.age_seconds >= seconds:
                instant, changes = self._clock.monotonic(), self._changes
                with labelled("control"):
                    self.state = await self._cell.read() or ControlState()
                if changes == self._changes:
                    # Otherwise it may show what was before this process's own change.
                    self._read_at = instant
        return self.state


class SubmitGuard:
    """Where producers come in: asked before every submit."""

    def __init__(self, access: QueueContext) -> None:
        self._queue = access.layout.queue
        self._reader = ControlReader(access)

    def forget(self) -> None:
        """This process has just drained or resumed something."""
        self._reader.forget()

    async def check(self, type: str) -> None:
        """Raise `QueueDrained` if submits of this type are refused."""
        state = await self._reader.read(seconds=PRODUCER_SECONDS)
        if not state.is_drained(type):
            return
        is_all = bool(state.queue.drained_ms)
        what = f"The queue {self._queue!r}"
        which = "" if is_all else f" --type {type}"
        raise QueueDrained(
            f"{what} is drained and takes no more tasks."
            if is_all
            else f"{what} takes no more tasks of type {type!r}: they are drained.",
            hint=f"'penstock queue resume{which}' lifts it, within {PRODUCER_SECONDS:.0f} s.",
        )
