"""File stores for tests, with disks that fail, wait or take notes, and a clock that only jumps."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.entropy import system_entropy
from penstock.store.base import ObjectStore
from penstock.store.file.backend import FileStore
from penstock.store.file.disk import Disk

Use = Callable[[FileStore], Awaitable[None]]


@asynccontextmanager
async def opened(
    root: Path, *, disk: Disk | None = None, fsync: bool = False, clock: Clock | None = None
) -> AsyncIterator[FileStore]:
    """A store that is closed at the end."""
    store = FileStore(
        root, clock=clock or SystemClock(), entropy=system_entropy(), fsync=fsync, disk=disk
    )
    try:
        yield store
    finally:
        await store.close()


def run(root: Path, use: Use, *, disk: Disk | None = None, fsync: bool = False) -> None:
    async def main() -> None:
        async with opened(root, disk=disk, fsync=fsync) as store:
            await use(store)

    asyncio.run(main())


async def body_of(store: ObjectStore, key: str) -> bytes:
    found = await store.get(key)
    assert found is not None
    return found.body


class FailingDisk(Disk):
    """A disk whose calls of one kind fail, from the nth of them on."""

    def __init__(self, call: str, code: int, *, from_nth: int = 1) -> None:
        super().__init__()
        self._call = call
        self._code = code
        self._good = from_nth - 1

    def before(self, call: str, target: bytes | int) -> None:
        if call == self._call:
            if self._good == 0:
                raise OSError(self._code, os.strerror(self._code))
            self._good -= 1


class NotingDisk(Disk):
    """A disk that notes every call, with the name of the path or the inode of the open file."""

    def __init__(self, *, fsync: bool = True) -> None:
        super().__init__(fsync=fsync)
        self.notes: list[tuple[str, bytes | int]] = []

    def before(self, call: str, target: bytes | int) -> None:
        noted = os.fstat(target).st_ino if isinstance(target, int) else target.rpartition(b"/")[2]
        self.notes.append((call, noted))


class WaitingDisk(Disk):
    """A disk whose first call of one kind waits until the test says so."""

    def __init__(self, call: str) -> None:
        super().__init__(fsync=False)
        self._call = call
        self.reached = threading.Event()
        self.go_on = threading.Event()

    def before(self, call: str, target: bytes | int) -> None:
        if call == self._call and not self.reached.is_set():
            self.reached.set()
            assert self.go_on.wait(60)


class FrozenDisk(Disk):
    """A disk whose file system stamps the same time on everything that is written."""

    def __init__(self, stamp_ns: int) -> None:
        super().__init__(fsync=False)
        self._stamp_ns = stamp_ns

    def write(self, file: int, body: bytes) -> None:
        super().write(file, body)
        os.utime(file, ns=(self._stamp_ns, self._stamp_ns))


class JumpingClock:
    """A clock that moves only when somebody sleeps, and tells a test of it."""

    def __init__(self, woken: Callable[[int], None] = lambda _: None) -> None:
        self._now = 1000.0
        self._woken = woken
        self.sleeps = 0

    def monotonic(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        self._now += seconds
        self.sleeps += 1
        self._woken(self.sleeps)


def files_below(folder: Path) -> list[str]:
    """The names of all files below a folder, with their folders."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


def names_in(folder: Path) -> list[str]:
    """The names in a folder."""
    return sorted(path.name for path in folder.iterdir())
