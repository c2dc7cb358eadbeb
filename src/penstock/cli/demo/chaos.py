"""What `penstock demo --chaos` kills, and when: a worker while it runs something, the dispatcher.

Everything is killed with `kill -9`, so that nothing can be tidied up. What `penstock up` keeps is
found among the processes below this one, by its command line.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from penstock.kernel.errors import InvalidInput

_PROCESSES: Final = Path("/proc")
_LEASH: Final = "penstock.kernel.leash"


@dataclass(frozen=True, slots=True)
class Death:
    """One that is to come: of which process, and when how much of the work is done."""

    process: str
    share_done: float
    """Of all partitions."""


@dataclass(slots=True)
class Chaos:
    """What is still to be killed; `told` is called with a sentence about each."""

    told: Callable[[str], None]
    deaths: list[Death] = field(
        default_factory=lambda: [Death("worker", 0.2), Death("dispatcher", 0.5)]
    )

    def __post_init__(self) -> None:
        if not (_PROCESSES / "self" / "stat").exists():
            raise InvalidInput(
                "--chaos finds the processes to kill in /proc, which this machine does not have.",
                hint="Leave --chaos out.",
            )

    def look(self, *, share_done: float, is_running: bool) -> None:
        """Kill what is due. Nothing is killed while nothing runs: that would prove nothing."""
        if not self.deaths or not is_running or share_done < self.deaths[0].share_done:
            return
        process = self.deaths[0].process
        number = next(_running(process), None)
        if number is None:
            return
        os.kill(number, signal.SIGKILL)
        self.deaths.pop(0)
        self.told(f"kill -9 {number}: the {process} is dead, and is started again")


def _running(process: str) -> Iterator[int]:
    """The numbers of the processes below this one that run a verb of ours, as `worker`."""
    every = _processes()
    below = {os.getpid()}
    # A process is below if its parent is; as many rounds as there are levels.
    for _ in range(10):
        below |= {number for number, (parent, _) in every.items() if parent in below}
    for number in sorted(below - {os.getpid()}):
        words = every[number][1]
        if words[-3:] == ["-m", "penstock", process] and _LEASH not in words:
            yield number


def _processes() -> Mapping[int, tuple[int, list[str]]]:
    """The parent and the command line of every process, by its number."""
    found = {}
    for folder in _PROCESSES.glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(") ")[2].split()[1])
            words = (folder / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
        except (OSError, IndexError):
            # It has ended meanwhile.
            continue
        found[int(folder.name)] = (parent, [word for word in words if word])
    return found
