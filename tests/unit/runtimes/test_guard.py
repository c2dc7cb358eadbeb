"""What the kernel tells of the processes of a task."""

from __future__ import annotations

import asyncio
import ctypes
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.kernel.entropy import system_entropy
from penstock.kernel.errors import WorkFailed
from penstock.kernel.process_locks import ProcessLocks
from penstock.runtimes.child_process import LaunchSpec, RuntimeChild
from penstock.runtimes.frames import from_child
from penstock.runtimes.guard import Guard
from penstock.runtimes.resource_limits import Cgroup

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="it is in /proc")

_CLOSED = """
import ctypes, sys
held = bytearray(b"x") * 50_000_000
ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
print("ready", flush=True)
sys.stdin.read()
"""
_LOOKING = """
import sys
from penstock.runtimes.guard import resident_bytes
print(resident_bytes(int(sys.argv[1])))
"""
_CAPBSET_DROP = 24
_SYS_PTRACE, _SYS_ADMIN, _PERFMON = 19, 21, 38


def be_root_of_a_container() -> None:
    if os.geteuid() == 0:
        for each in (_SYS_PTRACE, _SYS_ADMIN, _PERFMON):
            ctypes.CDLL(None).prctl(_CAPBSET_DROP, each, 0, 0, 0)


_GUARDED = """
import subprocess, sys
from pathlib import Path
from penstock.kernel.entropy import system_entropy
from penstock.kernel.process_locks import ProcessLocks
from penstock.runtimes.guard import Guard
lock = ProcessLocks(Path(sys.argv[1]), entropy=system_entropy()).acquire()
guard = Guard()
child = subprocess.Popen(["sleep", "3600"], start_new_session=True)
guard.watch(child.pid)
print(lock.incarnation, guard._process.pid, child.pid, flush=True)
sys.stdin.read()
"""


def test_a_process_has_ended_when_its_guard_has_ended_all_that_it_left(tmp_path: Path) -> None:
    folder = tmp_path / "locks"
    folder.mkdir(mode=0o700)
    locks = ProcessLocks(folder, entropy=system_entropy())
    with subprocess.Popen(
        [sys.executable, "-c", _GUARDED, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        incarnation, guard, child = process.stdout.readline().split()
        os.kill(int(guard), signal.SIGSTOP)
        process.kill()
        process.wait()
        assert locks.ended() == frozenset(), "a child of it runs"
        ended = os.pidfd_open(int(child))
        os.kill(int(guard), signal.SIGCONT)
        for _ in range(1000):
            if locks.ended():
                break
            select.select([], [], [], 0.01)
        assert locks.ended() == {incarnation}
        assert select.select([ended], [], [], 5.0)[0], "its child was killed before"
        os.close(ended)


class Noted(Guard):
    """Kills nobody; only remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.watched: set[int] = set()

    def watch(self, group: int, *, user: int = 0) -> None:
        self.watched.add(group)

    def forget(self, group: int) -> None:
        self.watched.remove(group)


def test_a_child_that_came_to_nothing_is_not_guarded(tmp_path: Path) -> None:
    """Its number may be a stranger's by the time that the guard kills."""
    guard, missing = Noted(), tmp_path / "missing"
    start = LaunchSpec(
        command=[sys.executable, "-c", "input()"],
        environment={},
        cgroup=Cgroup(missing, (missing,)),
    )
    with pytest.raises(WorkFailed, match="No child process can be started"):
        asyncio.run(RuntimeChild.born(start, guard=guard, decoder=from_child))
    assert guard.watched == set()


def test_a_process_that_may_not_be_looked_into_is_counted() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _CLOSED], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as closed:
        assert closed.stdout is not None
        assert closed.stdout.readline() == b"ready\n"
        looking = subprocess.run(
            [sys.executable, "-c", _LOOKING, str(closed.pid)],
            preexec_fn=be_root_of_a_container,
            capture_output=True,
            check=True,
            timeout=60,
        )
        closed.kill()
    assert 50_000_000 < int(looking.stdout) < 150_000_000
