"""Files to and from a real S3 server, and what readers make of them."""

from __future__ import annotations

import hashlib
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import obstore
import pyarrow as pa
import pytest
from obstore.exceptions import GenericError
from obstore.store import S3Store
from pyarrow import parquet

from penstock.datasets import buckets
from penstock.datasets.cache import Cache, WantedFile
from penstock.datasets.layout import location_below
from penstock.datasets.manifest import File, Manifest, digest, encode
from penstock.datasets.snapshot import files, preview, read, verify
from penstock.datasets.transfer import Transfer
from penstock.kernel.errors import (
    BucketNotFound,
    Damaged,
    NotFound,
    Refused,
    Unavailable,
)
from penstock.runtimes.base import Part
from penstock.store import Opening, open_store
from penstock.store.s3.local import LocalS3
from penstock.store.s3.signing import Credentials
from tests.conftest import Background

LARGE = bytes(range(256)) * (20 * 4096)
"""20 MiB: three ranges, and three parts."""


@pytest.fixture
def transfer(local_s3: LocalS3) -> Transfer:
    # The environment of the test must not matter: the client reads one of its own.
    return Transfer(local_s3.url, local_s3.credentials, environment={})


@pytest.fixture
def base(request: pytest.FixtureRequest, transfer: Transfer) -> Iterator[str]:
    location = f"s3://penstock/transfer/{request.node.name}/~all"
    yield location
    transfer.clear(location)


@pytest.mark.parametrize("size", [0, 1, 8 << 20, (8 << 20) + 1, len(LARGE)])
def test_a_file_goes_there_and_back(
    size: int, base: str, transfer: Transfer, tmp_path: Path
) -> None:
    source, back = tmp_path / "source", tmp_path / "back"
    source.write_bytes(LARGE[:size])
    location = f"{base}/part-é 1.parquet"
    sent = transfer.send(source, location)
    assert sent.bytes == size
    assert sent.sha256 == hashlib.sha256(LARGE[:size]).hexdigest()
    assert transfer.fetch(location, back, sha256=sent.sha256) == sent
    assert back.read_bytes() == LARGE[:size]
    assert transfer.verify(location, sha256=sent.sha256) == sent
    with pytest.raises(Damaged, match="not what its manifest says"):
        transfer.fetch(location, tmp_path / "to" / "x", sha256="0" * 64)
    assert list((tmp_path / "to").iterdir()) == []


def test_the_keys_are_those_of_the_store(
    base: str, transfer: Transfer, local_s3: LocalS3, background: Background
) -> None:
    key = base.removeprefix("s3://penstock/") + "/a~2Fb=1/manifest.json"
    transfer.write_bytes(f"s3://penstock/{key}", b"{}")

    async def look() -> bytes:
        store = await open_store(local_s3.url, Opening(credentials=local_s3.credentials))
        try:
            found = await store.get(key)
            assert found is not None
            return found.body
        finally:
            await store.close()

    assert background.run(look()) == b"{}"


def test_lists_deletes_and_clears(base: str, transfer: Transfer) -> None:
    for name in ("a/2", "a/1", "a/deep/er", "ab/1"):
        transfer.write_bytes(f"{base}/{name}", name.encode())
    listed = [(each.name, each.bytes) for each in transfer.list(f"{base}/a")]
    assert sorted(listed) == [("1", 3), ("2", 3), ("deep/er", 9)]
    transfer.delete([f"{base}/a/1", f"{base}/a/never"])
    transfer.delete([])
    assert sorted(each.name for each in transfer.list(base)) == ["a/2", "a/deep/er", "ab/1"]
    transfer.clear(f"{base}/a")
    assert [each.name for each in transfer.list(base)] == ["ab/1"]


@pytest.mark.parametrize("name", ["x%2F..%2Fy", "a b?c#d*[e]{f}", "%2E%2E%2Fz"])
def test_a_name_is_the_name_of_that_object_and_of_no_other(
    name: str, base: str, transfer: Transfer
) -> None:
    transfer.write_bytes(location_below(base, name), b"own")
    (listed,) = transfer.list(base)
    assert listed.name == name
    assert transfer.read_bytes(location_below(base, listed.name)) == b"own"


def test_a_key_that_leads_out_of_its_folder_is_refused(base: str, transfer: Transfer) -> None:
    transfer.write_bytes(f"{base}/secret", b"of another")
    for name in ("in/../secret", "in//secret", "tab\there"):
        with pytest.raises(Refused, match="is not a valid key"):
            transfer.read_bytes(f"{base}/{name}")


def test_a_file_is_read_anywhere_in_it(base: str, transfer: Transfer) -> None:
    transfer.write_bytes(f"{base}/x", LARGE[: 1 << 20])
    with transfer.open(f"{base}/x") as file:
        assert file.seek(-10, 2) == (1 << 20) - 10
        assert file.read() == LARGE[(1 << 20) - 10 : 1 << 20]
        assert file.read(1) == b""
        file.seek(777)
        assert file.read(300_000) == LARGE[777:300_777]


def test_problems_are_ours(base: str, local_s3: LocalS3, transfer: Transfer) -> None:
    with pytest.raises(NotFound):
        transfer.read_bytes(f"{base}/none")
    with pytest.raises(NotFound):
        transfer.open(f"{base}/none")
    with pytest.raises(Damaged, match="is not there"):
        transfer.verify(f"{base}/none", sha256="0" * 64)
    with pytest.raises(BucketNotFound):
        transfer.read_bytes("s3://no-such-bucket/x")
    wrong = Transfer(local_s3.url, Credentials("nobody", "nothing"), environment={})
    with pytest.raises(Refused) as caught:
        wrong.read_bytes(f"{base}/x")
    assert "nothing" not in str(caught.value)


def test_a_server_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "TRIES_MAX", 1)
    url = "s3://penstock?endpoint=http://127.0.0.1:1"
    transfer = Transfer(url, Credentials("a", "b"), environment={}, patience_seconds=0.1)
    with pytest.raises(Unavailable, match="could not be reached"):
        transfer.read_bytes("s3://penstock/x")


def test_an_answer_that_breaks_off_is_asked_for_again(
    base: str, transfer: Transfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer.write_bytes(f"{base}/x", b"body")
    asked = []
    get = obstore.get

    def broken(store: S3Store, path: str) -> object:
        asked.append(path)
        if len(asked) == 1:
            raise GenericError("error decoding response body")
        return get(store, path)

    monkeypatch.setattr(obstore, "get", broken)
    monkeypatch.setattr(buckets, "PAUSE_SECONDS", 0.0)
    assert transfer.read_bytes(f"{base}/x") == b"body"
    assert len(asked) == 2


def test_keys_are_found_by_the_chain_and_asked_for_again(
    base: str, local_s3: LocalS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    keys = tmp_path / "credentials"
    given = local_s3.credentials
    keys.write_text(
        f"[default]\naws_access_key_id={given.access_key}\naws_secret_access_key={given.secret_key}\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(keys))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    found = Transfer(local_s3.url)
    found.write_bytes(f"{base}/x", b"body")
    assert found.read_bytes(f"{base}/x") == b"body"
    provider = buckets.Provider(None)
    answer = provider()
    assert answer["access_key_id"] == given.access_key
    assert answer["expires_at"] is not None


def test_a_settings_environment_counts_and_the_machines_does_not(
    base: str, local_s3: LocalS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "stale")
    monkeypatch.setenv("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "true")
    environment = {
        "AWS_ENDPOINT_URL": local_s3.endpoint,
        "AWS_ACCESS_KEY_ID": local_s3.credentials.access_key,
        "AWS_SECRET_ACCESS_KEY": local_s3.credentials.secret_key,
    }
    elsewhere = pickle.loads(pickle.dumps(Transfer("s3://penstock", environment=environment)))
    assert elsewhere.write_bytes(f"{base}/x", b"body").bytes == 4


def test_threads_share_a_client_and_the_cache(
    base: str, transfer: Transfer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = []
    for number in range(6):
        body = bytes([number]) * 1000
        sent = transfer.write_bytes(f"{base}/{number}", body)
        wanted.append(WantedFile(location=f"{base}/{number}", bytes=1000, sha256=sent.sha256))
    cache = Cache(tmp_path / "cache", transfer, bytes_max=1)
    together = threading.Barrier(4, timeout=60)

    def hold(_: int) -> list[bytes]:
        together.wait()
        with cache.holding(wanted) as paths:
            return [path.read_bytes()[:1] for path in paths]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(hold, range(4))) == [[bytes([n]) for n in range(6)]] * 4


def test_a_snapshot_is_read_from_its_manifests(
    base: str, transfer: Transfer, tmp_path: Path
) -> None:
    table = pa.table({"id": pa.array(range(50_000)), "text": pa.array(["x" * 40] * 50_000)})
    path = tmp_path / "part.parquet"
    parquet.write_table(table, path, row_group_size=1000)
    sent = transfer.send(path, f"{base}/one/part.parquet")
    file = File(name="part.parquet", rows=50_000, bytes=sent.bytes, sha256=sent.sha256)
    body = encode(
        Manifest(
            dataset="d",
            generation="g",
            job="j",
            task_id=1,
            attempt=1,
            files=(file,),
            rows=50_000,
            bytes=sent.bytes,
        )
    )
    transfer.write_bytes(f"{base}/one/manifest.json", body)
    transfer.send(path, f"{base}/loose/part.parquet")
    parts = [
        Part(location=f"{base}/one", manifest=digest(body)),
        Part(location=f"{base}/loose/"),
    ]
    found = files(read(parts, transfer))
    assert [each.sha256 for each in found] == [sent.sha256, None]
    rows = preview(found, transfer, rows=3)
    assert [cast(int, row["id"]) for row in rows] == [0, 1, 2]
    assert list(verify(found, transfer)) == []
    transfer.write_bytes(f"{base}/one/part.parquet", b"damaged")
    ((file_found, said),) = verify(found, transfer)
    assert file_found.location == f"{base}/one/part.parquet"
    assert "not what its manifest says" in said
