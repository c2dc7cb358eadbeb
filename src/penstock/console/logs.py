"""The end of an attempt's log, if this dispatcher may read it.

A log is a file of the machine that the attempt ran on. Workers say where it is, and are not
believed: what is opened is `TASK-ATTEMPT.log` of the dispatcher's own folder of logs, which workers
of the same data folder write to, and only if what the worker has said, if anything, is that file.
It has to be a plain file that has no other name, and no link; so nobody can have anything else read
by it. At most its last 64 KiB are read, and what is read is text: bytes that are none, and signs
that steer a terminal, are left out or replaced.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.runtimes.places import Places

TAIL_BYTES_MAX: Final = 64 * 1024

_STEERING: Final = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])"
)
_UNSEEN: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


@dataclass(frozen=True, slots=True)
class Tail:
    """The end of a log."""

    text: str
    bytes: int
    """Of the whole file."""
    is_cut: bool
    """Whether there is more before it."""


def would_be_here(logs: Path, *, task_id: int, attempt: int, said: str | None) -> bool:
    """Whether the log would be here if its worker were on this machine and it had printed."""
    file = Path(Places("file:///", logs).log(task_id=task_id, attempt=attempt))
    return said is None or _is_same(said, file)


def tail_of(logs: Path | None, *, task_id: int, attempt: int, said: str | None) -> Tail | None:
    """The end of the log of an attempt; None if it is not here. `said` is what its worker says.

    Reads a file: to be called in a thread.
    """
    if logs is None:
        return None
    file = Path(Places("file:///", logs).log(task_id=task_id, attempt=attempt))
    if said is not None and not _is_same(said, file):
        return None
    try:
        # Without waiting for whoever writes to what only looks like a file.
        opened = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        about = os.fstat(opened)
        if not stat.S_ISREG(about.st_mode) or about.st_nlink != 1:
            return None
        is_cut = about.st_size > TAIL_BYTES_MAX
        content = os.pread(opened, TAIL_BYTES_MAX, max(0, about.st_size - TAIL_BYTES_MAX))
    except OSError:
        return None
    finally:
        os.close(opened)
    if is_cut:
        # The rest of a line is no line; one that is longer than everything is shown all the same.
        content = content.partition(b"\n")[2] or content
    return Tail(as_text(content), about.st_size, is_cut)


def as_text(content: bytes) -> str:
    """What was printed, as lines of text."""
    text = content.decode("utf-8", "replace").replace("\r\n", "\n").replace("\r", "\n")
    return _UNSEEN.sub("", _STEERING.sub("", text))


def _is_same(said: str, file: Path) -> bool:
    """Whether a worker means this file, by whatever way to its folder."""
    try:
        named = Path(said)
        return named.name == file.name and named.parent.resolve() == file.parent.resolve()
    except (OSError, ValueError, RuntimeError):
        return False
