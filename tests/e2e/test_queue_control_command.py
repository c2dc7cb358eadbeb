"""`penstock queue pause`, `resume`, `drain` and `limits`: what they do, and what they say."""

from __future__ import annotations

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

from penstock.cli import run

_VERBS = [
    *("pause", "resume", "drain", "limits"),
    *("limits set", "limits list", "limits show", "limits remove"),
]


@dataclass(frozen=True)
class User:
    """Somebody with a store in a folder."""

    folder: Path

    def queue(self, *words: str) -> subprocess.CompletedProcess[str]:
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
        out, errors = io.StringIO(), io.StringIO()
        store = f"file://{self.folder}/store"
        try:
            with (
                mock.patch.dict(os.environ, {"PENSTOCK_STORE": store}),
                redirect_stdout(out),
                redirect_stderr(errors),
            ):
                code = run(["queue", *words])
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        assert "Traceback" not in errors.getvalue()
        return subprocess.CompletedProcess(words, code, out.getvalue(), errors.getvalue())

    def said(self, *words: str) -> str:
        ran = self.queue(*words)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    def json(self, *words: str) -> Any:
        return json.loads(self.said(*words, "--json"))


@pytest.fixture
def user(tmp_path: Path) -> User:
    user = User(tmp_path)
    user.said("submit", "resize")
    return user


@pytest.mark.parametrize("verb", _VERBS)
def test_every_verb_has_help_with_an_example(user: User, verb: str) -> None:
    said = user.said(*verb.split(), "--help")
    assert f"penstock queue {verb}" in said
    assert "Example: penstock queue" in said


def test_a_type_is_paused_shown_and_resumed(user: User) -> None:
    said = user.said("pause", "--type", "resize", "--reason", "disk full")
    assert "The type 'resize' is paused since 2" in said
    assert " ago): disk full" in said
    assert "disk full" in said
    assert "within 10 s" in said
    user.said("submit", "resize")  # Accepted.
    assert "The type 'resize' is paused" in user.said("stats")
    (held,) = user.json("stats")["held"]
    assert (held["type"], held["reason"], held["drained_at"]) == ("resize", "disk full", None)
    assert held["paused_at"].endswith("Z")
    # The queue as a whole is not paused: that changes nothing for the type.
    (held,) = user.json("resume")["held"]
    assert held["type"] == "resize"
    assert user.said("resume", "--type", "resize") == "The type 'resize' goes on.\n"
    assert user.json("resume", "--type", "resize") == {"held": []}
    again = user.queue("resume")
    assert again.stdout == ""
    assert "the queue as a whole was neither paused nor drained" in again.stderr
    ran = user.queue("resume", "--type", "nosuch")
    assert ran.returncode == 0
    assert "the type 'nosuch' was neither paused nor drained" in ran.stderr


def test_a_drained_queue_refuses_submits_in_one_sentence(user: User) -> None:
    assert "submits are refused" in user.said("drain")
    ran = user.queue("submit", "resize")
    assert ran.returncode != 0
    assert ran.stdout == ""
    assert "is drained and takes no more tasks." in ran.stderr
    assert "penstock queue resume" in ran.stderr
    user.said("resume")
    user.said("submit", "resize")


def test_waiting_for_a_drain_ends_at_its_timeout(user: User) -> None:
    ran = user.queue("drain", "--wait", "--timeout", "0.2", "--json")
    assert json.loads(ran.stdout)["is_empty"] is False
    ran = user.queue("drain", "--wait", "--timeout", "0.2")
    assert ran.returncode == 1
    assert "there were tasks left" in ran.stdout
    assert ran.stderr == ""
    for words, problem in (
        (("--timeout", "5"), "--wait"),
        (("--wait", "--timeout", "-1"), "'-1' is not from 0 to"),
    ):
        ran = user.queue("drain", *words)
        assert ran.returncode == 2
        assert problem in ran.stderr


def test_limits_are_set_shown_and_removed(user: User) -> None:
    assert "has no limits" in user.said("limits", "list")
    assert "api: 5 at a time" in user.said("limits", "set", "api", "--concurrency", "5")
    said = user.said("limits", "set", "mail", "--rate", "100", "--per", "60", "--burst", "10")
    assert "mail: 100 starts in 60 s, 10 at once" in said
    listed = user.said("limits", "list")
    assert "0 held" in listed
    assert "10 may start" in listed
    shown = user.json("limits", "show", "mail")
    assert (shown["rate"], shown["per_seconds"], shown["holders"]) == (100, 60, [])
    assert [each["key"] for each in user.json("limits", "list")] == ["api", "mail"]
    assert user.json("limits", "remove", "api") == {"removed": "api"}
    for verb in ("remove", "show"):
        ran = user.queue("limits", verb, "api")
        assert ran.returncode == 1
        assert "There is no limit 'api'" in ran.stderr


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("api", "--concurrency", "0"), "would let nothing run"),
        (("api",), "needs a concurrency, a rate, or both.\n  Write --concurrency 5, or --rate"),
        (("api", "--rate", "nan"), "positive number"),
        (("api", "--rate", "1", "--per", "0"), "Invalid value for '--per': '0' is not from"),
        (("api", "--concurrency", "2", "--burst", "1"), "belongs to a rate"),
        (("a/b", "--concurrency", "2"), "not the key of a limit"),
    ],
)
def test_a_limit_that_cannot_be_meant_is_refused(
    user: User, words: tuple[str, ...], problem: str
) -> None:
    ran = user.queue("limits", "set", *words)
    assert ran.returncode == 2
    assert problem in ran.stderr
    assert user.json("limits", "list") == []


def test_a_schema_is_set_shown_held_to_and_taken_away(user: User) -> None:
    user.said("submit", "resize", "1", "--affinity", "customer-7")
    schema = user.folder / "resize.json"
    schema.write_text('{"type": "object"}')
    assert "types with a schema" in user.said("config", "set", "--schema", f"resize={schema}")
    assert user.json("config", "show")["schemas"] == {"resize": {"type": "object"}}
    refused = user.queue("submit", "resize", "1")
    assert refused.returncode == 2
    assert "does not fit the schema of 'resize': 1 is not of type \"object\"." in refused.stderr
    user.said("config", "set", "--schema", "resize=none")
    user.said("submit", "resize", "1")
    for wrong in ("resize", "resize=", f"resize={user.folder}/none.json"):
        assert user.queue("config", "set", "--schema", wrong).returncode == 2
