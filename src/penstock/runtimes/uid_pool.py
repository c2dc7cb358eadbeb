"""A pool of users for untrusted work: one for each attempt, and nobody else's meanwhile.

`uids = "60800-60863"` in the settings of a runtime names uids that belong to no account. A
worker that runs as root takes one for each untrusted attempt, and gives it the folders that the
attempt may write to. When the attempt is over, every process of the user is killed, the folders
are reclaimed, and the uid is free for another.

| state of a uid | its file in `folder` | who moves it |
|---|---|---|
| free | is not locked, and empty | `UidPool.take` |
| taken | is locked by its worker, and lists the folders that were given | `LeasedUid.end` |
| left by a killed worker | is not locked, and lists folders | `UidPool.take`, after ending it |
| spoilt: it could not be ended | is locked as long as that worker lives | the next `take` then |

Invariants: no two attempts on a machine have one uid at a time, whichever workers they are of
(the lock is the kernel's, and ends with its holder). A uid is free only when no process runs as
it, and when every folder that it was given is closed to it or has nothing that it owns, so that
who has it next can change nothing of what was published before. The list is written before the
first folder is given. A crash at any point leaves a file that is not locked and lists folders,
and maybe processes: the guard of the worker kills those (`penstock.runtimes.guard`), and `take`
ends what is left and closes the folders. Nobody was told of the end of that attempt, so nothing
in them is published.

A folder is *given* to the user of the work, then *closed*, which is one step and makes it root's
alone, and then, if it is an output of work that has ended well, *reclaimed*: everything below it
becomes the worker's, nobody else can write to it, and others may read it again.

    given ──close──▶ closed ──reclaim_folder──▶ the worker's, readable
                        └────────────────────▶ closed for good, and the attempt fails

An output is reclaimed only if it has nothing but folders and plain files that are the user's
and have one name each. So there is no link through which somebody reads another file or changes
this one, no file of a neighbour who goes on to own it, no pipe that a reader would wait for,
and no file that some other process still has open to write to. Nothing is mended: work that
leaves such things fails, and its folder stays closed. It may be large or deep beyond what is
looked at; then too.

Others of hostile users may run, and have files and folders in there open, so nothing is done by
path: a folder is made the worker's before it is looked into, from where on nobody can put
anything into it, and everything is opened in its folder, without following links.

What is not defended: what a user writes where everybody may, as in /tmp, stays there, and the
next one of that uid owns it. Uids are taken in turn, so that this is late. On a store of files
a user reads what everybody may, which is every dataset: folders of this machine are given only
where `untrusted_on_files` says so. All of it blocks, for seconds at most unless the output has
many files: called from threads.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import pwd
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from penstock.kernel.errors import InvalidInput, WorkFailed, WorkReleased
from penstock.runtimes.guard import kill_user
from penstock.runtimes.privileges import hindrance

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
_PLAIN_FILES_HINT: Final = (
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


def reclaim_folder(folder: Path, *, user: int) -> None:
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
            f"The output {folder} of untrusted work cannot be reclaimed: {error.strerror or error}."
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
    return WorkFailed(f"The output of untrusted work has {what}{shown}.", hint=_PLAIN_FILES_HINT)


_log = logging.getLogger(__name__)

FOLDER: Final = "/var/lib/penstock/users"
"""Where the locks are: one place for all workers of a machine, which only root can write to."""
_RANGE: Final = re.compile(r"([0-9]{1,10})-([0-9]{1,10})")
_LEAST: Final = 1_000
_MOST: Final = 2**31 - 2
_COUNT_MAX: Final = 4_096
_RECORD_BYTES_MAX: Final = 2**20
_SUBORDINATE: Final = (Path("/etc/subuid"), Path("/etc/subgid"))
_OF_SYSTEMD: Final = (
    (61_184, 65_519, "for services with DynamicUser"),
    (65_534, 65_535, "for nobody"),
    (524_288, 1_879_048_191, "for containers"),
)
"""Numbers that a machine with systemd gives to others, without an account: see its UIDS-GIDS.md."""
_REMOVING_SECONDS: Final = 600.0
_PATH: Final = "/usr/bin:/bin"
_UIDS_HINT: Final = (
    'Run a worker as root, on Linux, with uids = "60800-60863" in the settings of the runtime:'
    " numbers of users that no account has."
)


class UidPool:
    """The numbers of one runtime."""

    def __init__(self, *, first: int, last: int, folder: Path, is_on_files: bool = False) -> None:
        self._numbers = range(first, last + 1)
        self._folder = folder
        self._is_on_files = is_on_files
        self._lock = threading.Lock()
        self._turn = 0

    @classmethod
    def of(cls, said: str, folder: str, *, is_on_files: bool = False) -> UidPool:
        """The users of a setting such as 60800-60863."""
        found = _RANGE.fullmatch(said.strip())
        first, last = (int(found[1]), int(found[2])) if found is not None else (0, 0)
        if not _LEAST <= first <= last <= _MOST or last - first >= _COUNT_MAX:
            raise InvalidInput(
                f"uids has {said[:100]!r}, which is no range of users for untrusted work.",
                hint=f"Write the first and the last number, as in 60800-60863: at least {_LEAST},"
                f" and at most {_COUNT_MAX:,} of them.",
            )
        for start, end, whose in (*_OF_SYSTEMD, *_subordinate()):
            if first <= end and start <= last:
                raise InvalidInput(
                    f"uids has {said}, of which {max(first, start)}-{min(last, end)} may become"
                    f" somebody else's: they are {whose}.",
                    hint="Name others, as in 60800-60863, which nothing on a machine gives out.",
                )
        return cls(first=first, last=last, folder=Path(folder), is_on_files=is_on_files)

    def check_files(self) -> None:
        """Refuse work whose data is in folders of this machine, unless the settings allow it."""
        if not self._is_on_files:
            raise WorkReleased(
                "This worker runs no untrusted work on a file:// store, where it could read every"
                " dataset.",
                hint="Keep the data in a bucket; or set untrusted_on_files = true in the settings"
                " of the runtime, if untrusted code may read all that is in the store.",
            )

    def take(self) -> LeasedUid:
        """A user whom nobody else is, and of whom nothing is left."""
        if sys.platform != "linux" or os.geteuid() != 0:
            raise WorkReleased(
                "This worker cannot keep untrusted work apart: it does not run as root on Linux.",
                hint=_UIDS_HINT,
            )
        self._check_folder()
        for number in self._in_turn():
            _check_unknown(number)
            user = LeasedUid.locked(number, self._folder / str(number))
            if user is None:
                continue
            try:
                user.clear()
            except (WorkFailed, OSError) as error:
                _log.error("the user %d stays unused: %s", number, error)
                user.unlock()
                continue
            return user
        raise WorkReleased(
            f"All {len(self._numbers)} users for untrusted work are taken.",
            hint="Name more of them by `uids` in the settings of the runtime.",
        )

    def _in_turn(self) -> Sequence[int]:
        with self._lock:
            turn = self._turn
            self._turn = (turn + 1) % len(self._numbers)
        return [*self._numbers[turn:], *self._numbers[:turn]]

    def _check_folder(self) -> None:
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = self._folder.lstat()
        except OSError as error:
            raise WorkFailed(
                f"{self._folder}, the folder of users for untrusted work, cannot be made:"
                f" {error.strerror or error}.",
                hint="Name another by `uids_folder` in the settings of the runtime.",
            ) from error
        if self._folder.is_symlink() or status.st_uid != 0 or status.st_mode & 0o022:
            raise WorkFailed(
                f"{self._folder}, the folder of users for untrusted work, is not root's alone.",
                hint=f"Have it so by chown root {self._folder} and chmod 700 {self._folder}.",
            )


class LeasedUid:
    """One number that is taken, until `end` has given it back."""

    def __init__(self, number: int, lock: int) -> None:
        self.number = number
        self._file = lock
        self._outputs: Sequence[Path] = ()

    @classmethod
    def locked(cls, number: int, file: Path) -> LeasedUid | None:
        """Take a number, if nobody has it."""
        opened = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(opened)
            return None
        return cls(number, opened)

    def give(self, outputs: Sequence[Path], *, scratch: Sequence[Path] = ()) -> None:
        """Make folders for what the user writes, and give them to it. Outputs may be published."""
        folders = [*outputs, *scratch]
        self._record(folders)
        self._outputs = outputs
        for each in folders:
            each.mkdir(parents=True, exist_ok=True)
            os.chown(each, self.number, self.number, follow_symlinks=False)
            if (stopped_by := hindrance(each, self.number)) is not None:
                raise WorkFailed(
                    f"The user {self.number} of untrusted work cannot reach {each}, because of"
                    f" {stopped_by}.",
                    hint=f"Let everybody enter it by chmod o+x {stopped_by}, or keep the data"
                    " elsewhere.",
                )

    def clear(self) -> None:
        """End all processes of the user, and close its folders; `WorkFailed` if some stays."""
        self._stop()
        os.ftruncate(self._file, 0)

    def end(self) -> None:
        """Give the number back, and its outputs to whoever reads them.

        `WorkFailed` says that the outputs are not to be published. If something cannot be ended,
        the number stays taken as long as this process.
        """
        try:
            self._stop()
        except (WorkFailed, OSError) as error:
            _log.error("the user %d of untrusted work stays in use: %s", self.number, error)
            raise WorkFailed(
                f"Processes of the untrusted work cannot be killed: {error}"
            ) from error
        try:
            for each in self._outputs:
                reclaim_folder(each, user=self.number)
        except WorkFailed as error:
            _log.warning("an output of the user %d stays closed: %s", self.number, error)
            raise
        finally:
            # Also of outputs that stay closed: the user cannot reach into them.
            os.ftruncate(self._file, 0)
            self.unlock()

    def _stop(self) -> None:
        if not kill_user(self.number):
            raise WorkFailed(f"Processes of the user {self.number} cannot be killed.")
        for each in self._recorded():
            close(each)

    def unlock(self) -> None:
        """Let another process have the number."""
        os.close(self._file)

    def _record(self, folders: Sequence[Path]) -> None:
        body = json.dumps([str(each) for each in folders]).encode()
        if os.pwrite(self._file, body, 0) != len(body):
            raise OSError("the list of folders could not be written whole")
        os.ftruncate(self._file, len(body))
        os.fsync(self._file)

    def _recorded(self) -> Sequence[Path]:
        body = os.pread(self._file, _RECORD_BYTES_MAX, 0)
        if not body:
            return []
        try:
            return [Path(each) for each in json.loads(body)]
        except ValueError:
            # Cut off while it was written, so before anything was given.
            return []


def _subordinate() -> Iterator[tuple[int, int, str]]:
    """The numbers that accounts of this machine may give to containers of theirs."""
    for file in _SUBORDINATE:
        try:
            lines = file.read_text("utf-8", "replace").splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, numbers = line.partition(":")
            start, _, count = numbers.partition(":")
            if start.isdecimal() and count.isdecimal():
                yield int(start), int(start) + int(count) - 1, f"{name}'s in {file}"


def _check_unknown(number: int) -> None:
    try:
        name = pwd.getpwuid(number).pw_name
    except KeyError:
        return
    raise WorkFailed(
        f"The user {number} of `uids` is {name}, who has an account here.",
        hint="Name numbers that no account has.",
    )


def remove_tree(folder: Path) -> None:
    """Remove a folder with what a user has written to it, however deep."""
    program = shutil.which("rm", path=_PATH)
    if program is None:
        raise WorkFailed(f"There is no rm in {_PATH}.")
    _run([program, "-rf", "--", str(folder)])


def _run(command: Sequence[str]) -> None:
    try:
        ended = subprocess.run(  # noqa: S603 - our own
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env={"LC_ALL": "C"},
            timeout=_REMOVING_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise WorkFailed(f"{command[0]} has failed: {error}.") from error
    if ended.returncode != 0:
        said = ended.stderr.decode("utf-8", "replace").strip().partition("\n")[0]
        raise WorkFailed(f"{command[0]} has failed: {said}.")
