"""What a function finds of its own: the environment of its process, its token, its credentials."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from penstock.kernel.errors import InvalidInput, WorkFailed
from penstock.runtimes.base import AttemptWork
from penstock.runtimes.process import child_environment, untrusted_environment
from penstock.runtimes.secrets import (
    CONFIG,
    CREDENTIALS,
    TOKEN,
    TOKEN_VARIABLE,
    AttemptFiles,
    TaskCredentials,
)
from penstock.runtimes.task import FunctionTask
from penstock.testing.runtime_contract import RecordingReporter
from tests.unit.runtimes.benches import User, run

LOOKS = """
import json, os, pathlib

def run(task):
    token = pathlib.Path(os.environ.get("PENSTOCK_TASK_TOKEN_FILE", os.devnull)).read_text()
    found = task.credentials
    said = {
        "pid": os.getpid(),
        "token": token,
        "task_token": task.token,
        "key": found.access_key if found else "",
        "shown": repr(found),
        "secret": task.secrets.get("NAME", ""),
        "environment": dict(os.environ),
    }
    (task.output.path / "said.json").write_text(json.dumps(said))
"""
RENEWS = """
import os, pathlib

def run(task):
    folder = pathlib.Path(os.environ["PENSTOCK_TASK_TOKEN_FILE"]).parent
    before = task.token
    (folder / "new").write_text("second")
    (folder / "new").rename(folder / "token")
    return {"out": before + task.token}
"""
BOTO = """
import json
import botocore.session

def run(task):
    session = botocore.session.get_session()
    found = session.get_credentials().get_frozen_credentials()
    said = {
        "key": found.access_key,
        "secret": found.secret_key,
        "session": found.token,
        "region": session.get_config_variable("region"),
    }
    (task.output.path / "said.json").write_text(json.dumps(said))
"""

DAILY = """
import json

def run(task):
    found = [task.credentials_for(f"s3://lake/{hour}") for hour in range(24)]
    said = {
        "lacks": task.credentials.lacks,
        "keys": [each.access_key for each in found],
        "boto3": found[0].for_boto3(),
    }
    try:
        task.credentials_for("s3://lake/refused", "s3://lake/1")
    except Exception as error:
        said["error"] = str(error)
    (task.output.path / "said.json").write_text(json.dumps(said))
"""


class Minting(RecordingReporter):
    """A voice that has credentials."""

    async def credentials(self, locations: Sequence[str]) -> TaskCredentials:
        if len(locations) > 1:
            raise WorkFailed("There are too many.", hint="Ask for fewer.")
        return TaskCredentials(
            access_key=locations[0],
            secret_key="hidden",
            session_token="session",
            expires_at=datetime(2026, 1, 1, tzinfo=UTC),
            region="eu-west-9",
        )


@pytest.fixture
def user(tmp_path: Path) -> User:
    return User(tmp_path)


def handed(folder: Path, *, has_credentials: bool = False) -> AttemptFiles:
    folder.mkdir()
    (folder / TOKEN).write_text("first")
    variables = {TOKEN_VARIABLE: str(folder / TOKEN)}
    if has_credentials:
        document = {
            "Version": 1,
            "AccessKeyId": "the key",
            "SecretAccessKey": "the secret",
            "SessionToken": "the session",
            "Expiration": "2099-01-01T00:00:00+00:00",
        }
        (folder / CREDENTIALS).write_text(json.dumps(document))
        text = f"[default]\ncredential_process = cat '{folder / CREDENTIALS}'\nregion = eu-west-9\n"
        (folder / CONFIG).write_text(text)
        variables["AWS_CONFIG_FILE"] = str(folder / CONFIG)
    return AttemptFiles(
        folder=str(folder),
        variables=variables,
        region="eu-west-9",
        endpoint="http://store",
        has_credentials=has_credentials,
    )


def said_by(user: User, *works: AttemptWork) -> list[dict[str, Any]]:
    """What the function finds, in each of these one after the other."""

    async def main() -> list[dict[str, Any]]:
        found = []
        async with user.process() as runtime:
            for work in works:
                await run(runtime, work)
                found.append(json.loads((user.folder / "out" / "said.json").read_text()))
        return found

    return asyncio.run(main())


def test_variables_are_those_of_the_task_and_gone_after_it(user: User) -> None:
    user.module(LOOKS)
    first = user.work(handed=handed(user.folder / "one"))
    second = user.work(handed=handed(user.folder / "two"))
    said = said_by(user, first, user.work(), second)
    assert [each["token"] for each in said] == ["first", "", "first"]
    assert [each["task_token"] for each in said] == ["first", "", "first"]
    assert len({each["pid"] for each in said}) == 1, "it was one process"
    folders = [each["environment"].get(TOKEN_VARIABLE) for each in said]
    assert folders == [str(user.folder / "one/token"), None, str(user.folder / "two/token")]


def test_credentials_have_a_process_of_their_own(user: User) -> None:
    user.module(LOOKS)
    work = user.work(handed=handed(user.folder / "one", has_credentials=True))
    said = said_by(user, user.work(), work, work, user.work())
    assert [each["key"] for each in said] == ["", "the key", "the key", ""]
    pids = [each["pid"] for each in said]
    assert len(set(pids)) == 3
    assert pids[0] == pids[3], "a warm one is kept for tasks without"
    assert not any("the " in each["shown"] for each in said)


def test_files_are_read_anew_each_time(user: User) -> None:
    user.module(RENEWS)

    async def main() -> str:
        async with user.process() as runtime:
            return (await run(runtime, user.work(handed=handed(user.folder / "one"))))[0].location

    assert asyncio.run(main()) == "firstsecond"


def test_secrets_are_the_functions_and_in_no_repr(user: User) -> None:
    user.module(LOOKS)
    work = user.work(secrets={"NAME": "a value"})
    assert said_by(user, work)[0]["secret"] == "a value"
    assert "a value" not in repr(work)
    assert "a value" not in repr(FunctionTask(work).secrets)


def test_credentials_as_boto3_takes_them(tmp_path: Path) -> None:
    found = handed(tmp_path / "one", has_credentials=True).credentials
    assert found is not None
    assert found.for_boto3() == {
        "aws_access_key_id": "the key",
        "aws_secret_access_key": "the secret",
        "aws_session_token": "the session",
        "region_name": "eu-west-9",
        "endpoint_url": "http://store",
    }


@pytest.mark.skipif(importlib.util.find_spec("botocore") is None, reason="botocore is not there")
def test_the_tools_of_aws_find_the_credentials_and_not_those_of_the_worker(
    user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = user.folder / "a home"
    (home / ".aws").mkdir(parents=True)
    (home / ".aws" / "credentials").write_text(
        "[default]\naws_access_key_id = worker\naws_secret_access_key = worker\n"
    )
    monkeypatch.setenv("HOME", str(home))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, "worker")
    user.module(BOTO)
    work = user.work(handed=handed(user.folder / "one two", has_credentials=True))
    assert said_by(user, work) == [
        {"key": "the key", "secret": "the secret", "session": "the session", "region": "eu-west-9"}
    ]


SECRETS = {
    "PENSTOCK_WORKER_SECRET": "x",
    "penstock_lower": "x",
    "AWS_ACCESS_KEY_ID": "x",
    "AWS_SECRET_ACCESS_KEY": "x",
    "AWS_SESSION_TOKEN": "x",
    "AWS_SECURITY_TOKEN": "x",
    "AWS_PROFILE": "x",
    "AWS_DEFAULT_PROFILE": "x",
    "AWS_SHARED_CREDENTIALS_FILE": "x",
    "AWS_CONFIG_FILE": "x",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": "x",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI": "x",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN": "x",
    "AWS_WEB_IDENTITY_TOKEN_FILE": "x",
    "AWS_ROLE_ARN": "x",
    "AWS_ROLE_SESSION_NAME": "x",
}


def test_children_have_nothing_that_is_the_workers_own() -> None:
    ours = {**SECRETS, "PATH": "/bin", "AWS_REGION": "r", "DATABASE_URL": "d", "PYTHONPATH": "old"}
    found = child_environment(ours, {"PYTHONPATH": "new"})
    assert "x" not in found.values()
    assert found["AWS_SHARED_CREDENTIALS_FILE"] == found["AWS_CONFIG_FILE"] == "/dev/null"
    assert found["AWS_EC2_METADATA_DISABLED"] == "true"
    kept = {name: found[name] for name in ("PATH", "AWS_REGION", "DATABASE_URL", "PYTHONPATH")}
    assert kept == {"PATH": "/bin", "AWS_REGION": "r", "DATABASE_URL": "d", "PYTHONPATH": "new"}


def test_untrusted_children_have_what_a_program_needs() -> None:
    ours = {"PATH": "/bin", "LC_ALL": "C", "TZ": "UTC", "DATABASE_URL": "d", "HOME": "/root"}
    found = untrusted_environment(child_environment({**SECRETS, **ours}, {"PYTHONPATH": "p"}))
    assert found == {
        "PATH": "/bin",
        "LC_ALL": "C",
        "TZ": "UTC",
        "PYTHONPATH": "p",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def test_a_function_has_credentials_for_some_of_its_folders_at_a_time(user: User) -> None:
    user.module(DAILY)
    given = replace(handed(user.folder / "one", has_credentials=True), lacks="24 folders.")

    async def main() -> None:
        async with user.process() as runtime:
            await runtime.run(user.work(handed=given), Minting())

    asyncio.run(main())
    said = json.loads((user.folder / "out" / "said.json").read_text())
    assert said["lacks"] == "24 folders."
    assert said["keys"] == [f"s3://lake/{hour}" for hour in range(24)]
    assert said["boto3"] == {
        "aws_access_key_id": "s3://lake/0",
        "aws_secret_access_key": "hidden",
        "aws_session_token": "session",
        "region_name": "eu-west-9",
    }
    assert said["error"] == "There are too many. Ask for fewer."


def test_where_none_are_minted_there_are_none_for_some_folders_either(user: User) -> None:
    task = FunctionTask(user.work(handed=handed(user.folder / "one")))
    with pytest.raises(InvalidInput, match="No credentials are minted"):
        task.credentials_for("s3://lake/1")
    with pytest.raises(ValueError, match="for which locations"):
        task.credentials_for()
