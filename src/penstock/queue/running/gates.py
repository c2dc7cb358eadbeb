"""Gates: what stands between a pack that was found and its claim.

A worker asks its gates before it claims, and a gate says how many tasks of the pack may run here
now: none while the queue is paused, so many as a limit allows. What is admitted is used up by
tasks that start, and given back when they end or were not there after all. Gates decide when
something runs, never whether: a task that is not admitted stays where it is and is found again.

- `is_shut` is asked for every pack that a look shows, and must be answered from memory.
- `admit` may ask the store. None says that nothing may start now; then `is_shut` says so too, for
  as long as it is not worth asking again.
- An admission is asked before every start (`may_start`), is told of every start (`begin`), and is
  asked at every renewal whether what runs under it may go on (`may_run`). A gate that cannot wait
  for that says so itself (`watch`).

A worker that dies gives nothing back: what a gate keeps in the bucket must end by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.queue.discovery.scan import Sight


class Admission(Protocol):
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


class Gate(Protocol):
    """Decides what may start, for one worker."""

    def is_shut(self, sight: Sight) -> bool:
        """Whether there is no point in asking for this pack now."""

    def seconds_to_open(self) -> float | None:
        """How long until what is shut may be worth asking for; None if nobody can tell."""

    async def admit(self, sight: Sight, tasks: int) -> Admission | None:
        """Leave to run up to so many tasks of a pack. Raises `StoreError`."""

    async def keep(self) -> None:
        """Keep up what was admitted, leases say, until cancelled."""

    async def release(self) -> None:
        """Let go of everything. Within a bound; never fails."""


class Pass:
    """The leave of several gates at once: as much as the strictest of them gives."""

    def __init__(self, admissions: Sequence[Admission], tasks: int) -> None:
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
        return all(each.may_start() for each in self._admissions)

    def begin(self) -> bool:
        """Whether a task may start now; if so, it does."""
        may_start = self.may_start()
        for each in self._admissions if may_start else ():
            each.begin()
        return may_start

    def may_run(self) -> bool:
        return all(each.may_run() for each in self._admissions)

    def has_more(self) -> bool:
        return all(each.has_more() for each in self._admissions)

    def watch(self, *, over: Callable[[], None], freed: Callable[[], None]) -> None:
        for each in self._admissions:
            each.watch(over=over, freed=freed)


async def admit(gates: Sequence[Gate], sight: Sight, tasks: int) -> Pass | None:
    """The leave of all these gates for up to so many tasks; None if one of them gives none."""
    admissions: list[Admission] = []
    is_admitted = False
    try:
        for gate in gates:
            admission = await gate.admit(sight, tasks)
            if admission is None:
                return None
            admissions.append(admission)
            tasks = min(tasks, admission.tasks)
        is_admitted = True
    finally:
        for each in admissions:
            each.give(each.tasks - tasks if is_admitted else each.tasks)
    return Pass(admissions, tasks)
