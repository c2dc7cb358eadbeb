"""Runs one program of Postgres as the user it needs, and ends it quickly when asked to.

A script of its own, started by `penstock.dispatcher.database.local_server` below a leash with
`python -I`. It imports nothing of Penstock. Four things stand between a leash and Postgres:

- Postgres refuses to run as root. Then `owner` names another user, which also becomes the owner
  of the folders that are given as `folder:PATH`. The folders above them may be closed to that
  user: root opens them, and the program gets them as descriptors that it inherits, by the name
  `/proc/self/fd/N`. So no permission of a folder that is not ours has to be widened.
- Who has the same user number may look into a process: into its memory, its environment, and
  through `/proc/PID/fd` into the folders. Many services run as `nobody`. The kernel lets nobody
  look into a process that has a capability which they lack, so the program keeps one that opens
  nothing here (`capabilities(7)` calls it unused). The environment of root stays with root.
- SIGTERM, which a leash sends, makes Postgres wait for its clients. SIGINT does not: it rolls
  back what is open, writes what is committed, and ends.
- A leash that is killed takes this script with it and nothing else. So the kernel of Linux is asked
  to send the program the same SIGINT when this script ends; after the change of the user, which
  would undo it.
"""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

FOLDER = "folder:"

_PR_SET_PDEATHSIG = 1
_PR_SET_KEEPCAPS = 8
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_RAISE = 2
_CAPABILITY_VERSION = 0x20080522
_KEPT = (11, 10)
"""The first of these that root has here: NET_BROADCAST, which the kernel asks for nowhere; or
NET_BIND_SERVICE, which containers have, too. The server listens on no port."""
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def main(arguments: Sequence[str]) -> int:
    """Run a command until it ends. `owner` is `UID:GID`, or empty for the user that we are."""
    owner, command = arguments[0], arguments[1:]
    environment = {
        name: value
        for name, value in os.environ.items()
        if (name in ("LD_LIBRARY_PATH", "PATH") if owner else name[:2] != "PG")
    }
    environment["LC_ALL"] = "C"
    us = os.getpid()

    def end_with_us() -> None:
        # Between fork and exec, as the user that the program runs as.
        if _LIBC is not None:
            if owner:
                _keep_one_capability(_LIBC)
            _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGINT), 0, 0, 0)
            if os.getppid() != us:
                os.kill(os.getpid(), signal.SIGINT)

    if owner:
        user, group = (int(part) for part in owner.split(":"))
        handed = [_hand_over(each, user, group) for each in command]
        if _LIBC is not None:
            _LIBC.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0)  # over the change of the user, not over exec
        child = subprocess.Popen(  # noqa: S603 - the caller's own
            [name for name, _ in handed],
            env=environment,
            cwd="/",
            user=user,
            group=group,
            extra_groups=[],
            pass_fds=[number for _, number in handed if number is not None],
            preexec_fn=end_with_us,  # noqa: PLW1509 - there is no other thread
        )
    else:
        names = [each.removeprefix(FOLDER) for each in command]
        child = subprocess.Popen(  # noqa: S603 - the caller's own
            names,
            env=environment,
            preexec_fn=end_with_us,  # noqa: PLW1509 - there is no other thread
        )
    # A signal that comes before this ends us, and then the leash ends all that we have started.
    signal.signal(signal.SIGTERM, lambda *_: child.send_signal(signal.SIGINT))
    return child.wait()


def _keep_one_capability(libc: ctypes.CDLL) -> None:
    """Give up all capabilities but one, which the program keeps and can do nothing with."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    for number in _KEPT:
        # Effective, permitted, inheritable; and the same of the upper half.
        if libc.capset(header, (ctypes.c_uint32 * 6)(0, 1 << number, 1 << number)) == 0:
            libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, number, 0, 0)
            return
    libc.capset(header, (ctypes.c_uint32 * 6)())


def _hand_over(argument: str, user: int, group: int) -> tuple[str, int | None]:
    """An argument as the other user can use it, and the descriptor that it needs for that."""
    if not argument.startswith(FOLDER):
        return argument, None
    path = argument.removeprefix(FOLDER)
    os.chown(path, user, group)
    number = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    return f"/proc/self/fd/{number}", number


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
