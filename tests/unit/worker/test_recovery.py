"""What a killed worker has held is reported by whoever follows it, and by nobody while it lives."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest
from msgspec.structs import replace

from penstock.kernel import process_locks
from penstock.kernel.entropy import system_entropy
from penstock.kernel.errors import DispatcherRefused, DispatcherUnavailable
from penstock.kernel.process_locks import ProcessLocks, file_system
from penstock.protocol.work import Assignment, CompleteAsk, EndAsk, ResultsAnswer, TaskResult
from penstock.runtimes.base import AttemptWork, ProducedOutput, WorkReporter
from penstock.worker import recovery
from penstock.worker.recovery import BEGUN, NOT_BEGUN, AttemptJournal, CrashRecovery, left_behind
from tests.unit.worker.bench import Bench, nothing, play


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "workers"
    place.mkdir(mode=0o700)
    with (place / "probe").open("w") as probe:
        if file_system(probe.fileno()) not in process_locks.LOCAL_FILE_SYSTEMS:
            pytest.skip("the folder of the tests is not on a local file system")
    (place / "probe").unlink()
    return place


def _assignment(task_id: int, attempt: int = 1) -> Assignment:
    return Assignment(
        task_id=task_id,
        attempt=attempt,
        lease_token=f"lease {task_id}.{attempt}",
        lease_expires_at=datetime(2025, 1, 1, tzinfo=UTC),
        heartbeat_seconds=60.0,
        timeout_seconds=60.0,
        job="clean",
        operator="a:clean",
        runtime="process",
        generation="g",
        definition={},
        payload={},
        token=f"capability {task_id}.{attempt}",
    )


def _held(folder: Path) -> list[Path]:
    return list(folder.glob("*.held"))


class Process:
    """A worker's file and lock, and its end without a word."""

    def __init__(self, folder: Path) -> None:
        lock = ProcessLocks(folder, entropy=system_entropy()).acquire()
        assert lock is not None
        self._descriptor = lock.descriptor
        self.path = folder / f"{lock.incarnation}.held"
        self.journal = AttemptJournal(lock, folder)

    def kill(self) -> None:
        os.close(self._descriptor)


class Dispatcher:
    """Takes ends, unless it is away or does not understand one."""

    def __init__(self, *, away: int = 0, refused: int = 0, status: int = 400) -> None:
        self.asked: list[EndAsk] = []
        self._away = away
        self._refused = refused
        self._status = status

    async def complete(self, ask: CompleteAsk) -> ResultsAnswer:
        if self._away:
            self._away -= 1
            raise DispatcherUnavailable("Nobody is there.")
        if self._refused in [each.task_id for each in ask.tasks]:
            raise DispatcherRefused("No.", status=self._status)
        self.asked += ask.tasks
        return ResultsAnswer([TaskResult(each.task_id, 200) for each in ask.tasks])

    @property
    def reported(self) -> dict[int, str]:
        return {each.task_id: _said(each) for each in self.asked}


def _said(ask: EndAsk) -> str:
    if ask.release is not None:
        assert ask.release.is_lost
        assert not ask.release.is_delayed
        return ask.release.reason
    assert ask.failure is not None
    assert ask.failure.is_lost
    assert ask.failure.is_retried
    return ask.failure.reason


def _followed(folder: Path, dispatcher: Dispatcher) -> None:
    """Have a successor look a few times."""

    async def main() -> None:
        following = CrashRecovery(folder, dispatcher, _Hasty(3), system_entropy())
        await following.run(AttemptJournal(None, folder))

    with pytest.raises(_Enough):
        asyncio.run(main())


class _Enough(Exception):
    """So many looks are enough."""


class _Hasty:
    """A clock whose sleeps end at once, and after some of which a test is over."""

    def __init__(self, loops: int) -> None:
        self._left = loops

    async def sleep(self, seconds: float) -> None:
        assert 0 < seconds <= 1.0, "a chain that waits for a successor goes on within 3 s"
        self._left -= 1
        if not self._left:
            raise _Enough

    def monotonic(self) -> float:
        return 0.0

    def wall(self) -> float:
        return 0.0


def test_what_a_killed_worker_held_is_given_up_by_its_tokens(folder: Path) -> None:
    process = Process(folder)
    process.journal.hold([_assignment(each) for each in (1, 2, 3)])
    process.journal.begin(_assignment(2))
    process.journal.begin(_assignment(3))
    process.journal.release(_assignment(3))
    assert stat.S_IMODE(process.path.stat().st_mode) == 0o600
    dispatcher = Dispatcher()
    _followed(folder, dispatcher)
    assert dispatcher.asked == [], "it lives"
    process.kill()
    _followed(folder, dispatcher)
    assert dispatcher.reported == {1: NOT_BEGUN, 2: BEGUN}
    fences = [(each.attempt, each.lease_token, each.token) for each in dispatcher.asked]
    assert fences == [(1, "lease 1.1", "capability 1.1"), (1, "lease 2.1", "capability 2.1")]
    assert list(folder.iterdir()) == [], "nothing of it is reported again"


def test_what_nobody_has_answered_is_reported_again(folder: Path) -> None:
    process = Process(folder)
    process.journal.hold([_assignment(1)])
    process.kill()
    dispatcher = Dispatcher(away=2)
    _followed(folder, dispatcher)
    assert dispatcher.reported == {1: NOT_BEGUN}


@pytest.mark.parametrize(("status", "left"), [(400, 0), (403, 2)])
def test_one_end_that_is_not_understood_costs_no_other(
    folder: Path, status: int, left: int
) -> None:
    process = Process(folder)
    process.journal.hold([_assignment(each) for each in (1, 2, 3)])
    process.kill()
    dispatcher = Dispatcher(refused=2, status=status)
    _followed(folder, dispatcher)
    # Who is not let in may be, later: nothing is thrown away for that.
    assert sorted(dispatcher.reported) == ([] if left else [1, 3])
    assert len(list(folder.iterdir())) == left


def test_only_the_last_attempt_of_a_task_and_whole_lines_count(folder: Path) -> None:
    process = Process(folder)
    process.journal.hold([_assignment(1), _assignment(2)])
    process.journal.begin(_assignment(1))
    process.journal.hold([_assignment(1, 2)])
    with process.path.open("a") as file:
        file.write('[2,1,"beg')
    found = left_behind(process.path)
    assert {(each.task_id, each.attempt): _said(each) for each in found} == {
        (1, 2): NOT_BEGUN,
        (2, 1): NOT_BEGUN,
    }
    process.journal.release(_assignment(1, 2))
    process.journal.release(_assignment(1))
    process.journal.release(_assignment(2))
    process.journal.close()
    assert list(folder.iterdir()) == [], "a worker that ends in order leaves nothing"


def test_an_attempt_of_the_same_number_is_another(folder: Path) -> None:
    # As after a crash of Postgres that has forgotten a claim: decision 0076.
    process = Process(folder)
    forgotten = replace(_assignment(1), lease_token="forgotten")
    process.journal.hold([forgotten])
    process.journal.begin(forgotten)
    process.journal.hold([_assignment(1)])
    process.journal.begin(forgotten)
    process.journal.release(forgotten)
    (left,) = left_behind(process.path)
    assert (left.lease_token, _said(left)) == ("lease 1.1", NOT_BEGUN)


def test_a_file_that_has_grown_is_written_anew_and_stays_private(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "_FILE_BYTES_MAX", 1000)
    process = Process(folder)
    process.journal.hold([_assignment(0)])
    process.journal.begin(_assignment(0))
    for number in range(1, 50):
        process.journal.hold([_assignment(number)])
        process.journal.begin(_assignment(number))
        assert len(left_behind(process.path)) == 2
        process.journal.release(_assignment(number))
        assert process.path.stat().st_size <= 1000
    (left,) = left_behind(process.path)
    assert _said(left) == BEGUN
    assert stat.S_IMODE(process.path.stat().st_mode) == 0o600


def test_what_cannot_be_noted_whole_is_not_noted_at_all(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Process(folder)
    process.journal.hold([_assignment(1)])
    written = os.write
    monkeypatch.setattr(os, "write", lambda file, body: written(file, body[:-5]))
    process.journal.begin(_assignment(1))
    monkeypatch.undo()
    assert not process.path.exists(), "who has begun could be taken for who has not"
    process.journal.hold([_assignment(2)])
    assert left_behind(process.path) == []


def test_files_without_a_lock_are_swept(folder: Path) -> None:
    (folder / "gone.held").write_text("[1,1,'held']")
    following = CrashRecovery(folder, Dispatcher(), _Hasty(1), system_entropy())
    journal = following.journal()
    assert len(list(folder.glob("*.held"))) == 1, "our own"
    journal.close()
    assert list(folder.iterdir()) == []


def test_a_worker_notes_what_it_holds_and_lets_go_in_the_end(folder: Path) -> None:
    seen: list[Sequence[EndAsk]] = []

    async def doing(work: AttemptWork, reporter: WorkReporter) -> tuple[ProducedOutput, ...]:
        (path,) = _held(folder)
        before = left_behind(path)
        reporter.begins()
        # The one before it may still wait for the answer to its end.
        both = [*before, *left_behind(path)]
        seen.append([each for each in both if each.task_id == work.task_id])
        return await nothing(work, reporter)

    async def story(bench: Bench) -> None:
        bench.dispatcher.add()
        bench.dispatcher.add()
        await bench.until(lambda: all(each.ended for each in bench.dispatcher.tasks.values()))
        await bench.stopped()
        assert _held(folder) == []

    play(story, doing=doing, locks=folder, seeds=[1], concurrency=1)
    assert [[_said(each) for each in some] for some in seen] == [[NOT_BEGUN, BEGUN]] * 2
