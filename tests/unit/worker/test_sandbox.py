"""The folders of attempts: whose they are, and what becomes of those that nobody has any more."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from penstock.kernel.entropy import seeded_entropy
from penstock.kernel.errors import InvalidInput, WorkFailed
from penstock.runtimes.base import AttemptWork
from penstock.worker import sandbox
from penstock.worker.sandbox import AttemptSandbox, RunFolder

WORK = AttemptWork(task_id=7, attempt=2, job="j", operator="o", generation="g")
HOLDS = """
import sys
from pathlib import Path
from penstock.kernel.entropy import system_entropy
from penstock.worker.sandbox import AttemptSandbox, RunFolder
from penstock.runtimes.base import AttemptWork

run = RunFolder(Path(sys.argv[1]), system_entropy())
run.open()
work = AttemptWork(task_id=1, attempt=1, job="j", operator="o", generation="g")
AttemptSandbox(run.path / "1-1", work=work, users=None).prepare("secret")
print(run.path, flush=True)
sys.stdin.read()
"""


def opened(folder: Path, seed: int) -> RunFolder:
    run = RunFolder(folder, seeded_entropy(seed))
    run.open()
    return run


def prepared(run: RunFolder, name: str = "7-2") -> AttemptSandbox:
    made = AttemptSandbox(run.path / name, work=WORK, users=None)
    made.prepare("token")
    return made


def test_what_a_killed_worker_left_is_swept_and_what_a_live_one_has_is_not(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDS, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as one:
        assert one.stdout is not None
        left = Path(one.stdout.readline().strip())
        assert (left / "1-1" / "token").read_text() == "secret"
        live = opened(tmp_path, 1)
        assert (left / "1-1" / "token").exists(), "its worker lives"
        prepared(live)
        one.send_signal(signal.SIGKILL)
        one.wait()
        assert (left / "1-1" / "token").exists()
        next_one = opened(tmp_path, 2)
    assert not left.exists()
    assert (live.path / "7-2" / "token").read_text() == "token"
    for run in (live, next_one):
        run.close()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_is_swept_before_it_is_held_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers start at once: one sweeps what the other has just made."""
    locked = sandbox._locked
    swept: list[Path] = []

    def locking(file: Path, *, flags: int = 0) -> int | None:
        if flags and not swept:
            # Another finds it, and nobody holding it, and removes it.
            swept.append(file)
            file.touch()
            lock = locked(file)
            assert lock is not None
            file.unlink()
            os.close(lock)
            return None
        return locked(file, flags=flags)

    monkeypatch.setattr(sandbox, "_locked", locking)
    run = opened(tmp_path, 1)
    assert swept != []
    assert {each.name for each in tmp_path.iterdir()} == {run.path.name, f"{run.path.name}.lock"}
    run.close()


def test_a_lock_is_of_the_file_that_is_there(tmp_path: Path) -> None:
    file = tmp_path / "a.lock"
    first = sandbox._locked(file, flags=os.O_CREAT)
    assert first is not None
    assert sandbox._locked(file) is None, "it is held"
    os.close(first)
    real = os.open(file, os.O_RDWR)
    file.unlink()
    file.touch()
    second = sandbox._locked(file)
    assert second is not None
    assert not os.path.samestat(os.fstat(second), os.fstat(real))
    os.close(second)
    os.close(real)


def test_a_lock_that_was_removed_while_it_was_taken_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.lock"
    flock = fcntl.flock

    def locking(opened: int, operation: int) -> None:
        file.unlink()
        file.touch()
        flock(opened, operation)

    monkeypatch.setattr(fcntl, "flock", locking)
    assert sandbox._locked(file, flags=os.O_CREAT) is None


def test_nothing_is_written_after_the_end(tmp_path: Path) -> None:
    run = opened(tmp_path, 1)
    made = prepared(run)
    made.end()
    made.write({"token": "late"})
    assert list(run.path.iterdir()) == []
    run.close()


def test_writers_and_the_end_may_come_at_once(tmp_path: Path) -> None:
    run = opened(tmp_path, 1)
    for number in range(20):
        made = prepared(run, f"7-{number}")
        begun = threading.Event()

        def write(made: AttemptSandbox = made, begun: threading.Event = begun) -> None:
            for each in range(20):
                made.write({"token": str(each)})
                begun.set()

        writing = threading.Thread(target=write)
        writing.start()
        assert begun.wait(30)
        made.end()
        writing.join()
    assert list(run.path.iterdir()) == []
    run.close()


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match="of task credentials cannot be used: "):
        opened(tmp_path / "file" / "handed", 1)


def test_an_attempt_whose_folder_cannot_be_made_fails(tmp_path: Path) -> None:
    run = opened(tmp_path, 1)
    (run.path / "7-2").write_text("in the way")
    with pytest.raises(WorkFailed, match="The files of the attempt cannot be written: File exists"):
        prepared(run)
    run.close()


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    run = opened(tmp_path, 1)
    made = prepared(run)
    with pytest.raises(UnicodeEncodeError):
        made.write({"token": "\ud800"})
    assert [each.name for each in (run.path / "7-2").iterdir()] == ["token"]
    assert (run.path / "7-2" / "token").read_text() == "token"
    run.close()
    assert list(tmp_path.iterdir()) == []
