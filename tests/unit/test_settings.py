"""A value is the first that is there: the command line, a variable, the file, the default."""

from __future__ import annotations

import ast
import re
from dataclasses import make_dataclass, replace
from pathlib import Path

import pytest

from penstock.kernel.errors import InvalidInput
from penstock.kernel.settings_schema import Schema, declared, setting
from penstock.queue.settings import QUEUE_SCHEMA
from penstock.runtimes.function import FunctionSettings
from penstock.runtimes.process import ChildSettings
from penstock.runtimes.registry import RuntimeRegistry
from penstock.runtimes.spark.settings import SparkSettings
from penstock.runtimes.thread import ThreadSettings
from penstock.settings import (
    SCHEMA,
    InstallationProfile,
    Settings,
    Wakeups,
    misspelt,
    read_settings,
    variables_of,
)
from penstock.worker.settings import PipelineWorkerSettings
from tests.architecture.source import ROOT

_CLASSES = (
    *SCHEMA.kinds,
    PipelineWorkerSettings,
    ChildSettings,
    ThreadSettings,
    FunctionSettings,
    SparkSettings,
)


def told(folder: Path, text: str | None = None, **given: object) -> Settings:
    if text is not None:
        (folder / "penstock.toml").write_text(text)
    return read_settings(given, environment={}, folder=folder).settings


def test_the_order_of_origins(tmp_path: Path) -> None:
    (tmp_path / "penstock.toml").write_text("port = 1\nconcurrency = 2\nwakeups = 'sqs'\n")
    environment = {"PENSTOCK_PORT": "3", "PENSTOCK_CONCURRENCY": "4"}
    found = read_settings({"port": 5, "host": None}, environment=environment, folder=tmp_path)
    assert (found.settings.port, found.settings.concurrency) == (5, 4)
    assert found.settings.wakeups is Wakeups.SQS
    assert found.origins["port"] == "the command line"
    assert found.origins["concurrency"] == "PENSTOCK_CONCURRENCY"
    assert found.origins["wakeups"].endswith("penstock.toml")
    assert found.origins["host"] == "default"


def test_another_file_can_be_named(tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text("port = 9")
    environment = {"PENSTOCK_SETTINGS": "other.toml"}
    assert read_settings({}, environment=environment, folder=tmp_path).settings.port == 9


def test_a_named_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"no settings file .*gone\.toml"):
        read_settings({}, environment={"PENSTOCK_SETTINGS": "gone.toml"}, folder=tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot = 1", "'prot', which is not a setting"),
        ("port = 'x'", "port must be a number, not 'x'"),
        (
            "stop_seconds = 'soon'",
            "stop_seconds must be a number of seconds, or a time such as 30s or 2m, not 'soon'",
        ),
        ("wait_seconds = '2m'", "wait_seconds"),
        ("port = true", "port must be a number, not True"),
        ("port = 70.5", "port must be a number, not 70.5"),
        ("port = 70000", "port must be between"),
        ("profile = 'gcp'", "profile must be one of lite, aws, not 'gcp'"),
        ("port = ", "is not TOML"),
        ("concurrency = 0", "concurrency must be"),
        ("dispatchers = ['ftp://x']", "not an http URL"),
        ("host = '0.0.0.0'", "on loopback only"),
        ("runtimes = 3", "runtimes must be a table, as in .*, not 3"),
        ("store = 'ftp://user:secret@host'", "store has 'ftp://', which is not"),
        ("store = 'a/folder'", "store has 'a/folder', which is not"),
    ],
)
def test_what_cannot_be_right_is_one_sentence(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        told(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("port = 70000", "port must be between 0 and 65535 ({file}).", ""),
        ("[alerts]\nwebook = 'http://x'", "({file}).", ""),
        ("spark = 'there'", "not a Spark master ({file}).", "local"),
        ("prot = 1", "{file} has 'prot'", "Did you mean port?"),
        ("colour = 1", "{file} has 'colour'", "Settings are data, "),
        ("[worker]\nstop_second = 1", "{file} has 'worker.stop_second'", "worker.stop_seconds?"),
        ("[worker]\nlease_ttl_secs = 9", "has 'worker.lease_ttl_secs'", "worker.shard_leasing.l"),
        ("[queue.direct]\nx = 1", "{file} has 'queue.direct'", "queue.direct_dispatch"),
        ("api_token = 7", "api_token must be a text ({file}).", ""),
        ("port = ", "{file} is not TOML", "port = 8080"),
        ("worker_secret = 'short'", "worker_secret has fewer than 16", "openssl rand"),
        ("worker_secret = 'only-for-trying-it-out'", "everybody knows it", "openssl rand"),
        ("host = '0.0.0.0'\napi_token = 'short'", "api_token has fewer than 16", "openssl rand"),
    ],
)
def test_it_is_said_where_it_stands_and_what_to_do(
    tmp_path: Path, text: str, message: str, hint: str
) -> None:
    with pytest.raises(InvalidInput) as raised:
        told(tmp_path, text)
    assert message.format(file=tmp_path / "penstock.toml") in raised.value.message
    assert hint in raised.value.hint


def test_on_this_machine_alone_a_token_may_be_short() -> None:
    assert Settings(api_token="short").api_token == "short"


def test_the_names_that_the_console_answers_to() -> None:
    here = frozenset({"127.0.0.1", "::1", "localhost"})
    assert Settings().console_hosts == here
    assert Settings(alerts={"url": "https://A.example/x"}).console_hosts == here | {"a.example"}
    everywhere = Settings(host="0.0.0.0", api_token="x" * 16)
    assert everywhere.console_hosts is None
    named = replace(everywhere, hosts=("A.example", " [::2]"))
    assert named.console_hosts == here | {"a.example", "::2"}


def test_times_may_have_units(tmp_path: Path) -> None:
    found = told(tmp_path, "retention_days = '36h'\nsweep_hours = '30m'\nstop_seconds = '2m'\n")
    assert (found.retention_days, found.sweep_hours, found.stop_seconds) == (1.5, 0.5, 120)


def test_runtimes_are_tables(tmp_path: Path) -> None:
    found = told(tmp_path, "[runtimes.process]\nchildren_max = 3\n")
    assert found.runtimes == {"process": {"children_max": 3}}


def test_variables_give_the_same_settings_again(tmp_path: Path) -> None:
    settings = Settings(
        data=tmp_path,
        profile=InstallationProfile.AWS,
        port=0,
        host="::1",
        dispatchers=("http://a:1", "http://b:2"),
        retention_days=1.5,
    )
    again = read_settings({}, environment=variables_of(settings), folder=tmp_path).settings
    assert again == settings


def test_places_have_defaults_in_the_data_folder(tmp_path: Path) -> None:
    settings = Settings(data=tmp_path, internal_port=81)
    assert settings.store_url == (tmp_path / "store").as_uri()
    assert settings.dispatcher_urls == ("http://127.0.0.1:81",)
    assert Settings(store="s3://b/p").store_url == "s3://b/p"
    assert settings.secrets_path == tmp_path / "secrets"
    assert Settings(secrets_folder="/run/secrets").secrets_path == Path("/run/secrets")


def test_a_variable_that_is_nearly_one_is_told() -> None:
    environment = {
        "PENSTOCK_PROT": "1",
        "PENSTOCK_WORKER_SECERT": "x",
        "PENSTOCK_INTERNAL_PROT": "1",
        "PENSTOCK_URL": "x",
        "PENSTOCK_WORKER_STOP_SECONDS": "1",
        "PENSTOCK_PORT": "1",
        "PENSTOCK_SOMETHING_ELSE": "1",
        "PROT": "1",
        "PENSTOCK_": "x",
    }
    assert dict(misspelt(environment)) == {
        "PENSTOCK_PROT": "PENSTOCK_PORT",
        "PENSTOCK_WORKER_SECERT": "PENSTOCK_WORKER_SECRET",
        "PENSTOCK_INTERNAL_PROT": "PENSTOCK_INTERNAL_PORT",
    }


def test_no_documented_variable_is_called_misspelt() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    named = {
        name
        for page in pages
        for name in re.findall(r"\bPENSTOCK_[A-Z_]*[A-Z]\b", page.read_text())
    }
    known = SCHEMA.variables
    # An example, and the seed of our own tests.
    assert named - known == {"PENSTOCK_NAME", "PENSTOCK_PROOF_SEED"}
    assert {"PENSTOCK_WORKER_HEARTBEAT", "PENSTOCK_WORKER_SAMPLE_SHARDS"} <= named
    assert dict(misspelt(dict.fromkeys(named, "x"))) == {}


@pytest.mark.parametrize("variable", sorted(QUEUE_SCHEMA.variables))
def test_a_misspelt_variable_of_a_queue_is_told(variable: str) -> None:
    ours = {variable: variable[:-1]} if variable.startswith("PENSTOCK_") else {}
    assert {meant: wrong for wrong, meant in misspelt({variable[:-1]: "x"})} == ours


def test_every_variable_that_the_source_names_is_known() -> None:
    named = {
        name
        for file in (ROOT / "src").rglob("*.py")
        for name in re.findall(r"\bPENSTOCK_[A-Z_]*[A-Z]\b", file.read_text())
    }
    internal = {"PENSTOCK_RESULT_BEYOND_BOUND"}
    assert named - SCHEMA.variables == internal


def test_a_default_stands_in_one_place_only() -> None:
    """Code that gives a setting a value of its own would make an edit of its default do nothing."""
    kinds = {each.__name__: {one.name for one in declared(each)} for each in _CLASSES}
    given = [
        f"{file.relative_to(ROOT)}:{call.lineno} gives {word.arg} of {call.func.id}"
        for file in sorted((ROOT / "src/penstock").rglob("*.py"))
        # Those of simulations, of benchmarks and of the demo are not those of users.
        if not {"testing", "demo"}.intersection(file.parts)
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
        for word in call.keywords
        if word.arg in kinds.get(call.func.id, ()) and isinstance(word.value, ast.Constant)
    ]
    assert given == []


def test_what_two_classes_have_is_declared_in_one() -> None:
    tops = {each.name: each for each in declared(Settings)}
    for each in declared(PipelineWorkerSettings):
        if each.name in tops:
            assert tops[each.name].said.like is PipelineWorkerSettings
    twice = make_dataclass(
        "Twice", [("port", int, setting(1))], namespace={"PLACE": Settings.PLACE}
    )
    with pytest.raises(TypeError, match="PENSTOCK_PORT, port: declared more than once"):
        Schema(Settings, twice)


def test_a_whole_installation_is_told_a_misspelt_setting_of_a_runtime() -> None:
    with pytest.raises(InvalidInput) as raised:
        RuntimeRegistry({"process": {"idle_secnds": 3}}, installed=[]).runtime("process")
    assert "'idle_secnds' in the settings of the runtime process" in raised.value.message
    assert raised.value.hint == "Did you mean idle_seconds?"
