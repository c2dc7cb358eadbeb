"""What tasks are handed, by the real worker from the real API: a token of their own, and a user."""

from __future__ import annotations

import base64
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.datasets.layout import path_of
from penstock.datasets.manifest import digest
from penstock.runtimes.process import process
from tests.integration.worker.site import Site, play
from tests.unit.runtimes import test_untrusted

CODE = """
import json, os, pathlib

def run(task):
    own = pathlib.Path(os.environ["PENSTOCK_TASK_TOKEN_FILE"])
    said = {"token": task.token, "file": str(own), "user": os.getuid(), "home": os.environ["HOME"]}
    said["asks"] = task._handed.dispatchers[0]
    pathlib.Path(task.outputs["tidy"].path, "said.json").write_text(json.dumps(said))
    forge(task)

def forge(task):
    # Have the child report what it did not make.
    from penstock.runtimes.base import Facts, ProducedOutput
    place = task.outputs["tidy"].location
    facts = Facts(manifest="f" * 64, files=666, rows=666, bytes=666)
    key = task.partition_key
    made = ProducedOutput(output="tidy", location=place, partition_key=key, facts=facts)
    type(task).made = lambda *_: (made,)
"""
DAG = """
jobs:
  feed:
    activation: source
    source: {kind: manual}
    outputs: [raw]
  look:
    runtime: process
    operator: looks:run
    inputs: [raw]
    outputs: [tidy]
    untrusted: UNTRUSTED
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that everybody can enter, as the temporary ones of pytest are not."""
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o755)
        (Path(made) / "looks.py").write_text(CODE)
        yield Path(made)


def read(file: Path) -> dict[str, str | int]:
    said: dict[str, str | int] = json.loads(file.read_text())
    return said


def owners(*paths: Path) -> set[int]:
    return {each.stat().st_uid for each in paths}


def left(folder: Path) -> list[str]:
    """What is still handed to anybody."""
    return [each.name for each in folder.glob("handed/*")]


async def looked(site: Site) -> tuple[Path, dict[str, str | int]]:
    """Where the task has written, and what."""
    (row,) = await site.world.rows("SELECT location, manifest, files, rows FROM publication")
    place = path_of(row["location"])
    assert row["manifest"] == digest((place / "_manifest.json").read_bytes()), "by the worker"
    assert (row["files"], row["rows"]) == (1, None)
    return place, read(place / "said.json")


def test_a_task_has_a_token_of_its_own_while_it_runs(dsn: str, folder: Path) -> None:
    async def story(site: Site) -> None:
        await site.pipeline.send("p")
        async with site.working(process({"path": [str(folder)]})):
            await site.until_all(completed=1)
            place, said = await looked(site)
            assert str(said["asks"]).startswith("http://127.0.0.1:"), "task.query asks there"
            body = str(said["token"]).split(".")[1]
            claims = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
            assert (claims["task_id"], claims["attempt"], claims["aud"]) == (1, 1, "penstock:task")
            (write,) = claims["grants"]["write"]
            assert write["prefix"] == f"{place.as_uri()}/"
            handed = Path(str(said["file"])).parent
            assert list(handed.parent.glob("*")) == [], "it is gone with its task"
        assert left(folder) == []

    play(dsn, folder, DAG.replace("UNTRUSTED", "false"), story)


class TestUntrusted:
    pytestmark = test_untrusted.pytestmark

    def test_an_untrusted_task_is_somebody_else(self, dsn: str, folder: Path) -> None:
        path = [str(each) for each in (folder, test_untrusted.SOURCE, test_untrusted.PACKAGES)]
        runtime = process(
            {
                "path": path,
                "python": [test_untrusted.PYTHON],
                "uids": test_untrusted.RANGE,
                "uids_folder": str(folder / "users"),
                "untrusted_on_files": True,
            }
        )

        async def story(site: Site) -> None:
            await site.pipeline.send("p")
            async with site.working(runtime):
                await site.until_all(completed=1)
            place, said = await looked(site)
            assert said["user"] == test_untrusted.FIRST
            assert said["home"] == str(Path(str(said["file"])).parent / "tmp")
            files = (place / "said.json", place / "_manifest.json")
            assert owners(place, *files) == {0}, "it is the worker's again"
            assert left(folder) == []

        play(dsn, folder, DAG.replace("UNTRUSTED", "true"), story)
