"""A lock proves that a process has ended, with its children; everything else proves nothing."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.kernel import process_locks
from penstock.kernel.entropy import system_entropy
from penstock.kernel.process_locks import KEPT_SECONDS, ProcessLock, ProcessLocks, file_system

_HOLDS = """
import subprocess, sys
from pathlib import Path
from penstock.kernel.entropy import system_entropy
from penstock.kernel.process_locks import ProcessLocks
lock = ProcessLocks(Path(sys.argv[1]), entropy=system_entropy()).acquire()
child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=(lock.descriptor,))
print(lock.incarnation, child.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "locks"
    place.mkdir(mode=0o700)
    with (place / "probe").open("w") as probe:
        if file_system(probe.fileno()) not in process_locks.LOCAL_FILE_SYSTEMS:
            pytest.skip("the folder of the tests is not on a local file system")
    return place


def _locks(folder: Path) -> ProcessLocks:
    return ProcessLocks(folder, entropy=system_entropy())


def _lost(folder: Path) -> str:
    """A file as a process leaves it that was killed."""
    lock = _locks(folder).acquire()
    assert lock is not None
    os.close(lock.descriptor)
    return lock.incarnation


def test_a_killed_process_is_known_to_have_ended_when_its_last_child_has(folder: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDS, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        incarnation, child = process.stdout.readline().split()
        assert _locks(folder).ended() == frozenset()
        process.kill()
        process.wait()
        # The child reads from a pipe that nobody holds any more, and ends by itself.
        _await_end(int(child))
    assert _locks(folder).ended() == {incarnation}


def _await_end(pid: int) -> None:
    """Wait until a process has ended that is no child of ours."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    assert select.select([descriptor], [], [], 30)[0], "it does not end"
    os.close(descriptor)


def test_what_inherits_the_lock_keeps_it(folder: Path) -> None:
    lock = _locks(folder).acquire()
    assert lock is not None
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=(lock.descriptor,)) as child:
        os.close(lock.descriptor)
        assert _locks(folder).ended() == frozenset()
        child.communicate()
    assert _locks(folder).ended() == {lock.incarnation}


def test_who_lets_go_leaves_nothing(folder: Path) -> None:
    lock = _locks(folder).acquire()
    assert isinstance(lock, ProcessLock)
    lock.release()
    assert _locks(folder).ended() == frozenset()
    assert list(folder.glob("*.lock")) == []


def test_a_copy_proves_nothing(folder: Path) -> None:
    incarnation = _lost(folder)
    path = folder / f"{incarnation}.lock"
    shutil.copy2(path, folder / "copy")
    path.unlink()
    (folder / "copy").rename(path)
    assert _locks(folder).ended() == frozenset()


def test_another_boot_proves_nothing_and_is_removed(folder: Path) -> None:
    path = folder / f"{_lost(folder)}.lock"
    said = json.loads(path.read_text())
    path.write_text(json.dumps(["another boot", *said[1:]]))
    assert _locks(folder).ended() == frozenset()
    assert not path.exists()


def test_what_is_not_whole_proves_nothing(folder: Path) -> None:
    for body in ("", "{", '"x"', "[]"):
        path = folder / f"{_lost(folder)}.lock"
        path.write_text(body)
    assert _locks(folder).ended() == frozenset()


def test_old_files_are_removed_and_used_ones_kept(folder: Path) -> None:
    path = folder / f"{_lost(folder)}.lock"
    before = path.stat().st_mtime - KEPT_SECONDS - 60
    os.utime(path, (before, before))
    held = _locks(folder).acquire()
    assert held is not None
    used = folder / f"{held.incarnation}.lock"
    os.utime(used, (before, before))
    _locks(folder).ended()
    assert (path.exists(), used.exists()) == (False, True)
    held.refresh()
    assert used.stat().st_mtime > before
    held.release()


def test_of_one_that_dies_again_and_again_the_last_files_are_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_locks, "FILES_MAX", 3)
    lost = [_lost(folder) for _ in range(8)]
    for number, each in enumerate(lost):
        os.utime(folder / f"{each}.lock", ns=(0, folder.stat().st_mtime_ns - 10**9 * number))
    assert set(lost[:3]) <= _locks(folder).ended()
    assert {path.stem for path in folder.glob("*.lock")} == set(lost[:3])


def test_other_file_systems_and_folders_of_others_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    incarnation = _lost(folder)
    for nfs_or_fuse in (0x6969, 0x65735546, 0x1234):
        monkeypatch.setattr(process_locks, "file_system", lambda _, kind=nfs_or_fuse: kind)
        assert _locks(folder).acquire() is None
        assert _locks(folder).ended() == frozenset()
    monkeypatch.undo()
    assert _locks(folder).ended() == {incarnation}
    folder.chmod(0o777)
    assert _locks(folder).acquire() is None
    assert _locks(folder).ended() == frozenset()
