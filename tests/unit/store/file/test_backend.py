"""The `file://` backend, beyond the contract: plain files, versions, metadata and time."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from penstock.kernel.clock import SystemClock
from penstock.kernel.errors import (
    AlreadyExists,
    InvalidInput,
    NotFound,
    NotOurs,
    Unavailable,
    Unsupported,
    VersionConflict,
)
from penstock.store.base import CREATE, Swap, Version
from penstock.store.file import backend
from penstock.store.file.backend import STAMP_RESOLUTION_SECONDS, FileStore
from penstock.store.file.disk import Disk
from penstock.store.time import TimeSample
from tests.unit.store.file.stores import (
    FrozenDisk,
    body_of,
    files_below,
    names_in,
    opened,
    run,
)

# Files are objects and objects are files.


@pytest.mark.parametrize(
    "key",
    [
        "plain",
        "a/b c/d",
        "Käse/日本語/🚰",
        "100%/a%2Fb/%",
        "a#b?c=d&e;f",
        "'quotes\" and $(things) *",
        "-rf",
        ".hidden/.file",
        " leading and trailing ",
        "x" * 255 + "/" + "ü" * 127 + "y",
    ],
)
def test_a_key_is_the_path_of_a_plain_file(tmp_path: Path, key: str) -> None:
    async def use(store: FileStore) -> None:
        await store.put(key, b"body", metadata={"owner": "me"})
        assert (tmp_path / key).read_bytes() == b"body"
        assert await body_of(store, key) == b"body"
        assert [entry.key for entry in (await store.list()).entries] == [key]
        await store.delete(key)
        assert names_in(tmp_path) == [".penstock"]

    run(tmp_path, use)


def test_a_file_of_another_program_is_an_object(tmp_path: Path) -> None:
    async def use(store: FileStore) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out/part-0").write_bytes(b"rows")
        found = await store.get("out/part-0")
        assert found is not None
        assert (found.body, found.metadata) == (b"rows", {})
        assert (await store.list()).entries[0].version == found.version
        with pytest.raises(AlreadyExists):
            await store.put("out/part-0", b"", CREATE)

        (tmp_path / "out/part-0").write_bytes(b"more rows")
        with pytest.raises(VersionConflict):
            await store.put("out/part-0", b"", Swap(found.version))
        newer = await store.head("out/part-0")
        await store.put("out/part-0", b"ours", Swap(newer.version))
        assert (tmp_path / "out/part-0").read_bytes() == b"ours"

    run(tmp_path, use)


def test_what_is_no_plain_file_is_no_object(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    root = tmp_path / "root"
    (root / "folder").mkdir(parents=True)
    (root / "link").symlink_to(outside / "secret")
    (root / "linked").symlink_to(outside)
    os.mkfifo(root / "pipe")

    async def use(store: FileStore) -> None:
        for key in ("link", "linked", "linked/secret", "pipe", "folder"):
            with pytest.raises(NotFound):
                await store.get(key)
            with pytest.raises(NotFound):
                await store.head(key)
            with pytest.raises(VersionConflict):
                await store.touch(key, version=Version("1-1-1"))
            await store.delete(key)
        for key in ("link", "linked", "linked/secret", "linked/new", "pipe"):
            with pytest.raises(InvalidInput, match="cannot be a file"):
                await store.put(key, b"mine")
        assert (await store.list()).entries == ()
        assert (await store.list("linked/")).entries == ()
        assert (await store.list(delimiter="/")).folders == ()

    run(root, use)
    assert files_below(outside) == ["secret"]
    assert (outside / "secret").read_bytes() == b"secret"
    assert (root / "link").is_symlink()


def test_a_folder_that_becomes_a_link_meanwhile_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who owns a folder of the store may swap it for a link right after it was looked at."""
    outside, root = tmp_path / "outside", tmp_path / "root"
    for folder in (outside / "deep", root / "own" / "deep"):
        folder.mkdir(parents=True)
        (folder / "file").write_bytes(folder.parent.name.encode())

    def swapped(path: bytes, *, below: int) -> None:
        (root / "own").rename(root / "was-own")
        (root / "own").symlink_to(outside)

    async def use(store: FileStore) -> None:
        monkeypatch.setattr(backend, "obstacle", swapped)
        with pytest.raises(InvalidInput, match="a file or a link"):
            await store.delete("own/deep/file")

    run(root, use)
    assert (outside / "deep" / "file").read_bytes() == b"outside"


def test_the_root_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "root").symlink_to(tmp_path / "real")

    async def use(store: FileStore) -> None:
        await store.put("a/b", b"body")
        assert await body_of(store, "a/b") == b"body"
        assert [entry.key for entry in (await store.list("a/")).entries] == ["a/b"]

    run(tmp_path / "root", use)
    assert (tmp_path / "real/a/b").read_bytes() == b"body"


def test_a_key_cannot_be_a_folder_as_well(tmp_path: Path) -> None:
    async def use(store: FileStore) -> None:
        await store.put("a/b", b"body")
        for key in ("a", "a/b/c", "a/b/c/d"):
            with pytest.raises(InvalidInput, match="cannot be a file"):
                await store.put(key, b"other")
            with pytest.raises(NotFound):
                await store.get(key)
        assert await body_of(store, "a/b") == b"body"

    run(tmp_path, use)
    assert files_below(tmp_path / ".penstock/tmp") == []


def test_empty_folders_give_way_to_a_key(tmp_path: Path) -> None:
    (tmp_path / "a/b/c").mkdir(parents=True)
    (tmp_path / "a/d").mkdir()

    async def use(store: FileStore) -> None:
        await store.put("a", b"body", CREATE)
        assert await body_of(store, "a") == b"body"

    run(tmp_path, use)


def test_delete_removes_the_folders_that_it_empties(tmp_path: Path) -> None:
    async def use(store: FileStore) -> None:
        await store.put("a/b/c/one", b"")
        await store.put("a/two", b"")
        await store.delete("a/b/c/one")
        assert names_in(tmp_path / "a") == ["two"]
        await store.delete("a/two")
        assert names_in(tmp_path) == [".penstock"]

    run(tmp_path, use)


# Versions and metadata.


def test_no_version_comes_back_within_one_tick_of_the_clock(tmp_path: Path) -> None:
    async def use(store: FileStore) -> None:
        versions = []
        modified = []
        for number in range(300):
            versions.append(await store.put("key", f"{number:03}".encode()))
            modified.append((tmp_path / "key").stat().st_mtime_ns)
        assert len(set(versions)) == 300
        assert modified == sorted(set(modified))
        # Inodes come back, so that the time alone must tell the versions apart.
        assert max(modified) - 1_700_000_000_000_000_000 < 1_000_000

    run(tmp_path, use, disk=FrozenDisk(1_700_000_000_000_000_000))


def test_a_file_from_the_future_is_replaced_by_one_of_now(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"later")
    os.utime(tmp_path / "key", (4_000_000_000, 4_000_000_000))

    async def use(store: FileStore) -> None:
        later = await store.head("key")
        assert later.modified == 4_000_000_000
        await store.put("key", b"now", Swap(later.version))
        assert (await store.head("key")).modified < 4_000_000_000

    run(tmp_path, use)


def test_a_file_system_without_fine_times_is_refused(tmp_path: Path) -> None:
    class CoarseDisk(Disk):
        def set_time(self, file: int, mtime_ns: int) -> None:
            super().set_time(file, mtime_ns // 1_000_000_000 * 1_000_000_000)

    async def use(store: FileStore) -> None:
        with pytest.raises(Unsupported, match="microsecond"):
            await store.put("key", b"body")
        assert (await store.list()).entries == ()

    run(tmp_path, use, disk=CoarseDisk())


def test_metadata_goes_with_its_version(tmp_path: Path) -> None:
    meta = tmp_path / ".penstock/meta"

    async def use(store: FileStore) -> None:
        first = await store.put("key", b"body", metadata={"owner": "a"})
        second = await store.touch("key", version=first, metadata={"owner": "b"})
        assert second != first
        assert len(files_below(meta)) == 1
        head = await store.head("key")
        assert (head.version, head.metadata) == (second, {"owner": "b"})
        with pytest.raises(VersionConflict):
            await store.touch("key", version=first, metadata={"owner": "c"})
        third = await store.touch("key", version=second)
        assert (await store.head("key")).metadata == {}
        assert names_in(meta) == []
        await store.delete("key", version=third)
        await store.put("key", b"body")
        assert (await store.head("key")).metadata == {}

    run(tmp_path, use)


def test_damaged_metadata_is_reported(tmp_path: Path) -> None:
    async def use(store: FileStore) -> None:
        await store.put("key", b"body", metadata={"owner": "a"})
        (file,) = (tmp_path / ".penstock/meta").glob("*/*.json")
        file.write_bytes(b"{")
        with pytest.raises(NotOurs, match="damaged"):
            await store.get("key")

    run(tmp_path, use)


def test_body_and_metadata_always_belong_together(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as writer, opened(tmp_path) as reader:
            await writer.put("key", b"")
            finished = asyncio.Event()

            async def rewrite() -> None:
                for number in range(1, 400):
                    # Every fifth has no metadata at all.
                    metadata = {"size": str(number)} if number % 5 else {}
                    await writer.put("key", b"x" * number, metadata=metadata)
                finished.set()

            async def read() -> int:
                sizes = set()
                while not finished.is_set():
                    found = await reader.get("key")
                    assert found is not None
                    for seen in (found, await reader.head("key")):
                        size = seen.size
                        assert seen.metadata == ({"size": str(size)} if size % 5 else {})
                    assert len(found.body) == found.size
                    sizes.add(found.size)
                return len(sizes)

            async with asyncio.TaskGroup() as tasks:
                readers = [tasks.create_task(read()) for _ in range(3)]
                tasks.create_task(rewrite())
            assert max(task.result() for task in readers) > 10

    asyncio.run(main())


@pytest.mark.parametrize("metadata", [{}, {"owner": "me"}], ids=["plain", "with metadata"])
def test_a_body_that_changes_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metadata: Mapping[str, str]
) -> None:
    path = tmp_path / "key"
    changes = iter([b"three", b"a longer body"])
    read = os.read

    def read_and_change(file: int, size: int) -> bytes:
        change = next(changes, None)
        if change is not None:
            path.write_bytes(change)
        return read(file, size)

    async def use(store: FileStore) -> None:
        version = await store.put("key", b"one", metadata=metadata)
        monkeypatch.setattr(os, "read", read_and_change)
        found = await store.get("key")
        assert found is not None
        assert (found.body, found.size, found.metadata) == (b"a longer body", 13, {})
        assert found.version != version
        monkeypatch.undo()

    run(tmp_path, use)


def test_a_touch_does_not_bring_back_what_another_program_has_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "key"
    read = os.read

    def read_and_change(file: int, size: int) -> bytes:
        body = read(file, size)
        path.write_bytes(b"theirs")
        return body

    async def use(store: FileStore) -> None:
        version = await store.put("key", b"ours")
        monkeypatch.setattr(os, "read", read_and_change)
        with pytest.raises(VersionConflict):
            await store.touch("key", version=version)
        monkeypatch.undo()
        assert await body_of(store, "key") == b"theirs"

    run(tmp_path, use)


def test_a_body_that_never_rests_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"one")
    read = os.read

    def read_and_grow(file: int, size: int) -> bytes:
        with path.open("ab") as growing:
            growing.write(b"more")
        return read(file, size)

    async def use(store: FileStore) -> None:
        monkeypatch.setattr(os, "read", read_and_grow)
        with pytest.raises(Unavailable, match="whenever it was read"):
            await store.get("key")
        monkeypatch.undo()

    run(tmp_path, use)


# Time.


def test_a_sample_is_the_file_systems_time(tmp_path: Path) -> None:
    clock = SystemClock()
    lags = []

    async def use(store: FileStore) -> None:
        for number in range(20):
            before = tmp_path / f"before {number}"
            before.touch()
            started = clock.wall()
            sample = await store.sample()
            assert before.stat().st_mtime_ns / 1e9 <= sample.stamp <= clock.wall()
            assert sample.sent <= sample.received
            assert sample.resolution == STAMP_RESOLUTION_SECONDS
            lags.append(started - sample.stamp)
        # A busy machine may tick late now and then, but not always.
        assert min(lags) < STAMP_RESOLUTION_SECONDS

    run(tmp_path, use)


def test_samples_of_many_at_once_agree(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as one, opened(tmp_path) as other:
            samples: list[TimeSample] = await asyncio.gather(
                *(store.sample() for store in (one, other) for _ in range(50))
            )
            first = min(samples, key=lambda sample: sample.sent)
            for sample in samples:
                assert sample.stamp - sample.received <= first.stamp + 0.02 - first.sent
            now = await one.now()
            assert now.earliest <= SystemClock().wall()

    asyncio.run(main())
    assert files_below(tmp_path) == [".penstock/clock"]


def test_every_put_is_a_sample(tmp_path: Path) -> None:
    async def use(store: FileStore) -> None:
        assert store.clock.estimate() is None
        version = await store.put("key", b"")
        first = store.clock.estimate()
        assert first is not None
        modified = (await store.head("key")).modified
        assert modified <= first.latest
        assert modified >= first.earliest - 1.0
        await store.touch("key", version=version)
        await store.delete("key")

    run(tmp_path, use)
