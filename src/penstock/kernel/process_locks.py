"""Proof that a process of this machine has ended: a file lock that only its end releases.

A process that holds leases somewhere takes a lock here first, under a random id, its *incarnation*,
and writes the incarnation into its leases. Whoever starts later on the same machine sees which
incarnations have ended, and need not wait for those leases.

    {folder}/{incarnation}.lock     locked (`flock`) by the process, and by all who inherited it

| the file is | means |
|---|---|
| locked | the process lives, or a child of it that inherited the descriptor; or it is frozen |
| not locked, whole, of this boot, in its own inode | the process has ended, with all of these |
| anything else | nothing is known: the leases decide |

What makes it a proof:

- `flock` belongs to the open file, not to a process. A fork shares it, and so does every program
  that is started with the descriptor: it is inheritable, and our own children are given it
  (`descriptor`). It is released when the last of them has ended, however they end.
- The kernel keeps it, for all processes on this machine, in whatever namespace or container. So
  pids, names and host names prove nothing and are not looked at.
- Only file systems of which this kernel alone is the judge: the list below. On network and FUSE
  file systems, and on those that are not known, nothing is locked and nothing is proved.
- The file names the boot in which it was made. A disk that is seen by another machine, or after a
  reboot, proves nothing.
- The file names its own device and inode. A copy of it, in a snapshot or an image or on another
  mount of the same layers, is not locked by anybody, and proves nothing.
- It is written when it is locked. One that is empty may be about to be locked.

What it does not prove: that programs have ended which were started without the descriptor, as
Python's `subprocess` does unless it is told otherwise. Whoever ends such programs when the process
has died is given it (`held_descriptors`): the guard of a runtime keeps the lock until it has.

A crash leaves a file that nobody locks, which is the proof. Files of other boots, those that were
not refreshed for `KEPT_SECONDS`, and all but the last `FILES_MAX` are removed by whoever looks, if
nobody locks them; ids are never used twice, so a remove can meet nobody else's file. Used by the
workers of a queue and by those of a pipeline.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import logging
import os
import stat
import sys
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Final

from penstock.kernel.clock import SystemClock
from penstock.kernel.entropy import Entropy, new_id

KEPT_SECONDS: Final = 86_400.0
FILES_MAX: Final = 200
"""So many files are kept, the ones that were used last: a worker may die every second, all day."""
_FILES_SEEN_MAX: Final = 5000
_SUFFIX: Final = ".lock"
_BYTES_MAX: Final = 4096
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")

LOCAL_FILE_SYSTEMS: Final = {
    0xEF53: "ext",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0x01021994: "tmpfs",
    0x794C7630: "overlay",
    0x2FC12FC1: "zfs",
    0xF2F52010: "f2fs",
    0xCA451A4E: "bcachefs",
}
"""File systems whose locks are this kernel's own, by the magic numbers of `statfs`."""

_log = logging.getLogger(__name__)
_held: dict[int, tuple[int, int]] = {}
"""The descriptors of the locks of this process, and which files they are of."""


def held_descriptors() -> tuple[int, ...]:
    """What a program inherits that this process leaves to end what it cannot end itself."""
    return tuple(each for each, file in _held.items() if _is_of(each, file))


class ProcessLock:
    """The lock of one incarnation, held until `release` or the end of the process."""

    def __init__(self, incarnation: str, descriptor: int, path: Path) -> None:
        self.incarnation = incarnation
        self.descriptor = descriptor
        """For children: what inherits it counts as this process."""
        self._path = path
        _held[descriptor] = _identity(descriptor)

    def refresh(self) -> None:
        """Say that it is in use, so that its file is kept for as long after its end."""
        with suppress(OSError):
            os.utime(self.descriptor)

    def release(self) -> None:
        """Let go: only if nothing is left that others would have to take over."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
        _held.pop(self.descriptor, None)
        os.close(self.descriptor)


class ProcessLocks:
    """The locks in one folder."""

    def __init__(self, folder: Path, *, entropy: Entropy) -> None:
        self._folder = folder
        self._entropy = entropy

    def acquire(self) -> ProcessLock | None:
        """A lock under a new incarnation; None if nothing could be proved with it here."""
        try:
            boot = _boot()
            self._check_folder()
            return self._acquire(boot)
        except OSError as error:
            _log.info(
                "no process lock in %s: after a crash, takeover waits until leases expire (%s)",
                self._folder,
                error,
            )
            return None

    def _acquire(self, boot: str) -> ProcessLock:
        incarnation = new_id(self._entropy, characters=16)
        path = self._folder / f"{incarnation}{_SUFFIX}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        descriptor = os.open(path, flags, 0o600)
        try:
            _check_file_system(descriptor)
            # Whoever looks at it in this moment has it for microseconds.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            os.write(descriptor, json.dumps([boot, *_identity(descriptor)]).encode())
            os.set_inheritable(descriptor, True)  # noqa: FBT003 - it has no name
        except BaseException:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            raise
        return ProcessLock(incarnation, descriptor, path)

    def _check_folder(self) -> None:
        """Only a folder of this user's own: what others may write proves nothing."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = self._folder.stat()
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o022:
            raise PermissionError("the folder can be written by others")

    def ended(self) -> frozenset[str]:
        """The incarnations that have surely ended. Removes what is of no use any more."""
        try:
            boot = _boot()
            self._check_folder()
            names = self._names()
        except OSError:
            return frozenset()
        ended = [
            self._ended(name, boot, is_one_too_many=number >= FILES_MAX)
            for number, name in enumerate(names)
        ]
        return frozenset(each for each in ended if each)

    def forget(self, incarnation: str) -> None:
        """Remove the proof that an incarnation has ended: nobody needs it any more."""
        with suppress(OSError):
            (self._folder / f"{incarnation}{_SUFFIX}").unlink(missing_ok=True)

    def _names(self) -> list[str]:
        """The files here, those first that were used last."""
        used: dict[str, float] = {}
        with os.scandir(self._folder) as entries:
            for each in islice(entries, _FILES_SEEN_MAX):
                with suppress(FileNotFoundError):
                    if each.name.endswith(_SUFFIX):
                        used[each.name] = each.stat(follow_symlinks=False).st_mtime
        return sorted(used, key=lambda name: -used[name])

    def _ended(self, name: str, boot: str, *, is_one_too_many: bool) -> str:
        """The incarnation of a file, if it has surely ended."""
        path = self._folder / name
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return ""
        try:
            _check_file_system(descriptor)
            # Shared: two who look at the same time do not take each other for the owner.
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            said = _said(os.read(descriptor, _BYTES_MAX))
            is_old = SystemClock().wall() - os.fstat(descriptor).st_mtime > KEPT_SECONDS
            if is_old or is_one_too_many or (said and said[0] != boot):
                path.unlink(missing_ok=True)
            is_proof = said == [boot, *_identity(descriptor)]
        except OSError:
            return ""
        finally:
            os.close(descriptor)
        return name.removesuffix(_SUFFIX) if is_proof else ""


def _is_of(descriptor: int, file: tuple[int, int]) -> bool:
    try:
        return _identity(descriptor) == file
    except OSError:
        return False


def _identity(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


def _said(body: bytes) -> list[object]:
    with suppress(ValueError):
        said = json.loads(body)
        if isinstance(said, list):
            return said
    return []


def _boot() -> str:
    if sys.platform != "linux":
        raise OSError("only Linux is known to prove it")
    return _BOOT.read_text().strip()


def _check_file_system(descriptor: int) -> None:
    kind = file_system(descriptor)
    if kind not in LOCAL_FILE_SYSTEMS:
        raise OSError(f"a file system of type {kind:#x} is not known to be local")


def file_system(descriptor: int) -> int:
    """The type of the file system of an open file, as `statfs` numbers them."""
    buffer = ctypes.create_string_buffer(512)
    if ctypes.CDLL(None, use_errno=True).fstatfs(descriptor, buffer) != 0:
        raise OSError(ctypes.get_errno(), "fstatfs failed")
    # Its first field is a long: what is laid out in another way is not in the list either.
    return ctypes.c_long.from_buffer(buffer).value & 0xFFFFFFFF
