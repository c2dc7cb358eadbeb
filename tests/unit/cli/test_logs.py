"""`penstock logs`: what a line says, which comes first, and files that grow, shrink and go."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.cli import run
from penstock.cli.logs import LogFile, ProcessLogLine, in_order, log_of, parsed

NOON = 1893499200.0


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            '{"at": "2030-01-01T12:00:00.500Z", "level": "warning", "message": "m", "task": 7}',
            ProcessLogLine("p", NOON + 0.5, "m", "warning", {"task": 7}),
        ),
        ("2030-01-01T12:00:00Z INFO penstock: m", ProcessLogLine("p", NOON, "penstock: m", "info")),
        (
            "2030-01-01 12:00:00.250 UTC [7] LOG:  m",
            ProcessLogLine("p", NOON + 0.25, "[7] LOG:  m"),
        ),
        (
            "2030-01-01 14:00:00.250 +02 [7] LOG:  m",
            ProcessLogLine("p", NOON + 0.25, "[7] LOG:  m"),
        ),
        (
            "Traceback (most recent call last):",
            ProcessLogLine("p", None, "Traceback (most recent call last):"),
        ),
        ("  File 'x'", ProcessLogLine("p", None, "  File 'x'")),
        ('{"at": 7}', ProcessLogLine("p", None, '{"at": 7}')),
        ("{broken", ProcessLogLine("p", None, "{broken")),
        ('{"at": "?", "message": "m"}', ProcessLogLine("p", None, "m")),
        ("[" * 100_000, ProcessLogLine("p", None, "[" * 100_000)),
        ("2030-99-01T12:00:00Z x", ProcessLogLine("p", None, "x")),
    ],
)
def test_a_line_is_read_in_each_of_its_forms(text: str, line: ProcessLogLine) -> None:
    assert parsed("p", text) == line


def test_lines_are_by_time_and_those_without_one_stay_where_they_were() -> None:
    lines = [
        ProcessLogLine("a", 1.0, "a1"),
        ProcessLogLine("a", None, "a2"),
        ProcessLogLine("a", 5.0, "a3"),
        ProcessLogLine("a", 4.0, "a4"),  # A clock that was set back.
        ProcessLogLine("b", None, "b1"),
        ProcessLogLine("b", 3.0, "b2"),
        ProcessLogLine("b", 4.5, "b3"),
    ]
    told = [each.message for each in in_order(lines)]
    assert told == ["b1", "a1", "a2", "b2", "b3", "a3", "a4"]


def _messages(lines: object) -> list[str]:
    assert isinstance(lines, list)
    return [each.message for each in lines]


def test_the_last_lines_of_a_long_file_are_found(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_text("".join(f"line {number} {'x' * 90}\n" for number in range(5000)))
    file = LogFile("p", path)
    found = file.tail(3000)
    assert len(found) == 3000
    assert found[0].message.startswith("line 2000 ")
    assert found[-1].message.startswith("line 4999 ")
    assert _messages(file.tail(1))[0].startswith("line 4999 ")
    assert file.tail(0) == []


def test_what_comes_is_whole_lines_and_each_once(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_text("one\ntwo\n")
    file = LogFile("p", path)
    assert _messages(file.tail(10)) == ["one", "two"]
    assert file.more() == []
    with path.open("a") as opened:
        opened.write("three\nfo")
    assert _messages(file.more()) == ["three"]
    with path.open("a") as opened:
        opened.write("ur\n\nfive\n")
    assert _messages(file.more()) == ["four", "five"]


def test_a_file_that_is_cut_or_another_one_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    file = LogFile("p", path)
    assert file.more() == []
    path.write_text("one\ntwo\n")
    assert _messages(file.more()) == ["one", "two"]
    path.write_text("cut\n")
    assert _messages(file.more()) == ["cut"]
    path.rename(tmp_path / "x.log.1")
    assert file.more() == []
    path.write_text("another\n")
    assert _messages(file.more()) == ["another"]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for process, text in {
        "dispatcher": '{"at": "2030-01-01T12:00:02Z", "level": "info", "message": "d", "took": 3,'
        ' "request": {"path": "/"}}\n',
        "worker": '{"at": "2030-01-01T12:00:01Z", "level": "error", "message": "w\\u001b[2J",'
        ' "traceback": "Traceback:\\n  File x"}\n',
        "postgres": "2030-01-01 12:00:03.000 UTC [7] LOG:  p\n",
    }.items():
        path = log_of(tmp_path, process)
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_the_logs_of_all_are_shown_by_time(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["logs", "--data", str(data)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "2030-01-01T12:00:01Z  worker      ERROR  w [2J",
        "                      worker      Traceback:",
        "                      worker        File x",
        "2030-01-01T12:00:02Z  dispatcher  INFO  d  took=3",
        "2030-01-01T12:00:03Z  postgres    [7] LOG:  p",
    ]
    assert run(["logs", "--data", str(data), "--lines", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "process": "postgres",
        "at": "2030-01-01T12:00:03.000Z",
        "level": None,
        "message": "[7] LOG:  p",
    }
    assert run(["logs", "dispatcher", "--data", str(data), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["request"] == {"path": "/"}


def test_where_there_is_no_log_it_says_so(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["logs", "webhook", "--data", str(data)]) == 1
    assert f"There is no log of the process webhook in {data}." in capsys.readouterr().err
    assert run(["logs", "--data", str(tmp_path / "nowhere")]) == 1
    assert "There is no log of any process in" in capsys.readouterr().err
    assert run(["logs", "nosuch"]) == 2


def test_a_log_that_may_not_be_read_is_told(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = log_of(data, "worker")
    log.unlink()
    log.mkdir()
    assert run(["logs", "worker", "--data", str(data)]) == 1
    assert f"{log} cannot be read: Is a directory." in capsys.readouterr().err
    assert run(["logs", "--data", str(data)]) == 0
    shown = capsys.readouterr()
    assert "note: " in shown.err
    assert len(shown.out.splitlines()) == 2
