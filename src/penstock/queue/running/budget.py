"""The gate of a worker that runs so many tasks and no more.

Of its budget, so many attempts are claimed as are left, and each that begins uses one up; what is
given back unbegun is left again. When the last has begun, the worker is told (`spent`) and claims
nothing more. It costs no requests, and a worker without a budget has no such gate.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from penstock.queue.discovery.scan import Sight


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

    def is_shut(self, _: Sight) -> bool:
        return self.left <= 0

    def seconds_to_open(self) -> float | None:
        return None

    async def admit(self, _: Sight, tasks: int) -> BudgetAdmission | None:
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
