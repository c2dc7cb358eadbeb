"""The end of a log: only of a plain file of our own folder, only text, only so much."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.console.pages.tasks import TAIL_BYTES_MAX, LogTail, as_text, tail_of


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    folder = tmp_path / "data" / "logs"
    folder.mkdir(parents=True)
    return folder


def tail(logs: Path | None, said: str | None = None) -> LogTail | None:
    return tail_of(logs, task_id=7, attempt=2, said=said)


def test_what_an_attempt_that_runs_has_printed_so_far(logs: Path) -> None:
    (logs / "7-2.log").write_text("one\ntwo\n")
    (logs / "7-1.log").write_text("another\n")
    assert tail(logs) == LogTail("one\ntwo\n", 8, is_cut=False)


def test_what_a_worker_says_is_taken_if_it_is_that_file(logs: Path, tmp_path: Path) -> None:
    (logs / "7-2.log").write_text("here")
    (tmp_path / "way").symlink_to(logs.parent)
    for said in (logs / "7-2.log", logs / ".." / "logs" / "7-2.log", tmp_path / "way/logs/7-2.log"):
        found = tail(logs, str(said))
        assert found is not None
        assert found.text == "here"


def test_what_a_worker_says_is_not_believed(logs: Path, tmp_path: Path) -> None:
    (logs / "7-2.log").write_text("here")
    (tmp_path / "7-2.log").write_text("a secret")
    (logs / "8-1.log").write_text("of another task")
    outside = (tmp_path / "7-2.log", logs / "8-1.log", "/etc/passwd", "7-2.log", "", "a\x00b")
    for said in outside:
        assert tail(logs, str(said)) is None


def test_a_link_or_another_name_of_a_file_is_not_read(logs: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a secret")
    log = logs / "7-2.log"
    log.symlink_to(secret)
    assert tail(logs) is None
    log.unlink()
    os.link(secret, log)
    assert tail(logs) is None
    log.unlink()
    os.mkfifo(log)
    assert tail(logs) is None
    log.unlink()
    log.mkdir()
    assert tail(logs) is None


def test_there_is_no_log(logs: Path) -> None:
    assert tail(None) is None
    assert tail(logs) is None
    assert tail(logs / "not there") is None


def test_a_long_log_is_cut_at_the_beginning_of_a_line(logs: Path) -> None:
    line = "x" * 99 + "\n"
    (logs / "7-2.log").write_text("first\n" + line * 2000)
    found = tail(logs)
    assert found is not None
    assert found.is_cut
    assert found.bytes == 6 + 200_000
    assert len(found.text) <= TAIL_BYTES_MAX
    assert found.text.startswith(line)
    assert found.text.endswith(line)


def test_one_line_that_is_longer_than_all_is_shown(logs: Path) -> None:
    (logs / "7-2.log").write_text("y" * (TAIL_BYTES_MAX + 10))
    found = tail(logs)
    assert found is not None
    assert found.text == "y" * TAIL_BYTES_MAX


def test_what_is_no_text_or_steers_a_terminal_is_left_out() -> None:
    assert as_text(b"a\x1b[31mred\x1b[0m \x1b]0;title\x07b\x00\x08") == "ared b"
    assert as_text(b"10%\r50%\r\ndone\n") == "10%\n50%\ndone\n"
    assert (
        as_text(b"caf\xc3\xa9 \xff")
        == "caf\N{LATIN SMALL LETTER E WITH ACUTE} \N{REPLACEMENT CHARACTER}"
    )
