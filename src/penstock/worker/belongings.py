"""What an attempt has on this machine while it runs: a folder of its own, and maybe a user.

    {folder}/{run}.lock          held by the worker of that run, as long as it lives
    {folder}/{run}/{attempt}/    token, credentials.json, aws.config: see `penstock.runtimes.handed`

A run is one life of a worker. The folder of an attempt is the worker's and nobody else can look
into it, but for the user of untrusted work, who can read there and not write: nothing that root
writes can be led elsewhere by a link. A file is written beside its place and renamed, so a reader
finds the old one or the new one, whole, also when the disk is full.

Who makes and removes what: a worker makes its lock, then its folder; it removes the folder, then
the lock. An attempt's folder is there from before its work begins until nothing of it runs. A crash
leaves all of it, and a lock that nobody holds: the next worker that starts removes the folder, and
then the lock. It never takes the folder of a worker that lives, because it cannot take its lock,
and a worker that has made its lock and not yet locked it looks whether it is still the one there.

All of it blocks: called from threads, by `penstock.worker.handing`.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from penstock.datasets.layout import part, path_of
from penstock.kernel.entropy import Entropy, new_id
from penstock.kernel.errors import InvalidInput, WorkFailed, WorkReleased
from penstock.runtimes.base import Work
from penstock.runtimes.handed import OUTPUTS, TEMPORARY, TOKEN
from penstock.runtimes.reclaiming import close
from penstock.runtimes.users import User, Users, remove_tree

_log = logging.getLogger(__name__)

_LOCK: Final = ".lock"
_TRIES_MAX: Final = 10
_FILE: Final = "file:///"


class RunFolder:
    """The folder of one life of a worker."""

    def __init__(self, folder: Path, entropy: Entropy) -> None:
        self._all = folder
        self._entropy = entropy
        self._lock: int | None = None
        self._name = ""

    @property
    def path(self) -> Path:
        return self._all / self._name

    def open(self) -> None:
        """Remove what dead workers have left, and make the folder of this one."""
        try:
            self._all.mkdir(mode=0o711, parents=True, exist_ok=True)
            self._sweep()
            self._make()
        except OSError as error:
            raise InvalidInput(
                f"The folder {self._all} of what tasks are handed cannot be used:"
                f" {error.strerror or error}.",
                hint="Give the worker another data folder by --data.",
            ) from error

    def close(self) -> None:
        """Remove the folder. What cannot be removed is left to the next worker."""
        if self._lock is None:
            return
        if _is_removed(self.path):
            with suppress(OSError):
                (self._all / f"{self._name}{_LOCK}").unlink()
        os.close(self._lock)
        self._lock = None

    def _make(self) -> None:
        for _ in range(_TRIES_MAX):
            self._name = new_id(self._entropy, characters=12)
            file = self._all / f"{self._name}{_LOCK}"
            lock = _locked(file, flags=os.O_CREAT | os.O_EXCL)
            if lock is not None:
                self._lock = lock
                self.path.mkdir()
                # Whoever is not us may pass through, and see nothing.
                self.path.chmod(0o711)
                return
        raise OSError("its locks are taken as fast as they are made")

    def _sweep(self) -> None:
        for file in self._all.glob(f"*{_LOCK}"):
            lock = _locked(file)
            if lock is None:
                continue
            left = self._all / file.name.removesuffix(_LOCK)
            if _is_removed(left):
                with suppress(OSError):
                    file.unlink()
            os.close(lock)


class Belongings:
    """The folder and the user of one attempt. `prepare` first, `end` last; each once.

    Threads may call `write` and `end` at once: what is written after the end is not.
    """

    def __init__(self, folder: Path | None, *, work: Work, users: Users | None) -> None:
        self.folder = folder
        """None if the attempt is handed nothing."""
        self._work = work
        self._users = users
        self._user: User | None = None
        self._lock = threading.Lock()
        self._is_made = False

    @property
    def user(self) -> int:
        """The user that the work runs as; 0 for the worker's own."""
        return self._user.number if self._user is not None else 0

    @property
    def outputs(self) -> Mapping[str, Path]:
        """Folders for the outputs that are in a bucket, by name; none if nothing is handed."""
        if self.folder is None:
            return {}
        return {
            name: self.folder / OUTPUTS / part(name)
            for name, place in self._work.outputs.items()
            if not place.location.startswith(_FILE)
        }

    def prepare(self, token: str) -> None:
        """Have a user for untrusted work, with its folders, and the folder with the token."""
        try:
            outputs = _folders([each.location for each in self._work.outputs.values()])
            scratch = _folders([self._work.scratch])
            if self._work.is_untrusted:
                self._user = _taken(self._users, on_files=bool(outputs or scratch))
            if self.folder is not None:
                self._make_folder(self.folder)
            if self._user is not None:
                self._user.give([*outputs, *self.outputs.values()], scratch=scratch)
        except OSError as error:
            raise _unwritten(error) from error
        self.write({TOKEN: token})

    def write(self, files: dict[str, str]) -> None:
        """Replace files, each whole; `WorkFailed` says why one could not be."""
        with self._lock:
            if not self._is_made or self.folder is None:
                return
            for name, text in files.items():
                try:
                    self._write(self.folder / name, text)
                except OSError as error:
                    raise _unwritten(error) from error

    def take_back(self) -> None:
        """Make what the work has written the worker's. Nothing of the work may run, but for what
        its user has left.

        `WorkFailed` says that what the work has written is not to be published.
        """
        user, self._user = self._user, None
        if user is None:
            return
        try:
            if self._is_made and self.folder is not None:
                # Whoever is that user next has nothing to do with this token.
                close(self.folder)
        finally:
            user.end()

    def end(self) -> None:
        """Take everything back, and remove the folder."""
        try:
            self.take_back()
        finally:
            with self._lock:
                if self._is_made and self.folder is not None and not _is_removed(self.folder):
                    _log.warning("%s could not be removed; the next start tries again", self.folder)
                self._is_made = False

    def _make_folder(self, folder: Path) -> None:
        folder.mkdir(mode=0o700)
        self._is_made = True
        for each in self.outputs.values():
            each.mkdir(parents=True)
            # Whatever the umask: the user of untrusted work passes through.
            each.parent.chmod(0o711)
        if not self.user:
            return
        temporary = folder / TEMPORARY
        temporary.mkdir(mode=0o700)
        os.chown(temporary, self.user, self.user)
        os.chown(folder, -1, self.user)
        folder.chmod(0o750)

    def _write(self, file: Path, text: str) -> None:
        new = file.with_name(f".{file.name}.new")
        new.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        opened = os.open(new, flags, 0o600)
        try:
            with os.fdopen(opened, "w", encoding="utf-8") as stream:
                stream.write(text)
            if self.user:
                os.chown(new, self.user, self.user)
            new.rename(file)
        except BaseException:
            new.unlink(missing_ok=True)
            raise


def _taken(users: Users | None, *, on_files: bool) -> User:
    if users is None:
        raise WorkReleased(
            "This worker cannot keep untrusted work apart.",
            hint='Set uids = "60800-60863" for its runtime, and run the worker as root.',
        )
    if on_files:
        users.check_files()
    return users.take()


def _folders(locations: Sequence[str]) -> Sequence[Path]:
    """Those of the places to write to that are on this machine."""
    return [path_of(each) for each in locations if each.startswith(_FILE)]


def _unwritten(error: OSError) -> WorkFailed:
    where = f" ({error.filename})" if error.filename else ""
    # A worker with a full disk would fail task after task that others can run.
    return WorkReleased(
        f"What the task is handed cannot be written: {error.strerror or error}{where}."
    )


def _is_removed(folder: Path) -> bool:
    try:
        with suppress(FileNotFoundError):
            shutil.rmtree(folder)
    except (OSError, RecursionError):
        # Untrusted work may leave folders that are deeper than this goes.
        with suppress(WorkFailed):
            remove_tree(folder)
    return not folder.exists()


def _locked(file: Path, *, flags: int = 0) -> int | None:
    """The lock that this file is; None if another has it, or if it is not the one there."""
    try:
        opened = os.open(file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
    except (FileNotFoundError, FileExistsError):
        return None
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(opened), file.lstat()):
            return opened
    except OSError:
        pass
    os.close(opened)
    return None
