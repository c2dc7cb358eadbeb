"""Gates: what stands between a candidate and its claim: pause, limits, a budget of tasks.

A worker asks its gates before it claims, and a gate says how many tasks of the pack may run here
now: none while the queue is paused, so many as a limit allows. What is admitted is used up by
tasks that start, and given back when they end or were not there after all. Gates decide when
something runs, never whether: a task that is not admitted stays where it is and is found again.

- `is_shut` is asked for every pack that a look shows, and must be answered from memory.
- `admit` may ask the store. None says that nothing may start now; then `is_shut` says so too,
  for
  as long as it is not worth asking again.
- An admission is asked before every start (`may_start`), is notified of every start (`begin`),
  and
  is asked at every renewal whether what runs under it may go on (`may_run`). A gate that cannot
  wait for that says so itself (`watch`).

A worker that dies gives nothing back: what a gate keeps in the bucket must end by itself.

`ControlGate` is shut while the queue, or a type, is paused. It reads `control.json` when a
worker is about to claim and its reading is `WORKER_SECONDS` old, and as often while tasks are
admitted. An idle worker reads nothing. It fails closed: nothing starts on a reading older than
`TRUST_SECONDS`, nor while the object cannot be read, which is logged. Running tasks always go
on.

`BudgetGate` is for a worker that runs so many tasks and no more. It claims at most as many
attempts as are left; each that begins uses one up; what is given back unbegun is left again.
When the last has begun, the worker is notified (`spent`) and claims nothing more. It costs no
requests.

`penstock.queue.execution.limit_gate` keeps the limits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from penstock.kernel.errors import StoreError, UnreadableObject
from penstock.queue.context import LogLimiter, QueueContext
from penstock.queue.control import TRUST_SECONDS, WORKER_SECONDS, ControlReader
from penstock.queue.discovery.scanner import PackCandidate


class GateAdmission(Protocol):
    """Leave to run tasks of one pack."""

    @property
    def tasks(self) -> int:
        """How many may run; all of them count as running until they are given back."""

    def more(self, tasks: int) -> int:
        """Ask for so many more, without a request; returns how many there are."""

    def give(self, tasks: int) -> None:
        """So many have ended, or never began."""

    def may_start(self) -> bool:
        """Whether a task may start now."""

    def begin(self) -> None:
        """A task that may start does so."""

    def may_run(self) -> bool:
        """Whether what runs may go on; otherwise it is interrupted and given back."""

    def has_more(self) -> bool:
        """Whether `more` would give anything now."""

    def watch(self, *, over: Callable[[], None], freed: Callable[[], None]) -> None:
        """Call `over` as soon as what runs may not go on, and `freed` when there may be more."""


class StartGate(Protocol):
    """Decides what may start, for one worker."""

    def concerns(self, sight: PackCandidate) -> bool:
        """Whether it has to be asked for this pack at all."""

    def is_shut(self, sight: PackCandidate) -> bool:
        """Whether there is no point in asking for this pack now."""

    def seconds_to_open(self) -> float | None:
        """How long until what is shut may be worth asking for; None if nobody can tell."""

    async def admit(self, sight: PackCandidate, tasks: int) -> GateAdmission | None:
        """Leave to run up to so many tasks of a pack. Raises `StoreError`."""

    async def keep(self) -> None:
        """Keep up what was admitted, leases say, until cancelled."""

    async def release(self) -> None:
        """Let go of everything. Within a bound; never fails."""


class CombinedAdmission:
    """The leave of several gates at once: as much as the strictest of them gives.

    Every task asks it several times: hence loops where `all` would do.
    """

    __slots__ = ("_admissions", "tasks")

    def __init__(self, admissions: Sequence[GateAdmission], tasks: int) -> None:
        self._admissions = tuple(admissions)
        self.tasks = tasks

    def more(self, tasks: int) -> int:
        for number, each in enumerate(self._admissions):
            given = each.more(tasks)
            for before in self._admissions[:number]:
                before.give(tasks - given)
            tasks = given
        self.tasks += tasks
        return tasks

    def give(self, tasks: int) -> None:
        self.tasks -= tasks
        for each in self._admissions:
            each.give(tasks)

    def may_start(self) -> bool:
        for each in self._admissions:  # noqa: SIM110
            if not each.may_start():
                return False
        return True

    def begin(self) -> bool:
        """Whether a task may start now; if so, it does."""
        if not self.may_start():
            return False
        for each in self._admissions:
            each.begin()
        return True

    def may_run(self) -> bool:
        return all(each.may_run() for each in self._admissions)

    def has_more(self) -> bool:
        return all(each.has_more() for each in self._admissions)

    def watch(self, *, over: Callable[[], None], freed: Callable[[], None]) -> None:
        for each in self._admissions:
            each.watch(over=over, freed=freed)


async def admit(
    gates: Sequence[StartGate], sight: PackCandidate, tasks: int
) -> CombinedAdmission | None:
    """The leave of all these gates for up to so many tasks; None if one of them gives none."""
    admissions: list[GateAdmission] = []
    is_admitted = False
    try:
        for gate in gates:
            if not gate.concerns(sight):
                continue
            admission = await gate.admit(sight, tasks)
            if admission is None:
                return None
            admissions.append(admission)
            tasks = min(tasks, admission.tasks)
        is_admitted = True
    finally:
        for each in admissions:
            each.give(each.tasks - tasks if is_admitted else each.tasks)
    return CombinedAdmission(admissions, tasks)


class BudgetGate:
    """How many attempts one worker may still begin."""

    def __init__(self, tasks: int, *, spent: Callable[[], None]) -> None:
        self.left = tasks
        """How many are neither begun nor promised to a claim."""
        self._to_begin = tasks
        self._spent = spent

    @property
    def may_start(self) -> bool:
        return self._to_begin > 0

    def take(self, tasks: int) -> int:
        """Promise up to so many; returns how many."""
        taken = min(tasks, self.left)
        self.left -= taken
        return taken

    def begin(self) -> None:
        """One begins."""
        self._to_begin -= 1
        if not self._to_begin:
            self._spent()

    def concerns(self, _: PackCandidate) -> bool:
        return True

    def is_shut(self, _: PackCandidate) -> bool:
        return self.left <= 0

    def seconds_to_open(self) -> float | None:
        return None

    async def admit(self, _: PackCandidate, tasks: int) -> BudgetAdmission | None:
        taken = self.take(tasks)
        return BudgetAdmission(self, taken) if taken else None

    async def keep(self) -> None:
        await asyncio.Event().wait()

    async def release(self) -> None:
        pass


class BudgetAdmission:
    """Leave to begin so many tasks of a pack."""

    def __init__(self, gate: BudgetGate, tasks: int) -> None:
        self._gate = gate
        self.tasks = tasks
        self._begun = 0

    def more(self, tasks: int) -> int:
        taken = self._gate.take(tasks)
        self.tasks += taken
        return taken

    def give(self, tasks: int) -> None:
        self.tasks -= tasks
        used = min(tasks, self._begun)
        self._begun -= used
        self._gate.left += tasks - used

    def may_start(self) -> bool:
        return self._gate.may_start

    def begin(self) -> None:
        self._begun += 1
        self._gate.begin()

    def may_run(self) -> bool:
        return True

    def has_more(self) -> bool:
        return self._gate.left > 0

    def watch(self, *, over: Callable[[], None], freed: Callable[[], None]) -> None:
        pass  # What has begun may end, and what others give back is found again.


_AGAIN_SECONDS: Final = 2.0


class ControlGate:
    """One worker's view of what is paused."""

    def __init__(self, access: QueueContext) -> None:
        self._access = access
        self._clock = access.store.clock.machine
        self._reader = ControlReader(access)
        self._warn = LogLimiter(self._clock)
        self._asked_at = float("-inf")
        """When it was last read, or tried to be."""
        self._is_unreadable = False
        self._is_shut = False
        """Something was refused since then."""
        self._admitted = 0
        self._busy = asyncio.Event()
        self._asking = asyncio.Lock()

    def may_start(self, type: str) -> bool:
        """Whether a task of this type may start, by what is known now."""
        reader = self._reader
        if self._is_unreadable or reader.age_seconds >= TRUST_SECONDS:
            return False
        return not reader.state.is_paused(type)

    def count(self, tasks: int) -> None:
        """So many more are admitted, or fewer."""
        self._admitted += tasks
        if self._admitted:
            self._busy.set()
        else:
            self._busy.clear()

    def concerns(self, _: PackCandidate) -> bool:
        return True

    def is_shut(self, sight: PackCandidate) -> bool:
        return not self.may_start(sight.at.type) and self._seconds_to_ask() > 0

    def seconds_to_open(self) -> float | None:
        return max(0.0, self._seconds_to_ask()) if self._is_shut else None

    def _seconds_to_ask(self) -> float:
        return self._asked_at + WORKER_SECONDS - self._clock.monotonic()

    async def admit(self, sight: PackCandidate, tasks: int) -> ControlAdmission | None:
        await self._ask()
        type_ = sight.at.type
        if not self.may_start(type_):
            self._is_shut = True
            mark = self._reader.state.mark(type_)
            reason = mark.reason or self._reader.state.queue.reason
            if not self._is_unreadable:
                self._warn(f"tasks of type {type_!r} are paused{': ' if reason else ''}{reason}")
            return None
        return ControlAdmission(self, type_, tasks)

    async def _ask(self) -> None:
        """Know what holds: whoever comes while it is being read waits for the answer."""
        if self._seconds_to_ask() > 0 and not self._asking.locked():
            return
        async with self._asking:
            if self._seconds_to_ask() <= 0:
                await self._read()

    async def _read(self) -> None:
        """Read what holds. What cannot be read holds everything back; this is said, not raised."""
        self._asked_at = self._clock.monotonic()
        self._is_shut = False
        try:
            await self._reader.read(seconds=WORKER_SECONDS / 2)
            self._is_unreadable = False
        except UnreadableObject as error:
            self._is_unreadable = True
            self._warn(f"starting nothing, failed to read what is paused: {error}")
        except StoreError as error:
            self._asked_at -= WORKER_SECONDS - _AGAIN_SECONDS
            self._warn(f"failed to read what is paused, retrying: {error}")

    async def keep(self) -> None:
        while True:
            await self._busy.wait()
            await self._clock.sleep(max(0.1, self._seconds_to_ask()))
            if self._admitted:
                await self._ask()

    async def release(self) -> None:
        pass


class ControlAdmission:
    """Leave to run tasks of a type until it is paused."""

    def __init__(self, gate: ControlGate, type: str, tasks: int) -> None:
        self._gate = gate
        self._type = type
        self.tasks = tasks
        gate.count(tasks)

    def more(self, tasks: int) -> int:
        given = tasks if self.may_start() else 0
        self.tasks += given
        self._gate.count(given)
        return given

    def give(self, tasks: int) -> None:
        self.tasks -= tasks
        self._gate.count(-tasks)

    def may_start(self) -> bool:
        return self._gate.may_start(self._type)

    def begin(self) -> None:
        pass

    def may_run(self) -> bool:
        return True

    def has_more(self) -> bool:
        return self.may_start()

    def watch(self, *, over: Callable[[], None], freed: Callable[[], None]) -> None:
        pass  # What runs goes on, and a pause is heard of at the next write.
