"""Children that are forked from a template: what they share, and who ends whom."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from penstock.kernel.errors import WorkFailed
from penstock.runtimes.base import AttemptWork
from penstock.runtimes.process import ProcessRuntime
from penstock.runtimes.secrets import TOKEN_VARIABLE, VARIABLES, AttemptFiles
from tests.unit.runtimes.benches import User, run

IMPORTED = "import os\nwith open({imports!r}, 'a') as said: said.write(f'{{os.getpid()}}\\n')\n"
FILES = """
def run(task):
    open_files = [os.readlink(f'/proc/self/fd/{each}') for each in os.listdir('/proc/self/fd')
                  if os.path.exists(f'/proc/self/fd/{each}')]
    sockets = sum(each.startswith('socket:') for each in open_files)
    return {'out': f'{os.getpid()} {os.getppid()} {sockets} {os.environ.get("SAID", "")}'}
"""
UNFIT = {
    "threads": "import _thread, time\n_thread.start_new_thread(time.sleep, (60,))\n",
    "open": "import socket\nkept = socket.socket()\n",
    "process": "import subprocess\nkept = subprocess.Popen(['sleep', '60'])\n",
    "reads": f"import os\nkept = os.environ.get({TOKEN_VARIABLE!r})\n",
    "fails": "import sys\nassert 'penstock.runtimes.fork_server' not in sys.orig_argv\n",
}


@pytest.fixture
def user(tmp_path: Path) -> User:
    return User(tmp_path)


@pytest.fixture
def imports(tmp_path: Path) -> Path:
    return tmp_path / "imports"


def _alone(user: User, number: int) -> AttemptWork:
    """Work with credentials: in a child that runs nothing else."""
    handed = AttemptFiles(
        folder=str(user.folder), variables={"SAID": str(number)}, has_credentials=True
    )
    return user.work(task_id=number, handed=handed)


def _lines(file: Path) -> Sequence[str]:
    return file.read_text().split() if file.exists() else ()


async def _until(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not is_so():  # noqa: ASYNC110 - other processes
            await asyncio.sleep(0.01)  # noqa: TID251


async def _told(runtime: ProcessRuntime, work: AttemptWork) -> Sequence[str]:
    return (await run(runtime, work))[0].location.split(" ")


def test_children_are_forked_and_share_nothing_but_what_was_imported(
    user: User, imports: Path
) -> None:
    user.module(IMPORTED.format(imports=str(imports)) + FILES)

    async def main() -> None:
        async with user.process() as runtime:
            told = [await _told(runtime, _alone(user, number)) for number in range(3)]
            async with asyncio.TaskGroup() as group:
                more = [group.create_task(_told(runtime, _alone(user, each))) for each in (3, 4, 5)]
            told += [each.result() for each in more]
            assert _lines(imports) == [told[0][1]], "the module was imported once"
            pids, parents, sockets, said = zip(*told, strict=True)
            assert len(set(pids)) == len(told)
            assert set(parents) == {told[0][1]}
            assert set(sockets) == {"1"}, "nobody has a socket but its own"
            assert said == tuple("012345")

    asyncio.run(main())


@pytest.mark.parametrize("why", UNFIT)
def test_what_a_fork_could_not_share_is_started_and_the_log_says_why(
    user: User, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    user.module(f"import os\n{UNFIT[why]}{FILES}")

    async def main() -> None:
        async with user.process() as runtime:
            for number in range(2):
                assert int((await _told(runtime, _alone(user, number)))[1]) == os.getpid()

    with caplog.at_level("INFO"):
        asyncio.run(main())
    (said,) = [
        each.getMessage()
        for each in caplog.records
        if "are started, not forked" in each.getMessage()
    ]
    assert why in said


def test_threads_that_end_for_a_fork_are_none_and_numbers_are_drawn_anew(user: User) -> None:
    """OpenBLAS, in NumPy, has threads from its import on where there are cores for them."""
    user.module(
        "import os, random\nimport numpy\n"
        "def run(task):\n"
        "    drawn = f'{random.random()} {numpy.random.random()}'\n"
        "    return {'out': f'{os.getppid()} {drawn}'}\n"
    )

    async def main() -> None:
        async with user.process() as runtime:
            told = [await _told(runtime, _alone(user, number)) for number in range(2)]
        assert told[0][0] == told[1][0] != str(os.getpid())
        assert told[0][1] != told[1][1]
        assert told[0][2] != told[1][2]

    asyncio.run(main())


def test_a_template_that_is_killed_fails_what_runs_and_is_replaced(
    user: User, imports: Path
) -> None:
    user.module(
        IMPORTED.format(imports=str(imports)) + "def run(task):\n"
        "    if task.id == 7:\n"
        "        os.kill(os.getppid(), 9)\n"
        "        __import__('time').sleep(60)\n"
        "    return {'out': str(os.getppid())}\n"
    )

    async def main() -> None:
        async with user.process() as runtime:
            with pytest.raises(WorkFailed, match="was killed by SIGKILL") as caught:
                await run(runtime, user.work())
            assert caught.value.is_retried
            (first,) = _lines(imports)
            (again,) = await _told(runtime, _alone(user, 8))
            assert _lines(imports) == [first, again]

    asyncio.run(main())


def test_new_code_is_forked_from_a_new_template_and_what_runs_is_left_alone(
    user: User, imports: Path
) -> None:
    text = IMPORTED.format(imports=str(imports)) + (
        "import time\n"
        "def run(task):\n"
        "    while task.id == 1 and not os.path.exists({end!r}):\n"
        "        time.sleep(0.01)\n"
        "    return {{'out': 'VERSION'}}\n"
    ).format(end=str(user.folder / "end"))
    user.module(text)

    async def main() -> None:
        async with user.process() as runtime:
            old = asyncio.get_running_loop().create_task(_told(runtime, _alone(user, 1)))
            await _until(lambda: _lines(imports))
            assert await _told(runtime, _alone(user, 2)) == ["VERSION"]
            user.module(text.replace("VERSION", "2"))
            os.utime(user.folder / "mine.py", (1, 1))
            assert await _told(runtime, _alone(user, 3)) == ["2"]
            (user.folder / "end").touch()
            assert await old == ["VERSION"]
            assert len(_lines(imports)) == 2

    asyncio.run(main())


def test_what_a_fork_has_left_of_its_session_ends_with_it(user: User) -> None:
    user.module(
        "import os, signal, subprocess\n"
        "def run(task):\n"
        # The shell ends, so that its child is an orphan; and in a group of its own.
        "    said = 'set -m; sleep 60 >/dev/null & echo $!'\n"
        "    made = subprocess.run(said, shell=True, executable='bash', stdout=subprocess.PIPE)\n"
        "    return {'out': made.stdout.decode()}\n"
    )

    async def main() -> None:
        async with user.process() as runtime:
            pid = int((await run(runtime, _alone(user, 1)))[0].location)
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)

    asyncio.run(main())


def test_a_template_is_let_go_when_nothing_was_forked_for_a_while(
    user: User, imports: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.runtimes.child_process._IDLE_SECONDS_MIN", 0.05)
    user.module(IMPORTED.format(imports=str(imports)) + FILES)

    async def main() -> None:
        async with user.process(idle_seconds=0) as runtime:
            await run(runtime, user.work())
            (template,) = runtime._children._templates._all
            async with asyncio.timeout(30):
                await template.process.ended.wait()
            await run(runtime, user.work())
        assert len(_lines(imports)) == 2

    asyncio.run(main())


def test_giving_up_while_a_child_is_made_leaves_none(user: User, imports: Path) -> None:
    user.module(IMPORTED.format(imports=str(imports)) + FILES)

    async def main() -> None:
        async with user.process() as runtime:
            (_, parent, *_) = await _told(runtime, _alone(user, 0))
            for turns in range(1, 12):
                running = asyncio.get_running_loop().create_task(_told(runtime, _alone(user, 1)))
                for _ in range(turns):
                    await asyncio.sleep(0)  # noqa: TID251 - a turn of the loop
                running.cancel()
                await asyncio.wait({running})
            template = next(iter(runtime._children._templates._all))
            children = Path(f"/proc/{parent}/task/{parent}/children")
            await _until(lambda: not template.forks and not _lines(children))
            assert (await _told(runtime, _alone(user, 2)))[1] == parent

    asyncio.run(main())


def test_none_is_forked_where_the_settings_say_so(user: User) -> None:
    user.module("import os\n" + FILES)

    async def main() -> None:
        async with user.process(templates_max=0) as runtime:
            assert int((await _told(runtime, user.work()))[1]) == os.getpid()

    asyncio.run(main())


def test_a_template_that_does_not_answer_costs_no_task(
    user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.runtimes.child_process._ANSWER_SECONDS_MAX", 0.2)
    user.module("import os\n" + FILES)

    async def main() -> None:
        async with user.process(idle_max=0) as runtime:
            (_, parent, *_) = await _told(runtime, user.work())
            os.kill(int(parent), signal.SIGSTOP)
            assert int((await _told(runtime, user.work()))[1]) == os.getpid()

    asyncio.run(main())


def test_the_variables_that_an_import_must_not_read_are_those_that_tasks_have() -> None:
    from penstock.worker import sandbox  # noqa: PLC0415 - only its text is of interest

    source = Path(sandbox.__file__).read_text()
    for name in VARIABLES - {TOKEN_VARIABLE}:
        assert f'"{name}"' in source
