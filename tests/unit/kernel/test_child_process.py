"""Commands on a leash end with their parent, and with what they have started themselves.

The processes are real. Each of them opens a named pipe for writing and says "ready"; the pipe
shows its end when the last of them is gone. So nothing here polls or sleeps.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import pytest

from penstock.kernel.child_process import ChildProcess

_OPEN = "import os, signal, subprocess, sys\npipe = os.open(sys.argv[1], os.O_WRONLY)\n"
_READY = "os.write(pipe, b'ready\\n')\n"
_WAIT = "while True:\n    signal.pause()\n"

OBEDIENT = _OPEN + _READY + _WAIT
STUBBORN = _OPEN + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + _READY + _WAIT
POLITE = (
    _OPEN
    + "def end(*_):\n    os.write(pipe, b'ended\\n')\n    sys.exit(0)\n"
    + "signal.signal(signal.SIGTERM, end)\n"
    + _READY
    + _WAIT
)
SHORT = _OPEN + _READY
PARENT_OF_ANOTHER = (
    _OPEN + "subprocess.Popen([sys.executable, '-c', sys.argv[2], *sys.argv[1:2]])\n" + _WAIT
)
STARTER = """
import asyncio, pathlib, sys
from penstock.kernel.child_process import ChildProcess

async def main():
    command_process = ChildProcess(sys.argv[2:], log=pathlib.Path(sys.argv[1]), grace_seconds=0.05)
    await command_process.start()
    await asyncio.Event().wait()

asyncio.run(main())
"""


class Watched:
    """The reading end of the named pipe."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "pipe"
        self.log = folder / "log"
        os.mkfifo(self.path)
        # Both ends are opened, so that opening does not wait; the writing end is closed as soon
        # as somebody else has it.
        self._reading = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)
        self._writing = os.open(self.path, os.O_WRONLY)
        os.set_blocking(self._reading, True)
        self._lines: IO[str] = os.fdopen(self._reading)

    def command(self, script: str, *more: str) -> list[str]:
        return [sys.executable, "-c", script, str(self.path), *more]

    def wait_until_ready(self) -> None:
        assert self._lines.readline() == "ready\n", self.log.read_text()
        self.let_go()

    def let_go(self) -> None:
        if self._writing >= 0:
            os.close(self._writing)
        self._writing = -1

    def rest(self) -> str:
        """What was said until the last process was gone."""
        return self._lines.read()

    def close(self) -> None:
        self.let_go()
        self._lines.close()


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    pipe = Watched(tmp_path)
    yield pipe
    pipe.close()


def _start_and_stop(watched: Watched, command: Sequence[str], *, grace_seconds: float) -> None:
    """Start the command, and stop it when it is ready."""

    async def main() -> list[bool]:
        command_process = ChildProcess(command, log=watched.log, grace_seconds=grace_seconds)
        running = [command_process.running]
        async with command_process:
            await asyncio.to_thread(watched.wait_until_ready)
            running.append(command_process.running)
        return [*running, command_process.running]

    assert asyncio.run(main()) == [False, True, False]


def _kill_parent(watched: Watched, command: Sequence[str]) -> None:
    """Start the command from a process of its own, and kill that with SIGKILL."""
    parent = subprocess.Popen([sys.executable, "-c", STARTER, str(watched.log), *command])
    try:
        watched.wait_until_ready()
    finally:
        parent.kill()
        assert parent.wait() == -signal.SIGKILL


def test_a_command_ends_with_a_parent_that_is_killed(watched: Watched) -> None:
    _kill_parent(watched, watched.command(OBEDIENT))
    assert watched.rest() == ""


def test_a_stubborn_command_ends_with_a_parent_that_is_killed(watched: Watched) -> None:
    _kill_parent(watched, watched.command(STUBBORN))
    assert watched.rest() == ""


def test_what_a_command_started_ends_with_a_parent_that_is_killed(watched: Watched) -> None:
    _kill_parent(watched, watched.command(PARENT_OF_ANOTHER, STUBBORN))
    assert watched.rest() == ""


def test_stop_lets_a_command_end_by_itself(watched: Watched) -> None:
    _start_and_stop(watched, watched.command(POLITE), grace_seconds=60)
    assert watched.rest() == "ended\n"


def test_stop_kills_a_command_that_ignores_it(watched: Watched) -> None:
    _start_and_stop(watched, watched.command(STUBBORN), grace_seconds=0.05)
    assert watched.rest() == ""


def test_stop_ends_what_a_command_started(watched: Watched) -> None:
    _start_and_stop(watched, watched.command(PARENT_OF_ANOTHER, STUBBORN), grace_seconds=60)
    assert watched.rest() == ""


def test_a_command_that_ended_by_itself_is_stopped_without_fuss(watched: Watched) -> None:
    async def main() -> None:
        command_process = ChildProcess(watched.command(SHORT), log=watched.log)
        await command_process.start()
        await asyncio.to_thread(watched.wait_until_ready)
        assert await asyncio.to_thread(watched.rest) == ""
        await command_process.stop()
        await command_process.stop()
        assert not command_process.running

    asyncio.run(main())


def test_stop_without_a_start_is_harmless(watched: Watched) -> None:
    asyncio.run(ChildProcess(["nothing"], log=watched.log).stop())


def test_a_command_that_is_not_there_is_told_in_the_log(watched: Watched) -> None:
    async def main() -> None:
        command_process = ChildProcess(["./no-such-command"], log=watched.log)
        await command_process.start()
        assert command_process._process is not None
        await command_process._process.wait()
        assert not command_process.running
        await command_process.stop()

    asyncio.run(main())
    assert "no-such-command" in watched.log.read_text()


def test_output_and_environment(watched: Watched) -> None:
    script = _OPEN + "print('to the log', os.environ['WORD'], flush=True)\n" + _READY + _WAIT

    async def main() -> None:
        command_process = ChildProcess(
            watched.command(script),
            log=watched.log,
            environment={**os.environ, "WORD": "word"},
            grace_seconds=60,
        )
        async with command_process:
            await asyncio.to_thread(watched.wait_until_ready)

    asyncio.run(main())
    assert watched.log.read_text() == "to the log word\n"


@pytest.mark.skipif(sys.platform != "linux", reason="only the kernel of Linux does this")
@pytest.mark.parametrize("script", [OBEDIENT, STUBBORN], ids=["obedient", "stubborn"])
def test_a_command_ends_with_a_leash_that_is_killed(watched: Watched, script: str) -> None:
    async def main() -> None:
        command_process = ChildProcess(watched.command(script), log=watched.log, grace_seconds=60)
        async with command_process:
            await asyncio.to_thread(watched.wait_until_ready)
            assert command_process._process is not None
            command_process._process.kill()
            assert await asyncio.to_thread(watched.rest) == ""

    asyncio.run(main())
