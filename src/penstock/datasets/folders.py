"""The `file://` side of `penstock.datasets.transfer`: plain files, a key is a path.

A file appears whole, by a rename, and is on the disk when a call returns, unless syncing is off.
Below the root of a `file://` store these files are objects of that store like any other.

A link is no file, and neither is a pipe or a device: they are not listed, and not read. Whoever may
write into one folder could name files of others by a link. Below the root of a store no folder on
the way is a link either, also if somebody puts one there meanwhile. Above it folders may be: where
the store lies is its operator's business.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from penstock.datasets.layout import root_characters
from penstock.kernel.errors import NotFound, Refused, Unavailable
from penstock.store.file.disk import obstacle, open_folder

_CHUNK_BYTES: Final = 1024 * 1024
_SYNCED_AT_ONCE: Final = 32
"""A disk takes hardly longer for many files that it is asked to sync at once than for one."""
_LINK: Final = "a link or another thing that is no file"

Chunk = bytes | memoryview


@dataclass(frozen=True, slots=True)
class Listed:
    """A file below a location; the name is relative to it."""

    name: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Folder:
    """The folders of this machine."""

    is_synced: bool = True

    def chunks(self, key: str) -> Iterator[Chunk]:
        with self.open(key) as file, _explained(key):
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk

    def send(self, path: Path, key: str) -> None:
        def copy(file: BinaryIO) -> None:
            with path.open("rb") as source:
                shutil.copyfileobj(source, file, _CHUNK_BYTES)

        self._put(key, copy)

    def write(self, key: str, body: bytes) -> None:
        def fill(file: BinaryIO) -> None:
            file.write(body)

        self._put(key, fill)

    def settle(self, folder: str, keys: Sequence[str]) -> None:
        if not self.is_synced:
            return
        home = Path(folder)
        parents = {Path(key).parent for key in keys}
        made = {each for one in parents for each in (one, *one.parents) if home in each.parents}
        with ThreadPoolExecutor(_SYNCED_AT_ONCE, thread_name_prefix="penstock-sync") as pool:
            for _ in pool.map(_sync_file, keys):
                pass
            for _ in pool.map(_sync, [*made, home]):
                pass

    def list(self, key: str) -> Iterator[Listed]:
        with _explained(key):
            try:
                base = _opened_folder(key, is_itself=True)
            except (FileNotFoundError, NotADirectoryError):
                return
        try:
            for folder, folders, names, opened in os.fwalk(".", dir_fd=base):
                folders.sort()
                for name in sorted(names):
                    # What vanishes between the look and the question was not there.
                    with suppress(FileNotFoundError):
                        status = os.stat(name, dir_fd=opened, follow_symlinks=False)
                        if stat.S_ISREG(status.st_mode):
                            yield Listed(Path(folder, name).as_posix(), status.st_size)
        finally:
            os.close(base)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            with _explained(key), suppress(FileNotFoundError):
                Path(key).unlink()

    def clear(self, key: str) -> None:
        with _explained(key), suppress(FileNotFoundError):
            shutil.rmtree(key)

    def open(self, key: str) -> BinaryIO:
        with _explained(key):
            return _opened(key)

    def change(self, key: str) -> BinaryIO:
        """A file that is there, to be changed in place."""
        with _explained(key):
            return _opened(key, is_changed=True)

    def _put(self, key: str, fill: Callable[[BinaryIO], None]) -> None:
        to = Path(key)
        with _explained(key):
            make_folder(to.parent, is_synced=self.is_synced)
            handle, name = tempfile.mkstemp(dir=to.parent, prefix=".")
            try:
                with os.fdopen(handle, "wb") as file:
                    fill(file)
                    file.flush()
                    # Others read it too, such as a Spark that runs as another user.
                    os.fchmod(file.fileno(), 0o644)
                    if self.is_synced:
                        os.fsync(file.fileno())
                Path(name).replace(to)
            finally:
                with suppress(FileNotFoundError):
                    Path(name).unlink()
            if self.is_synced:
                _sync(to.parent)


def make_folder(path: Path, *, is_synced: bool) -> None:
    """Make a folder and those above it; synced, what is in them is found after a power cut too."""
    if path.is_dir():
        return
    make_folder(path.parent, is_synced=is_synced)
    path.mkdir(exist_ok=True)
    if is_synced:
        _sync(path.parent)


def _sync_file(key: str) -> None:
    with _explained(key), _opened(key) as file:
        os.fsync(file.fileno())


def _opened_folder(key: str, *, is_itself: bool = False) -> int:
    """A folder, opened so that no link below the root of its store is followed.

    `is_itself` has it be no link also where it lies in no store.
    """
    path = os.fsencode(key.rstrip("/"))
    root = root_characters(key)
    below = len(os.fsencode(key[:root])) if root is not None else len(path)
    if root is None and is_itself:
        below = path.rfind(b"/")
    try:
        return open_folder(path, below=below)
    except NotADirectoryError as error:
        # Linux says so of a link, too.
        stopped_by = obstacle(path + b"/", below=below)
        if stopped_by is not None and os.path.islink(stopped_by):  # noqa: PTH114 - bytes
            raise OSError(errno.ELOOP, _LINK) from error
        raise


def _opened(key: str, *, is_changed: bool = False) -> BinaryIO:
    above, _, name = key.rpartition("/")
    folder = _opened_folder(above)
    try:
        # A pipe is not waited for before it is known for one.
        flags = os.O_RDWR if is_changed else os.O_RDONLY
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        handle = os.open(name, flags, dir_fd=folder)
    finally:
        os.close(folder)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.ELOOP, _LINK)
    return os.fdopen(handle, "r+b" if is_changed else "rb")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _explained(key: str) -> Iterator[None]:
    """Errors of the file system as ours."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFound(f"There is no file {key}.", key=key) from error
    except PermissionError as error:
        raise Refused(
            f"Access to {key} was denied: {error.strerror}.",
            key=key,
            hint="Check who owns the folder.",
        ) from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise Refused(
                f"{key} is {_LINK}.", key=key, hint="Write the file itself there."
            ) from error
        raise Unavailable(f"{key} cannot be used: {error.strerror or error}.", key=key) from error
