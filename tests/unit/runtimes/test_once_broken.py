"""What once made a child lie about a task, or fail one that was in order."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from penstock.kernel.errors import WorkFailed
from penstock.runtimes.process import ProcessRuntime
from tests.unit.runtimes.benches import User, run


@pytest.fixture
def user(tmp_path: Path) -> User:
    return User(tmp_path)


async def _failure(runtime: ProcessRuntime, user: User) -> str:
    with pytest.raises(WorkFailed) as caught:
        await run(runtime, user.work())
    return caught.value.message


def test_a_fork_that_returns_does_not_end_the_task_nor_the_next_one(user: User) -> None:
    user.module(
        "import os\n"
        "def run(task):\n"
        "    if task.partition_key == 'first':\n"
        "        child = os.fork()\n"
        "        if child == 0:\n"
        "            return {'out': 'the fork'}\n"
        "        assert os.waitpid(child, 0)[1] == 0\n"
        "    return {'out': task.partition_key}\n"
    )

    async def main() -> None:
        async with user.process() as runtime:
            for key in ("first", "second"):
                (made,) = await run(runtime, user.work(payload={"partition_key": key}))
                assert (made.location, made.partition_key) == (key, key)

    asyncio.run(main())


@pytest.mark.parametrize("said", ["progress(part=1)", "emit(cursor=1)"])
def test_a_fork_that_speaks_for_its_task_is_told_and_does_not_hang(user: User, said: str) -> None:
    user.module(
        "import multiprocessing\n"
        "def part(number):\n"
        f"    TASK.{said}\n"
        "def run(task):\n"
        "    global TASK\n"
        "    TASK = task\n"
        "    with multiprocessing.get_context('fork').Pool(1) as pool:\n"
        "        pool.map(part, [1])\n"
    )

    async def main() -> None:
        async with user.process() as runtime, asyncio.timeout(60):
            assert "cannot report for its task" in await _failure(runtime, user)

    asyncio.run(main())


def test_new_code_is_loaded_however_many_children_have_the_old(user: User) -> None:
    user.module(
        "import pathlib, time\n"
        "def run(task):\n"
        "    here = pathlib.Path(task.config['folder'])\n"
        "    (here / f'began-{task.id}').touch()\n"
        "    while len(list(here.glob('began-*'))) < 5:\n"
        "        time.sleep(0.01)\n"
    )

    async def main() -> None:
        async with user.process() as runtime, asyncio.timeout(60):
            config = {"folder": str(user.folder)}
            async with asyncio.TaskGroup() as group:
                for number in range(5):
                    task = user.work(task_id=number + 1, config=config)
                    group.create_task(run(runtime, task))
            assert len(runtime.pids) == 5
            user.module("def run(task):\n    return {'out': 'new'}\n")
            (made,) = await run(runtime, user.work())
            assert made.location == "new"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("before", "why"),
    [
        ("def other(task): ...\n", "has no run"),
        ("from parts import missing\ndef run(task): ...\n", "ImportError"),
    ],
)
def test_code_that_was_put_right_is_seen_by_a_warm_child(user: User, before: str, why: str) -> None:
    user.module("", "parts")
    user.module(before)

    async def main() -> None:
        async with user.process() as runtime:
            assert why in await _failure(runtime, user)
            user.module("missing = 'here now'\n", "parts")
            user.module("from parts import missing\ndef run(task):\n    return {'out': missing}\n")
            (made,) = await run(runtime, user.work())
            assert made.location == "here now"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("def run(task):\n    return {'out': 'x' * 17_000_000}\n", "too large for one message"),
        ("def run(task):\n    return {'out': '\\ud800'}\n", "surrogates not allowed"),
        (
            "class Text(str): ...\ndef run(task):\n    return {'out': Text('x')}\n",
            "objects of type Text",
        ),
        (
            "class Odd:\n    def __repr__(self): raise ValueError\ndef run(task): exit(Odd())\n",
            "ended by SystemExit: <Odd>.",
        ),
    ],
)
def test_what_cannot_be_told_is_said_and_costs_no_child(
    user: User, text: str, sentence: str
) -> None:
    user.module(text)

    async def main() -> None:
        async with user.process() as runtime:
            assert sentence in await _failure(runtime, user)
            assert len(runtime.pids) == 1

    asyncio.run(main())


def test_a_child_that_has_no_room_for_files_is_not_kept(user: User) -> None:
    user.module(
        "import resource\ndef run(task):\n    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))\n"
    )

    async def main() -> None:
        async with user.process() as runtime:
            assert "cannot be written" in await _failure(runtime, user)
            user.module("def run(task): ...\n")
            assert await run(runtime, user.work())

    asyncio.run(main())
