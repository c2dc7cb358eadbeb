"""`penstock queue schedule` and `batch`: what they do, and what they say."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from penstock import Queue
from penstock.cli import run

VERBS = ("add", "list", "show", "pause", "resume", "remove", "run")


@dataclass(frozen=True)
class User:
    """Somebody with a store in a folder."""

    folder: Path

    @property
    def url(self) -> str:
        return f"file://{self.folder}/store"

    def queue(self, *words: str) -> subprocess.CompletedProcess[str]:
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
        out, errors = io.StringIO(), io.StringIO()
        try:
            with (
                mock.patch.dict(os.environ, {"PENSTOCK_STORE": self.url}),
                redirect_stdout(out),
                redirect_stderr(errors),
            ):
                code = run(["queue", *words])
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        assert "Traceback" not in errors.getvalue()
        return subprocess.CompletedProcess(words, code, out.getvalue(), errors.getvalue())

    def json(self, *words: str) -> Any:
        ran = self.queue(*words, "--json")
        assert ran.returncode == 0, ran.stderr
        return json.loads(ran.stdout)


@pytest.fixture
def user(tmp_path: Path) -> User:
    return User(tmp_path)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_an_example_and_json(verb: str, user: User) -> None:
    shown = user.queue("schedule", verb, "--help").stdout
    assert "--json" in shown
    assert "Example: penstock queue schedule" in " ".join(shown.split())


def test_a_schedule_from_add_to_remove(user: User) -> None:
    added = user.json(
        "schedule", "add", "nightly", "0 3 * * *", "report", '{"n": 1}',
        "--time-zone", "Europe/Paris", "--catch-up", "one", "--tag", "env=prod", "--priority", "2",
    )  # fmt: skip
    assert (added["cron"], added["time_zone"], added["input"]) == (
        "0 3 * * *",
        "Europe/Paris",
        {"n": 1},
    )
    assert (added["catch_up"], added["tags"], added["priority"]) == ("one", {"env": "prod"}, 2)
    assert added["next_at"].endswith("Z")
    (listed,) = user.json("schedule", "list")
    assert listed == added == user.json("schedule", "show", "nightly")
    assert "nightly  0 3 * * *  Europe/Paris  report" in user.queue("schedule", "list").stdout
    assert user.json("schedule", "pause", "nightly")["is_paused"]
    assert "paused" in user.queue("schedule", "show", "nightly").stdout
    assert not user.json("schedule", "resume", "nightly")["is_paused"]
    task = user.json("schedule", "run", "nightly")["id"]
    assert user.json("get", task)["tags"] == {"env": "prod", "schedule": "nightly"}
    assert user.json("schedule", "remove", "nightly") == {"removed": "nightly"}
    assert user.queue("schedule", "list").stdout == "There are no schedules.\n"


def test_a_second_definition_is_one_sentence_and_the_first_stays(user: User) -> None:
    user.json("schedule", "add", "n", "0 3 * * *", "report")
    ran = user.queue("schedule", "add", "n", "0 4 * * *", "report")
    assert ran.returncode != 0
    assert "its cron is '0 3 * * *' and not '0 4 * * *'" in ran.stderr
    assert "  Choose another name, or replace it: --replace.\n" in ran.stderr
    assert user.json("schedule", "show", "n")["cron"] == "0 3 * * *"
    replaced = user.json("schedule", "add", "n", "0 4 * * *", "report", "--replace")
    assert replaced["cron"] == "0 4 * * *"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("schedule", "add", "n", "61 * * * *", "t"), "The cron line '61 * * * *' has 61"),
        (("schedule", "add", "n", "@daily", "t", "--time-zone", "Mars"), "'Mars' is not a time"),
        (
            ("schedule", "add", "n", "@daily", "t", "--catch-up", "x"),
            "'x' is not a catch-up policy",
        ),
        (("schedule", "add", "n", "@daily", "t", "{"), "INPUT is not JSON"),
        (("schedule", "add", "n", "@daily", "t", "--tag", "x"), "'x' is not a tag"),
        (("schedule", "show", "n"), "schedule 'n' in the queue 'default'.\n  The queue has no"),
        (("batch", "x"), "'x' is not the id of a batch"),
        (("batch", "0" * 24), "There is no batch"),
        (("batch", "--wait"), "--wait and --timeout go with the ID"),
    ],
)
def test_what_is_wrong_is_one_sentence(words: tuple[str, ...], sentence: str, user: User) -> None:
    user.queue("submit", "any")
    ran = user.queue(*words)
    assert ran.returncode != 0
    assert sentence in ran.stderr


def test_how_far_a_batch_is(user: User) -> None:
    async def begin() -> tuple[str, str]:
        async with await Queue.open(user.url, name="default") as queue:
            waiting = await queue.batch("resize", [1, 2], then="zip")
            return waiting.id, (await queue.batch("resize", [])).id

    assert user.queue("submit", "any").returncode == 0
    assert user.queue("batch").stdout == "There are no batches.\n"
    waiting, ended = asyncio.run(begin())
    shown = user.json("batch", waiting)
    assert (shown["status"], shown["total"], shown["ready"]) == ("sealed", 2, 2)
    assert [each["id"] for each in user.json("batch")] == [waiting, ended]
    assert f"{waiting}  sealed      0/2" in user.queue("batch").stdout
    assert "then" in user.queue("batch", waiting).stdout
    late = user.queue("batch", waiting, "--wait", "--timeout", "0.1")
    assert late.returncode == 1
    assert "has not ended in 0.1 s" in late.stderr
    assert user.queue("batch", ended, "--wait").returncode == 0


def test_a_monitor_of_one_pass_submits_what_is_due(user: User) -> None:
    user.json("schedule", "add", "n", "* * * * *", "report")

    async def make_late() -> None:
        async with await Queue.open(user.url, name="default") as queue:
            access = queue.access
            where = access.layout.schedule("n")
            found = await access.store.get(where)
            assert found is not None
            body = json.loads(found.body)
            body["cursor_ms"] -= 60_000
            await access.store.put(where, json.dumps(body).encode())

    asyncio.run(make_late())
    assert user.queue("monitor", "--once").returncode == 0
    task = user.json("schedule", "show", "n")["last_task"]
    assert user.json("get", task)["status"] == "ready"
