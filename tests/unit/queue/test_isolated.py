"""Handlers in processes of their own: what comes back, what is killed, what a crash costs."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.kernel.entropy import seeded_entropy
from penstock.kernel.errors import InvalidInput
from penstock.queue.attempt_outcomes import (
    AttemptCancelled,
    AttemptOutcome,
    Failed,
    GivenBack,
    Rescheduled,
    Retried,
    Succeeded,
)
from penstock.queue.client import Queue
from penstock.queue.execution.attempt import AttemptResult, HandlerAttempt
from penstock.queue.execution.handler_processes import HandlerProcess, HandlerProcessPool
from penstock.queue.execution.handlers import Handler, HandlerAddress, ProgressReporter, TaskContext
from penstock.queue.execution.retry import Retry
from penstock.queue.ids import TaskId
from penstock.queue.settings import Polling, WorkerSettings
from penstock.queue.worker import Worker
from tests.unit.queue import apart

ROOT = Path(__file__).parents[3]


class Bench:
    """Runs attempts, one after the other, in processes that are kept between them."""

    def __init__(self, children: HandlerProcessPool) -> None:
        self.children = children
        self.spoken = asyncio.Event()

    def attempt(
        self, function: Callable[[TaskContext], Any], input: object = None, **rules: Any
    ) -> HandlerAttempt:
        handler = Handler(type="t", function=function, isolate=True, **rules)
        raw = msgspec.Raw(json.dumps(input).encode())
        reporter = ProgressReporter(self.spoken.set)
        task = TaskContext(id=TaskId("x"), type="t", attempt=2, raw_input=raw, reporter=reporter)
        return HandlerAttempt(
            handler,
            task,
            counted=1,
            now_ms=lambda: 0,
            entropy=seeded_entropy(1),
            grace_seconds=0.5,
            children=self.children,
        )

    async def run(
        self, function: Callable[[TaskContext], Any], input: object = None, **rules: Any
    ) -> AttemptOutcome | None:
        ended = await self.attempt(function, input, **rules).run()
        assert ended.released is None
        return ended.ending

    async def pid(self) -> int:
        ending = await self.run(apart.whoami)
        assert isinstance(ending, Succeeded)
        found: int = json.loads(bytes(ending.result))["pid"]
        return found


def _run(check: Callable[[Bench], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with HandlerProcessPool() as children:
            await check(Bench(children))

    asyncio.run(main())


class Pipe:
    """A file that processes hold open: they are gone when it ends."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "pipe")
        os.mkfifo(self.path)
        self._end = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)

    async def closed(self) -> None:
        """Until nobody has it open any more."""
        os.set_blocking(self._end, True)
        assert await asyncio.to_thread(os.read, self._end, 1) == b""
        os.close(self._end)


@pytest.fixture
def pipe(tmp_path: Path) -> Pipe:
    return Pipe(tmp_path)


def test_a_handler_gets_its_task_and_gives_its_result(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def check(bench: Bench) -> None:
        attempt = bench.attempt(apart.whoami, {"n": "ü"})
        ended = await attempt.run()
        assert isinstance(ended.ending, Succeeded)
        result = json.loads(bytes(ended.ending.result))
        assert result["pid"] != os.getpid()
        assert {**result, "pid": 0} == {"pid": 0, "input": {"n": "ü"}, "attempt": 2, "id": "x"}
        said = attempt.task.reporter.unsent
        assert said is not None
        assert (said.done, said.total, said.message) == (1, 4, "begun")
        # The process is kept, and used again for whatever comes.
        assert await bench.pid() == result["pid"]
        ending = await bench.run(apart.gently, [1])
        assert isinstance(ending, Succeeded)
        assert bytes(ending.result) == b"[1]"
        ending = await bench.run(apart.gently, retry=Retry(on=TimeoutError))
        assert isinstance(ending, Retried)

    _run(check)
    assert "task x: working on {'n': 'ü'}" in caplog.text
    assert "task x: and complaining" in caplog.text


@pytest.mark.parametrize(
    ("on", "is_retried"),
    [((Exception,), True), ((OSError,), True), ((apart.Odd,), True), ((KeyError,), False), ((), 0)],
)
def test_what_is_retried_is_told_by_class_as_in_the_worker(
    on: tuple[type[BaseException], ...], is_retried: bool
) -> None:
    async def check(bench: Bench) -> None:
        for function, error in ((apart.odd, "Odd"), (apart.several, "ExceptionGroup")):
            ending = await bench.run(function, retry=Retry(on=on))
            assert isinstance(ending, Retried if is_retried else Failed)
            assert ending.failure.error == error
            assert "apart.py" in ending.failure.trace
            assert "attempt.py" not in ending.failure.trace

    _run(check)


def test_what_is_never_retried_and_what_comes_later_is_known_in_another_process() -> None:
    async def check(bench: Bench) -> None:
        for function in (apart.odd, apart.several):
            assert isinstance(await bench.run(function, retry=Retry(never=apart.Odd)), Failed)
            assert isinstance(await bench.run(function, retry=Retry(never=KeyError)), Retried)
        assert isinstance(await bench.run(apart.hopeless), Failed)
        assert await bench.run(apart.later) == Rescheduled(90_000, "not there yet")

    _run(check)


@pytest.mark.parametrize(
    ("function", "input", "words"),
    [
        (apart.leave, 3, "exit code 3"),
        (apart.leave, 0, "exit code 0"),
        (apart.suicide, "SIGSEGV", "killed by SIGSEGV"),
        (apart.suicide, "SIGKILL", "killed by SIGKILL, perhaps because memory ran out"),
    ],
)
def test_a_process_that_dies_costs_one_attempt(
    function: Callable[[TaskContext], Any], input: object, words: str
) -> None:
    async def check(bench: Bench) -> None:
        before = await bench.pid()
        ending = await bench.run(function, input)
        assert isinstance(ending, Retried)
        assert ending.failure.error == "ChildProcessError"
        assert words in ending.failure.message
        assert not ending.failure.trace
        ending = await bench.run(function, input, retry=Retry(on=ValueError))
        assert isinstance(ending, Failed)
        assert await bench.pid() != before

    _run(check)


def fork_and_die(task: TaskContext) -> None:
    """Leave a process that has all that this has open, the frames and the output too."""
    opened = os.open(task.input, os.O_WRONLY)
    if os.fork() == 0:
        threading.Event().wait(600)
        os._exit(0)
    os.close(opened)
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_death_of_a_process_is_noticed_though_one_that_it_forked_lives(pipe: Pipe) -> None:
    async def check(bench: Bench) -> None:
        async with asyncio.timeout(40):  # Or it would wait for the forked one.
            ending = await bench.run(fork_and_die, pipe.path)
        assert isinstance(ending, Retried)
        assert ending.failure.error == "ChildProcessError"
        assert "killed by SIGKILL" in ending.failure.message
        await pipe.closed()

    _run(check)


def misspell(_: TaskContext) -> None:
    raise KeyError(apart.Odd(os.fsdecode(b"\xff"))) from apart.Odd(os.fsdecode(b"\xff"))


def test_an_error_whose_text_cannot_be_encoded_is_still_told_by_its_class() -> None:
    async def check(bench: Bench) -> None:
        before = await bench.pid()
        ending = await bench.run(misspell, retry=Retry(on=KeyError))
        assert isinstance(ending, Retried)
        assert ending.failure.error == "KeyError"
        assert "Odd: ?\n" in ending.failure.trace
        assert await bench.pid() == before

    _run(check)


def _open_files() -> set[Path]:
    return set(Path("/dev/fd").iterdir())


@pytest.mark.parametrize("error", [OSError, asyncio.CancelledError])
@pytest.mark.parametrize("step", ["connect_read_pipe", "create_unix_connection"])
def test_a_process_that_cannot_be_started_leaves_nothing_open(
    error: type[BaseException], step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise error

    async def main() -> None:
        monkeypatch.setattr(asyncio.get_running_loop(), step, fail)
        before = _open_files()
        with pytest.raises(error):
            await HandlerProcess.start()
        assert _open_files() == before

    asyncio.run(main())


def test_one_that_died_while_it_had_nothing_to_do_costs_nothing() -> None:
    async def check(bench: Bench) -> None:
        before = await bench.pid()
        os.killpg(before, signal.SIGKILL)
        # Whether or not the loop has heard of it yet.
        assert await bench.pid() != before

    _run(check)


def test_at_its_timeout_it_is_killed_with_what_it_has_started(pipe: Pipe) -> None:
    async def check(bench: Bench) -> None:
        ending = await bench.run(apart.hog, pipe.path, timeout_seconds=0.5)
        assert isinstance(ending, Retried)
        assert ending.failure.error == "TimeoutError"
        assert ending.failure.message == "The handler did not end within 0.5 s."
        await pipe.closed()

    _run(check)


async def _interrupted(
    bench: Bench,
    function: Callable[[TaskContext], Any],
    path: str,
    how: Callable[[HandlerAttempt], None],
) -> AttemptResult:
    attempt = bench.attempt(function, path)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(attempt.run())
        await bench.spoken.wait()
        how(attempt)
    return running.result()


def test_one_that_heeds_a_cancel_is_kept() -> None:
    async def check(bench: Bench) -> None:
        before = await bench.pid()
        bench.spoken.clear()
        ended = await _interrupted(bench, apart.heed, os.devnull, HandlerAttempt.ask_to_stop)
        assert ended == AttemptResult(AttemptCancelled())
        assert await bench.pid() == before

    _run(check)


@pytest.mark.parametrize(
    ("function", "how", "ending"),
    [
        (apart.heed_not, HandlerAttempt.ask_to_stop, AttemptCancelled()),
        (apart.heed_not, HandlerAttempt.give_back, GivenBack()),
        (apart.heed_not, HandlerAttempt.lose, None),
    ],
)
def test_one_that_does_not_is_killed(
    pipe: Pipe,
    function: Callable[[TaskContext], Any],
    how: Callable[[HandlerAttempt], None],
    ending: AttemptOutcome | None,
) -> None:
    async def check(bench: Bench) -> None:
        assert await _interrupted(bench, function, pipe.path, how) == AttemptResult(ending)
        await pipe.closed()
        assert await bench.pid()

    _run(check)


def test_one_that_is_interrupted_while_its_process_starts_never_runs(pipe: Pipe) -> None:
    async def check(bench: Bench) -> None:
        attempt = bench.attempt(apart.hog, pipe.path)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(attempt.run())
            for _ in range(3):
                await asyncio.wait((running,), timeout=0)
            attempt.give_back()
        assert running.result() == AttemptResult(GivenBack())
        await pipe.closed()

    _run(check)


ORPHAN = """
import asyncio, msgspec, os, signal, sys
from penstock.kernel.entropy import seeded_entropy
from penstock.queue.execution.attempt import HandlerAttempt
from penstock.queue.execution.handlers import Handler, TaskContext
from penstock.queue.execution.handler_processes import HandlerProcessPool
from penstock.queue.execution.handlers import ProgressReporter
from tests.unit.queue import apart

def die():
    os.kill(os.getpid(), signal.SIGKILL)

async def main():
    handler = Handler(type="t", function=getattr(apart, sys.argv[1]), isolate=True)
    raw = msgspec.Raw(msgspec.json.encode(sys.argv[2]))
    task = TaskContext(id="x", type="t", attempt=1, raw_input=raw, reporter=ProgressReporter(die))
    pool = HandlerProcessPool()
    entropy = seeded_entropy(1)
    await HandlerAttempt(
        handler, task, counted=1, now_ms=int, entropy=entropy, children=pool
    ).run()

asyncio.run(main())
"""


def test_a_process_whose_worker_is_killed_ends_too(pipe: Pipe) -> None:
    # With all that it has started, as long as it gets to run.
    done = subprocess.run(
        [sys.executable, "-c", ORPHAN, "heed", pipe.path], cwd=ROOT, timeout=60, check=False
    )
    assert done.returncode == -signal.SIGKILL
    asyncio.run(pipe.closed())


def test_functions_that_no_other_process_could_find_are_refused_at_once() -> None:
    def inner(_: TaskContext) -> None:
        pass

    for function in (inner, lambda _: None, functools.partial(apart.odd)):
        with pytest.raises(InvalidInput, match="cannot run in a process of its own"):
            Handler(type="t", function=function, isolate=True)


def test_a_function_whose_name_is_another_by_now_is_refused_before_the_worker_runs() -> None:
    async def main() -> None:
        worker = Worker(Queue("memory://", name="q"))
        worker.handler("t", isolate=True)(apart.original)
        with pytest.raises(InvalidInput, match="decorated once more"):
            await worker.run(signals=False)

    asyncio.run(main())


def test_a_module_that_cannot_be_imported_is_a_failure_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(bench: Bench) -> None:
        broken = HandlerAddress("penstock_broken_here", "handle")
        monkeypatch.setattr(Handler, "address", property(lambda _: broken))
        monkeypatch.syspath_prepend(tmp_path)
        (tmp_path / "penstock_broken_here.py").write_text("raise RuntimeError('no luck')")
        ending = await bench.run(apart.odd, retry=Retry(on=KeyError))
        assert isinstance(ending, Failed)
        assert ending.failure.error == "RuntimeError"
        assert "the module penstock_broken_here cannot be used: no luck" in ending.failure.message

    _run(check)


SCRIPT = """
import asyncio, os
from penstock import Polling, Queue, Retry, Worker, WorkerSettings

class Mine(Exception): pass

queue = Queue("memory://", name="q")
settings = WorkerSettings(polling=Polling(min_seconds=0.05, max_seconds=0.1))
worker = Worker(queue, settings=settings)

@worker.handler("t", isolate=True, retry=Retry(attempts=2, first_seconds=0, on=(Mine,)))
def handle(task):
    if task.attempt == 1:
        raise Mine
    return [os.getpid(), task.input, __name__]

async def main():
    async with queue:
        task = await queue.submit("t", "x")
        running = asyncio.ensure_future(worker.run())
        print(os.getpid(), *(await task.result(timeout=60)))
        worker.stop()
        await running

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_a_script_may_have_its_handlers_in_itself(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    done = subprocess.run(
        [sys.executable, "-W", "error", "script.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ours, theirs, *rest = done.stdout.split()
    assert ours != theirs
    assert rest == ["x", "__penstock_main__"]
    assert done.stderr == ""


def test_the_example_of_the_documentation_runs(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "queue.md").read_text()
    (block,) = re.findall(r"```py\n(.*?)```", page, re.DOTALL)
    script = tmp_path / "tasks.py"
    script.write_text(block.replace("file:///tmp/bucket", f"file://{tmp_path}/bucket"))
    done = subprocess.run(
        [sys.executable, "-W", "error", script],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "{'ok': 1}\n"), done.stderr


def test_what_an_isolated_handler_reports_is_shown_and_its_task_is_settled() -> None:
    async def main() -> None:
        async with Queue("memory://", name="q") as queue:
            polling = Polling(min_seconds=0.05, max_seconds=0.1)
            worker = Worker(queue, settings=WorkerSettings(polling=polling))
            worker.handler("t", isolate=True)(apart.whoami)
            async with asyncio.TaskGroup() as group:
                group.create_task(worker.run(signals=False))
                tasks = await queue.submit_many("t", [1, 2, 3])
                pids = {(await task.result(timeout=60))["pid"] for task in tasks}
                worker.stop()
            assert os.getpid() not in pids
            progress = (await tasks[0].view()).progress
            assert progress is not None
            assert progress.message == "begun"

    asyncio.run(main())
