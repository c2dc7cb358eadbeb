"""`penstock queue`: what it says, where it says it, and how the worker of a user's module ends."""

from __future__ import annotations

import asyncio
import io
import json
import os
import pty
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from penstock.cli import run
from penstock.queue.ids import task_at
from penstock.queue.layout import QueueLayout
from penstock.store import open_store
from tests.e2e.command import PENSTOCK

VERBS = (
    *("submit", "get", "history", "list", "tail", "cancel", "replay", "stats", "worker", "monitor"),
    *("reshard", "config show", "config set"),
)
LAYOUT = QueueLayout("default")
NOBODY = "now.000.1jgfjjz0000000000000000a.1.0.resize"

MODULE = """
import asyncio
from penstock import Queue, Retry, Worker

queue = Queue("file://{folder}/store", name="default")
worker = Worker(queue, concurrency=1)

def say(line):
    # In one piece: handlers run beside each other.
    print(line + "\\n", end="", flush=True)

@worker.handler("wait")
async def wait(task):
    heard = asyncio.Event()
    asyncio.get_running_loop().add_reader(0, heard.set)
    say("began %s" % task.input)
    await heard.wait()
    say("ended %s" % task.input)
    return "heard"

@worker.handler("bad", retry=Retry(attempts=1))
def bad(task):
    say("failing")
    raise ValueError("no good")
"""

_NO_HANDLER = "from penstock import *\nworker = Worker(Queue('memory://', name='q'))"


@dataclass(frozen=True)
class User:
    """Somebody in a folder, with a store in it and a module."""

    folder: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"file://{self.folder}/store"

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
        return {**kept, "PENSTOCK_STORE": self.url}

    def queue(
        self, *words: str, stdin: str | bytes = "", environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        ran = subprocess.run(
            [PENSTOCK, "queue", *words],
            input=stdin.encode() if isinstance(stdin, str) else stdin,
            capture_output=True,
            timeout=60,
            cwd=self.folder,
            env=self.environment if environment is None else environment,
            check=False,
        )
        out, errors = ran.stdout.decode(), ran.stderr.decode()
        assert "Traceback" not in errors, errors
        return subprocess.CompletedProcess(ran.args, ran.returncode, out, errors)

    def here(self, *words: str, stdin: str | bytes = "") -> subprocess.CompletedProcess[str]:
        """The same within this process, which is quicker."""
        body = stdin.encode() if isinstance(stdin, str) else stdin
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
        out, errors = io.StringIO(), io.StringIO()
        try:
            with (
                mock.patch.dict(os.environ, self.environment),
                mock.patch("sys.stdin", io.TextIOWrapper(io.BytesIO(body))),
                redirect_stdout(out),
                redirect_stderr(errors),
            ):
                code = run(["queue", *words])
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return subprocess.CompletedProcess(words, code, out.getvalue(), errors.getvalue())

    def said(self, *words: str, stdin: str | bytes = "") -> str:
        ran = self.here(*words, stdin=stdin)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    def json(self, *words: str, stdin: str | bytes = "") -> Any:
        return json.loads(self.said(*words, "--json", stdin=stdin))

    def start(self, *words: str) -> subprocess.Popen[str]:
        running = subprocess.Popen(
            [PENSTOCK, "queue", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            # Only a second signal interrupts a handler then.
            env={**self.environment, "PENSTOCK_WORKER_STOP_SECONDS": "3000"},
        )
        self.started.append(running)
        return running

    def put(self, key: str, body: bytes) -> None:
        async def put() -> None:
            store = await open_store(self.url)
            await store.put(key, body)
            await store.close()

        asyncio.run(put())


@pytest.fixture
def user(tmp_path: Path) -> Iterator[User]:
    (tmp_path / "mine.py").write_text(MODULE.format(folder=tmp_path))
    somebody = User(tmp_path)
    yield somebody
    for running in somebody.started:
        running.kill()
        running.communicate(timeout=60)


def _line(running: subprocess.Popen[str]) -> str:
    assert running.stdout is not None
    return running.stdout.readline().strip()


def _release(running: subprocess.Popen[str]) -> None:
    assert running.stdin is not None
    running.stdin.write("go\n")
    running.stdin.flush()


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_an_example_and_json(verb: str, user: User) -> None:
    said = user.said(*verb.split(), "--help")
    assert f"Example: penstock queue {verb}" in said
    for option in ("--json", "--store", "--queue"):
        assert option in said


def test_alone_it_shows_the_verbs(user: User) -> None:
    said = user.said()
    assert all(f"  {verb.split()[0]} " in said for verb in VERBS)
    assert "..." not in said.partition("Commands:")[2]


def test_without_a_store_it_says_how_to_give_one(user: User) -> None:
    ran = user.queue("list", environment={**os.environ, "PENSTOCK_STORE": ""})
    assert ran.returncode == 2
    assert ran.stderr.startswith("penstock: Which store? Give --store URL or set PENSTOCK_STORE.\n")
    assert ran.stdout == ""


def test_a_store_in_memory_is_refused_because_it_would_be_gone(user: User) -> None:
    ran = user.here("submit", "resize", "--store", "memory://x")
    assert ran.returncode == 2
    assert "lives in one process and would be gone with this command" in ran.stderr


@pytest.mark.parametrize(
    "words", [("get", NOBODY), ("list",), ("stats",), ("cancel", NOBODY), ("monitor", "--once")]
)
def test_an_unknown_queue_is_named_with_those_that_there_are(
    words: tuple[str, ...], user: User
) -> None:
    user.said("submit", "resize")
    ran = user.here(*words, "--queue", "imagse")
    assert ran.returncode == 1
    assert (
        "penstock: There is no queue 'imagse' in this store.\n  There are: default." in ran.stderr
    )


def test_a_task_from_submit_to_cancel(user: User) -> None:
    now = user.said("submit", "resize", '{"n": 1}').strip()
    view = user.json("get", now)
    assert (view["status"], view["input"], view["attempt"]) == ("ready", {"n": 1}, 0)
    assert view["submitted_at"].endswith("Z")
    # What it does not have is null, be it a text or not.
    assert (view["key"], view["error"], view["batch"]) == (None, None, None)
    shown = user.said("get", now)
    assert 'input      {"n": 1}\n' in shown
    assert "submitted  20" in shown
    assert "s ago" in shown

    later = user.json("submit", "resize", "-", "--delay", "3600", stdin='{"n": 2}')["id"]
    keyed = user.json("submit", "resize", "3", "--key", "k")["id"]
    assert user.json("submit", "resize", "4", "--key", "k")["id"] == keyed
    listed = user.json("list")
    assert {task["id"]: task["status"] for task in listed["tasks"]} == {
        now: "ready",
        keyed: "ready",
        later: "delayed",
    }
    heads, *rows = user.said("list", "--status", "delayed").splitlines()
    assert heads.split() == ["status", "type", "attempt", "submitted", "id", "note"]
    assert len(rows) == 1
    assert rows[0].startswith("delayed  resize ")
    assert f"{later}  due in 59 min" in rows[0]

    counted = user.json("stats")
    (resize,) = counted["types"]
    assert (resize["ready"], resize["delayed"], resize["in_progress"]) == (2, 1, 0)
    assert (len(counted["unowned"]), counted["shards"]) == (64, 64)
    assert "resize      2        1" in user.said("stats")

    assert f"{now}  cancelled\n" in user.said("cancel", now, later)
    told = [(event["what"], event["who"]) for event in user.json("history", now)]
    assert told[0] == ("submitted", None)
    assert told[-1] == ("cancelled", "cancel")
    assert "what" in user.said("history", now).splitlines()[0]
    assert {task["status"] for task in user.json("list")["tasks"]} == {"ready", "cancelled"}


def test_many_tasks_from_lines(user: User) -> None:
    ids = user.said("submit", "resize", "--many", stdin='{"n": 1}\n\n[2]\r\n"drei"').split()
    assert len(ids) == 3
    assert [user.json("get", each)["input"] for each in ids[1:]] == [[2], "drei"]
    lines = user.folder / "lines"
    lines.write_text("1\n2\n")
    assert len(user.json("submit", "resize", str(lines), "--many")["ids"]) == 2


def test_lines_become_a_batch_that_is_waited_for(user: User) -> None:
    words = ("submit", "resize", "--many", "--batch", "--then", "zip")
    made = user.json(*words, "--tag", "of=day", stdin="1\n2\n")
    view = user.json("batch", made["batch"])
    assert (view["total"], view["status"]) == (2, "sealed")
    assert user.json("get", made["ids"][0])["batch"] == made["batch"]
    user.said("cancel", *made["ids"])
    assert user.json("batch", made["batch"])["then_task"].endswith(".zip")
    told = user.said("submit", "resize", "--many", "--batch", stdin="3").strip()
    assert user.json("batch", told)["total"] == 1
    for wrong, said in (
        (("--batch",), "--batch goes with --many."),
        (("--many", "--then", "zip"), "--then goes with --batch."),
    ):
        ran = user.here("submit", "resize", *wrong, stdin="1")
        assert (ran.returncode, ran.stdout) == (2, "")
        assert said in ran.stderr


@pytest.mark.parametrize(
    ("words", "stdin", "said"),
    [
        (("resize", "{n: 1}"), "", "INPUT is not JSON: Expecting property name"),
        (("resize", "NaN"), "", "NaN is not a number of JSON"),
        (("resize", '"\\ud800"'), "", "INPUT is not JSON that can be stored"),
        (("resize", "-"), "x" * 9, "INPUT is not JSON"),
        (("resize", "-"), b"\xff", "Standard input is not UTF-8"),
        (("resize", "-"), f'"{"x" * 67_200_000}"', "INPUT has 67,200,002 bytes; at most 67,"),
        (("resize", "--many"), "1\n\n{\n4", "Line 3 is not JSON"),
        (("resize", "--many"), f'1\n"{"x" * 67_200_000}"', "Line 2 has 67,200,002 bytes"),
        (("resize", "nowhere", "--many"), "", "'nowhere' cannot be read: No such file"),
        (("resize", "--many", "--key", "k"), "", "does not go with --many"),
        (("re/size",), "", "'re/size' is not the name of a type"),
        (("resize", "--delay", "-1"), "", "'-1' is not from 0"),
        (("resize", "--delay", "nan"), "", "'nan' is not a duration"),
        (("resize", "--key", ""), "", "An idempotency key is a text of 1 to 1000"),
    ],
)
def test_what_cannot_be_submitted_is_one_sentence(
    words: tuple[str, ...], stdin: str | bytes, said: str, user: User
) -> None:
    ran = user.here("submit", *words, stdin=stdin)
    assert ran.returncode == 2
    assert said in ran.stderr
    assert ran.stdout == ""


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("get", "x"), 2, "'x' is not the id of a task."),
        (("get", NOBODY), 1, f"There is no task '{NOBODY}'."),
        (("history", NOBODY), 1, f"There is no task '{NOBODY}'."),
        (("cancel", "x"), 2, "'x' is not the id of a task."),
        (("cancel", NOBODY), 1, f"There is no task '{NOBODY}'."),
        (("cancel",), 2, "Name the tasks to cancel by their ids, or by --type and --tag."),
        (("replay",), 2, "Name the tasks to replay by their ids, or give --failed."),
        (("replay", NOBODY, "--failed"), 2, "Name the tasks to replay by their ids"),
        (("replay", NOBODY), 1, f"There is no task '{NOBODY}'."),
        (("list", "--status", "done"), 2, "'done' is not one of 'ready', 'delayed'"),
        (("list", "--limit", "0"), 2, "Invalid value for '--limit'"),
        (("list", "--queue", "a b"), 2, "'a b' is not the name of a queue."),
        (("list", "--store", "file:///nowhere/at/all"), 1, "does not exist"),
    ],
)
def test_other_bad_words_are_one_sentence(
    words: tuple[str, ...], code: int, said: str, user: User
) -> None:
    user.said("submit", "resize")
    ran = user.here(*words)
    assert ran.returncode == code
    assert said in ran.stderr
    assert ran.stdout == ""


def test_one_bad_id_of_many_costs_the_others_nothing(user: User) -> None:
    task = user.said("submit", "resize").strip()
    ran = user.here("cancel", NOBODY, task)
    assert ran.returncode == 1
    assert "There is no task" in ran.stderr
    assert ran.stdout == f"{task}  cancelled\n"
    ran = user.here("cancel", task, "x")
    assert ran.returncode == 2
    assert ran.stdout == ""


def test_what_is_not_ours_is_named_and_the_rest_is_shown(user: User) -> None:
    good, newer, broken = (
        user.said("submit", "a", "1").strip(),
        *(user.said("submit", "a", number).strip() for number in "23"),
    )
    pack = LAYOUT.pack(task_at(newer)[0])
    user.put(pack, b'{"penstock":"pack/9"}')
    user.put(LAYOUT.ledger(task_at(broken)[0]), b"garbage")
    user.put(f"{LAYOUT.root}notes.txt", b"mine")

    ran = user.queue("list")
    assert ran.returncode == 0
    assert [line.split()[-1] for line in ran.stdout.splitlines()[1:]] == [good]
    assert f"note: {LAYOUT.root}notes.txt is not an object of this queue" in ran.stderr
    assert f"note: {pack} has format 9 of 'pack'; this release reads up to 1.\n" in ran.stderr
    assert ".ledger was not written by Penstock." in ran.stderr
    assert len(user.json("list")["notes"]) == 3

    counted = user.queue("stats")
    assert counted.returncode == 0
    assert "notes.txt is not an object of this queue" in counted.stderr
    for task, said in ((newer, "has format 9"), (broken, "was not written by Penstock.")):
        ran = user.queue("get", task)
        assert ran.returncode == 1
        assert said in ran.stderr
        assert len(ran.stderr.splitlines()) == 2


@pytest.mark.parametrize(
    ("text", "target", "code", "said"),
    [
        ("", "mine", 2, "'mine' does not name a worker."),
        ("", "mine.py:worker", 2, "'mine.py:worker' does not name a worker."),
        ("", "nothere:worker", 2, "There is no module 'nothere' in "),
        ("", "mine.deeper:worker", 2, "There is no module 'mine.deeper' in "),
        ("", "mine:wroker", 2, "The module 'mine' has no 'wroker'.\n  It has: worker."),
        ("", "mine:queue", 2, "'mine:queue' is of type Queue, not a Worker."),
        ("worker = 1 / 0", "theirs:worker", 1, "ZeroDivisionError: division by zero (theirs.py,"),
        ("import nothere", "theirs:worker", 1, "No module named 'nothere' (theirs.py, line 1)"),
        ("def f(:", "theirs:worker", 1, "SyntaxError: "),
        ("raise SystemExit(3)", "theirs:worker", 1, "SystemExit: 3 (theirs.py, line 1)"),
        (_NO_HANDLER, "theirs:worker", 2, "The worker has no handler."),
        (_NO_HANDLER, "theirs:worker", 2, "a memory:// queue is this process's own"),
    ],
)
def test_a_worker_that_is_not_there_is_one_sentence(
    text: str, target: str, code: int, said: str, user: User
) -> None:
    (user.folder / "theirs.py").write_text(text)
    ran = user.queue("worker", target)
    assert ran.returncode == code
    assert said in ran.stderr


def test_debug_shows_the_traceback_of_the_users_module(user: User) -> None:
    (user.folder / "theirs.py").write_text("1 / 0")
    ran = subprocess.run(
        [PENSTOCK, "--debug", "queue", "worker", "theirs:worker"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=user.folder,
        check=False,
    )
    assert ran.returncode == 1
    assert 'theirs.py", line 1' in ran.stderr


@pytest.mark.parametrize("mode", ["leased", "shared", "direct"])
def test_a_first_signal_drains(mode: str, user: User) -> None:
    first = user.said("submit", "wait", "1").strip()
    running = user.start("worker", "mine:worker", "--mode", mode)
    assert _line(running) == "began 1"
    second = user.said("submit", "wait", "2").strip()
    running.send_signal(signal.SIGTERM)
    _release(running)
    out, errors = running.communicate(timeout=60)
    assert running.returncode == 0, errors
    assert out == "ended 1\n"
    assert "Working on bad, wait of the queue 'default', 1 at a time, in mode " + mode in errors
    assert "Stopped; all leases are released." in errors
    assert "Traceback" not in errors
    ended = user.json("get", first)
    assert (ended["status"], ended["result"]) == ("succeeded", "heard")
    assert user.json("get", second)["status"] == "ready"
    assert user.json("stats")["workers"] == []


def test_a_name_of_the_mode_direct_is_one_workers_own(user: User) -> None:
    words = ("worker", "mine:worker", "--mode", "direct", "--name", "one")
    user.said("submit", "wait", "1")
    running = user.start(*words)
    assert _line(running) == "began 1"
    second = user.queue(*words)
    assert second.returncode == 1
    assert "The name 'one' is in use by another worker" in second.stderr
    _release(running)
    assert _line(running) == "ended 1"
    running.send_signal(signal.SIGTERM)
    assert running.wait(timeout=60) == 0


def test_a_second_signal_gives_back_at_once(user: User) -> None:
    task = user.said("submit", "wait", "1").strip()
    running = user.start("worker", "mine:worker", "--json")
    assert json.loads(_line(running))["event"] == "started"
    assert _line(running) == "began 1"
    seen = user.json("stats")
    (worker,) = seen["workers"]
    assert (worker["role"], len(worker["shards"]), seen["unowned"]) == ("owner", 64, [])
    # Two signals of one kind could be one.
    running.send_signal(signal.SIGTERM)
    running.send_signal(signal.SIGINT)
    assert running.wait(timeout=60) == 0
    assert json.loads(_line(running))["event"] == "stopped"
    told = [event["what"] for event in user.json("history", task)]
    assert told == ["submitted", "claimed", "given back"]
    assert user.json("get", task)["status"] == "ready"


def test_a_failed_task_is_shown_and_replayed_once(user: User) -> None:
    task = user.said("submit", "bad", "1").strip()
    waits = user.said("submit", "wait", "2").strip()
    running = user.start("worker", "mine:worker", "--concurrency", "2")
    assert {_line(running), _line(running)} == {"failing", "began 2"}
    running.send_signal(signal.SIGTERM)
    _release(running)
    _, errors = running.communicate(timeout=60)
    # Nobody reads it on a terminal: the log is JSON, as that of every process is then.
    logged = [line for line in errors.splitlines() if "ValueError" in line]
    assert logged
    assert {json.loads(line)["level"] for line in logged} == {"warning"}
    counted = user.json("stats")["types"]
    assert [(each["type"], each["failed_recently"]) for each in counted] == [
        ("bad", 1),
        ("wait", 0),
    ]
    assert "dead letters: " in user.said("stats")
    shown = user.said("get", task)
    assert "error      ValueError: no good\n" in shown
    assert "trace      Traceback (most recent call last):" in shown
    assert user.here("replay", "--failed", "--type", "wait").stdout == ""
    (made,) = user.json("replay", "--failed")
    assert made["of"] == task
    assert user.json("get", made["id"])["input"] == 1
    assert user.here("replay", "--failed").stdout == ""
    assert user.said("replay", task).startswith(f"{made['id']}  replays {task}")
    ran = user.here("replay", made["id"], waits)
    assert ran.returncode == 1
    assert "is ready: only what has ended can be replayed." in ran.stderr
    assert f"replays {waits}" in ran.stdout
    failed = user.json("list", "--status", "failed")
    assert [view["id"] for view in failed["tasks"]] == [task]


def test_a_worker_ends_by_itself_when_it_is_done(user: User) -> None:
    for number in ("1", "2", "3"):
        user.said("submit", "bad", number)
    ran = user.queue("worker", "mine:worker", "--max-tasks", "2")
    assert (ran.returncode, ran.stdout) == (0, "failing\nfailing\n")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as heard:
        heard.bind(("127.0.0.1", 0))
        heard.settimeout(30)
        statsd = f"127.0.0.1:{heard.getsockname()[1]}"
        ran = user.queue("worker", "mine:worker", "--until-empty", "--statsd", statsd)
        assert b"penstock_queue_tasks_total:1|c|#type:bad,outcome:failed" in heard.recv(2000)
    assert (ran.returncode, ran.stdout) == (0, "failing\n")
    assert "Stopped; all leases are released." in ran.stderr
    ran = user.queue("worker", "mine:worker", "--statsd", "8125")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "--statsd takes HOST:PORT, not '8125'." in ran.stderr


def test_options_lead_a_worker_to_another_queue(user: User) -> None:
    user.said("submit", "wait", "1")
    user.said("submit", "wait", "2", "--queue", "other")
    running = user.start("worker", "mine:worker", "--queue", "other")
    assert _line(running) == "began 2"
    running.send_signal(signal.SIGTERM)
    _release(running)
    running.communicate(timeout=60)
    assert running.returncode == 0


def test_a_monitor_makes_a_pass_or_goes_on_until_a_signal(user: User) -> None:
    user.said("cancel", user.said("submit", "resize").strip())
    assert "1 settled packs seen, 0 archived" in user.said("monitor", "--once")
    running = user.start("monitor", "--json")
    made = json.loads(_line(running))
    assert (made["settled_seen"], made["ledgers_archived"]) == (1, 0)
    running.send_signal(signal.SIGTERM)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 0
    assert errors == ""
    said = user.said("monitor", "--help")
    assert "every 600 s" in said
    assert "7 cents a month" in said


def _on_a_terminal(user: User, *words: str, environment: Mapping[str, str]) -> str:
    ours, theirs = pty.openpty()
    command = [str(PENSTOCK), "queue", *words]
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment):
        os.close(theirs)
        shown = b""
        # Linux ends a terminal whose last writer has left with an error.
        with suppress(OSError):
            while chunk := os.read(ours, 4096):
                shown += chunk
    os.close(ours)
    return shown.decode()


def test_statuses_have_colours_on_terminals_that_want_them(user: User) -> None:
    user.said("cancel", user.said("submit", "resize").strip())
    yellow = "\x1b[33m"
    assert yellow in _on_a_terminal(user, "list", environment=user.environment)
    silent = _on_a_terminal(user, "list", environment={**user.environment, "NO_COLOR": "1"})
    assert "cancelled" in silent
    assert "\x1b" not in silent
    assert "\x1b" not in user.said("list")
