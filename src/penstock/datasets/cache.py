"""Files that were fetched to this machine, by their SHA-256: a folder of a bounded size.

    {folder}/lock                      whoever changes what is there holds it
    {folder}/files-{boot}/{sha256}.parquet
    {folder}/pins/{id}                 the sums that one holder needs; locked as long as it lives

A file gets its place by a rename, after its sum was verified, so what is there is whole, and is
verified once for all readers on this machine. A machine that lost its power may have lost part of
what it had: what another boot fetched is not used again.

Whoever reads says which files first: `holding` writes a pin, fetches what is missing, and gives
the paths. What is pinned is never removed, by any thread or process. The pin of a process that
died is not locked any more, and whoever finds it so removes it. Room is made before files come, by
removing what was used longest ago and is not pinned. If what is pinned is more than the bound, the
bound is passed, rather than that work could not be done, and kept again by the next who comes.

A file without a sum may be another tomorrow, in the same place and of the same size. Each holder
fetches it anew, and it goes with the holder.

Called by runtimes that read through local files. Blocks; for any number of threads and processes.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import rmtree
from typing import Final

from penstock.datasets.transfer import Transfer
from penstock.kernel.entropy import Entropy, new_id, system_entropy

FETCHES_AT_ONCE: Final = 8
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_SUFFIX: Final = ".parquet"
_LEFTOVER_SECONDS: Final = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedFile:
    """A file that is needed. Without a sum it is not verified, and is its holder's alone."""

    location: str
    bytes: int
    sha256: str | None = None
    holder: str = ""

    @property
    def name(self) -> str:
        """Its name in the cache."""
        if self.sha256 is not None:
            return self.sha256 + _SUFFIX
        known = hashlib.sha256(f"{self.holder} {self.bytes} {self.location}".encode()).hexdigest()
        return f"unverified-{known}{_SUFFIX}"


class Cache:
    """The fetched files below a folder, at most `bytes_max` of what nobody holds."""

    def __init__(
        self, folder: Path, transfer: Transfer, *, bytes_max: int, entropy: Entropy | None = None
    ) -> None:
        self._transfer = transfer
        self._bytes_max = bytes_max
        self._entropy = entropy or system_entropy()
        self._folder = folder
        self._files = folder / f"files-{_boot()}"
        self._pins = folder / "pins"
        self._fetching: dict[str, threading.Lock] = {}
        self._guard = threading.Lock()

    @contextmanager
    def holding(self, wanted: Sequence[WantedFile]) -> Iterator[list[Path]]:
        """The paths of these files, in their order; they stay until the block ends.

        Raises `Damaged` if a file is not what its sum says, and what `Transfer.fetch` raises.
        """
        holder = new_id(self._entropy)
        mine = [each if each.sha256 else replace(each, holder=holder) for each in wanted]
        with self._pinned(mine):
            try:
                missing = self._missing(mine)
                if missing:
                    self._make_room(sum(each.bytes for each in missing))
                    self._fetch(missing)
                yield [self._files / each.name for each in mine]
            finally:
                for each in mine:
                    if not each.sha256:
                        (self._files / each.name).unlink(missing_ok=True)

    def _missing(self, wanted: Iterable[WantedFile]) -> list[WantedFile]:
        """Those that have to be fetched; the others have been used now."""
        missing = []
        for each in {each.name: each for each in wanted}.values():
            path = self._files / each.name
            if _size(path) == each.bytes:
                os.utime(path)
            else:
                missing.append(each)
        return missing

    def _fetch(self, missing: Sequence[WantedFile]) -> None:
        with ThreadPoolExecutor(FETCHES_AT_ONCE, thread_name_prefix="penstock-fetch") as pool:
            coming = [pool.submit(self._have, each) for each in missing]
            try:
                for each in coming:
                    each.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _have(self, wanted: WantedFile) -> None:
        """See to it that a pinned file is there. Threads that want the same fetch it once."""
        path = self._files / wanted.name
        with self._guard:
            turn = self._fetching.setdefault(wanted.name, threading.Lock())
        with turn:
            if _size(path) != wanted.bytes:
                self._transfer.fetch(wanted.location, path, sha256=wanted.sha256)
        with self._guard:
            self._fetching.pop(wanted.name, None)

    @contextmanager
    def _pinned(self, wanted: Iterable[WantedFile]) -> Iterator[None]:
        path = self._pins / new_id(self._entropy)
        names = "\n".join(sorted({each.name for each in wanted}))
        # Under the lock: whoever makes room sees the pin, or has removed before we look.
        with self._locked():
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(handle, fcntl.LOCK_EX)
            os.write(handle, names.encode())
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            fcntl.flock(handle, fcntl.LOCK_UN)
            os.close(handle)

    def _make_room(self, size: int) -> None:
        """Remove what was used longest ago, until this much more fits."""
        with self._locked():
            self._drop_leftovers()
            held = self._held()
            there = sorted(self._there(), key=lambda each: each[1].st_mtime_ns)
            total = sum(found.st_size for _, found in there)
            for path, found in there:
                if total + size <= self._bytes_max:
                    return
                if path.name not in held:
                    path.unlink(missing_ok=True)
                    total -= found.st_size

    def _drop_leftovers(self) -> None:
        """Remove what processes that died while they fetched have left."""
        lock = self._folder / "lock"
        os.utime(lock)
        now = lock.stat().st_mtime
        for path in self._files.glob(".*"):
            with suppress(FileNotFoundError):
                if path.stat().st_mtime + _LEFTOVER_SECONDS < now:
                    path.unlink()

    def _there(self) -> Iterator[tuple[Path, os.stat_result]]:
        for path in self._files.iterdir():
            # A fetch of another process may end, or fail, while we look.
            with suppress(FileNotFoundError):
                if path.name.endswith(_SUFFIX):
                    yield path, path.stat()

    def _held(self) -> set[str]:
        """What living holders need; the pins of dead ones are removed."""
        held: set[str] = set()
        for path in self._pins.iterdir():
            try:
                handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                held.update(path.read_text().split("\n"))
            else:
                path.unlink(missing_ok=True)
            finally:
                os.close(handle)
        return held

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One thread of one process at a time. Held for a look at a folder, never for a fetch."""
        with self._guard:
            self._prepare()
            handle = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX)
                yield
            finally:
                # Closing is not enough if another thread has forked meanwhile.
                fcntl.flock(handle, fcntl.LOCK_UN)
                os.close(handle)

    def _prepare(self) -> None:
        if self._files.is_dir() and self._pins.is_dir():
            return
        self._pins.mkdir(parents=True, exist_ok=True)
        for old in self._folder.glob("files-*"):
            if old != self._files:
                rmtree(old, ignore_errors=True)
        self._files.mkdir(exist_ok=True)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _boot() -> str:
    """What is different after every start of the machine."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return "unknown"
