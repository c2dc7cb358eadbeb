"""Secrets show no values, and texts that leave the work have none in them."""

from __future__ import annotations

import asyncio
import json
import pickle
from pathlib import Path
from urllib.parse import quote

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kernel.errors import WorkFailed
from penstock.runtimes.base import AttemptWork
from penstock.runtimes.frames import BeginTask, CallStyle, to_child
from penstock.runtimes.secrets import HIDDEN, HIDDEN_CHARACTERS_MIN, Secrets, hidden
from tests.unit.runtimes.benches import User, run

VALUE = "hunter2-hunter2"


def work() -> AttemptWork:
    return AttemptWork(
        task_id=1, attempt=1, job="j", operator="m:f", generation="g", secrets={"KEY": VALUE}
    )


def test_no_repr_has_a_value() -> None:
    secrets = Secrets({"KEY": VALUE})
    begin = BeginTask(style=CallStyle.TASK, entry="m:f", work=work())
    for thing in (secrets, work(), begin):
        assert VALUE not in f"{thing!r} {thing!s}"
    assert repr(secrets) == "Secrets(KEY)"


def test_values_go_to_the_child_with_the_work() -> None:
    begin = BeginTask(style=CallStyle.TASK, entry="m:f", work=work())
    again = to_child.decode(msgspec.json.encode(begin))
    assert isinstance(again, BeginTask)
    assert again.work.secrets == {"KEY": VALUE}


def test_a_mapping_of_what_there_is() -> None:
    secrets = Secrets({"KEY": VALUE})
    assert secrets["KEY"] == VALUE
    assert (secrets.get("KEY"), secrets.get("OTHER"), secrets.get("OTHER", "x")) == (
        VALUE,
        None,
        "x",
    )
    assert (list(secrets), len(secrets), "KEY" in secrets, "OTHER" in secrets) == (
        ["KEY"],
        1,
        True,
        False,
    )
    with pytest.raises(KeyError, match=r"The job has no secret 'OTHER'; it has KEY\."):
        secrets["OTHER"]
    with pytest.raises(KeyError, match=r"it has none"):
        Secrets()["OTHER"]
    assert pickle.loads(pickle.dumps(secrets)) == secrets


CODE = """
import os, sys
from pathlib import Path

def run(task):
    print(task.secrets, vars(task))
    seen = Path("/proc/self/environ").read_text() + Path("/proc/self/cmdline").read_text()
    assert "hunter2" not in seen + str(os.environ)
    return {"out": task.secrets["KEY"][::-1]}

def fail(task):
    raise ValueError("401 for " + task.secrets["KEY"])
"""


def test_a_function_in_a_child_process_has_its_own_alone(tmp_path: Path) -> None:
    user = User(tmp_path)
    user.module(CODE)

    async def main() -> None:
        async with user.process() as runtime:
            (made,) = await run(runtime, user.work(secrets={"KEY": VALUE}))
            assert made.location == VALUE[::-1]
            # The same child, for a job that names another secret.
            with pytest.raises(WorkFailed, match="The job has no secret 'KEY'; it has NEW"):
                await run(runtime, user.work(secrets={"NEW": VALUE}))

            with pytest.raises(WorkFailed):
                await run(runtime, user.work("mine:fail", secrets={"KEY": VALUE}))

    asyncio.run(main())
    printed = (tmp_path / "log").read_text()
    assert "Secrets(KEY)" in printed
    assert "ValueError: 401 for ***" in printed
    assert "hunter2" not in printed


PEM = "-----BEGIN KEY-----\nMIIEvQIBADAN\nBgkqhkiG9w0B\n-----END KEY-----\n"


@pytest.mark.parametrize(
    ("value", "text", "expected"),
    [
        (VALUE, f"401 for {VALUE}.", "401 for ***."),
        (VALUE, f"{VALUE}{VALUE} {VALUE}", "****** ***"),
        ("a'b\\c\"d", repr({"k": "a'b\\c\"d"}), "{'k': '***'}"),
        ("a'b\\c\"d", json.dumps(["a'b\\c\"d"]), '["***"]'),
        ("p@ss/w:rd", f"postgres://me:{quote('p@ss/w:rd', safe='/')}@db", "postgres://me:***@db"),
        ("p@ss w:rd", "?key=p%40ss+w%3Ard", "?key=***"),
        (PEM, "bad line BgkqhkiG9w0B in it", "bad line *** in it"),
        (PEM, repr(PEM), "'***'"),
        ('{"user": "ann", "password": "correct horse"}', "no: correct horse", "no: ***"),
        ('{"a": [{"b": "correct horse"}]}', "correct horse", "***"),
        (f"  {VALUE} ", f"[{VALUE}]", "[***]"),
        (VALUE, f"it was cut off: {VALUE[:9]}", "it was cut off: ***"),
        ("short", "short", "short"),
        ("12345", "12345", "12345"),
        ("123456", "123456", "***"),
        ("      ", "a       b", "a       b"),
        (VALUE, "nothing of it", "nothing of it"),
    ],
)
def test_values_are_hidden(value: str, text: str, expected: str) -> None:
    assert hidden(text, [value]) == expected


def test_the_longer_of_two_is_hidden_as_a_whole() -> None:
    assert hidden("key=secret-and-more", ["secret", "secret-and-more"]) == "key=***"


@given(st.text(min_size=HIDDEN_CHARACTERS_MIN), st.text(), st.text())
def test_a_value_is_never_left(value: str, before: str, after: str) -> None:
    found = hidden(before + value + after, [value])
    if value.strip() and not set(value) <= set(HIDDEN):
        assert value not in found


@given(st.text("ab", min_size=HIDDEN_CHARACTERS_MIN, max_size=12), st.text("ab", max_size=20))
def test_the_longest_beginning_at_the_end_is_hidden(value: str, text: str) -> None:
    found = hidden(text, [value])
    if value in text:
        return
    lengths = range(HIDDEN_CHARACTERS_MIN, len(value))
    most = max((each for each in lengths if text.endswith(value[:each])), default=0)
    assert found == (f"{text[:-most]}{HIDDEN}" if most else text)
