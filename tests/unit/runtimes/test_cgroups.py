"""Control groups of children: what they bound, and that none is left behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.runtimes.resource_limits import Cgroup, CgroupLimit, Cgroups

MAKES_ONE = """
from penstock.runtimes.resource_limits import Cgroups, CgroupLimit
group = Cgroups.found().made(CgroupLimit(2**30))
print(*group.folders)
"""


@pytest.fixture
def cgroups() -> Cgroups:
    found = Cgroups.found() if sys.platform == "linux" else None
    if found is None:
        pytest.skip("no control groups can be made here")
    return found


def waiting(group: Cgroup) -> subprocess.Popen[bytes]:
    """A process in the group that starts processes until it cannot, and then waits."""
    code = """
import os, sys
sys.stdin.buffer.read(1)
count = 0
try:
    while count < 50:
        if os.fork() == 0:
            os.setsid()
            os.read(0, 1)
        count += 1
except BlockingIOError:
    pass
print(count, flush=True)
os.read(0, 1)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    group.admit(process.pid)
    assert process.stdin is not None
    process.stdin.write(b"x")
    process.stdin.flush()
    return process


def test_a_group_bounds_processes_and_ends_with_all_that_is_in_it(cgroups: Cgroups) -> None:
    group = cgroups.made(CgroupLimit(2**30, processes_max=10))
    with waiting(group) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"9\n"
        process.kill()
        process.wait()
        # Those that have left the session of their parent are in the group all the same.
        group.remove()
        assert process.stdout.read() == b"", "they have ended"
    assert not any(each.exists() for each in group.folders)
    assert not group.has_overrun()


def test_what_a_killed_worker_leaves_is_swept_and_ours_stays(cgroups: Cgroups) -> None:
    made = subprocess.run([sys.executable, "-c", MAKES_ONE], capture_output=True, check=True)
    left = [Path(each) for each in made.stdout.decode().split()]
    ours = cgroups.made(CgroupLimit(2**30))
    try:
        assert left
        assert all(each.exists() for each in left)
        cgroups.sweep()
        assert not any(each.exists() for each in left)
        assert all(each.exists() for each in ours.folders)
    finally:
        ours.remove()


def test_a_group_that_is_not_ours_to_divide_is_left_alone(tmp_path: Path) -> None:
    own = tmp_path / "system.slice" / "penstock.service"
    own.mkdir(parents=True)
    (own / "cgroup.procs").write_text("1\n")
    (own / "cgroup.controllers").write_text("memory pids\n")
    (own / "cgroup.subtree_control").write_text("")
    said = "0::/system.slice/penstock.service\n"
    assert Cgroups.found(tmp_path, said) is None
    assert {each.name for each in own.iterdir()} == {
        "cgroup.procs",
        "cgroup.controllers",
        "cgroup.subtree_control",
    }
