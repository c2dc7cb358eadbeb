"""The runtime `thread`: what tasks of one process do to each other, and what they do not."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.kernel.errors import WorkFailed, WorkReleased
from penstock.runtimes.base import AttemptWork
from penstock.runtimes.thread import ThreadRuntime, ThreadSettings, thread
from penstock.testing.runtime_contract import RecordingReporter
from tests.unit.runtimes.benches import User

MODULE = """
import asyncio, os, pathlib, threading, time

async def wait(task):
    pathlib.Path(task.config["begun"]).touch()
    await asyncio.Event().wait()

def stubborn(task):
    pathlib.Path(task.config["begun"]).touch()
    while True:
        try:
            time.sleep(0.01)
        except BaseException:
            pass

def die(task):
    os._exit(3)

def tell(task):
    return {"out": f"{os.getpid()} VERSION"}

async def emit(task):
    task.emit(cursor=1)

def prints(task):
    print(task.id)
    threading.Event().wait(0.05)
    print(task.id)
"""


@pytest.fixture
def user(tmp_path: Path) -> User:
    made = User(tmp_path)
    made.module(MODULE)
    return made


def _run(user: User, story: Callable[[ThreadRuntime], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        async with ThreadRuntime(ThreadSettings(path=(str(user.folder),), **settings)) as runtime:
            await story(runtime)

    asyncio.run(main())


def _work(user: User, function: str, number: int, **more: Any) -> AttemptWork:
    begun = str(user.folder / f"begun-{number}")
    return user.work(f"mine:{function}", task_id=number, config={"begun": begun}, **more)


async def _begun(user: User, *numbers: int) -> None:
    async with asyncio.timeout(30):
        while not all((user.folder / f"begun-{each}").exists() for each in numbers):  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.01)  # noqa: TID251


async def _told(runtime: ThreadRuntime, work: AttemptWork) -> Sequence[str]:
    return (await runtime.run(work, RecordingReporter())).made[0].location.split(" ")


def test_a_process_that_dies_in_company_costs_no_attempt_and_alone_it_does(user: User) -> None:
    async def story(runtime: ThreadRuntime) -> None:
        loop = asyncio.get_running_loop()
        waiting = loop.create_task(runtime.run(_work(user, "wait", 1), RecordingReporter()))
        await _begun(user, 1)
        with pytest.raises(WorkReleased, match="exit code 3") as caught:
            await runtime.run(_work(user, "die", 2), RecordingReporter())
        assert caught.value.runs_alone
        with pytest.raises(WorkReleased) as other:
            await waiting
        assert other.value.runs_alone
        assert not other.value.is_delayed
        again = loop.create_task(runtime.run(_work(user, "wait", 3), RecordingReporter()))
        await _begun(user, 3)
        with pytest.raises(WorkFailed, match="exit code 3") as alone:
            await runtime.run(_work(user, "die", 4, runs_alone=True), RecordingReporter())
        assert not isinstance(alone.value, WorkReleased)
        assert not again.done()
        again.cancel()
        await asyncio.wait({again})

    _run(user, story)


def test_what_does_not_stop_is_ended_with_its_process_and_the_others_are_handed_back(
    user: User,
) -> None:
    async def story(runtime: ThreadRuntime) -> None:
        loop = asyncio.get_running_loop()
        waiting = loop.create_task(runtime.run(_work(user, "wait", 1), RecordingReporter()))
        work = _work(user, "stubborn", 2, grace_seconds=0.1)
        stubborn = loop.create_task(runtime.run(work, RecordingReporter()))
        await _begun(user, 1, 2)
        stubborn.cancel()
        with pytest.raises(WorkReleased, match="did not stop in its time") as caught:
            await waiting
        assert not caught.value.runs_alone
        assert not caught.value.is_delayed
        await asyncio.wait({stubborn})
        assert stubborn.cancelled()
        assert runtime.pids == []

    _run(user, story)


def test_new_code_runs_in_a_new_process_and_the_old_one_goes_on_with_what_it_runs(
    user: User,
) -> None:
    async def story(runtime: ThreadRuntime) -> None:
        loop = asyncio.get_running_loop()
        waiting = loop.create_task(runtime.run(_work(user, "wait", 1), RecordingReporter()))
        await _begun(user, 1)
        old = await _told(runtime, _work(user, "tell", 2))
        user.module(MODULE.replace("VERSION", "new"))
        os.utime(user.folder / "mine.py", (1, 1))
        new = await _told(runtime, _work(user, "tell", 3))
        assert (old[1], new[1]) == ("VERSION", "new")
        assert old[0] != new[0]
        assert sorted(map(str, runtime.pids)) == sorted([old[0], new[0]])
        waiting.cancel()
        await asyncio.wait({waiting})
        async with asyncio.timeout(30):
            while runtime.pids != [int(new[0])]:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.01)  # noqa: TID251

    _run(user, story)


def test_a_process_is_replaced_after_so_many_tasks_and_let_go_when_idle(user: User) -> None:
    async def story(runtime: ThreadRuntime) -> None:
        pids = [(await _told(runtime, _work(user, "tell", each)))[0] for each in range(4)]
        assert pids[0] == pids[1] != pids[2] == pids[3]

    _run(user, story, tasks_max=2)

    async def idle(runtime: ThreadRuntime) -> None:
        await _told(runtime, _work(user, "tell", 1))
        async with asyncio.timeout(30):
            while runtime.pids:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.01)  # noqa: TID251

    _run(user, idle, idle_seconds=0.05)


def test_each_prints_to_its_own_log(user: User) -> None:
    async def story(runtime: ThreadRuntime) -> None:
        works = [
            replace(_work(user, "prints", each), log=str(user.folder / f"log-{each}"))
            for each in range(3)
        ]
        async with asyncio.TaskGroup() as group:
            for each in works:
                group.create_task(runtime.run(each, RecordingReporter()))
        said = [Path(each.log).read_text() for each in works]  # noqa: ASYNC240 - it is over
        assert said == [f"{each}\n{each}\n" for each in range(3)]

    _run(user, story)


def test_what_would_keep_all_others_waiting_is_refused(user: User) -> None:
    async def story(runtime: ThreadRuntime) -> None:
        with pytest.raises(WorkFailed, match=re.escape("await asyncio.to_thread(task.emit")):
            await runtime.run(_work(user, "emit", 1), RecordingReporter())

    _run(user, story)


def test_untrusted_work_and_resources_are_refused(user: User) -> None:
    async def story(runtime: ThreadRuntime) -> None:
        with pytest.raises(WorkFailed, match="cannot keep untrusted code") as caught:
            await runtime.run(_work(user, "tell", 1, is_untrusted=True), RecordingReporter())
        assert not caught.value.is_retried

    _run(user, story)
    runtime = thread({})
    asked = {"memory": "1GiB"}
    (fault,) = runtime.faults("mine:tell", config={}, resources=asked)
    assert fault.field == "resources.memory"
    (fault,) = runtime.faults("no function", config={}, resources={})
    assert fault.field == "operator"
    assert runtime.untrusted_refused()
    assert runtime.secrets_refused("mine:tell") == ""
