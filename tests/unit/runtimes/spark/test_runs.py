"""What is dropped, cancelled and interrupted of a run; and folders of hosts."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any

from penstock.kernel.entropy import seeded_entropy
from penstock.runtimes.base import AttemptWork
from penstock.runtimes.guard import kill_session, session_members
from penstock.runtimes.spark.engine_protocol import JobGroup, WorkOutcome
from penstock.runtimes.spark.host_process import LOGS_MAX, HostFolders
from penstock.runtimes.spark.run_executor import HostRun
from penstock.runtimes.task import Stopped
from tests.contract.spark_standin import NoSessions

_never = threading.Event()


class Seen(NoSessions):
    def __init__(self) -> None:
        self.groups: list[JobGroup] = []

    def enter(self, session: Any, group: JobGroup) -> None:
        self.groups.append(group)


class Heard:
    """What a run says to its slot."""

    def __init__(self) -> None:
        self.dropped: list[str] = []

    def begun(self, run: HostRun, task_ids: Collection[int]) -> None:
        pass

    def ended(self, run: HostRun, task_id: int, ended: WorkOutcome) -> None:
        pass

    def dropping(self) -> None:
        self.dropped.append("dropped")


def _run(*task_ids: int) -> tuple[HostRun, Seen, list[str]]:
    works = [
        AttemptWork(
            task_id=each, attempt=1, job="job", operator="compact", generation="g", log=f"{each}"
        )
        for each in task_ids
    ]
    seen, heard = Seen(), Heard()
    run = HostRun(4, works, seen)
    run.reporting = heard
    run.enter(object())
    return run, seen, heard.dropped


def test_a_group_is_cancelled_when_all_of_its_tasks_are_dropped() -> None:
    run, seen, dropped = _run(1, 2, 3)
    assert [group.tasks for group in seen.groups] == ["tasks 1, 2, 3"]
    run.drop(1)
    assert (run.look(), dropped, run.wanted) == ("", [], [2, 3])
    assert run.is_dropped(1)
    run.begin([2])
    run.drop(3)
    assert run.look() == ""
    run.drop(2)
    assert dropped == ["dropped"]
    assert run.look() == seen.groups[-1].name == run.groups[-1]
    assert len(set(run.groups)) == 2
    run.leave()
    assert run.look() == ""


def test_what_is_begun_for_nobody_is_cancelled_at_once() -> None:
    run, seen, dropped = _run(1, 2)
    run.drop(1)
    run.begin([1])
    assert dropped == ["dropped"]
    assert run.look() == seen.groups[-1].name
    assert not run.is_vain
    run.begin([2])
    assert run.look() == ""
    run.leave()


def test_a_run_that_nobody_wants_is_interrupted_but_never_after_it_has_left() -> None:
    caught = threading.Event()
    entered = threading.Event()
    runs: list[HostRun] = []

    def work() -> None:
        run, _, _ = _run(1)
        runs.append(run)
        entered.set()
        try:
            while True:
                _never.wait(0.01)
        except Stopped:
            caught.set()
        finally:
            run.leave()

    thread = threading.Thread(target=work)
    thread.start()
    assert entered.wait(30)
    run = runs[0]
    run.drop(1)
    looks = 0
    while not run.was_interrupted:
        assert run.look()
        looks += 1
    # Engine and Spark get some time to end by themselves.
    assert looks > 4
    assert caught.wait(30)
    thread.join(30)
    assert run.look() == ""


def test_folders_of_dead_runtimes_are_removed_and_those_of_others_kept(tmp_path: Path) -> None:
    alive, dead, new = (
        HostFolders(str(tmp_path), entropy=seeded_entropy(seed)) for seed in range(3)
    )
    (tmp_path / "spark").mkdir(mode=0o755)
    alive.open()
    assert (tmp_path / "spark").stat().st_mode & 0o077 == 0, "data is no other user's to read"
    dead.open()
    dead.new_host()
    assert dead._held is not None
    os.close(dead._held)
    new.open()
    assert alive.folder.is_dir()
    assert not dead.folder.exists()
    alive.close()
    new.close()
    assert not list((tmp_path / "spark" / "hosts").iterdir())


def test_the_newest_logs_are_kept(tmp_path: Path) -> None:
    places = HostFolders(str(tmp_path))
    for number in range(LOGS_MAX + 3):
        _, log = places.new_host()
        log.touch()
        os.utime(log, (number, number))
    kept = {log.name.rpartition("-")[2] for log in (tmp_path / "logs").iterdir()}
    assert kept == {f"{number}.log" for number in range(4, LOGS_MAX + 4)}


def test_what_left_the_group_of_its_leader_ends_with_the_session() -> None:
    said = (
        "import os, subprocess, sys\n"
        "inner = 'import os, signal; os.setpgid(0, 0); os.write(1, b\"x\"); signal.pause()'\n"
        "subprocess.run([sys.executable, '-c', inner])\n"
    )
    leader = subprocess.Popen(
        [sys.executable, "-c", said], stdout=subprocess.PIPE, start_new_session=True
    )
    assert leader.stdout is not None
    assert leader.stdout.read(1) == b"x"
    assert len(session_members(leader.pid)) == 2
    os.kill(leader.pid, 9)
    os.waitid(os.P_PID, leader.pid, os.WEXITED | os.WNOWAIT)
    kill_session(leader.pid)
    # Nobody holds the pipe any more.
    assert leader.stdout.read() == b""
    leader.wait()
    leader.stdout.close()
