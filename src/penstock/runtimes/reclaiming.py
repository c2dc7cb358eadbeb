"""Takes back the folders that untrusted work wrote to, before anything in them is published.

A folder is *given* to the user of the work, then *closed*, which is one step and makes it root's
alone, and then, if it is an output of work that has ended well, *taken back*: everything below it
becomes the worker's, nobody else can write to it, and others may read it again.

    given  --close-->  closed  --take_back-->  the worker's, readable
                          \\--------------------  closed for good, and the attempt fails

An output is taken back only if it has nothing but folders and plain files that are the user's and
have one name each. So there is no link through which somebody reads another file or changes this
one, no file of a neighbour who goes on to own it, no pipe that a reader would wait for, and no file
that some other process still has open to write to. Nothing is mended: work that leaves such things
fails, and its folder stays closed. It may be large or deep beyond what is looked at; then too.

Every process of the user has ended before. Others of hostile users may run, and have files and
folders in there open, so nothing is done by path: a folder is made the worker's before it is looked
into, from where on nobody can put anything into it, and everything is opened in its folder, without
following links. The way to the folders that were given is the worker's own. A crash leaves a folder
closed. It costs a few system calls for each file.
"""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import threading
from pathlib import Path
from typing import Final

from penstock.kernel.errors import WorkFailed

FILES_MAX: Final = 100_000
"""How many files and folders an output of untrusted work has at most."""
DEPTH_MAX: Final = 64
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW | os.O_CLOEXEC
_READABLE: Final = 0o755
"""What is left of a mode: nobody but the owner writes, and nobody becomes another by it."""
_NAME_CHARACTERS_MAX: Final = 200
_LOOKS_MAX: Final = 50
_LOOK_SECONDS: Final = 0.02
_HINT: Final = (
    "Write plain files and folders, each once, and no links: what untrusted work has written is"
    " published only if nobody else can reach it."
)


def close(folder: Path) -> None:
    """Make a folder root's alone, so that nobody else reaches what is below it; if it is there."""
    try:
        opened = os.open(folder, _FOLDER)
    except FileNotFoundError:
        return
    try:
        os.fchmod(opened, stat.S_IRWXU)
        os.fchown(opened, os.geteuid(), os.getegid())
    finally:
        os.close(opened)


def take_back(folder: Path, *, user: int) -> None:
    """Let others read a closed folder again, if it can be published; `WorkFailed` says why not."""
    try:
        top = os.open(folder, _FOLDER)
    except FileNotFoundError:
        return
    try:
        _Taking(top, user).run()
        os.fchmod(top, _READABLE)
    except OSError as error:
        raise WorkFailed(
            f"The output {folder} of untrusted work cannot be taken back:"
            f" {error.strerror or error}."
        ) from error
    finally:
        os.close(top)


class _Taking:
    """One walk over what is below a closed folder."""

    def __init__(self, top: int, user: int) -> None:
        self._top = top
        self._user = user
        self._left: list[tuple[str, ...]] = [()]
        self._found = 0
        self._looks = 0

    def run(self) -> None:
        """Visit every folder, one open at a time, so that no depth is too deep for us."""
        while self._left:
            parts = self._left.pop()
            folder = self._open(parts)
            try:
                self._visit(folder, parts)
            finally:
                os.close(folder)

    def _open(self, parts: tuple[str, ...]) -> int:
        """Open a folder, whose way from the top has been taken back already."""
        opened = os.dup(self._top)
        for name in parts:
            above = opened
            try:
                opened = os.open(name, _FOLDER, dir_fd=above)
            finally:
                os.close(above)
        return opened

    def _visit(self, folder: int, parts: tuple[str, ...]) -> None:
        if parts:
            status = os.fstat(folder)
            if status.st_uid != self._user:
                raise _fault("a folder of another user", parts)
            self._own(folder, status.st_mode | stat.S_IXUSR)
        # What it says of files to come is no part of its mode.
        _forget_default_acl(folder)
        with os.scandir(folder) as entries:
            for entry in entries:
                named = (*parts, entry.name)
                self._found += 1
                if self._found > FILES_MAX:
                    raise _fault(f"more than {FILES_MAX:,} files and folders", ())
                if not entry.is_dir(follow_symlinks=False):
                    self._take_file(folder, named)
                elif len(named) > DEPTH_MAX:
                    raise _fault(f"folders more than {DEPTH_MAX} deep", ())
                else:
                    self._left.append(named)

    def _take_file(self, folder: int, named: tuple[str, ...]) -> None:
        self._check(os.stat(named[-1], dir_fd=folder, follow_symlinks=False), named)
        file = os.open(named[-1], _FILE, dir_fd=folder)
        try:
            status = os.fstat(file)
            self._check(status, named)
            self._own(file, status.st_mode)
            while _is_open_elsewhere(file):
                # The kernel may not be done with what has just ended.
                self._looks += 1
                if self._looks > _LOOKS_MAX:
                    raise _fault("a file that another process has open to write to", named)
                threading.Event().wait(_LOOK_SECONDS)
        finally:
            os.close(file)

    def _check(self, status: os.stat_result, named: tuple[str, ...]) -> None:
        if not stat.S_ISREG(status.st_mode):
            raise _fault("a link, a pipe or another thing that is no file", named)
        if status.st_uid != self._user:
            raise _fault("a file of another user", named)
        if status.st_nlink != 1:
            raise _fault("a file that has more than one name, by a hard link", named)

    def _own(self, opened: int, mode: int) -> None:
        # Before it is root's: it must not be root's with the bit that makes others root. The part
        # for the group is also the most that an access list gives anybody.
        os.fchmod(opened, (mode | stat.S_IRUSR | stat.S_IWUSR) & _READABLE)
        os.fchown(opened, os.geteuid(), os.getegid())


def _is_open_elsewhere(file: int) -> bool:
    """Whether anybody can still write to a file, though its mode would not let them any more.

    A lease is given only if nobody can. It ends when the file is closed here. File systems without
    leases do not tell.
    """
    try:
        # Should root write to it right now, we would be told so, by default by being ended.
        fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _forget_default_acl(folder: int) -> None:
    try:
        os.removexattr(folder, "system.posix_acl_default")
    except OSError:
        # There is none, or there are none in this file system.
        return


def _fault(what: str, named: tuple[str, ...]) -> WorkFailed:
    name = "/".join(named)
    shown = f": {name[:_NAME_CHARACTERS_MAX]!r}" if named else ""
    return WorkFailed(f"The output of untrusted work has {what}{shown}.", hint=_HINT)
