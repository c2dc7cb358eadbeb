"""The file system under the `file://` store: what changes it, and Penstock's own folder in it.

`Disk` makes every system call that changes anything, one call a method, and calls `before`
first. A test that overrides `before` can kill its own process, fail, or take notes between any
two of them; nothing else in the store writes. Reads go to `os` directly. Paths are bytes: a
key's UTF-8 is its path, whatever the locale of the process says.

    ROOT/.penstock/locks/   empty files, never removed; a writer holds an exclusive flock on one
    ROOT/.penstock/tmp/     bodies that are being written, named by the stripe of their lock
    ROOT/.penstock/meta/    a folder a key, with a file for the metadata of each version
    ROOT/.penstock/clock    a file that is touched to learn the time

Called by `penstock.store.file.backend`; every method blocks. The keys are spread over 256 locks
by a hash that must never change, since every process that shares the store goes by it. The
system frees the lock of a dead process. So whoever gets the lock of a stripe knows that the
files in `tmp` that bear its name have no owner any more, whatever their age.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from penstock.kernel.errors import (
    BucketNotFound,
    InvalidInput,
    NotOurs,
    OutcomeUnknown,
    PenstockError,
    Refused,
    Unavailable,
    Unsupported,
)
from penstock.store.base import RESERVED_FOLDER, Entry, Version

# Only macOS has it, where a plain fsync leaves the data in the drive's own cache.
_FULL_SYNC: Final[int | None] = getattr(fcntl, "F_FULLFSYNC", None)

_READ_BYTES_MAX: Final = 1 << 30

_BAD_NAME: Final = (errno.ENAMETOOLONG, errno.EILSEQ, errno.EINVAL)
_FOLDER_CLASH: Final = (errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY, errno.EEXIST, errno.ELOOP)
_NOT_ALLOWED: Final = (errno.EACCES, errno.EPERM, errno.EROFS)
_NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT)
_NO_LOCKS: Final = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


class Disk:
    """The system calls that change the disk. `folder` is an open folder that a name is in.

    Without `fsync` nothing waits for the disk: what was answered survives the death of the
    process, but not a power cut.
    """

    def __init__(self, *, fsync: bool = True) -> None:
        self._fsync = fsync

    def before(self, call: str, target: bytes | int) -> None:
        """Called before each of them, with the path, name or open file that it is about."""

    def create(self, path: bytes) -> int:
        """A new, empty file, open for writing."""
        self.before("create", path)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def open_shared(self, path: bytes) -> int:
        """A file that many processes hold open; made if it is not there."""
        self.before("open_shared", path)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)

    def write(self, file: int, body: bytes) -> None:
        """Write the whole body."""
        rest = memoryview(body)
        while rest:
            self.before("write", file)
            rest = rest[os.write(file, rest) :]

    def set_time(self, file: int, mtime_ns: int) -> None:
        """Set when the file was changed last."""
        self.before("set_time", file)
        os.utime(file, ns=(mtime_ns, mtime_ns))

    def touch(self, file: int) -> None:
        """Let the file system set when the file was changed last: now."""
        self.before("touch", file)
        os.utime(file)

    def sync(self, file: int) -> None:
        """Wait until a file, or the names in a folder, would survive a power cut."""
        if not self._fsync:
            return
        self.before("sync", file)
        if _FULL_SYNC is None:
            os.fsync(file)
        else:
            fcntl.fcntl(file, _FULL_SYNC)

    def sync_folder(self, path: bytes) -> None:
        """Wait until the names in a folder would survive a power cut."""
        if self._fsync:
            folder = open_folder(path)
            try:
                self.sync(folder)
            finally:
                os.close(folder)

    def rename(self, path: bytes, name: bytes, *, folder: int) -> None:
        """Give a file its place, in one step, over whatever file was there."""
        self.before("rename", name)
        os.rename(path, name, dst_dir_fd=folder)

    def unlink(self, name: bytes, *, folder: int | None = None) -> None:
        """Remove a file."""
        self.before("unlink", name)
        os.unlink(name, dir_fd=folder)

    def mkdir(self, path: bytes) -> None:
        """Make a folder in one that is there."""
        self.before("mkdir", path)
        os.mkdir(path)  # noqa: PTH102 - pathlib has no bytes

    def rmdir(self, path: bytes) -> None:
        """Remove a folder if it is empty."""
        self.before("rmdir", path)
        os.rmdir(path)  # noqa: PTH106 - pathlib has no bytes


def is_file(found: os.stat_result) -> bool:
    """Whether this is a plain file, and so an object: no folder, no link, no device."""
    return stat.S_ISREG(found.st_mode)


def version_of(found: os.stat_result) -> Version:
    """The version of a file: when it was changed last, its inode and its size."""
    return Version(f"{found.st_mtime_ns:x}-{found.st_ino:x}-{found.st_size:x}")


def entry_of(key: str, found: os.stat_result) -> Entry:
    """A file as the row of a list."""
    return Entry(key, version_of(found), found.st_size, found.st_mtime_ns / 1e9)


def status(path: bytes) -> os.stat_result | None:
    """What is at the path itself, links not followed; None if nothing is."""
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def obstacle(path: bytes, *, below: int) -> bytes | None:
    """The first folder on the way to a path that is no real folder, but a link or a file.

    The first `below` bytes of the path are the root, which may well be a link.
    """
    slash = path.find(b"/", below + 1)
    while slash >= 0:
        found = status(path[:slash])
        if found is None:
            return None
        if not stat.S_ISDIR(found.st_mode):
            return path[:slash]
        slash = path.find(b"/", slash + 1)
    return None


def open_folder(path: bytes, *, below: int | None = None) -> int:
    """A folder, open for what is done to the names in it.

    With `below`, the first so many bytes of the path are a root, which may well be a link. From
    there on no folder on the way is one, also if somebody replaces a folder by a link meanwhile:
    each is opened in the one before it.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    if below is None:
        return os.open(path, flags | os.O_NOFOLLOW)
    folder = os.open(path[:below] or b"/", flags)
    for name in filter(None, path[below:].split(b"/")):
        above = folder
        try:
            folder = os.open(name, flags | os.O_NOFOLLOW, dir_fd=above)
        finally:
            os.close(above)
    return folder


def read_all(file: int, size: int) -> bytes:
    """The bytes of an open file that had this size a moment ago; a byte more if it has grown."""
    parts = []
    while True:
        # One byte more than there should be: a short answer is the end, without asking again.
        wanted = min(size + 1, _READ_BYTES_MAX)
        part = os.read(file, wanted)
        parts.append(part)
        size -= len(part)
        if len(part) < wanted or size < 0:
            return parts[0] if len(parts) == 1 else b"".join(parts)


@contextmanager
def explained(root: Path, key: str = "") -> Iterator[None]:
    """Turn what the operating system says into a sentence, for requests that changed nothing."""
    try:
        yield
    except OSError as error:
        raise explain(error, root, key) from error


def explain(error: OSError, root: Path, key: str) -> PenstockError:
    """The error of a request that changed nothing."""
    what = f"the key {key!r}" if key else f"the folder {root}"
    reason = (error.strerror or str(error)).lower()
    code = error.errno
    if code in (errno.ENOENT, errno.ENOTDIR) and not root.is_dir():
        return no_root(root)
    if code in _BAD_NAME:
        return InvalidInput(
            f"The file system of {root} refuses the name of {what}: {reason}.",
            hint="Use shorter and plainer names between the slashes.",
        )
    if code in _FOLDER_CLASH:
        return folder_clash(key)
    if code in _NOT_ALLOWED:
        return Refused(
            f"The file system does not allow this for {what}: {reason}.",
            key=key,
            hint=f"Give this user the right to read and write {root} and what is in it.",
        )
    if code in _NO_SPACE:
        return Unavailable(
            f"There is no space left for {what}: {reason}.",
            key=key,
            hint=f"Free some space on the disk that holds {root}.",
        )
    if code in _NO_LOCKS:
        return Unsupported(
            f"The file system of {root} has no file locks: {reason}.",
            hint="Use a file system of this machine, such as ext4, XFS or APFS.",
        )
    if code == errno.EXDEV:
        return Unsupported(
            f"The folder {root} spans several file systems.",
            key=key,
            hint="Keep everything below it on one file system.",
        )
    return Unavailable(f"The file system failed for {what}: {reason}.", key=key)


def no_root(root: Path) -> BucketNotFound:
    """The error of a store whose folder is not there."""
    return BucketNotFound(f"There is no folder {root}.", hint=f"mkdir -p {root}")


def unconfirmed(error: OSError, key: str) -> OutcomeUnknown:
    """The error of a change that can perhaps be seen already, so that it may not be denied."""
    reason = (error.strerror or str(error)).lower()
    return OutcomeUnknown(f"The disk did not confirm the change of {key!r}: {reason}.", key=key)


def folder_clash(key: str) -> InvalidInput:
    """The error of a key that a file system cannot have beside the others."""
    return InvalidInput(
        f"The key {key!r} cannot be a file: it is the folder of other keys, or one of its own"
        " folders is a file or a link.",
        hint="Use a key that is not the beginning of another one up to a slash.",
    )


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
