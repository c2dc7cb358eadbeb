"""The runtime `process`: how children are kept and replaced, and what they say when they fail."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from penstock.kernel.errors import InvalidInput, WorkFailed, WorkReleased
from penstock.runtimes.process import ProcessRuntime, process
from penstock.runtimes.resource_limits import Cgroups
from penstock.testing.runtime_contract import RecordingReporter
from tests.unit.runtimes.benches import User, run

TELLS_ITS_PID = "import os\ndef run(task):\n    return {'out': f'pid:{os.getpid()}'}\n"


@pytest.fixture
def user(tmp_path: Path) -> User:
    return User(tmp_path)


def _pids(user: User, times: int, **settings: object) -> Sequence[str]:
    async def main() -> Sequence[str]:
        async with user.process(**settings) as runtime:
            return [(await run(runtime, user.work()))[0].location for _ in range(times)]

    return asyncio.run(main())


def _failure(user: User, text: str, function: str = "mine:run", **more: object) -> WorkFailed:
    user.module(text)

    async def main() -> WorkFailed:
        async with user.process() as runtime:
            with pytest.raises(WorkFailed) as caught:
                await run(runtime, user.work(function, **more))
            return caught.value

    return asyncio.run(main())


def test_a_child_is_kept_for_the_next_task(user: User) -> None:
    user.module(TELLS_ITS_PID)
    assert len(set(_pids(user, 5))) == 1


def test_a_child_is_replaced_after_so_many_tasks(user: User) -> None:
    user.module(TELLS_ITS_PID)
    pids = _pids(user, 5, tasks_max=2)
    assert [pids[0] == pids[1], pids[1] == pids[2], pids[2] == pids[3]] == [True, False, True]
    assert len(set(pids)) == 3


def test_a_child_is_not_kept_idle_for_nothing(user: User) -> None:
    user.module(TELLS_ITS_PID)
    assert len(set(_pids(user, 2, idle_max=0))) == 2


def test_an_idle_child_ends_after_its_time(user: User) -> None:
    user.module(TELLS_ITS_PID)

    async def main() -> None:
        async with user.process(idle_seconds=0) as runtime:
            await run(runtime, user.work())
            (child,) = runtime._children._all
            async with asyncio.timeout(30):
                await child.ended.wait()
            assert runtime.pids == ()

    asyncio.run(main())


def test_operators_have_children_of_their_own(user: User) -> None:
    user.module(TELLS_ITS_PID)
    user.module(TELLS_ITS_PID, "other")

    async def main() -> None:
        async with user.process() as runtime:
            first = await run(runtime, user.work())
            second = await run(runtime, user.work("other:run"))
            assert first[0].location != second[0].location
            assert len(runtime.pids) == 2

    asyncio.run(main())


def test_a_child_that_dies_idle_costs_no_task(user: User) -> None:
    user.module(TELLS_ITS_PID)

    async def main() -> None:
        async with user.process() as runtime:
            await run(runtime, user.work())
            (child,) = runtime._children._all
            os.kill(child.pid, signal.SIGKILL)
            async with asyncio.timeout(30):
                await child.ended.wait()
            assert await run(runtime, user.work())

    asyncio.run(main())


def test_code_that_has_changed_is_loaded_anew(user: User) -> None:
    async def main() -> None:
        async with user.process() as runtime:
            for word in ("one", "another"):
                user.module(f"def run(task):\n    return {{'out': {word!r}}}\n")
                (made,) = await run(runtime, user.work())
                assert made.location == word

    asyncio.run(main())


def test_async_functions_run_too(user: User) -> None:
    user.module(
        "import asyncio\n"
        "async def run(task):\n"
        "    paused = await asyncio.to_thread(task.emit, cursor=3)\n"
        "    return {'out': paused}\n"
    )

    async def main() -> None:
        ear = RecordingReporter(pause="full")
        async with user.process() as runtime:
            (made,) = (await runtime.run(user.work(), ear)).made
        assert made.location == "full"
        assert [each.cursor for each in ear.news] == [3]

    asyncio.run(main())


def test_an_async_function_is_cancelled_and_may_clean_up(user: User) -> None:
    user.module(
        "import asyncio\n"
        "async def run(task):\n"
        "    task.progress(begun=True)\n"
        "    try:\n"
        "        await asyncio.Event().wait()\n"
        "    finally:\n"
        "        task.progress(cleaned=True)\n"
    )
    begun = asyncio.Event()

    class Listening(RecordingReporter):
        def progress(self, said: object) -> None:
            self.said.append(said)  # type: ignore[arg-type] # only remembered
            begun.set()

    async def main() -> None:
        ear = Listening()
        async with user.process() as runtime, asyncio.TaskGroup() as group:
            running = group.create_task(runtime.run(user.work(grace_seconds=30), ear))
            await begun.wait()
            running.cancel()
        assert ear.said == [{"begun": True}, {"cleaned": True}]

    asyncio.run(main())


def test_a_failure_shows_the_users_lines_and_the_log_has_all(user: User) -> None:
    failure = _failure(user, "def run(task):\n    inner()\ndef inner():\n    raise KeyError('x')\n")
    first, *trace = failure.message.splitlines()
    assert first == "KeyError: 'x'"
    assert [line.strip() for line in trace[1::2]] == ["inner()", "raise KeyError('x')"]
    assert "user_code.py" not in failure.message
    assert "Traceback" in (user.folder / "log").read_text()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("import nothing_like_this\ndef run(task): ...\n", "No module named 'nothing_like_this'"),
        ("other = 1\n", "The module mine has no run."),
        ("run = 1\n", "mine:run is not a function."),
        ("def run(task):\n    return 7\n", "The function returned int"),
        ("import sys\ndef run(task):\n    sys.exit(3)\n", "SystemExit: 3"),
        ("import os\ndef run(task):\n    os._exit(3)\n", "ended with exit code 3"),
        (
            "import os\ndef run(task):\n    os.kill(os.getpid(), 9)\n",
            "was killed by SIGKILL, perhaps because memory ran out",
        ),
        ("def run(task):\n    raise ValueError('\\ud800')\n", r"ValueError: \ud800"),
        ("def run(task):\n    task.progress(x=object())\n", "TypeError"),
        (
            "def run(task):\n    task.emit(cursor=1, payload={'x': 'y' * 200_000})\n",
            "bytes are too large for one message; 131,072 are allowed",
        ),
    ],
)
def test_what_goes_wrong_is_one_sentence(user: User, text: str, sentence: str) -> None:
    assert sentence in _failure(user, text).message


@pytest.mark.parametrize(
    ("progress", "why"),
    [
        ("x='y' * 20_000_000", "It has 20,000,008 bytes as JSON; 16,384 are allowed."),
        ("x=deep(40)", "It is nested more than 32 levels deep."),
        ("x=deep(973)", "It is nested more than 32 levels deep."),
        ("x=deep(100_000)", "It cannot be written as JSON: RecursionError"),
    ],
)
def test_progress_that_is_too_much_is_left_out_and_the_attempt_goes_on(
    user: User, progress: str, why: str
) -> None:
    user.module(
        "def deep(levels):\n"
        "    found = []\n"
        "    for _ in range(levels):\n"
        "        found = [found]\n"
        "    return found\n"
        "def run(task):\n"
        f"    for _ in range(3):\n        task.progress({progress})\n"
        "    task.progress(step=2)\n"
    )

    async def main() -> None:
        ear = RecordingReporter()
        async with user.process() as runtime:
            await runtime.run(user.work(), ear)
        assert ear.said == [{"step": 2}]

    asyncio.run(main())
    log = (user.folder / "log").read_text()
    assert log.count(f"penstock: progress is not reported: {why}") == 1


@pytest.mark.parametrize(
    "body",
    [
        b'{"type":"progress","said":{"x":' + b"[" * 60_000 + b"]" * 60_000 + b"}}",
        b'{"type":"progress","said":{"x":[' + b"{}," * 100_000 + b"1]}}",
        b'{"said":{"x":[' + b"{}," * 100_000 + b'1]},"type":"progress"}',
        b'{"type":"done","made":' + b"[" * 5_000 + b"]" * 5_000 + b"}",
    ],
    ids=["deep", "large", "type last", "deep end"],
)
def test_a_child_that_says_what_no_child_says_ends_its_own_attempt_alone(
    user: User, body: bytes
) -> None:
    user.module(
        "import gc, socket\n"
        "from pathlib import Path\n"
        "def run(task):\n"
        "    body = Path(task.config['body']).read_bytes()\n"
        "    (ours,) = [each for each in gc.get_objects() if isinstance(each, socket.socket)]\n"
        "    ours.sendall(len(body).to_bytes(4, 'big') + body)\n"
        "    task.wait(60)\n"
    )
    (user.folder / "body").write_bytes(body)

    async def main() -> None:
        async with user.process() as runtime:
            work = user.work(config={"body": str(user.folder / "body")})
            with pytest.raises(WorkFailed, match="sent an invalid message"):
                await run(runtime, work)

    asyncio.run(main())


def test_a_signal_that_stops_all_processes_of_a_machine_is_no_failure(user: User) -> None:
    failure = _failure(
        user,
        "import os, signal, time\n"
        "def run(task):\n    os.kill(os.getpid(), signal.SIGTERM)\n    time.sleep(60)\n",
    )
    assert isinstance(failure, WorkReleased)
    assert (failure.message, failure.is_delayed) == ("The function was stopped.", False)


def test_what_a_function_has_made_until_it_was_stopped_is_not_published(user: User) -> None:
    failure = _failure(
        user,
        "import os, signal\n\n"
        "def run(task):\n    task.wait(0)\n    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    while not task.stopping:\n        pass\n",
    )
    assert isinstance(failure, WorkReleased)


@pytest.mark.parametrize(
    "text",
    [
        "import asyncio\n\nasync def run(task):\n    raise asyncio.CancelledError\n",
        "from penstock.runtimes.task import Stopped\n\ndef run(task):\n    raise Stopped\n",
    ],
    ids=["cancelled by itself", "stopped by itself"],
)
def test_a_function_that_nobody_has_stopped_fails(user: User, text: str) -> None:
    """It would be handed back and begun at once, 20 times, whatever its `max_attempts`."""
    assert not isinstance(_failure(user, text), WorkReleased)


def test_a_module_that_is_not_there_says_where_it_was_looked_for(user: User) -> None:
    failure = _failure(user, "", "absent.part:run")
    assert failure.message.startswith("There is no module absent for absent.part:run in ")
    assert isinstance(failure, WorkReleased)


@pytest.mark.parametrize(
    ("text", "is_released"),
    [
        ("import absent\n", True),
        ("def other(task): ...\n", True),
        ("def run(task):\n    import absent\n", False),
        ("from os import absent\n", False),
        ("run = 5\n", False),
    ],
)
def test_only_code_that_is_not_here_is_handed_back(
    user: User, text: str, *, is_released: bool
) -> None:
    assert isinstance(_failure(user, text), WorkReleased) is is_released


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such limit")
def test_memory_is_a_limit(user: User) -> None:
    text = "def run(task):\n    bytearray(10**9)\n"
    failure = _failure(user, text, resources={"memory": "300MiB"})
    assert failure.message.startswith("MemoryError")


HELPERS = """
import os, time

def run(task):
    for _ in range(4):
        if os.fork() == 0:
            held = bytearray(100 * 2**20)
            time.sleep(60)
    os.wait()
    raise ValueError("a helper has died")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such limit")
@pytest.mark.parametrize("has_cgroups", [True, False])
def test_memory_is_a_limit_of_all_processes_together(
    user: User, has_cgroups: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_cgroups:
        monkeypatch.setattr(Cgroups, "found", lambda: None)
    elif Cgroups.found() is None:
        pytest.skip("no control groups can be made here")
    failure = _failure(user, HELPERS, resources={"memory": "200MiB"})
    said = "The processes of the task used more memory than resources.memory = 200MiB."
    assert failure.message.endswith(said)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such limit")
def test_a_child_is_used_again_with_its_own_bound_only(user: User) -> None:
    user.module(TELLS_ITS_PID)

    async def main() -> None:
        async with user.process() as runtime:
            found = []
            for memory in ("300MiB", "300MiB", "600MiB", None):
                resources = {"memory": memory} if memory else {}
                found.append((await run(runtime, user.work(resources=resources)))[0].location)
            assert found[0] == found[1]
            assert len(set(found)) == 3

    asyncio.run(main())


def test_secrets_of_the_worker_are_not_the_users(
    user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_SECRET", "x")
    monkeypatch.setenv("THEIRS", "y")
    user.module(
        "import os\n"
        "def run(task):\n"
        "    ours = [name for name in os.environ if name.startswith('PENSTOCK_')]\n"
        "    return {'out': f'{ours} {os.environ[\"THEIRS\"]}'}\n"
    )
    assert _pids(user, 1) == ["[] y"]


def test_a_python_that_is_not_there_is_told(user: User) -> None:
    async def main() -> None:
        async with user.process(python=("./no-such-python",)) as runtime:
            with pytest.raises(WorkReleased, match="No child process can be started: No such file"):
                await run(runtime, user.work())

    asyncio.run(main())


def test_a_guard_that_is_killed_is_replaced(user: User) -> None:
    user.module(TELLS_ITS_PID)

    async def main() -> None:
        async with user.process(idle_max=0) as runtime:
            await run(runtime, user.work())
            guard = runtime._children._guard
            before = guard._process
            assert before is not None
            before.kill()
            before.wait()
            await run(runtime, user.work())
            assert guard._process is not None
            assert guard._process.pid != before.pid

    asyncio.run(main())


@pytest.mark.parametrize("operator", ["clean", "clean.sales", ":f", "m:", "m:f-g", "a b:c"])
def test_an_operator_must_name_a_function(operator: str) -> None:
    (fault,) = ProcessRuntime().faults(operator, config={}, resources={})
    assert fault.field == "operator"


def test_resources_are_judged() -> None:
    wrong = {"memory": "much", "cpu": 0, "gpu": 1}
    found = {fault.field for fault in ProcessRuntime().faults("m:f", config={}, resources=wrong)}
    assert found == {"resources.memory", "resources.cpu", "resources.gpu"}
    right = {"memory": "2GiB", "cpu": 0.5}
    assert list(ProcessRuntime().faults("m:f", config={}, resources=right)) == []


@pytest.mark.parametrize(
    ("settings", "where"),
    [({"tasks_max": 0}, "tasks_max"), ({"warmth": 1}, "warmth"), ({"path": 3}, "path")],
)
def test_settings_are_judged(settings: dict[str, object], where: str) -> None:
    with pytest.raises(InvalidInput, match=where):
        process(settings)
