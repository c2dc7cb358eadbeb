"""The function of docs/getting-started.md on a real bucket, with credentials of its own or none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.datasets.manifest import decode, digest
from penstock.datasets.snapshot import preview, read, verify
from penstock.datasets.transfer import Transfer
from penstock.kernel.errors import PenstockError
from penstock.runtimes.base import Part
from penstock.runtimes.process import process
from penstock.store.s3.local import LocalS3
from tests.conftest import Background
from tests.integration.minting_place import Place, seaweedfs_place
from tests.integration.worker.site import Site, play

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
    told = ran(dsn, tmp_path, place, is_minted=is_minted)
    assert (told["files"], told["rows"]) == (1, 3)
    transfer = Transfer(url(place))
    part = Part(location=told["location"], manifest=told["manifest"])
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
    told = ran(dsn, tmp_path, place, is_minted=True)
    assert (told["files"], told["rows"], told["bytes"]) == (2, None, 22)
    transfer = Transfer(url(place))
    body = transfer.read_bytes(f"{told['location']}/manifest.json")
    assert digest(body) == told["manifest"]
    assert [each.name for each in decode(body).files] == ["a b%2F.txt", "more.txt"]


def url(place: Place) -> str:
    return f"s3://{place.bucket}/{place.root}?region={place.region}&endpoint={place.endpoint}"


def ran(dsn: str, folder: Path, place: Place, *, is_minted: bool) -> dict[str, Any]:
    """What is published after the pipeline of the page has run."""
    found: list[dict[str, Any]] = []
    parts = {"minter": place.minter()} if is_minted else {}

    async def story(site: Site) -> None:
        await site.pipeline.send("2026-01-01")
        async with site.working(process({"path": [str(folder)]}), store_url=url(place)):
            await site.until_all(completed=1)
        rows = await site.world.rows(
            "SELECT location, manifest, files, rows, bytes FROM publication"
        )
        found.extend(dict(each) for each in rows)

    root = url(place).partition("?")[0].rstrip("/")
    play(dsn, folder, DAG, story, root=root, **parts)
    assert list(folder.glob("handed/*/*")) == []
    (told,) = found
    return told
