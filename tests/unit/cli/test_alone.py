"""What `penstock` alone says in each situation, and the dispatcher that a verb finds."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from penstock.cli import run, start_page
from penstock.cli.start_page import DispatcherAddress, Glance, address, likely_address
from penstock.kernel.errors import InvalidInput

OURS = "a token of our own"
STATUS: Mapping[str, Any] = {
    "dag_version": 3,
    "jobs": [
        {"queued": 1200, "running": 2, "dead": 1, "paused": ["because"]},
        {"queued": 0, "running": 0, "dead": 0, "paused": []},
    ],
    "workers": 1,
}


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("URL", "API_TOKEN", "PORT", "HOST", "SETTINGS", "VIEWER_TOKEN"):
        monkeypatch.delenv(f"PENSTOCK_{name}", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], seen: Glance | None) -> str:
    with mock.patch.object(start_page, "glance", return_value=seen) as asked:
        assert run([]) == 0
    assert asked.call_args.kwargs["seconds"] <= 0.3
    return capsys.readouterr().out


def first_group(text: str) -> str:
    return text.partition("What next?")[2].split("\n\n")[1].splitlines()[0]


def test_where_nothing_runs_it_proposes_to_try_it(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, None)
    assert "There is no penstock.toml in this folder" in text
    assert "No dispatcher answers at http://127.0.0.1:7070; 'penstock up' starts one." in text
    assert first_group(text) == "Try it"
    assert all(f"\n{title}\n" in text for title in start_page.EXAMPLES)
    assert max(map(len, text.splitlines())) <= 80


def test_what_variables_say_is_no_default(
    capsys: pytest.CaptureFixture[str], somewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "every setting has its default." in said(capsys, None)
    monkeypatch.setenv("PENSTOCK_STORE", "file:///tmp/bucket")
    text = said(capsys, None)
    assert "its default" not in text
    assert "Set by PENSTOCK_STORE: 'penstock settings --changed'." in text


def test_where_one_answers_it_says_how_it_is(
    capsys: pytest.CaptureFixture[str], somewhere: Path
) -> None:
    (somewhere / "penstock.toml").write_text("port = 8080")
    text = said(capsys, Glance(200, STATUS))
    assert "Settings are read from penstock.toml" in text
    assert "A dispatcher answers at http://127.0.0.1:8080" in text
    line = "DAG version 3: 2 jobs, 1,200 waiting, 2 running, 1 dead, 1 worker; 1 job paused.\n"
    assert line in text
    assert first_group(text) == "Look at it"


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (Glance(401, {}), "wants a token"),
        (Glance(200, {}), "is no dispatcher, or not well"),
        (Glance(502, {}), "is no dispatcher, or not well"),
        (Glance(200, {"jobs": [], "dag_version": None}), "No DAG is in force yet"),
        # Whoever answers, nothing of it goes to the terminal, and nothing of it breaks.
        (Glance(200, {"jobs": [7, {"queued": "\x1b[2J"}], "dag_version": "\x1b[2J"}), "No DAG is"),
    ],
)
def test_whatever_answers_is_told(
    capsys: pytest.CaptureFixture[str], seen: Glance, words: str
) -> None:
    text = said(capsys, seen)
    assert words in text
    assert "\x1b[2J" not in text


def test_wrong_settings_are_told_and_nothing_else_is_lost(
    capsys: pytest.CaptureFixture[str], somewhere: Path
) -> None:
    (somewhere / "penstock.toml").write_text("prot = 1")
    text = said(capsys, None)
    assert "The settings are wrong: " in text
    assert "'prot', which is not a setting" in text
    assert "What next?" in text


@pytest.mark.parametrize(
    ("words", "heavy"),
    [
        (["--help"], ("penstock.settings", "penstock.queue", "penstock.dispatcher", "msgspec")),
        (["status", "--help"], ("penstock.settings", "penstock.queue", "penstock.store", "httpx")),
    ],
)
def test_it_imports_nothing_that_takes_its_time(words: list[str], heavy: tuple[str, ...]) -> None:
    code = (
        f"import sys; from penstock.cli import run; run({words!r});"
        f" print([each for each in {heavy!r} if each in sys.modules])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert ran.stdout.splitlines()[-1] == "[]"


def test_the_dispatcher_is_that_of_the_settings_unless_another_is_named(
    somewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert address() == DispatcherAddress("http://127.0.0.1:7070", None)
    (somewhere / "penstock.toml").write_text(f"port = 8080\nhost = '0.0.0.0'\napi_token = '{OURS}'")
    assert address() == DispatcherAddress("http://127.0.0.1:8080", OURS)
    # Our token is for our dispatcher, and goes to nobody else.
    assert address("http://elsewhere") == DispatcherAddress("http://elsewhere", None)
    monkeypatch.setenv("PENSTOCK_URL", "http://there")
    assert address() == DispatcherAddress("http://there", None)
    monkeypatch.setenv("PENSTOCK_API_TOKEN", "theirs")
    assert address() == DispatcherAddress("http://there", "theirs")
    assert address("http://elsewhere", "mine") == DispatcherAddress("http://elsewhere", "mine")


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("port = 0", "http://127.0.0.1:7070"),
        (f"host = '::'\napi_token = '{OURS}'", "http://[::1]:7070"),
        (f"host = 'fd00::1'\napi_token = '{OURS}'", "http://[fd00::1]:7070"),
    ],
)
def test_every_host_gives_an_address(somewhere: Path, text: str, url: str) -> None:
    (somewhere / "penstock.toml").write_text(text)
    assert address().url == url


def test_who_has_nobody_to_tell_goes_on_with_wrong_settings(somewhere: Path) -> None:
    (somewhere / "penstock.toml").write_text("port = 'x'")
    with pytest.raises(InvalidInput):
        address()
    assert likely_address() == DispatcherAddress("http://127.0.0.1:7070", None)
