"""The installed command in a terminal and in a pipe: widths, colours, bars, Ctrl-C, `head`.

Most of it asks a little dispatcher of this test, which says what a real one would.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import pytest

from penstock.cli.logs import log_of
from tests.e2e.command import PENSTOCK, penstock

CODES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
ERASE = "\r\x1b[K"
AT = "2030-01-01T00:00:00Z"
SECONDS = 60
_IN_ITS_TERMINAL = "import os, sys; os.login_tty(0); os.execv(sys.argv[1], sys.argv[1:])"
"""Keys such as Ctrl-C signal the processes of the terminal that they are typed in."""


class Dispatcher:
    """A dispatcher that says what it is told to say, in turn; the last for ever."""

    def __init__(self) -> None:
        self.answers: dict[str, list[Any]] = {}
        self.heard: list[str] = []
        self.url = ""

    def says(self, path: str, *answers: Any) -> None:
        self.answers[path] = list(answers)

    def next(self, path: str) -> bytes:
        self.heard.append(path)
        answers = self.answers[path]
        return json.dumps(answers.pop(0) if len(answers) > 1 else answers[0]).encode()


@pytest.fixture
def dispatcher() -> Iterator[Dispatcher]:
    made = Dispatcher()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = made.next(self.path.partition("?")[0])
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        made.url = f"http://127.0.0.1:{server.server_port}"
        yield made
        server.shutdown()
        thread.join(SECONDS)


def _environment(dispatcher: Dispatcher | None, **more: str) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("NO_COLOR", "COLUMNS", "LINES") and not name.startswith("PENSTOCK_")
    }
    url = {"PENSTOCK_URL": dispatcher.url} if dispatcher is not None else {}
    return {**kept, "TERM": "xterm", **url, **more}


class Terminal:
    """A command in a terminal of so many columns."""

    def __init__(self, *words: str, environment: Mapping[str, str], columns: int = 80) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.running = subprocess.Popen(
            [sys.executable, "-c", _IN_ITS_TERMINAL, PENSTOCK, *words],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=dict(environment),
        )
        os.close(theirs)
        self.shown = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.running.poll() is None:
            self.running.kill()
        self.running.wait(SECONDS)
        os.close(self._ours)

    def until(self, text: str) -> None:
        """Read until this is shown."""
        while text not in self.shown:
            assert self._read(), f"{text!r} is not in {self.shown!r}"

    def types(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def end(self) -> int:
        """Read to the end; the exit code."""
        while self._read():
            pass
        return self.running.wait(SECONDS)

    def _read(self) -> bool:
        # Linux ends a terminal whose last writer has left with an error.
        with suppress(OSError):
            if piece := os.read(self._ours, 4096):
                self.shown += piece.decode("utf-8", "replace")
                return True
        return False


def _shown(*words: str, environment: Mapping[str, str], columns: int = 80) -> str:
    with Terminal(*words, environment=environment, columns=columns) as terminal:
        assert terminal.end() == 0, terminal.shown
        return terminal.shown


def _task(**fields: Any) -> dict[str, Any]:
    return {
        "id": 4_200_042,
        "job": "clean_the_sales_of_all_regions",
        "operator": "sales:clean",
        "generation": "e6c9b63c-df91-40ea-9f6d-afaca8efced7",
        "status": "dead",
        "priority": "normal",
        "partition_key": "region-europe/2026-01-01T00",
        "attempt": 3,
        "attempt_limit": 3,
        "worker": "worker-1.example.org-31337",
        "reason": "ValueError: the column 'amount' has texts in it\x1b[2J, in row 17",
        "created_at": AT,
        "due_at": AT,
        "settled_at": AT,
        **fields,
    }


def _status(**job: Any) -> dict[str, Any]:
    told = {
        "name": "clean",
        "activation": "reactive",
        "runtime": "process",
        "operator": "sales:clean",
        "priority": "normal",
        "generation": "g",
        "is_building": False,
        "outputs": ["sales"],
        "queued": 0,
        "running": 0,
        "dead": 0,
        "oldest_seconds": 0.0,
        "paused": [],
        **job,
    }
    nothing = {"events_pending": 0, "outbox_pending": 0, "outbox_parked": 0}
    return {
        "dag_version": 1,
        "now": AT,
        "jobs": [told],
        **nothing,
        "workers": 1,
        "backfills": [],
    }


def _backfill(**fields: Any) -> dict[str, Any]:
    return {
        "id": 7,
        "job": "totals",
        "kind": "keys",
        "state": "running",
        "partitions": 4,
        "planned": 2,
        "open": 1,
        "dead": 0,
        "concurrency": 100,
        "created_at": AT,
        **fields,
    }


@pytest.mark.parametrize("columns", [80, 120])
def test_a_table_is_as_wide_as_the_terminal(dispatcher: Dispatcher, columns: int) -> None:
    dispatcher.says("/v1/tasks", {"tasks": [_task(), _task(status="running")], "before": None})
    shown = _shown("task", "list", environment=_environment(dispatcher), columns=columns)
    lines = CODES.sub("", shown).splitlines()
    # What had to be left out is named below it.
    assert lines[3:] == ([] if columns > 80 else ["note: the terminal has no room for: worker."])
    assert max(map(len, lines)) <= columns
    assert "…" in lines[1]
    assert "4200042" in lines[1]
    # Nothing that others have written moves the cursor.
    assert "\x1b[2J" not in shown


def test_in_a_pipe_nothing_is_cut_or_coloured(dispatcher: Dispatcher) -> None:
    dispatcher.says("/v1/tasks", {"tasks": [_task()], "before": None})
    ran = penstock("task", "list", "--url", dispatcher.url, environment={"COLUMNS": "40"})
    assert ran.returncode == 0, ran.stderr
    assert "region-europe/2026-01-01T00" in ran.stdout
    assert "worker-1.example.org-31337" in ran.stdout
    assert "in row 17" in ran.stdout
    assert "\x1b" not in ran.stdout + ran.stderr


def test_colours_are_for_terminals_that_want_them(dispatcher: Dispatcher) -> None:
    dispatcher.says("/v1/tasks", {"tasks": [_task()], "before": None})
    red = "\x1b[31mdead"
    assert red in _shown("task", "list", environment=_environment(dispatcher))
    plain = _shown("task", "list", environment=_environment(dispatcher, NO_COLOR="1"))
    assert "dead" in plain
    assert not COLOUR.search(plain)


def test_times_are_ages_and_the_time_itself_is_at_hand(dispatcher: Dispatcher) -> None:
    dispatcher.says("/v1/tasks", {"tasks": [_task()], "before": None})
    ages = penstock("task", "list", "--url", dispatcher.url).stdout
    times = penstock("task", "list", "--absolute", "--url", dispatcher.url).stdout
    programs = json.loads(penstock("task", "list", "--json", "--url", dispatcher.url).stdout)
    assert AT not in ages
    assert AT in times
    assert programs["tasks"][0]["created_at"] == AT


def test_waiting_shows_a_bar_on_a_terminal_and_nothing_in_a_pipe(dispatcher: Dispatcher) -> None:
    steps = (_backfill(), _backfill(planned=4, open=1), _backfill(planned=4, open=0, state="done"))
    dispatcher.says("/v1/backfills/7", *steps)
    words = ("backfill", "show", "7", "--wait")
    shown = _shown(*words, environment=_environment(dispatcher))
    drawn = [each for each in shown.split(ERASE) if "backfill 7 of totals" in each]
    assert [each.count("█") for each in drawn] == [6, 18, 24]
    assert all(len(each) < 80 for each in drawn)
    # The bar is gone before the answer comes.
    assert "█" not in shown.rpartition(ERASE)[2]
    assert "status" in shown.rpartition(ERASE)[2]
    dispatcher.says("/v1/backfills/7", *steps)
    ran = penstock(*words, "--url", dispatcher.url)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_waiting_for_everything_shows_how_much_is_left(dispatcher: Dispatcher) -> None:
    dispatcher.says("/v1/status", _status(queued=9, running=1), _status(queued=5), _status())
    shown = _shown("status", "--wait", environment=_environment(dispatcher))
    drawn = [each for each in shown.split(ERASE) if " waiting, " in each and "event" in each]
    assert drawn[0].endswith("9 waiting, 1 running, 0 events")
    assert [each.count("█") for each in drawn[:2]] == [0, 12]


@pytest.mark.parametrize("is_typed", [True, False], ids=["typed", "signalled"])
def test_ctrl_c_ends_with_130_and_the_bar_is_gone(
    dispatcher: Dispatcher, *, is_typed: bool
) -> None:
    dispatcher.says("/v1/backfills/7", _backfill())
    words = ("backfill", "show", "7", "--wait")
    with Terminal(*words, environment=_environment(dispatcher)) as terminal:
        terminal.until("backfill 7 of totals")
        if is_typed:
            terminal.types("\x03")
        else:
            terminal.running.send_signal(signal.SIGINT)
        assert terminal.end() == 130
    assert terminal.shown.rstrip().endswith("penstock: Interrupted.")
    assert "█" not in terminal.shown.rpartition(ERASE)[2]
    assert "Traceback" not in terminal.shown


def test_what_would_harm_is_asked_on_a_terminal_and_refused_in_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    store = f"file://{tmp_path}/store"
    assert penstock("queue", "submit", "resize", "--store", store).returncode == 0
    words = ("queue", "purge", "--all", "--store", store)
    ran = penstock(*words)
    assert ran.returncode == 2
    assert "confirm with --yes" in ran.stderr
    with Terminal(*words, environment=_environment(None)) as terminal:
        terminal.until("Continue? [y/N]")
        terminal.types("n\n")
        assert terminal.end() != 0
    with Terminal(*words, environment=_environment(None)) as terminal:
        terminal.until("Continue? [y/N]")
        terminal.types("y\n")
        assert terminal.end() == 0
    assert "1 task cancelled, 0 asked to stop" in terminal.shown


@contextmanager
def _logs(folder: Path, lines: int) -> Iterator[Path]:
    log = log_of(folder, "worker")
    log.parent.mkdir(parents=True)
    log.write_text("".join(f"line {number}\n" for number in range(lines)))
    yield log


def test_a_reader_that_leaves_ends_it_without_a_word(tmp_path: Path) -> None:
    with _logs(tmp_path, 50_000):
        ran = subprocess.run(
            f"{PENSTOCK} logs worker --lines 50000 --data {tmp_path} | head -1",
            shell=True,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    assert ran.stdout == "                      worker      line 0\n"
    assert ran.stderr == ""


def test_logs_are_followed_until_ctrl_c(tmp_path: Path) -> None:
    environment = _environment(None)
    words = ("logs", "--follow", "--lines", "2", "--data", str(tmp_path))
    with _logs(tmp_path, 5) as log, Terminal(*words, environment=environment) as terminal:
        terminal.until("line 4")
        with log.open("a") as opened:
            opened.write("line 5\n")
        terminal.until("line 5")
        # A process that starts later is heard of, too.
        log_of(tmp_path, "webhook").write_text("from webhook\n")
        terminal.until("from webhook")
        terminal.types("\x03")
        assert terminal.end() == 0
    assert "line 2" not in terminal.shown
    assert terminal.shown.count("line 5") == 1


def test_alone_it_says_how_things_are(dispatcher: Dispatcher, tmp_path: Path) -> None:
    dispatcher.says("/v1/status", _status(queued=2, dead=1))
    shown = _shown(environment=_environment(dispatcher))
    assert "1 job, 2 waiting, 0 running, 1 dead, 1 worker." in shown
    assert max(len(CODES.sub("", each)) for each in shown.splitlines()) <= 80
    # Where somebody listens and never answers, nobody is kept waiting.
    with socket_that_is_silent() as url:
        ran = penstock(environment={"PENSTOCK_URL": url}, seconds=SECONDS)
    assert ran.returncode == 0
    assert f"No dispatcher answers at {url}" in ran.stdout


@contextmanager
def socket_that_is_silent() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_completes_from_a_dispatcher_or_in_silence(
    dispatcher: Dispatcher, shell: str
) -> None:
    dispatcher.says("/v1/status", _status())
    line = {"COMP_WORDS": "penstock pause cl", "COMP_CWORD": "cl" if shell == "fish" else "2"}
    asked = {"_PENSTOCK_COMPLETE": f"{shell}_complete", **line}
    ran = penstock(environment={**asked, "PENSTOCK_URL": dispatcher.url})
    assert "clean" in ran.stdout
    assert ran.stderr == ""
    ran = penstock(environment={**asked, "PENSTOCK_URL": "http://127.0.0.1:1"})
    assert (ran.stdout.strip(), ran.stderr) == ("", "")


def test_bash_takes_the_program_and_completes(dispatcher: Dispatcher) -> None:
    dispatcher.says("/v1/status", _status())
    script = (
        f'PATH="{PENSTOCK.parent}:$PATH"; source <(penstock completion bash);'
        " COMP_WORDS=(penstock pause cl); COMP_CWORD=2; _penstock_completion penstock;"
        ' echo "${COMPREPLY[@]}"'
    )
    ran = subprocess.run(
        ["bash", "-c", script],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=_environment(dispatcher),
        check=False,
    )
    assert (ran.stdout, ran.stderr) == ("clean\n", "")
