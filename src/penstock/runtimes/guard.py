"""A small process that outlives a runtime by a moment, to kill what the runtime has left behind.

A runtime that is killed with `kill -9` can end nothing. Its children notice, but what *they*
have started would live on if the kernel is quicker to end a child than the child its own
process group. So one guard a runtime, this file run as a script, is told the number of every
process group over a pipe that nobody else holds. When the pipe closes, it kills them all, and
ends.

A group is registered before anything of the user runs in it, and taken back before its number
is free for others. What is in the session of its leader, though it has a group of its own (the
Python workers of Spark do), is ended too, where the kernel tells (`/proc`). With the group of
untrusted work comes the uid that is its alone: then every process of that user is ended,
wherever it has hidden itself (`kill_user`). A guard that is itself killed is replaced when the
next group is registered. The lock by which the end of this process is proved
(`kernel.process_locks`) is given to it: so it is proved when nothing of the groups runs any
more, and not before.

With a uid as its argument the script does one thing: it becomes that user and kills all that the
user has, at one instant.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final

_END_SECONDS: Final = 5.0
_PROCESSES: Final = Path("/proc")
_LOOKS_MAX: Final = 10
"""How often a session is looked at: what is killed may have made a process meanwhile."""
_USER_LOOKS_MAX: Final = 200
_USER_LOOK_SECONDS: Final = 0.02
_NOBODY_FROM: Final = 2**31
"""Above all numbers of users that are taken for untrusted work."""


class Guard:
    """The runtime's side. Its methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: dict[int, int] = {}
        """The users of the groups; 0 for our own."""
        self._process: subprocess.Popen[bytes] | None = None

    def watch(self, group: int, *, user: int = 0) -> None:
        """Name a group that is to end with this process, and all of its user if it has its own."""
        with self._lock:
            self._groups[group] = user
            if not self._say(f"+{group} {user}\n"):
                self._replace()

    def forget(self, group: int) -> None:
        """Take a group back, which has ended."""
        with self._lock:
            self._groups.pop(group, None)
            self._say(f"-{group} 0\n")

    def close(self) -> None:
        """End the guard. No group may be left."""
        with self._lock:
            self._end()

    def _say(self, line: str) -> bool:
        if self._process is None or self._process.poll() is not None:
            return False
        assert self._process.stdin is not None
        try:
            # Short enough to be written whole, and no buffer that somebody would have to flush.
            os.write(self._process.stdin.fileno(), line.encode())
        except BrokenPipeError:
            return False
        return True

    def _replace(self) -> None:
        # Here, so that the script imports nothing of ours.
        from penstock.kernel.process_locks import held_descriptors  # noqa: PLC0415

        self._end()
        self._process = subprocess.Popen(  # noqa: S603 - our own
            [sys.executable, "-I", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            bufsize=0,
            # A Ctrl-C in the terminal is for the runtime.
            start_new_session=True,
            env={},
            pass_fds=held_descriptors(),
        )
        for group, user in self._groups.items():
            self._say(f"+{group} {user}\n")

    def _end(self) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None


def main() -> None:
    """Remember groups until standard input ends; then kill them."""
    groups: dict[int, int] = {}
    for line in sys.stdin:
        group, user = map(int, line[1:].split())
        groups.pop(group, None)
        if line.startswith("+"):
            groups[group] = user
    for group, user in groups.items():
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
        kill_session(group)
        if user:
            kill_user(user)


def kill_session(leader: int, *, but: int = 0) -> None:
    """Kill what is left of a session, except for one process.

    Its leader is one of ours, which has not been waited for: its number is not a stranger's.
    """
    for _ in range(_LOOKS_MAX):
        members = [member for member in session_members(leader) if member != but]
        for member in members:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(member, signal.SIGKILL)
        if not members:
            return


def kill_user(number: int) -> bool:
    """Kill every process of a user whom nobody else may be; whether none is left.

    Looking for processes and killing what was found is not enough: one that forks and ends all the
    time is always another by the time that it is looked at. So a process of ours becomes the user
    and kills all others of it by one call, during which the kernel lets nobody fork. Only after
    that does it count that none is seen: what is still seen is about to end and makes no other.
    """
    assert number > 0, "root is everybody"
    pause = threading.Event()
    for _ in range(_USER_LOOKS_MAX):
        if _is_struck(number) and not user_processes(number):
            return True
        pause.wait(_USER_LOOK_SECONDS)
    return False


def _is_struck(number: int) -> bool:
    """Whether all that the user had a moment ago was sent a signal that ends it."""
    try:
        ended = subprocess.run(  # noqa: S603 - our own
            [sys.executable, "-I", "-S", __file__, str(number)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            env={},
            timeout=_END_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return ended.returncode == 0


def strike(number: int) -> None:
    """Become a user, for good, and kill every process of it but this one.

    Nothing is run as the user in between, and no process of the user can look into this one. Nor
    can it be quicker and kill this one: the right to do so goes by the real user, and that is one
    whom nobody is, where the kernel knows so many. Where it does not, a killed one is seen by its
    end, and another is started.
    """
    nobody = _NOBODY_FROM + number
    os.setgroups([])
    os.setresgid(number, number, number)
    try:
        os.setresuid(nobody, number, nobody)
    except OSError:
        os.setresuid(number, number, number)
    if 0 in os.getresuid():
        raise PermissionError("refusing to kill every process as root")
    # There is none, or none but those of others.
    with suppress(ProcessLookupError, PermissionError):
        os.kill(-1, signal.SIGKILL)


def user_processes(number: int) -> list[int]:
    """The processes that are this user's in any way, without those that have ended."""
    there = [int(each.name) for each in _PROCESSES.iterdir() if each.name.isdigit()]
    return [process for process in there if _is_living_of(process, number)]


def session_members(leader: int) -> list[int]:
    """The processes of a session, without those that have ended; none where nobody tells."""
    try:
        there = [int(each.name) for each in _PROCESSES.iterdir() if each.name.isdigit()]
    except OSError:
        return []
    return [process for process in there if _is_living_member(process, leader)]


def resident_bytes(process: int) -> int:
    """How much memory a process has for itself, and its part of what it shares; 0 if it is gone.

    Root may not look so closely at others in most containers, and nobody at a process that has
    forbidden it. What everybody may know is then counted: all that it shares, too.
    """
    for file, names in (
        ("smaps_rollup", ("Pss:", "SwapPss:")),
        ("status", ("RssAnon:", "RssShmem:", "VmSwap:")),
    ):
        with suppress(OSError):
            text = (_PROCESSES / str(process) / file).read_text("utf-8", "replace")
            sizes = [line.split()[1] for line in text.split("\n") if line.startswith(names)]
            return sum(map(int, sizes)) * 1024
    return 0


def _is_living_member(process: int, leader: int) -> bool:
    try:
        # The name of the program may hold anything; what follows its last bracket may not.
        state, _, _, session = (
            (_PROCESSES / str(process) / "stat")
            .read_text(encoding="utf-8", errors="replace")
            .rpartition(")")[2]
            .split()[:4]
        )
    except (OSError, ValueError):
        return False
    return state not in "ZX" and int(session) == leader


def _is_living_of(process: int, number: int) -> bool:
    try:
        text = (_PROCESSES / str(process) / "status").read_text("utf-8", "replace")
    except OSError:
        return False
    # The first line has the program's own name, in which the kernel writes ends of lines otherwise.
    fields = dict(line.split(":", 1) for line in text.split("\n") if ":" in line)
    state, users = fields.get("State", "").split(), fields.get("Uid", "").split()
    # Where the first thread has ended and others go on, it looks like a process that has ended.
    has_ended = state[:1] in (["Z"], ["X"]) and fields.get("Threads", "1").strip() in {"0", "1"}
    return not has_ended and str(number) in users


if __name__ == "__main__":
    if len(sys.argv) > 1:
        strike(int(sys.argv[1]))
    else:
        main()
