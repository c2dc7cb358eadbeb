"""Penstock's own folder beside the objects of a `file://` store.

    ROOT/.penstock/locks/   empty files, never removed; a writer holds an exclusive flock on one
    ROOT/.penstock/tmp/     bodies that are being written, named by the stripe of their lock
    ROOT/.penstock/meta/    a folder a key, with a file for the metadata of each version
    ROOT/.penstock/clock    a file that is touched to learn the time

Called by `penstock.store.file.objects`; every method blocks. The keys are spread over 256 locks
by a hash that must never change, since every process that shares the store goes by it. The system
frees the lock of a dead process. So whoever gets the lock of a stripe knows that the files in
`tmp` that bear its name have no owner any more, whatever their age.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Final

from penstock.kernel.errors import NotOurs
from penstock.store.base import RESERVED_FOLDER, Version
from penstock.store.file.disk import Disk, read_all

_TEMPORARY: Final = re.compile(rb"([0-9a-f]{2})-\w+")


class OwnFolder:
    """The folder `.penstock` below a root."""

    def __init__(self, base: bytes, disk: Disk) -> None:
        self._disk = disk
        self._base = base
        self._home = base + b"/" + RESERVED_FOLDER.encode()
        self._locks = self._home + b"/locks"
        self._tmp = self._home + b"/tmp"
        self._meta = self._home + b"/meta"

    def prepare(self) -> None:
        """Make what is missing, and remove what dead writers left in `tmp`."""
        self._make()
        for stripe, names in self._leftovers().items():
            with self.lock(stripe) as mine:
                for name in names if mine else ():
                    with suppress(FileNotFoundError):
                        self._disk.unlink(self._tmp + b"/" + name)

    def _make(self) -> None:
        made = [self._is_made(path) for path in (self._home, self._locks, self._tmp, self._meta)]
        if any(made):
            self._disk.sync_folder(self._base)
            self._disk.sync_folder(self._home)

    def _is_made(self, path: bytes) -> bool:
        try:
            self._disk.mkdir(path)
        except FileExistsError:
            return False
        return True

    def _leftovers(self) -> dict[str, list[bytes]]:
        found: dict[str, list[bytes]] = {}
        with os.scandir(self._tmp) as scan:
            for entry in scan:
                match = _TEMPORARY.fullmatch(entry.name)
                if match:
                    found.setdefault(match[1].decode(), []).append(entry.name)
        return found

    @contextmanager
    def lock(self, stripe: str) -> Iterator[bool]:
        """Hold the lock of a stripe, and say True; or say False at once if another holds it."""
        file = self._open_shared(self._locks + b"/" + stripe.encode())
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            try:
                yield True
            finally:
                # Closing is not enough if another thread has forked meanwhile.
                fcntl.flock(file, fcntl.LOCK_UN)
        finally:
            os.close(file)

    def stamp_ns(self) -> int:
        """The time on the file system's clock.

        The file is shared. If another process touches it between our touch and our look, we see
        its stamp, which is as good: it was made while we were asking.
        """
        file = self._open_shared(self._home + b"/clock")
        try:
            self._disk.touch(file)
            return os.fstat(file).st_mtime_ns
        finally:
            os.close(file)

    def _open_shared(self, path: bytes) -> int:
        try:
            return self._disk.open_shared(path)
        except FileNotFoundError:
            self._make()
            return self._disk.open_shared(path)

    def temporary(self, stripe: str, name: str) -> bytes:
        """The path of a body that is being written under the lock of this stripe."""
        return self._tmp + f"/{stripe}-{name}".encode()

    def read_metadata(self, key: str, version: Version) -> Mapping[str, str] | None:
        """The metadata of a version; None if there is none."""
        path = self._folder(key) + f"/{version}.json".encode()
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            text = read_all(file, os.fstat(file).st_size)
        finally:
            os.close(file)
        try:
            metadata: dict[str, str] = json.loads(text)["metadata"]
        except (ValueError, KeyError, TypeError) as error:
            raise NotOurs(f"The metadata of the object {key!r} is damaged.") from error
        return metadata

    def write_metadata(self, key: str, version: Version, metadata: Mapping[str, str]) -> None:
        """Store the metadata of a version that is about to be. The lock of the key is held."""
        folder = self._folder(key)
        if self._is_made(folder):
            self._disk.sync_folder(self._meta)
        text = json.dumps({"key": key, "metadata": dict(metadata)}).encode()
        file = self._disk.create(folder + f"/{version}.json".encode())
        try:
            self._disk.write(file, text)
            self._disk.sync(file)
        finally:
            os.close(file)
        self._disk.sync_folder(folder)

    def drop_metadata(self, key: str, *, keep: Version | None) -> None:
        """Remove the metadata of other versions. The lock is held; nobody needs what is removed,
        so that a failure only leaves it for the next time."""
        folder = self._folder(key)
        with suppress(OSError):
            with os.scandir(folder) as scan:
                names = [entry.name for entry in scan]
            kept = b"" if keep is None else f"{keep}.json".encode()
            for name in names:
                if name != kept:
                    self._disk.unlink(folder + b"/" + name)
            if kept not in names:
                self._disk.rmdir(folder)

    def _folder(self, key: str) -> bytes:
        return self._meta + b"/" + _digest(key).encode()


def stripe_of(key: str) -> str:
    """The lock that a key shares with one in 256 others."""
    return _digest(key)[:2]


def _digest(key: str) -> str:
    return hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
