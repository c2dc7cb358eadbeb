"""The `file://` backend when something fails, waits, is cancelled or was left behind."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.kernel.errors import (
    AlreadyExists,
    BucketNotFound,
    InvalidInput,
    NotFound,
    OutcomeUnknown,
    PenstockError,
    Refused,
    Unavailable,
    Unsupported,
)
from penstock.store.base import CREATE, Version
from penstock.store.file.backend import LOCK_SECONDS, FileStore
from penstock.store.file.disk import Disk, stripe_of
from tests.unit.store.file.stores import (
    FailingDisk,
    JumpingClock,
    NotingDisk,
    WaitingDisk,
    body_of,
    files_below,
    names_in,
    opened,
    run,
)

# What goes wrong.


@pytest.mark.parametrize(
    ("call", "code", "expected"),
    [
        ("open_shared", errno.EACCES, Refused),
        ("create", errno.ENOSPC, Unavailable),
        ("create", errno.EROFS, Refused),
        ("write", errno.ENOSPC, Unavailable),
        ("write", errno.EDQUOT, Unavailable),
        ("set_time", errno.EPERM, Refused),
        ("sync", errno.EIO, Unavailable),
        ("rename", errno.EACCES, Refused),
        ("rename", errno.EXDEV, Unsupported),
        ("rename", errno.ENAMETOOLONG, InvalidInput),
        ("rename", errno.EIO, OutcomeUnknown),
    ],
)
def test_a_put_that_fails_says_why_and_changes_nothing(
    tmp_path: Path, call: str, code: int, expected: type[PenstockError]
) -> None:
    async def before(store: FileStore) -> None:
        await store.put("a/key", b"old", metadata={"owner": "old"})

    async def use(store: FileStore) -> None:
        with pytest.raises(expected) as raised:
            await store.put("a/key", b"new")
        assert type(raised.value) is expected
        assert raised.value.message.endswith(".")
        found = await store.get("a/key")
        assert found is not None
        assert (found.body, found.metadata) == (b"old", {"owner": "old"})

    run(tmp_path, before)
    run(tmp_path, use, disk=FailingDisk(call, code))
    assert files_below(tmp_path / ".penstock/tmp") == []


def test_a_change_that_the_disk_does_not_confirm_is_unknown(tmp_path: Path) -> None:
    async def before(store: FileStore) -> None:
        await store.put("key", b"old")

    async def put(store: FileStore) -> None:
        with pytest.raises(OutcomeUnknown, match="did not confirm"):
            await store.put("key", b"new")
        assert await body_of(store, "key") == b"new"

    async def delete(store: FileStore) -> None:
        with pytest.raises(OutcomeUnknown):
            await store.delete("key")
        assert (await store.list()).entries == ()

    run(tmp_path, before)
    run(tmp_path, put, disk=FailingDisk("sync", errno.EIO, from_nth=2))
    run(tmp_path, delete, disk=FailingDisk("sync", errno.EIO))


def test_whoever_may_not_write_may_read(tmp_path: Path) -> None:
    class ReadOnlyDisk(Disk):
        def before(self, call: str, target: bytes | int) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    (tmp_path / "a").mkdir()
    (tmp_path / "a/key").write_bytes(b"body")

    async def use(store: FileStore) -> None:
        assert await body_of(store, "a/key") == b"body"
        assert (await store.head("a/key")).size == 4
        assert len((await store.list()).entries) == 1
        for request in (store.put("a/key", b""), store.delete("a/key"), store.sample()):
            with pytest.raises(Refused, match="read-only file system") as raised:
                await request
            assert str(tmp_path) in raised.value.hint

    run(tmp_path, use, disk=ReadOnlyDisk())
    assert names_in(tmp_path) == ["a"]


@pytest.mark.parametrize("make", [lambda root: None, Path.touch], ids=["missing", "a file"])
def test_without_its_folder_there_is_no_bucket(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    root = tmp_path / "root"
    make(root)

    async def use(store: FileStore) -> None:
        for request in (
            store.get("key"),
            store.head("a/key"),
            store.put("a/key", b""),
            store.delete("key"),
            store.list(),
            store.list("a/"),
            store.sample(),
        ):
            with pytest.raises(BucketNotFound) as raised:
                await request
            assert str(root) in raised.value.message

    run(root, use)


def test_a_folder_that_is_removed_meanwhile_is_no_bucket(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()

    async def use(store: FileStore) -> None:
        await store.put("a/key", b"")
        root.rename(tmp_path / "elsewhere")
        with pytest.raises(BucketNotFound):
            await store.put("a/key", b"")
        with pytest.raises(BucketNotFound):
            await store.get("a/key")
        root.mkdir()
        await store.put("a/key", b"new", CREATE)
        assert await body_of(store, "a/key") == b"new"

    run(root, use)


def test_bad_keys_and_metadata_are_refused(tmp_path: Path) -> None:
    async def use(store: FileStore) -> None:
        for key in ("", "/a", "a//b", "../a", "a/..", ".penstock/locks/00", "a\0b", "a\\b"):
            for request in (store.get(key), store.head(key), store.put(key, b"")):
                with pytest.raises(InvalidInput):
                    await request
            with pytest.raises(InvalidInput):
                await store.touch(key, version=Version("1"))
            with pytest.raises(InvalidInput):
                await store.delete(key)
        with pytest.raises(InvalidInput):
            await store.put("key", b"", metadata={"Upper": "case"})

    run(tmp_path, use)


# Locks, threads and what is left behind.


def hold_lock(root: Path, key: str) -> int:
    file = os.open(root / ".penstock/locks" / stripe_of(key), os.O_RDWR | os.O_CREAT)
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


def test_a_lock_that_is_never_free_is_given_up(tmp_path: Path) -> None:
    clock = JumpingClock()

    async def main() -> None:
        async with opened(tmp_path, clock=clock) as store:
            await store.put("key", b"old")
            file = hold_lock(tmp_path, "key")
            with pytest.raises(Unavailable, match="lock of the key"):
                await store.put("key", b"new")
            assert await body_of(store, "key") == b"old"
            os.close(file)
            await store.put("key", b"new")

    asyncio.run(main())
    assert LOCK_SECONDS <= clock.monotonic() - 1000 < LOCK_SECONDS + 1
    assert clock.sleeps < 5000


def test_a_lock_is_waited_for(tmp_path: Path) -> None:
    held: list[int] = []

    def woken(sleeps: int) -> None:
        if sleeps == 5:
            os.close(held.pop())

    clock = JumpingClock(woken)

    async def main() -> None:
        async with opened(tmp_path, clock=clock) as store:
            await store.put("key", b"old")
            held.append(hold_lock(tmp_path, "key"))
            await store.put("key", b"new")
            assert await body_of(store, "key") == b"new"

    asyncio.run(main())
    assert clock.sleeps == 5


def test_a_write_that_is_cancelled_is_completed(tmp_path: Path) -> None:
    disk = WaitingDisk("rename")

    async def is_created(store: FileStore) -> bool:
        try:
            await store.put("key", b"next", CREATE)
        except AlreadyExists:
            return False
        return True

    async def main() -> None:
        async with opened(tmp_path, disk=disk) as store, asyncio.TaskGroup() as tasks:
            writing = tasks.create_task(store.put("key", b"cancelled"))
            assert await asyncio.to_thread(disk.reached.wait, 60)
            writing.cancel()
            await asyncio.wait([writing])
            assert writing.cancelled()
            # The thread still holds the lock, though the task has gone.
            following = tasks.create_task(is_created(store))
            with pytest.raises(NotFound):
                await store.get("key")
            disk.go_on.set()
            assert not await following
            assert await body_of(store, "key") == b"cancelled"

    asyncio.run(main())


def test_close_waits_for_writes(tmp_path: Path) -> None:
    disk = WaitingDisk("rename")

    async def main() -> None:
        async with opened(tmp_path, disk=disk) as store, asyncio.TaskGroup() as tasks:
            writing = tasks.create_task(store.put("key", b"body"))
            assert await asyncio.to_thread(disk.reached.wait, 60)
            writing.cancel()
            closing = tasks.create_task(store.close())
            await asyncio.to_thread(tmp_path.exists)
            assert not closing.done()
            disk.go_on.set()
            await closing
            assert (tmp_path / "key").read_bytes() == b"body"

    asyncio.run(main())


def test_what_the_dead_left_is_removed_and_what_the_living_write_is_not(tmp_path: Path) -> None:
    tmp = tmp_path / ".penstock/tmp"
    disk = WaitingDisk("rename")

    async def main() -> None:
        async with opened(tmp_path, disk=disk) as living, opened(tmp_path) as other:
            async with asyncio.TaskGroup() as tasks:
                writing = tasks.create_task(living.put("key", b"living"))
                assert await asyncio.to_thread(disk.reached.wait, 60)
                dead = f"{(int(stripe_of('key'), 16) + 1) % 256:02x}-dead"
                (tmp / dead).write_bytes(b"half a bo")
                (tmp / "notes of somebody").write_bytes(b"")
                free = next(
                    key for key in map(str, range(1000)) if stripe_of(key) != stripe_of("key")
                )
                await other.put(free, b"")
                left = files_below(tmp)
                assert dead not in left
                assert [name[:3] for name in left] == [f"{stripe_of('key')}-", "not"]
                disk.go_on.set()
            await writing
            assert await body_of(other, "key") == b"living"

    asyncio.run(main())


def test_a_folder_that_is_removed_under_a_put_is_made_again(tmp_path: Path) -> None:
    class RemovingDisk(Disk):
        times = 5

        def before(self, call: str, target: bytes | int) -> None:
            if call == "rename" and self.times:
                self.times -= 1
                (tmp_path / "a/b").rmdir()
                if self.times % 2:
                    (tmp_path / "a").rmdir()

    class AlwaysRemovingDisk(RemovingDisk):
        times = 1_000_000

    async def use(store: FileStore) -> None:
        await store.put("a/b/key", b"body", CREATE)
        assert await body_of(store, "a/b/key") == b"body"
        await store.delete("a/b/key")

    async def give_up(store: FileStore) -> None:
        with pytest.raises(Unavailable, match="removed in every try"):
            await store.put("a/b/key", b"body")

    run(tmp_path, use, disk=RemovingDisk())
    run(tmp_path, give_up, disk=AlwaysRemovingDisk())
    assert files_below(tmp_path / ".penstock/tmp") == []


def test_the_folder_that_is_synced_is_the_one_that_the_file_is_in(tmp_path: Path) -> None:
    class ExchangingDisk(NotingDisk):
        exchanged = False

        def before(self, call: str, target: bytes | int) -> None:
            super().before(call, target)
            if call == "rename" and not self.exchanged:
                self.exchanged = True
                (tmp_path / "a").rename(tmp_path / "old")
                (tmp_path / "old").rmdir()
                (tmp_path / "a").mkdir()

    disk = ExchangingDisk()

    async def use(store: FileStore) -> None:
        await store.put("a/key", b"body")

    run(tmp_path, use, disk=disk)
    assert disk.exchanged
    assert disk.notes[-1] == ("sync", (tmp_path / "a").stat().st_ino)
    # The first folder was held open, so that its inode cannot have come back.
    assert [call for call, _ in disk.notes].count("rename") == 2
