"""`penstock settings`: values, where they came from, what is never shown, and the reference."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import run
from penstock.cli.installation import settings_of
from penstock.cli.settings import SECRET, markdown, shown_value
from penstock.kernel.errors import InvalidInput
from penstock.kernel.settings_schema import declared
from penstock.runtimes.process import ChildSettings
from penstock.runtimes.spark.settings import SparkSettings
from penstock.settings import SCHEMA, Settings

REFERENCE = Path(__file__).resolve().parents[3] / "docs" / "settings.md"


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for each in fields(Settings):
        monkeypatch.delenv(f"PENSTOCK_{each.name.upper()}", raising=False)
    monkeypatch.delenv("PENSTOCK_SETTINGS", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def told(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, dict[str, Any]]:
    assert run(["settings", "--json", *words]) == 0
    return {each["name"]: each for each in json.loads(capsys.readouterr().out)}


def test_every_setting_is_shown_with_its_origin_and_purpose(
    capsys: pytest.CaptureFixture[str], somewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (somewhere / "penstock.toml").write_text(
        "port = 1\nconcurrency = 2\ninternal_port = 3\n[runtimes.process]\nidle_max = 3\n"
    )
    monkeypatch.setenv("PENSTOCK_PORT", "8080")
    found = told(
        capsys, "--concurrency", "9", "--dispatcher", "http://a", "--dispatcher", "http://b"
    )
    assert list(found) == [each.name for each in fields(Settings)]
    origins = {name: (each["value"], each["origin"]) for name, each in found.items()}
    file = str(somewhere / "penstock.toml")
    assert origins["concurrency"] == (9, "the command line")
    assert origins["dispatchers"] == (["http://a", "http://b"], "the command line")
    assert origins["port"] == (8080, "PENSTOCK_PORT")
    assert origins["internal_port"] == (3, file)
    assert origins["runtimes"] == ({"process": {"idle_max": 3}}, file)
    assert origins["spark"] == ("local[*]", "default")
    assert all(each["purpose"] and each["variable"] for each in found.values())


def test_only_what_was_changed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_PORT", "8080")
    assert list(told(capsys, "--changed")) == ["port"]
    assert run(["settings", "--changed"]) == 0
    heads, row, *_ = capsys.readouterr().out.splitlines()
    assert heads.split() == ["setting", "value", "from", "what", "it", "is", "for"]
    assert row.startswith("port     8080   PENSTOCK_PORT  The port of the public listener")
    monkeypatch.delenv("PENSTOCK_PORT")
    assert run(["settings", "--changed"]) == 0
    assert capsys.readouterr().err.startswith("All settings have their defaults.")


def test_no_secret_is_shown(
    capsys: pytest.CaptureFixture[str], somewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (somewhere / "penstock.toml").write_text(
        "worker_secret = 'hunter2-of-all-workers'\nstore = 's3://key:hunter2@bucket'\n"
        "[runtimes.spark.conf]\n'spark.hadoop.fs.s3a.secret.key' = 'hunter2'\n"
        "password = 'hunter2'\n"
        "[runtimes.other]\nuses = 'process'\n[runtimes.other.resources]\ntoken = 'hunter2'\nurl = 'smtp://me:hunter2@host'\n"
    )
    monkeypatch.setenv("PENSTOCK_API_TOKEN", "hunter2")
    monkeypatch.setenv("PENSTOCK_VIEWER_TOKEN", "hunter2-too")
    monkeypatch.setenv("PENSTOCK_WEBHOOK_TOKEN", "hunter2-hook")
    monkeypatch.setenv("PENSTOCK_POSTGRES", "postgresql://me:hunter2@db/penstock")
    for words in (["settings"], ["settings", "--json"]):
        assert run(words) == 0
        shown = capsys.readouterr()
        assert "hunter2" not in shown.out + shown.err
    found = told(capsys)
    assert {found[name]["value"] for name in SECRET} == {"set"}
    assert found["postgres"]["value"] == "set, with a password in it"


@pytest.mark.parametrize(
    "text",
    [
        "postgresql://me:pass@db/x",
        "postgresql://db/x?password=pass",
        "host=db password=pass",
        "host=db PassWord = 'pass word'",
        "s3://key@bucket",
        "http://pass@[broken",
    ],
)
def test_an_address_that_may_hold_a_password_is_not_shown(text: str) -> None:
    assert shown_value("postgres", text) == "set, with a password in it"


@pytest.mark.parametrize(
    "text", ["postgresql://me@db/x", "host=db user=me", "s3://bucket/prefix", "local[*]", ""]
)
def test_an_address_without_one_is(text: str) -> None:
    assert shown_value("postgres", text) == text


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--postgres", "postgresql://me:hunter2@db/x"),
        ("--postgres", "host=db passfile=/p password=hunter2"),
        ("--spark", "sc://host:15002/;token=hunter2"),
    ],
)
def test_a_password_among_the_arguments_is_refused(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["up", option, value]) == 2
    said = capsys.readouterr().err
    assert f"{option} has a password, which every user of this machine could read" in said
    assert f"PENSTOCK_{option[2:].upper()}" in said
    assert "hunter2" not in said


def test_the_name_of_a_file_with_the_password_is_no_secret() -> None:
    assert settings_of({"postgres": "host=db passfile=/p"}).postgres == "host=db passfile=/p"


def test_words_that_cannot_be_right_are_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_PROT", "1")
    assert run(["settings", "--changed"]) == 0
    assert "unknown setting PENSTOCK_PROT; did you mean PENSTOCK_PORT?" in capsys.readouterr().err
    monkeypatch.setenv("PENSTOCK_PORT", "x")
    assert run(["settings"]) == 2
    assert "PENSTOCK_PORT must be a number, not 'x'" in capsys.readouterr().err


def test_a_runtime_that_cannot_be_is_told(
    capsys: pytest.CaptureFixture[str], somewhere: Path
) -> None:
    (somewhere / "penstock.toml").write_text("[runtimes.proces]\nchildren_max = 3\n")
    assert run(["settings"]) == 2
    said = capsys.readouterr().err
    assert "The runtime proces would use 'proces', which is not there" in said
    assert "Is process meant?" in said


def test_the_reference_is_the_page_of_the_docs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["settings", "--reference"]) == 0
    shown = capsys.readouterr().out
    again = "make it anew with: penstock settings --reference > docs/settings.md"
    assert shown == REFERENCE.read_text("utf-8"), again


def test_every_setting_says_what_it_is_for() -> None:
    shown = markdown()
    for each in (*SCHEMA.settings, *declared(SparkSettings), *declared(ChildSettings)):
        assert each.purpose.endswith("."), each.name
        assert not each.variables or f"`{each.keys[0] if each.keys else each.variable}`" in shown


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"viewer_token": "a", "api_token": "a"}, "are the same"),
        ({"viewer_token": "a"}, "so anybody may change things"),
    ],
)
def test_who_may_only_look_cannot_steer(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        Settings(**given)
