"""Drops privileges for good and runs a command as another user: a script of its own.

    python -I -S privileges.py USER COMMAND…

A worker that runs as root starts processes of untrusted work through this file. Between its
start and the command there is one thread and nothing of the user, so everything that is given
up is given up before a line of theirs is read: root and all groups; the way back
(`no_new_privs`, so that no program with the setuid bit helps); core dumps, which would hold
secrets; and more processes than anybody needs, so that what has to be killed can be counted.

If the command cannot be run, the sentence about it goes over standard input, which is the
socket to the runtime, as the frame of a task that has failed (`penstock.runtimes.frames`). It
imports nothing of ours, because it is run without the paths that would find it. `hindrance` is
also used by `penstock.runtimes.uid_pool` and `penstock.runtimes.process`.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

PROCESSES_MAX: Final = 1_000
"""How many processes and threads untrusted work may have at a time."""
_NO_NEW_PRIVILEGES: Final = 38
_HEADER_BYTES: Final = 4


def hindrance(path: Path, number: int) -> Path | None:
    """What keeps a user of this number, and of no other group, from reading a file or folder.

    It is a folder on the way that the user may not enter, or the thing itself; None if there is
    none.
    What an ACL says beyond the mode is not looked at.
    """
    real = Path(os.path.realpath(path))
    # By the folders that are named, and by those that links among them lead to.
    named = Path(os.path.abspath(path))  # noqa: PTH100 - this one does not follow links
    for each in (*reversed(named.parents), *reversed(real.parents), real):
        try:
            status = each.stat()
        except OSError:
            return each
        wanted = (4 if each == real else 0) | (1 if stat.S_ISDIR(status.st_mode) else 0)
        shift = 6 if status.st_uid == number else 3 if status.st_gid == number else 0
        if (status.st_mode >> shift) & wanted != wanted:
            return each
    return None


def drop_privileges(number: int) -> None:
    """Give up everything that the user of this number does not have."""
    library = ctypes.CDLL(None, use_errno=True)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NPROC, (PROCESSES_MAX, PROCESSES_MAX))
    os.umask(0o022)
    os.setgroups([])
    os.setresgid(number, number, number)
    os.setresuid(number, number, number)
    if library.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def main(arguments: Sequence[str]) -> None:
    """Become the user, and run the command."""
    number, command = int(arguments[0]), list(arguments[1:])
    # Looked at as root: the user could not tell which folder it is.
    stopped_by = hindrance(Path(command[0]), number)
    try:
        drop_privileges(number)
    except OSError as error:
        _fail(f"No process can become the user {number}: {error.strerror or error}.")
        return
    try:
        os.execvp(command[0], command)  # noqa: S606 - the runtime's own command
    except OSError as error:
        why = error.strerror or str(error)
        where = f", because of {stopped_by}" if stopped_by is not None else ""
        _fail(
            f"The user {number} cannot run {command[0]}{where}: {why}. Name a Python that everybody"
            " can run as `python` in the settings of the runtime."
        )


def _fail(reason: str) -> None:
    said = {"type": "failed", "reason": reason, "is_retried": True, "is_clean": False}
    body = json.dumps(said).encode()
    os.write(0, len(body).to_bytes(_HEADER_BYTES, "big") + body)


if __name__ == "__main__":
    main(sys.argv[1:])
