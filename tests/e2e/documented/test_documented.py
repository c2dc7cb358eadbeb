"""Every command that a page shows, run."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from tests.architecture.source import ROOT
from tests.e2e.documented.forked import Forked, forking
from tests.e2e.documented.plan import AWS, NOWHERE, PIPELINE, QUEUE, TABLES, Planned, plan
from tests.e2e.documented.tables import CODES, FIRST, LAST, REASONS, SAYS, STAYS, TYPED
from tests.e2e.documented.worlds import World, a_pipeline, a_queue, nowhere
from tests.integration.aws_server import AwsServer
from tests.pages import Shown

pytestmark = pytest.mark.timeout(600)
PLAN = plan()
EARLY = "penstock queue drain --wait"
"""What takes half a minute by itself, of a queue of its own, in which nothing is left."""


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forked]:
    with forking(tmp_path_factory.mktemp("ours")) as forked:
        yield forked


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory, ours: Forked) -> Iterator[World]:
    with a_pipeline(tmp_path_factory.mktemp("pipeline"), ours) as world:
        yield world


@pytest.fixture(scope="module")
def queue(tmp_path_factory: pytest.TempPathFactory, ours: Forked) -> Iterator[World]:
    def begin(world: World) -> None:
        for each in PLAN.runs:
            if each.line == EARLY:
                world.begun[EARLY] = world.start(each, PENSTOCK_QUEUE="empty")

    with a_queue(tmp_path_factory.mktemp("queue"), ours, early=begin) as world:
        yield world


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory, ours: Forked) -> World:
    return nowhere(tmp_path_factory.mktemp("nowhere"), ours)


def in_world(name: str) -> pytest.MarkDecorator:
    lines = [each for each in PLAN.runs if each.world == name and each.line != EARLY]
    return pytest.mark.parametrize("planned", lines, ids=lambda each: each.line)


@in_world(NOWHERE)
def test_a_command_that_needs_nothing(planned: Planned, empty: World) -> None:
    _try(planned, empty)


@in_world(QUEUE)
def test_a_command_about_a_queue(planned: Planned, queue: World) -> None:
    _try(planned, queue)


@in_world(PIPELINE)
def test_a_command_about_a_pipeline(planned: Planned, pipeline: World) -> None:
    _try(planned, pipeline)


@pytest.mark.parametrize("planned", [each for each in PLAN.runs if each.line == EARLY])
def test_a_command_that_takes_half_a_minute(planned: Planned, queue: World) -> None:
    _try(planned, queue)


def _try(planned: Planned, world: World) -> None:
    """Run a command as it stands, and look at what it says and how it ends."""
    if planned.line.startswith("curl ") and shutil.which("curl") is None:
        pytest.skip("there is no curl on this machine")
    if planned.is_staying:
        said = STAYS[planned.verb]
        code, out = world.stay(planned, said)
    else:
        said = next((SAYS[each] for each in _names(planned) if each in SAYS), "")
        ran = world.run(planned)
        code, out = ran.returncode, ran.stdout + ran.stderr
    allowed = next((CODES[each] for each in _names(planned) if each in CODES), (0,))
    assert code in allowed, (
        f"'{planned.line}' ends with {code} and says: {out}\nIs it wrong on its page? If a page"
        f" only names the verb, say in ENDINGS of {TABLES} what belongs to it."
    )
    assert "Traceback" not in out, out
    assert out.strip()
    assert said in out, out


def _names(planned: Planned) -> Iterator[str]:
    """What a table may call it: with its options, or only the verb."""
    yield " ".join(planned.words)
    yield planned.verb or planned.line.split()[0]


@in_world(AWS)
def test_a_command_of_the_tools_of_aws(
    planned: Planned, aws_server: AwsServer, empty: World
) -> None:
    """Those tools are not installed with us: what they ask for is asked for by boto3."""
    service, operation, *options = shlex.split(planned.line)[1:]
    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "testtest"}
    where: dict[str, Any] = {"endpoint_url": aws_server.endpoint, "region_name": "us-east-1"}
    client = boto3.client(service.removesuffix("api"), **where, **keys)
    told: dict[str, Any] = {}
    for name, value in zip(options[::2], options[1::2], strict=True):
        text = _text(value, empty)
        told |= json.loads(text) if name == "--cli-input-json" else {_field(name): text}
    if "Bucket" in told:
        client.create_bucket(Bucket=told["Bucket"])
    answer = getattr(client, operation.replace("-", "_"))(**told)
    assert answer["ResponseMetadata"]["HTTPStatusCode"] in (200, 204)


def _text(value: str, world: World) -> str:
    """What is said, or what is in the file that is named: one of ours, or what a line has saved."""
    if not value.startswith("file://"):
        return value
    name = value.removeprefix("file://")
    for each in PLAN.runs:
        if each.saved == name and not (world.folder / name).exists():
            world.run(each)
    place = world.folder / name
    return (place if place.exists() else ROOT / name).read_text()


def _field(option: str) -> str:
    return "".join(each.title() for each in option.removeprefix("--").split("-"))


def test_nothing_on_the_pages_is_left_out() -> None:
    assert not PLAN.problems, "\n".join(PLAN.problems)
    assert len(PLAN.runs) > 100


def test_what_is_not_run_here_is_run_where_it_says() -> None:
    for each in REASONS:
        assert each.form in PLAN.used, f"No page shows {each.form} any more: remove it."
        if each.file:
            assert each.proof in (ROOT / each.file).read_text(), f"{each.file}: {each.form}"
    for page, title, file in TYPED:
        text = (ROOT / file).read_text()
        assert Path(page).name in text, f"{file} does not read {page}"
        assert f'"{title}"' in text, f"{file} does not type {title!r} of {page}"


def test_the_tables_have_nothing_that_no_page_shows() -> None:
    known = {name for each in PLAN.runs for name in (*_names(each), each.verb)}
    left = [each for each in (*FIRST, *LAST, *STAYS, *CODES, *SAYS) if each not in known]
    assert not left, f"No page shows these any more: remove them from {TABLES}."


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("penstock task show TASK", "say what TASK stands for"),
        ("penstock queue batch BATCH --wait", "say what BATCH stands for"),
        ("helm install penstock", "say where it runs"),
        ("penstock task show 7", ""),
        ("penstock queue get|history ID", ""),
        ("make demo", ""),
    ],
)
def test_what_nobody_can_run_is_told(line: str, said: str) -> None:
    problems = plan([Shown("docs/new.md", "", line)]).problems
    assert bool(problems) == bool(said)
    assert said in "".join(problems)
    assert all(re.match(r"docs/new\.md shows ", each) for each in problems)
