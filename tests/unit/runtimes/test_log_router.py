"""What a thread prints goes to the log of its task."""

from __future__ import annotations

import io
import threading
from pathlib import Path

from penstock.runtimes.log_router import LogRouter, RoutedStream, TaskLogs


def test_threads_print_to_their_own_logs_and_others_as_before(tmp_path: Path) -> None:
    before = io.StringIO()
    printing = LogRouter()
    stream = RoutedStream(before, printing)
    both = threading.Barrier(2, timeout=30)

    def work(name: str) -> None:
        with printing.to(TaskLogs(lambda: [str(tmp_path / "logs" / name)])):
            for number in range(3):
                both.wait()
                print(name, number, file=stream)
        print("after", name, file=stream)

    threads = [threading.Thread(target=work, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for name in ("one", "two"):
        assert (tmp_path / "logs" / name).read_text() == f"{name} 0\n{name} 1\n{name} 2\n"
    assert sorted(before.getvalue().splitlines()) == ["after one", "after two"]


def test_of_a_batch_each_log_gets_what_is_printed_while_it_is_served(tmp_path: Path) -> None:
    files = [str(tmp_path / "1"), str(tmp_path / "2"), ""]
    log = TaskLogs(lambda: files)
    log.write("for both\n")
    assert not (tmp_path / "1").exists()
    log.flush()
    files = files[:1]
    log.write("for the first\n")
    assert (tmp_path / "1").read_text() == "for both\nfor the first\n"
    assert (tmp_path / "2").read_text() == "for both\n"


def test_much_is_not_kept_back(tmp_path: Path) -> None:
    log = TaskLogs(lambda: [str(tmp_path / "1"), str(tmp_path / "2")])
    log.write("x" * 100_000)
    assert (tmp_path / "2").stat().st_size == 100_000


def test_a_log_that_cannot_be_written_fails_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    log = TaskLogs(lambda: [str(tmp_path / "file" / "log")])
    log.write("lost\n")
    log.write("lost\n")
