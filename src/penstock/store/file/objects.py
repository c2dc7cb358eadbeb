"""Objects as plain files below one folder: how one is read, replaced and removed.

Owned by the `file://` store. Every method blocks and is called in a thread. `write`, `rewrite`
and `remove` are called only through `attempt`, which holds the lock of the key's stripe for them.
Readers take no lock. The object `a/b c/d` is the file `ROOT/a/b c/d`: its body, nothing else.

A version is the file's time of change in nanoseconds, its inode and its size. Bytes never change
under a version, since a file gets its place by a rename when it is complete. The time is what
the file system stamped on it, less a random part of a millisecond, and later than that of the
file it replaces. So no version of an object comes back, not even if its inode does; and after a
delete it would take the same inode, size and nanosecond at once.

The version is known before the rename. So the metadata is written first, under the name of that
version, and the rename commits both. A reader that finds no metadata for the version it has read
looks whether that is still the version: only what has been replaced can lose its metadata.

What a crash leaves, at any point: the old object or the new one. It may also leave
- a file in `.penstock/tmp`, which the next store that is opened to write removes;
- metadata of a version that is not there: nobody looks it up, the next write of the key removes it;
- empty folders, which no list shows.
A power cut leaves the same if the disk is synced: what was answered is there. What others saw
before it was answered may be undone. (The file system must keep the order of changes to names, as
all with a journal do: a folder that another process made a moment ago is not synced again.)

Folders are made when a rename needs them and removed when a delete leaves them empty. These two
race without a lock: a rename into a folder that has gone is done again.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from penstock.kernel.errors import (
    AlreadyExists,
    NotFound,
    StoreError,
    Unavailable,
    Unsupported,
    VersionConflict,
)
from penstock.store.base import NO_METADATA, Head, Object, Page, Put, PutMode, Swap, Version
from penstock.store.file.disk import (
    Disk,
    explained,
    folder_clash,
    is_file,
    no_root,
    obstacle,
    open_folder,
    read_all,
    status,
    unconfirmed,
    version_of,
)
from penstock.store.file.listing import Query, page
from penstock.store.file.own import OwnFolder, stripe_of

READ_TRIES_MAX: Final = 100
FOLDER_TRIES_MAX: Final = 100
JITTER_NS_MAX: Final = 1_000_000
TIME_STEP_NS: Final = 1_000
"""The finest step that the file system's times must have; most have one nanosecond."""


@dataclass(frozen=True, slots=True)
class Chance:
    """What is random in one write: the name of its temporary file, and a part of its time."""

    name: str
    jitter_ns: int


@dataclass(frozen=True, slots=True)
class Done:
    """A write that took effect. `stamp_ns` is when the body was written, if one was."""

    version: Version
    stamp_ns: int | None


class FileObjects:
    """The objects below one folder."""

    def __init__(self, root: Path, disk: Disk) -> None:
        self.root = root
        self.base = os.fsencode(root.absolute()).rstrip(b"/")
        self._disk = disk
        self._own = OwnFolder(self.base, disk)

    def prepare(self) -> None:
        """Get ready to write."""
        with explained(self.root):
            self._own.prepare()

    def stamp_ns(self) -> int:
        """The time on the file system's clock."""
        with explained(self.root):
            return self._own.stamp_ns()

    def list(self, asked: Query) -> Page:
        with explained(self.root):
            return page(asked)

    def attempt(self, key: str, work: Callable[[], Done]) -> Done | None:
        """Do the work under the lock of the key; None, at once, if another holds the lock."""
        with explained(self.root, key), self._own.lock(stripe_of(key)) as mine:
            return work() if mine else None

    def head(self, key: str) -> Head:
        path = self._path(key)
        with explained(self.root, key):
            for _ in range(READ_TRIES_MAX):
                found = self._find(key)
                if found is None:
                    raise self._missing(key)
                version = version_of(found)
                metadata = self._own.read_metadata(key, version)
                now = status(path) if metadata is None else found
                if now is None or version_of(now) != version:
                    continue
                return Head(
                    key=key,
                    version=version,
                    size=found.st_size,
                    modified=found.st_mtime_ns / 1e9,
                    metadata=NO_METADATA if metadata is None else metadata,
                )
        raise _restless(key)

    def read(self, key: str, unless: Version | None) -> Object | None:
        path = self._path(key)
        with explained(self.root, key):
            for _ in range(READ_TRIES_MAX):
                file = self._open(key)
                try:
                    found = os.fstat(file)
                    version = version_of(found)
                    if version == unless:
                        return None
                    body = read_all(file, found.st_size)
                    metadata = self._own.read_metadata(key, version)
                    # Also another program may have written into the file while we read it.
                    now = status(path) if metadata is None else os.fstat(file)
                finally:
                    os.close(file)
                if now is None or version_of(now) != version:
                    continue
                return Object(
                    key=key,
                    version=version,
                    size=found.st_size,
                    modified=found.st_mtime_ns / 1e9,
                    metadata=NO_METADATA if metadata is None else metadata,
                    body=body,
                )
        raise _restless(key)

    def write(
        self, key: str, body: bytes, mode: PutMode, metadata: Mapping[str, str], chance: Chance
    ) -> Done:
        current = self._find(key)
        problem = _refuse(key, mode, current)
        if problem is not None:
            raise problem
        if current is None:
            self._make_way(key)
        return self._replace(key, body, metadata, current, chance)

    def rewrite(
        self, key: str, version: Version, metadata: Mapping[str, str], chance: Chance
    ) -> Done:
        """Write the body that is there once more, with other metadata."""
        try:
            file = self._open(key)
        except NotFound as error:
            raise _conflict(key) from error
        try:
            current = os.fstat(file)
            body = read_all(file, current.st_size)
            # Only after reading: the lock keeps other writers out, but not other programs.
            if version_of(os.fstat(file)) != version:
                raise _conflict(key)
        finally:
            os.close(file)
        return self._replace(key, body, metadata, current, chance)

    def remove(self, key: str, version: Version | None) -> Done:
        current = self._find(key)
        if current is None:
            return Done(Version(""), None)
        found = version_of(current)
        if version is not None and version != found:
            raise _conflict(key)
        above = self._path(key).rpartition(b"/")[0]
        folder = open_folder(above, below=len(self.base))
        try:
            self._change(key, folder, self._disk.unlink)
        finally:
            os.close(folder)
        self._own.drop_metadata(key, keep=None)
        with suppress(OSError):
            while len(above) > len(self.base):
                self._disk.rmdir(above)
                above = above.rpartition(b"/")[0]
        return Done(found, None)

    def _path(self, key: str) -> bytes:
        return self.base + b"/" + key.encode()

    def _find(self, key: str) -> os.stat_result | None:
        """The file of a key; None if there is none, or something else."""
        path = self._path(key)
        found = status(path)
        if found is None or not is_file(found) or obstacle(path, below=len(self.base)):
            return None
        return found

    def _open(self, key: str) -> int:
        """The file of a key, open for reading, or `NotFound`."""
        above, _, name = self._path(key).rpartition(b"/")
        try:
            folder = open_folder(above, below=len(self.base))
            try:
                # Without NONBLOCK, opening a pipe would wait for somebody to write into it.
                flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
                file = os.open(name, flags, dir_fd=folder)
            finally:
                os.close(folder)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO):
                raise self._missing(key) from error
            raise
        if is_file(os.fstat(file)):
            return file
        os.close(file)
        raise self._missing(key)

    def _missing(self, key: str) -> StoreError:
        if self.root.is_dir():
            return NotFound(f"There is no object {key!r}.", key=key)
        return no_root(self.root)

    def _make_way(self, key: str) -> None:
        """Make sure that a new file can have this place: only empty folders give way."""
        path = self._path(key)
        if obstacle(path, below=len(self.base)):
            raise folder_clash(key)
        found = status(path)
        if found is None:
            return
        if not stat.S_ISDIR(found.st_mode):
            raise folder_clash(key)
        for folder, _, files in os.walk(path, topdown=False):
            if files:
                raise folder_clash(key)
            with suppress(FileNotFoundError):
                self._disk.rmdir(folder)

    def _replace(
        self,
        key: str,
        body: bytes,
        metadata: Mapping[str, str],
        current: os.stat_result | None,
        chance: Chance,
    ) -> Done:
        temporary = self._own.temporary(stripe_of(key), chance.name)
        try:
            done = self._stage(temporary, body, current, chance)
            if metadata:
                self._own.write_metadata(key, done.version, metadata)
            self._move(temporary, key)
        except BaseException:
            with suppress(OSError):
                self._disk.unlink(temporary)
            raise
        self._own.drop_metadata(key, keep=done.version if metadata else None)
        return done

    def _stage(
        self, path: bytes, body: bytes, current: os.stat_result | None, chance: Chance
    ) -> Done:
        """Write the body aside, with the time that makes its version."""
        file = self._disk.create(path)
        try:
            self._disk.write(file, body)
            stamp_ns = os.fstat(file).st_mtime_ns
            mtime_ns = stamp_ns - chance.jitter_ns
            if current is not None and mtime_ns <= current.st_mtime_ns < stamp_ns + JITTER_NS_MAX:
                mtime_ns = current.st_mtime_ns + TIME_STEP_NS + chance.jitter_ns % TIME_STEP_NS
            self._disk.set_time(file, mtime_ns)
            found = os.fstat(file)
            if abs(found.st_mtime_ns - mtime_ns) >= TIME_STEP_NS:
                raise Unsupported(
                    f"The file system of {self.root} does not keep times to the microsecond.",
                    hint="Use a file system such as ext4, XFS or APFS.",
                )
            self._disk.sync(file)
        finally:
            os.close(file)
        return Done(version_of(found), stamp_ns)

    def _move(self, temporary: bytes, key: str) -> None:
        """Give a staged file its place, with folders made as needed."""
        above = self._path(key).rpartition(b"/")[0]
        for _ in range(FOLDER_TRIES_MAX):
            try:
                folder = open_folder(above, below=len(self.base))
            except FileNotFoundError:
                self._make_folders(above)
                continue
            try:
                # By the open folder: it fails if that folder, which is synced next, has gone.
                self._change(key, folder, partial(self._disk.rename, temporary))
            except FileNotFoundError:
                continue
            else:
                return
            finally:
                os.close(folder)
        raise Unavailable(f"What is written for {key!r} is removed again and again.", key=key)

    def _make_folders(self, path: bytes) -> None:
        """Make a folder and those above it, unless somebody removes one meanwhile."""
        end = len(self.base)
        while end < len(path):
            above, slash = end, path.find(b"/", end + 1)
            end = slash if slash >= 0 else len(path)
            try:
                self._disk.mkdir(path[:end])
            except FileExistsError:
                continue
            except FileNotFoundError:
                if above == len(self.base):
                    raise
                return
            self._disk.sync_folder(path[:above] or b"/")

    def _change(self, key: str, folder: int, change: Callable[..., None]) -> None:
        """Change what the name of a key means in its folder, and make that durable."""
        name = key.encode().rpartition(b"/")[2]
        try:
            change(name, folder=folder)
        except OSError as error:
            if error.errno == errno.EIO:
                raise unconfirmed(error, key) from error
            raise
        try:
            self._disk.sync(folder)
        except OSError as error:
            raise unconfirmed(error, key) from error


def _refuse(key: str, mode: PutMode, current: os.stat_result | None) -> StoreError | None:
    match mode:
        case Put.REPLACE:
            return None
        case Put.CREATE:
            if current is None:
                return None
            return AlreadyExists(f"The object {key!r} already exists.", key=key)
        case Swap(version):
            if current is not None and version_of(current) == version:
                return None
            return _conflict(key)


def _conflict(key: str) -> VersionConflict:
    return VersionConflict(f"The object {key!r} is not there in the version named.", key=key)


def _restless(key: str) -> Unavailable:
    return Unavailable(f"The object {key!r} changed whenever it was read.", key=key)
