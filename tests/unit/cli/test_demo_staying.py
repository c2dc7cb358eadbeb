"""The end of `penstock demo` on a terminal, with a dispatcher of this test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from penstock.cli.demo import MONTH, REMARKS, KeyPresses, Stay, pipeline_folder
from penstock.dispatcher.client import Client
from penstock.kernel.errors import DispatcherUnavailable, PenstockError
from penstock.protocol.steering import TaskAnswer, TasksAnswer
from penstock.testing.virtual import World, simulate
from tests.unit.dispatcher.client import scripted

URL = "http://127.0.0.1:1"


class Desk:
    """A dispatcher with one task, which fails as long as its file is missing."""

    def __init__(self, *, fails: bool = True, lost: int = 0) -> None:
        self.file = Path()
        self.status, self.attempt = "queued", 0
        self.events: list[str | None] = []
        self._fails = fails
        self._lost = lost
        """How many answers are lost."""

    async def trigger(self, job: str, *, event_id: str, payload: Any, **_: object) -> None:
        assert job == "desk"
        self.events.append(event_id)
        self.file = Path(payload["file"])
        self.replay()
        self._answers()

    def replay(self) -> None:
        self.attempt += 1
        is_missing = self._fails and not self.file.exists()
        self.status = "dead" if is_missing else "completed"

    async def tasks(self, *, job: str, status: str, limit: int) -> TasksAnswer:
        self._answers()
        assert (job, status, limit) == ("remarks", "dead", 1)
        found = [self._said().task] if self.status == "dead" else []
        return TasksAnswer(tasks=found, before=None)

    async def task(self, number: int) -> TaskAnswer:
        self._answers()
        assert number == 42
        return self._said()

    def _said(self) -> TaskAnswer:
        return scripted.task(status=self.status, attempt=self.attempt, attempt_limit=9)

    def _answers(self) -> None:
        if self._lost:
            self._lost -= 1
            raise DispatcherUnavailable("It does not answer.")


def stayed(folder: Path, desk: Desk, *deeds: Callable[[KeyPresses], None]) -> list[str]:
    """What is said while somebody does these deeds, one after the other, with time in between."""
    said: list[str] = []

    async def main(world: World) -> None:
        keys, clock = KeyPresses(), world.clock()
        stay = Stay(cast(Client, desk), url=URL, folder=folder, clock=clock, say=said.append)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(stay.run(keys))
            for deed in deeds:
                await clock.sleep(5)
                deed(keys)
            await clock.sleep(5)
            keys.end.set()
            await running

    simulate(main, seed=1)
    return said


def test_the_task_is_mended_by_enter_and_a_replay(tmp_path: Path) -> None:
    desk = Desk()
    said = stayed(tmp_path, desk, lambda keys: keys.enter.set(), lambda _: desk.replay())
    failed, delivered, completed = said
    assert f"One task has failed, on purpose. Find out why at {URL}/tasks/42\n" in failed
    assert "Enter delivers what it misses" in failed
    assert str(desk.file) in delivered
    assert desk.file.read_text() == REMARKS
    assert desk.file.is_relative_to(tmp_path)
    assert "Task 42 is completed, by attempt 2" in completed
    assert f"{URL}/datasets/remarks" in completed


def test_a_replay_too_early_says_what_is_missing(tmp_path: Path) -> None:
    desk = Desk()
    said = stayed(
        tmp_path,
        desk,
        lambda _: desk.replay(),
        lambda _: desk.replay(),
        lambda keys: keys.enter.set(),
        lambda keys: keys.enter.set(),
    )
    assert [each.partition(":")[0] for each in said[1:3]] == [
        "Task 42 has failed again, in attempt 2",
        "Task 42 has failed again, in attempt 3",
    ]
    assert "The remarks are delivered" in said[3]
    # Once is enough.
    assert "It is delivered already" in said[4]
    assert len(said) == 5


def test_a_dispatcher_that_is_away_is_asked_again(tmp_path: Path) -> None:
    desk = Desk(lost=3)
    said = stayed(tmp_path, desk)
    assert len(said) == 1
    # The same event, so that there is one task of it.
    assert set(desk.events) == {MONTH}


def test_who_ends_it_at_once_is_not_kept(tmp_path: Path) -> None:
    async def main(world: World) -> None:
        keys = KeyPresses()
        keys.end.set()
        desk = cast(Client, Desk(fails=False))
        await Stay(desk, url=URL, folder=tmp_path, clock=world.clock()).run(keys)

    simulate(main, seed=1)


def test_a_task_that_does_not_fail_is_told(tmp_path: Path) -> None:
    async def main(world: World) -> None:
        desk = cast(Client, Desk(fails=False))
        await Stay(desk, url=URL, folder=tmp_path, clock=world.clock()).run(KeyPresses())

    with pytest.raises(PenstockError, match="The task that was to fail has not"):
        simulate(main, seed=1)


def test_the_pipeline_has_what_is_to_fail() -> None:
    text = (pipeline_folder() / "flights.yaml").read_text()
    assert "operator: remarks:take" in text
    assert "\n  desk:\n" in text
