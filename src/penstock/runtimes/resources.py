"""What a job may ask of a runtime that runs children: `memory` and `cpu`.

`memory` is a limit on Linux. Of each process: an allocation beyond it fails (`limit_memory`), and
who is not root cannot raise it again. Of all processes of a task together: by a control group where
one can be made (`cgroups`), else by samples (`children`). `cpu` is advice, which the user's code
reads by `task.resources`. Both have defaults in the registry, and a job's own words win.
"""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final

from penstock.runtimes.base import Fault

_UNITS: Final = {
    "": 1,
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)},
    **{f"{letter}B": 1000**power for power, letter in enumerate("kMGT", 1)},
}
_SIZE: Final = re.compile(r"([0-9]{1,15})\s?([A-Za-z]*)")
_KNOWN: Final = ("memory", "cpu")


def resource_faults(resources: Mapping[str, Any], *, runtime: str) -> Iterator[Fault]:
    """What is wrong with what a job asks for."""
    for name in resources:
        if name not in _KNOWN:
            known = " and ".join(_KNOWN)
            message = f"The runtime {runtime} has no resource {name!r}; it has {known}."
            yield Fault(f"resources.{name}", message)
    if "memory" in resources and memory_bytes(resources["memory"]) is None:
        yield Fault("resources.memory", "Write how much, as in 512MiB or 2GiB.")
    cpu = resources.get("cpu", 1)
    if isinstance(cpu, bool) or not isinstance(cpu, int | float) or cpu <= 0:
        yield Fault("resources.cpu", "Write how many, as in 2 or 0.5.")


def memory_bytes(said: object) -> int | None:
    """How many bytes a text such as 2GiB means; None if it means none."""
    found = _SIZE.fullmatch(str(said)) if isinstance(said, str | int) else None
    if found is None or isinstance(said, bool) or found[2] not in _UNITS:
        return None
    return int(found[1]) * _UNITS[found[2]] or None


def limit_memory(resources: Mapping[str, Any]) -> None:
    """Bound this process by what a job asks for, for good: it runs work of one bound only."""
    bytes_max = memory_bytes(resources.get("memory"))
    if bytes_max is None or sys.platform != "linux":
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = bytes_max if hard == resource.RLIM_INFINITY else min(bytes_max, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
