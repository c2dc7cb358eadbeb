"""Tasks of one operator that are claimed, finished and failed in whatever order a test draws."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings

from penstock.dispatcher.tasks.model import ClaimedTask
from tests.integration.dispatcher.test_deployment import Pipeline
from tests.integration.dispatcher.world import failed

drawn = settings(
    deadline=None, max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
"""Few examples, each in a world that is emptied first."""


@dataclass
class Crew:
    """What runs now of one operator, and how it is finished."""

    pipeline: Pipeline
    operator: str
    finish: Callable[[ClaimedTask], Awaitable[None]]
    running: list[ClaimedTask] = field(default_factory=list)

    async def claim(self) -> bool:
        """Begin one more; whether there was one."""
        found = await self.pipeline.tasks.claim_next(self.operator, worker="w")
        self.running.extend(found)
        return bool(found)

    async def end(self, which: int, *, is_failed: bool) -> None:
        """End one of those that run, if any does."""
        if not self.running:
            return
        claimed = self.running.pop(which % len(self.running))
        if is_failed:
            await self.pipeline.tasks.fail(failed(claimed.fence))
        else:
            await self.finish(claimed)

    async def do(self, deed: str, which: int) -> None:
        """`claim`, `finish` or `fail`."""
        if deed == "claim":
            await self.claim()
        else:
            await self.end(which, is_failed=deed == "fail")

    async def drain(self) -> None:
        """Finish everything that runs, waits or is to be tried again."""
        for _ in range(100):
            self.pipeline.world.later(1000)
            while self.running:
                await self.end(-1, is_failed=False)
            if not await self.claim():
                return
        pytest.fail("there is no end to tasks")
