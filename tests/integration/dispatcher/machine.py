"""The part of a machine of calls that does not depend on how the calls are made.

Tasks are made, time passes, leases are ended, and after every step the database is compared with
the model. How claims, heartbeats and ends are called is the matter of what is derived from it: the
operations themselves, or the API.
"""

from __future__ import annotations

import asyncio
import contextlib
from datetime import UTC, datetime, timedelta
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from penstock.dispatcher.tasks.model import Fence
from penstock.protocol.base import TaskStatus
from tests.integration.dispatcher.model import PAUSE_MAX, Model, ModelTask
from tests.integration.dispatcher.world import Job, World, Worlds

BASE = datetime(2030, 1, 1, tzinfo=UTC)
FOREVER_SECONDS = 1e9
"""No outage is as long: reapers that hold still have a test of their own."""


class Machine(RuleBasedStateMachine):
    """Tasks of one job. Old proofs stay in use for ever."""

    worlds: ClassVar[Worlds]
    world: World
    job: Job

    tasks = Bundle("tasks")
    fences = Bundle("fences")

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.stack = contextlib.AsyncExitStack()
        self.model = Model(BASE)

    @initialize(target=tasks)
    def begin(self) -> object:
        async def enter() -> None:
            self.world = await self.stack.enter_async_context(self.worlds.world())
            self.job = await self.world.job(
                max_attempts=2, heartbeat_ms=10_000, retry_first_ms=4_000, retry_max_ms=4_000
            )
            await self.world.tasks.reap()
            await self.entered()

        self.runner.run(enter())
        # Something to begin with; the rest is made later, or never.
        return multiple(*self.made("a"), *self.made("b"))

    async def entered(self) -> None:
        """The world is there."""

    def teardown(self) -> None:
        self.runner.run(self.stack.aclose())
        self.runner.close()

    @rule(target=tasks, key=st.sampled_from("abcd"))
    def create(self, key: str) -> object:
        return multiple(*self.made(key))

    def made(self, key: str) -> list[int]:
        """The task with this key, unless it is there already."""
        (task_id,) = self.runner.run(self.world.tasks.create([self.job.new(key)]))
        assert (task_id is None) == (key in self.model.keys)
        if task_id is None:
            return []
        self.model.keys.add(key)
        self.model.tasks[task_id] = ModelTask(self.model.now)
        return [task_id]

    @rule(target=fences, fence=consumes(fences), is_token=st.booleans())
    def guess(self, fence: Fence, is_token: bool) -> object:
        """Somebody who knows one half of a proof."""
        task_id, attempt, token = fence.task_id, fence.attempt, fence.lease_token
        wrong = Fence(task_id, attempt, "x") if is_token else Fence(task_id, attempt + 1, token)
        return multiple(fence, wrong)

    @rule()
    def reap(self) -> None:
        found = self.runner.run(self.world.tasks.reap(outage_seconds=FOREVER_SECONDS))
        assert {each.task_id: each.status for each in found.reaped} == self.model.reap()
        rows = self.runner.run(self.world.rows("SELECT id, due_at FROM task"))
        dues = {row["id"]: row["due_at"] for row in rows}
        for each in found.reaped:
            if each.status is TaskStatus.RETRYING:
                self.retried(each.task_id, dues[each.task_id])

    def retried(self, task_id: int, due: datetime) -> None:
        """A retry is due when it may be; from now on at a time that no luck decides.

        The same calls have to lead to the same tasks, or a failure could not be found again.
        """
        self.model.retry(task_id, due)
        pinned = self.model.now + PAUSE_MAX
        self.model.retry(task_id, pinned)
        self.runner.run(
            self.world.rows("UPDATE task SET due_at = %s WHERE id = %s", pinned, task_id)
        )

    @rule(seconds=st.sampled_from([1, 4, 5, 10]))
    def wait(self, seconds: int) -> None:
        self.world.later(seconds)
        self.model.now += timedelta(seconds=seconds)

    @invariant()
    def the_database_is_the_model(self) -> None:
        if not hasattr(self, "job"):
            return
        rows = self.runner.run(
            self.world.rows(
                "SELECT id, status, attempt, cancel_asked, worker, lease_token, lease_expires_at,"
                " (SELECT count(*) FROM attempt WHERE task_id = id) AS attempts,"
                " (SELECT count(*) FROM attempt WHERE task_id = id AND ended_at IS NULL) AS open"
                " FROM task"
            )
        )
        seen = {row.pop("id"): row for row in rows}
        assert seen.keys() == self.model.tasks.keys()
        for task_id, task in self.model.tasks.items():
            *columns, attempts, still_open = seen[task_id].values()
            assert tuple(columns) == task.seen
            assert (attempts, still_open) == (task.attempt, int(task.status is TaskStatus.RUNNING))
        published = self.runner.run(self.world.rows("SELECT task_id, revision FROM publication"))
        expected = [{"task_id": self.model.head, "revision": self.model.revision}]
        assert published == (expected if self.model.revision else [])
        events = self.runner.run(self.world.value("SELECT count(*) FROM event"))
        assert events == self.model.revision
