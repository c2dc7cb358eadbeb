"""What a job may ask of a runtime with children, `memory` and `cpu`, and how memory is bounded.

`memory` is a limit on Linux. Of each process: an allocation beyond it fails (`limit_memory`),
and who is not root cannot raise it again. Of all processes of a task together: by a control
group where one can be made, else by samples (`process`). `cpu` is advice, which the user's code
reads by `task.resources`. Both have defaults in the registry, and a job's own values win.

A limit of the kernel for one process is doubled by a fork. A control group counts what all
processes of a child use together, also what they share, and there is no way out of it for a
process that is not root. It is found where this process may make groups below its own:

- version 2 of control groups: its own group already bounds memory below itself; or the group, or
  the one above it, was delegated (`Delegate=` of systemd, a container with a writable one). Of a
  delegated group with processes in it, these move to a group `penstock-worker` first, because the
  kernel wants processes in leaves only;
- version 1: below its own group in the hierarchies `memory` and `pids`.

A group is removed when its child has ended, with what is left in it. A worker that is killed
leaves groups that are empty as soon as its guard has ended the processes; the next worker
removes them (`sweep`), known by the number and the start of the process that has made them.
Control groups are handled by calls that block for moments.
"""

from __future__ import annotations

import itertools
import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from penstock.kernel.units import memory_bytes
from penstock.runtimes.base import RuntimeFault

_KNOWN: Final = ("memory", "cpu")


def resource_faults(resources: Mapping[str, Any], *, runtime: str) -> Iterator[RuntimeFault]:
    """What is wrong with what a job asks for."""
    for name in resources:
        if name not in _KNOWN:
            known = " and ".join(_KNOWN)
            message = f"The runtime {runtime} has no resource {name!r}; it has {known}."
            yield RuntimeFault(f"resources.{name}", message)
    if "memory" in resources and memory_bytes(resources["memory"]) is None:
        yield RuntimeFault("resources.memory", "Write how much, as in 512MiB or 2GiB.")
    cpu = resources.get("cpu", 1)
    if isinstance(cpu, bool) or not isinstance(cpu, int | float) or cpu <= 0:
        yield RuntimeFault("resources.cpu", "Write how many, as in 2 or 0.5.")


def limit_memory(resources: Mapping[str, Any]) -> None:
    """Bound this process by what a job asks for, for good: it runs work of one bound only."""
    bytes_max = memory_bytes(resources.get("memory"))
    if bytes_max is None or sys.platform != "linux":
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = bytes_max if hard == resource.RLIM_INFINITY else min(bytes_max, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


_log = logging.getLogger(__name__)

MOUNTED: Final = Path("/sys/fs/cgroup")
_PREFIX: Final = "penstock-"
_LEAF: Final = "penstock-worker"
_MOVES_MAX: Final = 10
_REMOVALS_MAX: Final = 100
_REMOVAL_SECONDS: Final = 0.02
_REACHED: Final = 0.9
"""What part of its limit a group of version 1 has used when the kernel finds no room in it."""
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class CgroupLimit:
    """What all processes of a child may use together."""

    memory_bytes: int
    processes_max: int = 0
    """0 for any number."""


@dataclass(frozen=True, slots=True)
class Cgroup:
    """The group of one child: a folder, or one in each hierarchy of version 1."""

    memory: Path
    folders: Sequence[Path] = field(default=())

    def admit(self, process: int) -> None:
        """Have a process in the group, and all that it starts from now on."""
        for each in self.folders:
            (each / "cgroup.procs").write_text(str(process))

    def has_overrun(self) -> bool:
        """Whether a process of it was ended because the group had reached its limit.

        The kernel also counts those that it ends when the machine, or a group above, is short.
        """
        events = self.memory / "memory.events"
        if events.exists():
            return _count(events, "oom_kill") > 0 and _count(events, "oom") > 0
        most = _count(self.memory / "memory.max_usage_in_bytes")
        limit = _count(self.memory / "memory.limit_in_bytes")
        is_reached = most >= _REACHED * limit
        return is_reached and _count(self.memory / "memory.oom_control", "oom_kill") > 0

    def remove(self) -> None:
        """End what is left in the group, and remove it; a child of ours has ended before."""
        pause = threading.Event()
        for each in self.folders:
            for _ in range(_REMOVALS_MAX):
                with suppress(OSError):
                    for process in _processes(each):
                        os.kill(process, signal.SIGKILL)
                try:
                    each.rmdir()
                except FileNotFoundError:
                    break
                except OSError:
                    pause.wait(_REMOVAL_SECONDS)
                else:
                    break
            else:
                _log.warning("the control group %s could not be removed", each)


class Cgroups:
    """Makes groups of children below a group of ours."""

    def __init__(self, memory: Path, *, processes: Path | None, is_unified: bool) -> None:
        self._memory = memory
        self._processes = processes
        self._is_unified = is_unified

    def __str__(self) -> str:
        return f"version {2 if self._is_unified else 1}, below {self._memory}"

    @classmethod
    def found(cls, mounted: Path = MOUNTED, own: str | None = None) -> Cgroups | None:
        """Where groups can be made; None if nowhere. `own` is `/proc/self/cgroup`."""
        try:
            lines = (Path("/proc/self/cgroup").read_text() if own is None else own).splitlines()
        except OSError:
            return None
        ours = {line.split(":", 2)[1]: line.split(":", 2)[2].lstrip("/") for line in lines}
        if "memory" in ours:
            pids = mounted / "pids" / ours["pids"] if "pids" in ours else None
            made = cls(mounted / "memory" / ours["memory"], processes=pids, is_unified=False)
            return made if made._is_usable() else None
        base = _prepared(mounted, mounted / ours.get("", ""))
        if base is None:
            return None
        made = cls(base, processes=base, is_unified=True)
        return made if made._is_usable() else None

    def made(self, limit: CgroupLimit) -> Cgroup:
        """A group with this limit; `OSError` if there can be none."""
        name = f"{_PREFIX}{os.getpid()}-{_started(os.getpid())}-{next(_numbers)}"
        memory = self._memory / name
        above = {self._memory: None, **({self._processes: None} if self._processes else {})}
        group = Cgroup(memory, tuple(each / name for each in above))
        try:
            for each in group.folders:
                each.mkdir()
            self._bound(memory, limit.memory_bytes)
            if limit.processes_max and self._processes is not None:
                (self._processes / name / "pids.max").write_text(str(limit.processes_max))
        except OSError:
            group.remove()
            raise
        return group

    def sweep(self) -> None:
        """Remove groups of workers that are gone, as far as they are empty."""
        for above in {self._memory, self._processes or self._memory}:
            for each in above.glob(f"{_PREFIX}[0-9]*-[0-9]*-[0-9]*"):
                number, started, _ = each.name.removeprefix(_PREFIX).split("-", 2)
                if _started(int(number)) != started:
                    with suppress(OSError):
                        each.rmdir()

    def _bound(self, memory: Path, size: int) -> None:
        if self._is_unified:
            (memory / "memory.max").write_text(str(size))
            optional = {"memory.swap.max": "0", "memory.oom.group": "1"}
        else:
            (memory / "memory.limit_in_bytes").write_text(str(size))
            optional = {"memory.memsw.limit_in_bytes": str(size)}
        for name, value in optional.items():
            # The kernel may be built without swap, or be too old for groups that end as one.
            with suppress(OSError):
                if (memory / name).exists():
                    (memory / name).write_text(value)

    def _is_usable(self) -> bool:
        try:
            self.made(CgroupLimit(memory_bytes=2**30)).remove()
        except OSError:
            return False
        return True


def _prepared(mounted: Path, own: Path) -> Path | None:
    """The group below which version 2 bounds memory, or None; see the top of this file."""
    if "memory" in _controllers(own):
        return own
    # In a container its own group is the top of what it sees, and not that of the machine.
    if _is_delegated(own) or (own == mounted and (own / "cgroup.type").exists()):
        return own if _enabled(own, moves=True) else None
    if own.name == _LEAF and "memory" in _controllers(own.parent):
        return own.parent  # prepared by a worker before this one
    if own != mounted and _is_delegated(own.parent):
        return own.parent if _enabled(own.parent, moves=False) else None
    return None


def _enabled(group: Path, *, moves: bool) -> bool:
    """Whether memory is bounded below a group from now on."""
    try:
        if moves:
            leaf = group / _LEAF
            leaf.mkdir(exist_ok=True)
            for _ in range(_MOVES_MAX):
                # What is started meanwhile is moved in the next turn.
                there = _processes(group)
                for process in there:
                    with suppress(ProcessLookupError):
                        (leaf / "cgroup.procs").write_text(str(process))
                if not there:
                    break
        wanted = "+memory +pids" if "pids" in _words(group / "cgroup.controllers") else "+memory"
        (group / "cgroup.subtree_control").write_text(wanted)
    except OSError:
        return False
    return "memory" in _controllers(group)


def _controllers(group: Path) -> Sequence[str]:
    return _words(group / "cgroup.subtree_control")


def _words(file: Path) -> Sequence[str]:
    try:
        return file.read_text().split()
    except OSError:
        return ()


def _is_delegated(group: Path) -> bool:
    for name in ("trusted.delegate", "user.delegate"):
        with suppress(OSError):
            if os.getxattr(group, name) == b"1":
                return True
    return False


def _processes(group: Path) -> Sequence[int]:
    # One that this process cannot see is 0, by which a signal would reach ourselves.
    return [int(each) for each in _words(group / "cgroup.procs") if each != "0"]


def _count(file: Path, name: str = "") -> int:
    """A number of a file, which is the only one in it or stands behind its name; 0 if none does."""
    words = ["", *_words(file)]
    counts = dict(itertools.pairwise(words))
    return int(counts.get(name, "0"))


def _started(process: int) -> str:
    """When a process was started, in ticks of the kernel; empty if there is none."""
    try:
        text = Path(f"/proc/{process}/stat").read_text("utf-8", "replace")
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[19]
