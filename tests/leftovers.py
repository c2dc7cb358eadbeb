"""Nothing of a run of the tests outlives it, however it ends: no process, folder or socket.

The first process of a run names it, in a variable that all it starts inherit, and starts a small
guard beside itself, this module run with `-m`. What lives when the tests have ended fails the run
and is named with the test that started it. The guard removes what a run leaves that was killed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

VARIABLE: Final = "TEST_RUN_OF_PENSTOCK"
"""The folder of the run, by which its processes are known too: no setting of Penstock, which some
processes are started without."""
SECONDS_MAX: Final = 20.0
"""That what is leashed, or was told to stop, may take to end."""
_TEST: Final = b"PYTEST_CURRENT_TEST="


def of_run(run: str) -> Mapping[int, str]:
    """The processes of a run but this one and those above it, and who started which."""
    above = _above(os.getpid())
    return {number: said for number, said in _processes(run) if number not in above}


def _processes(run: str) -> Iterator[tuple[int, str]]:
    for each in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = (each / "environ").read_bytes().split(b"\0")
            if f"{VARIABLE}={run}".encode() in variables:
                by = next((one for one in variables if one.startswith(_TEST)), b"")
                words = (each / "cmdline").read_bytes().replace(b"\0", b" ")[:200].decode("latin")
                test = by.removeprefix(_TEST).decode("latin") or "no test"
                yield int(each.name), f"{words}, started by {test}"


def _above(number: int) -> set[int]:
    found: set[int] = set()
    # Some of those above may be ending.
    with contextlib.suppress(OSError):
        while number > 1:
            found.add(number)
            stat = Path(f"/proc/{number}/stat").read_text()
            number = int(stat.rpartition(") ")[2].split()[1])
    return found


def until_none(run: str, seconds: float = SECONDS_MAX) -> Mapping[int, str]:
    """What is left of a run when what ends by itself has had its time."""
    deadline = time.monotonic() + seconds
    while (left := of_run(run)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def end(run: str, left: Mapping[int, str]) -> None:
    """Kill what is left, and what that has started meanwhile."""
    while left:
        for number in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        left = until_none(run, 1)


class Guard:
    """What removes all that is left of a run, when this process ends in whatever way."""

    def __init__(self) -> None:
        self.run = tempfile.mkdtemp(prefix="penstock-tests-")
        # What servers keep below it belongs to users of their own.
        Path(self.run).chmod(0o755)
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), self.run],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        os.environ[VARIABLE] = self.run

    def close(self) -> None:
        self._process.communicate(timeout=2 * SECONDS_MAX)


def _remove_dead_sockets() -> None:
    """Of SeaweedFS, which has them in /tmp whatever it is told, and leaves them when it is killed.

    Nobody listens at them any more: those of other runs answer."""
    for each in Path("/tmp").glob("seaweedfs-*.sock"):
        with socket.socket(socket.AF_UNIX) as asked, contextlib.suppress(OSError):
            is_ours = each.stat().st_uid == os.getuid()
            if is_ours and asked.connect_ex(str(each)) == errno.ECONNREFUSED:
                each.unlink()


def main() -> None:
    (run,) = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.read()
    end(run, until_none(run))
    shutil.rmtree(run, ignore_errors=True)
    _remove_dead_sockets()


if __name__ == "__main__":
    main()
