"""Files to and from folders; buckets are in tests/integration/test_transfer.py."""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.datasets.transfer import Sent, Transfer
from penstock.kernel.errors import Damaged, InvalidInput, NotFound, Refused
from penstock.store.s3.signing import Credentials

BODY = bytes(range(256)) * 20_000
SUM = hashlib.sha256(BODY).hexdigest()
SENT = Sent(len(BODY), SUM)


@pytest.fixture
def transfer() -> Transfer:
    return Transfer("file:///unused?fsync=off")


def test_a_file_goes_there_and_back(tmp_path: Path, transfer: Transfer) -> None:
    source, back = tmp_path / "source", tmp_path / "here" / "back"
    source.write_bytes(BODY)
    location = f"{tmp_path.as_uri()}/a%20b/c/part.parquet"
    assert transfer.send(source, location) == SENT
    assert (tmp_path / "a b" / "c" / "part.parquet").read_bytes() == BODY
    assert transfer.fetch(location, back, sha256=SUM) == SENT
    assert back.read_bytes() == BODY
    assert transfer.sum(location) == SENT
    assert transfer.verify(location, sha256=SUM) == SENT
    assert transfer.read_bytes(location) == BODY
    with transfer.open(location) as file:
        file.seek(1000)
        assert file.read(10) == BODY[1000:1010]


def test_a_damaged_file_is_told_and_leaves_nothing(tmp_path: Path, transfer: Transfer) -> None:
    location = f"{tmp_path.as_uri()}/x"
    transfer.write_bytes(location, b"other")
    reads: tuple[Callable[[], Sent], ...] = (
        lambda: transfer.fetch(location, tmp_path / "to" / "x", sha256=SUM),
        lambda: transfer.verify(location, sha256=SUM),
    )
    for read in reads:
        with pytest.raises(Damaged) as caught:
            read()
        assert caught.value.location == location
        assert location in caught.value.message
        assert SUM in caught.value.message
    assert list((tmp_path / "to").iterdir()) == []


def test_a_failed_fetch_leaves_what_was_there(tmp_path: Path, transfer: Transfer) -> None:
    here = tmp_path / "to" / "x"
    here.parent.mkdir()
    here.write_bytes(b"before")
    with pytest.raises(NotFound):
        transfer.fetch(f"{tmp_path.as_uri()}/none", here)
    transfer.write_bytes(f"{tmp_path.as_uri()}/x", b"other")
    with pytest.raises(Damaged):
        transfer.fetch(f"{tmp_path.as_uri()}/x", here, sha256=SUM)
    assert [path.name for path in here.parent.iterdir()] == ["x"]
    assert here.read_bytes() == b"before"


def test_what_is_missing_is_told(tmp_path: Path, transfer: Transfer) -> None:
    location = f"{tmp_path.as_uri()}/none"
    for read in (transfer.read_bytes, transfer.sum, transfer.open):
        with pytest.raises(NotFound):
            read(location)
    with pytest.raises(Damaged, match="is not there"):
        transfer.verify(location, sha256=SUM)
    assert list(transfer.list(location)) == []
    transfer.delete([location])
    transfer.clear(location)


def test_lists_deletes_and_clears(tmp_path: Path, transfer: Transfer) -> None:
    base = tmp_path.as_uri()
    for name in ("a/2", "a/1", "a/deep/er", "b/1"):
        transfer.write_bytes(f"{base}/{name}", name.encode())
    listed = [(each.name, each.bytes) for each in transfer.list(f"{base}/a")]
    assert listed == [("1", 3), ("2", 3), ("deep/er", 9)]
    transfer.delete([f"{base}/a/1", f"{base}/b/1"])
    assert [each.name for each in transfer.list(base)] == ["a/2", "a/deep/er"]
    transfer.clear(f"{base}/a")
    assert list(transfer.list(base)) == []


def test_writing_replaces_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    transfer = Transfer("s3://bucket?region=x")
    location = f"{tmp_path.as_uri()}/x"
    transfer.write_bytes(location, b"one")
    assert transfer.write_bytes(location, b"two").bytes == 3
    assert transfer.read_bytes(location) == b"two"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("is_synced", [True, False])
def test_new_folders_survive_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_synced: bool
) -> None:
    """The name of a folder is in the folder above it, which has to be on the disk as well."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.fstat(handle).st_ino))
    transfer = Transfer("file:///unused" if is_synced else "file:///unused?fsync=off")
    transfer.write_bytes(f"{tmp_path.as_uri()}/a/b/manifest.json", b"{}")
    above = [each.stat().st_ino for each in (tmp_path, tmp_path / "a", tmp_path / "a/b")]
    assert [each for each in synced if each in above] == above * is_synced
    synced.clear()
    transfer.write_bytes(f"{tmp_path.as_uri()}/a/b/other.json", b"{}")
    assert [each for each in synced if each in above] == above[2:] * is_synced


@pytest.mark.parametrize("is_synced", [True, False])
def test_what_another_program_wrote_survives_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_synced: bool
) -> None:
    files = [tmp_path / "home" / name for name in ("a/x", "a/y", "b/c/z")]
    for each in files:
        each.parent.mkdir(parents=True, exist_ok=True)
        each.write_bytes(b"rows")
    folders = [tmp_path / "home" / name for name in ("", "a", "b", "b/c")]
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.fstat(handle).st_ino))
    transfer = Transfer("file:///unused" if is_synced else "file:///unused?fsync=off")
    transfer.settle(f"{tmp_path.as_uri()}/home", ["a/x", "a/y", "b/c/z"])
    expected = [each.stat().st_ino for each in (*files, *folders)]
    assert sorted(synced) == sorted(expected) * is_synced
    # A name in a folder means something once the file that it names is there.
    assert set(synced[: len(files)]) == set(expected[: len(files)] * is_synced)


def test_a_folder_in_the_way_is_explained(tmp_path: Path, transfer: Transfer) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises((Refused, NotFound)):
        transfer.read_bytes(f"{tmp_path.as_uri()}/file/below")


@pytest.mark.parametrize(
    "location",
    ["", "/x", "http://a/b", "s3://", "file://host/x", "file:///a?b", "file:///a#b"],
)
def test_what_is_no_location_is_refused(location: str, transfer: Transfer) -> None:
    with pytest.raises(InvalidInput):
        transfer.read_bytes(location)


def test_it_travels_and_shows_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "quite-secret")
    monkeypatch.setenv("UNRELATED", "not-taken")
    transfer = Transfer("s3://bucket", Credentials("key", "more-secret"))
    assert pickle.loads(pickle.dumps(transfer)) == transfer
    assert transfer.environment["AWS_SECRET_ACCESS_KEY"] == "quite-secret"
    assert "UNRELATED" not in transfer.environment
    assert "secret" not in repr(transfer)


def test_no_link_is_followed_and_no_pipe_waited_for(tmp_path: Path, transfer: Transfer) -> None:
    (tmp_path / "secret").write_text("of another")
    made = tmp_path / "made"
    (made / "in").mkdir(parents=True)
    (made / "in" / "file").write_text("own")
    (made / "link").symlink_to(tmp_path / "secret")
    (made / "folder").symlink_to(tmp_path)
    os.mkfifo(made / "pipe")
    assert [each.name for each in transfer.list(made.as_uri())] == ["in/file"]
    for name in ("link", "pipe", "folder", "in"):
        location = f"{made.as_uri()}/{name}"
        for read in (transfer.read_bytes, transfer.sum, transfer.open):
            with pytest.raises(Refused, match=f"{name} is a link or another thing that is no file"):
                read(location)
    with pytest.raises(Refused, match="folder is a link"):
        list(transfer.list(f"{made.as_uri()}/folder"))
    # What lies behind a link of the operator's is read.
    assert transfer.read_bytes(f"{made.as_uri()}/folder/made/in/file") == b"own"
    # Writing replaces a link, and leaves what it leads to.
    transfer.write_bytes(f"{made.as_uri()}/link", b"new")
    assert (tmp_path / "secret").read_text() == "of another"
    assert transfer.read_bytes(f"{made.as_uri()}/link") == b"new"


@pytest.mark.parametrize("name", ["..%2Fsecret", "in%2F..%2F..%2Fsecret", "../secret", "%00", "."])
def test_no_name_leads_out_of_a_folder(name: str, tmp_path: Path, transfer: Transfer) -> None:
    (tmp_path / "made" / "in").mkdir(parents=True)
    (tmp_path / "secret").write_text("of another")
    for read in (transfer.read_bytes, transfer.sum, transfer.open, transfer.list):
        with pytest.raises(InvalidInput, match="is no location of a file"):
            read(f"{tmp_path.as_uri()}/made/{name}")
    with pytest.raises(InvalidInput, match="is no location of a file"):
        transfer.write_bytes(f"{tmp_path.as_uri()}/made/{name}", b"new")
    assert (tmp_path / "secret").read_text() == "of another"


def test_below_a_store_no_folder_on_the_way_is_a_link(tmp_path: Path, transfer: Transfer) -> None:
    """Whoever may write into the folder of an attempt could put a link in the place of a folder."""
    (tmp_path / "real").mkdir()
    root = tmp_path / "root"
    # Where the store lies is its operator's business.
    root.symlink_to(tmp_path / "real")
    attempt = root / "datasets" / "d" / "g" / "p" / f"1-1-{'a' * 24}"
    (attempt / "in").mkdir(parents=True)
    (attempt / "in" / "file").write_text("own")
    location = f"{attempt.as_uri()}/in/file"
    assert transfer.read_bytes(location) == b"own"
    assert [each.name for each in transfer.list(attempt.as_uri())] == ["in/file"]
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "file").write_text("of another")
    for folder in (attempt / "in", attempt, attempt.parent):
        folder.rename(f"{folder}-away")
        folder.symlink_to(tmp_path / "secrets")
        for read in (transfer.read_bytes, transfer.sum, transfer.open):
            with pytest.raises(Refused, match="is a link"):
                read(location)
        with pytest.raises(Refused, match="is a link"):
            list(transfer.list(f"{attempt.as_uri()}/in"))
        folder.unlink()
        Path(f"{folder}-away").rename(folder)
