"""Runs one program of Postgres as the user it needs, and ends it quickly when asked to.

A script of its own, started by `penstock.dispatcher.database.local` below a leash with
`python -I`. It imports nothing of Penstock. Three things stand between a leash and Postgres:

- Postgres refuses to run as root. Then `owner` names another user, which also becomes the owner
  of the folders that are given as `folder:PATH`. The folders above them may be closed to that
  user: root opens them, and the program gets them as descriptors that it inherits, by the name
  `/proc/self/fd/N`. So no permission of a folder that is not ours has to be widened.
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
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def main(arguments: Sequence[str]) -> int:
    """Run a command until it ends. `owner` is `UID:GID`, or empty for the user that we are."""
    owner, command = arguments[0], arguments[1:]
    environment = {name: value for name, value in os.environ.items() if name[:2] != "PG"}
    environment["LC_ALL"] = "C"
    us = os.getpid()

    def end_with_us() -> None:
        # Between fork and exec, as the user that the program runs as.
        if _LIBC is not None:
            _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGINT), 0, 0, 0)
            if os.getppid() != us:
                os.kill(os.getpid(), signal.SIGINT)

    if owner:
        user, group = (int(part) for part in owner.split(":"))
        handed = [_hand_over(each, user, group) for each in command]
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
