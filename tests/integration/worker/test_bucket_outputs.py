"""The function of docs/getting-started.md on a real bucket, with credentials of its own or none."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.datasets.manifest import decode, digest
from penstock.datasets.snapshot import preview, read, verify
from penstock.datasets.transfer import Transfer
from penstock.kernel.errors import PenstockError
from penstock.runtimes.base import Part
from penstock.runtimes.process import ProcessRuntime, process
from penstock.store.s3.local import LocalS3
from tests.conftest import Background
from tests.integration.minting_place import Place, seaweedfs_place
from tests.integration.worker.site import Site, play
from tests.unit.runtimes import test_untrusted

PAGE = Path(__file__).parents[3] / "docs" / "getting-started.md"
DAG = """
jobs:
  feed:
    activation: source
    source: {kind: manual}
    outputs: [raw]
  clean:
    runtime: process
    operator: shop:clean
    inputs: [raw]
    outputs: [orders]
"""
DIRECT = """
import boto3

def clean(task):
    bucket, _, key = task.outputs["orders"].location.removeprefix("s3://").partition("/")
    s3 = boto3.client("s3", **task.credentials.for_boto3())
    s3.put_object(Bucket=bucket, Key=f"{key}/a b%2F.txt", Body=b"by itself")
    (task.outputs["orders"].path / "more.txt").write_text("by the worker")
"""


UNTRUSTED = """
import os

def clean(task):
    folder = task.outputs["orders"].path
    (folder / "own.txt").write_text(str(os.getuid()))
    if task.partition_key == "linked":
        (folder / "link.txt").symlink_to("SECRET")
"""


@pytest.fixture(scope="module")
def place(background: Background, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("bucket")
    server = LocalS3(folder, mints=True, grace_seconds=1)
    try:
        background.run(server.start())
    except PenstockError as error:
        background.run(server.stop())
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no S3 server: {error.message} {error.hint}")
    yield seaweedfs_place(server, folder)
    background.run(server.stop())


def block(language: str, begins: str) -> str:
    """A block of the page."""
    blocks = PAGE.read_text().split(f"```{language}\n")[1:]
    return next(each.partition("```")[0] for each in blocks if each.startswith(begins))


@pytest.mark.parametrize("is_minted", [True, False])
def test_the_function_of_the_page_works_on_a_bucket(
    dsn: str, tmp_path: Path, place: Place, is_minted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in place.own.items():
        monkeypatch.setenv(name.upper(), value)
    (tmp_path / "shop.py").write_text(block("python", "from pathlib"))
    (tmp_path / "orders").mkdir()
    (tmp_path / "orders" / "2026-01-01.csv").write_text(block("csv", "shop,amount"))
    done = ran(dsn, tmp_path, place, is_minted=is_minted)
    assert (done["files"], done["rows"]) == (1, 3)
    transfer = Transfer(url(place))
    part = Part(location=done["location"], manifest=done["manifest"])
    (contents,) = read([part], transfer)
    assert [each.name for each in contents.columns] == ["shop", "amount"]
    assert len(preview(contents.files, transfer, rows=9)) == 3
    assert list(verify(contents.files, transfer)) == []


def test_what_a_function_has_put_there_itself_is_in_the_manifest_too(
    dsn: str, tmp_path: Path, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in place.own.items():
        monkeypatch.setenv(name.upper(), value)
    (tmp_path / "shop.py").write_text(DIRECT)
    done = ran(dsn, tmp_path, place, is_minted=True)
    assert (done["files"], done["rows"], done["bytes"]) == (2, None, 22)
    transfer = Transfer(url(place))
    body = transfer.read_bytes(f"{done['location']}/_manifest.json")
    assert digest(body) == done["manifest"]
    assert [each.name for each in decode(body).files] == ["a b%2F.txt", "more.txt"]


class TestUntrusted:
    pytestmark = test_untrusted.pytestmark

    @pytest.mark.parametrize("key", ["good", "linked"])
    def test_what_untrusted_code_leaves_is_taken_back_before_it_is_sent(
        self, dsn: str, place: Place, key: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name, value in place.own.items():
            monkeypatch.setenv(name.upper(), value)
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            folder.chmod(0o755)
            (folder / "secret").write_text("of root")
            (folder / "secret").chmod(0o600)
            (folder / "shop.py").write_text(UNTRUSTED.replace("SECRET", str(folder / "secret")))
            path = [str(each) for each in (folder, test_untrusted.SOURCE, test_untrusted.PACKAGES)]
            runtime = process(
                {
                    "path": path,
                    "python": [test_untrusted.PYTHON],
                    "uids": test_untrusted.RANGE,
                    "uids_folder": str(folder / "users"),
                }
            )
            dag = f"{DAG}    untrusted: true\n    max_attempts: 1\n"
            found, reasons = told(dsn, folder, place, runtime, dag, key=key, is_minted=True)
        if key == "good":
            assert [(each["files"], each["bytes"]) for each in found] == [(1, 5)], reasons
        else:
            assert found == []
            assert "a link, a pipe or another thing that is no file" in reasons[0]


def url(place: Place) -> str:
    return f"s3://{place.bucket}/{place.root}?region={place.region}&endpoint={place.endpoint}"


def ran(dsn: str, folder: Path, place: Place, *, is_minted: bool) -> dict[str, Any]:
    """What is published after the pipeline of the page has run."""
    runtime = process({"path": [str(folder)]})
    (found,), _ = told(dsn, folder, place, runtime, DAG, key="2026-01-01", is_minted=is_minted)
    return found


def told(
    dsn: str,
    folder: Path,
    place: Place,
    runtime: ProcessRuntime,
    dag: str,
    *,
    key: str,
    is_minted: bool,
) -> tuple[list[dict[str, Any]], list[str]]:
    """What is published after one task has ended, and why it failed."""
    found: list[dict[str, Any]] = []
    reasons: list[str] = []
    parts = {"minter": place.minter()} if is_minted else {}

    async def story(site: Site) -> None:
        async def is_over() -> bool:
            return (await site.statuses()).keys() <= {"completed", "dead"}

        await site.pipeline.send(key)
        async with site.working(runtime, store_url=url(place)):
            await site.until(is_over)
        asked = "SELECT location, manifest, files, rows, bytes FROM publication"
        found.extend(dict(each) for each in await site.world.rows(asked))
        asked = "SELECT reason FROM attempt WHERE reason IS NOT NULL"
        reasons.extend(each["reason"] for each in await site.world.rows(asked))

    root = url(place).partition("?")[0].rstrip("/")
    play(dsn, folder, dag, story, root=root, **parts)
    assert list(folder.glob("handed/*/*")) == []
    return found, reasons
