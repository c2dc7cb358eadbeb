"""The workers of each queue: which runtimes they run, from which image, and how much they need.

A fleet is of a queue, since that is what a worker serves (`Settings.queues`), and of all runtimes
whose tasks wait there. Runtimes of one queue have one image and one command, or none is made. Pure:
functions of settings and the registry. `kubernetes` and `ecs` write fleets down; nothing of a
secret is in one.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Final

from penstock.kernel.errors import InvalidInput
from penstock.kernel.words import nearest
from penstock.runtimes.base import Delivery
from penstock.runtimes.registry import Placement, Registry
from penstock.runtimes.resources import memory_bytes
from penstock.runtimes.spark.settings import SparkSettings, heap_bytes
from penstock.settings import Settings

_MIB: Final = 1024**2
_WORKER_BYTES: Final = 512 * _MIB
"""What the worker itself needs."""
_TASK_BYTES: Final = 512 * _MIB
_TASK_CPU: Final = 0.25
"""What a task gets whose runtime does not say."""
_NAME_CHARACTERS_MAX: Final = 40
LABEL: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
"""What Kubernetes takes as the name of a namespace, or in one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The workers of a queue."""

    queue: str
    image: str
    command: tuple[str, ...]
    """What follows the image's entry point, `penstock`."""
    concurrency: int
    stop_seconds: float
    memory_bytes: int
    cpu: float
    workers_min: int
    workers_max: int

    @property
    def name(self) -> str:
        """What it is called where names are DNS labels: two queues never share a name."""
        plain = self.queue.replace("_", "-").strip("-")[:_NAME_CHARACTERS_MAX].strip("-")
        if plain == self.queue and LABEL.fullmatch(plain):
            return f"worker-{plain}"
        digest = hashlib.sha256(self.queue.encode()).hexdigest()[:8]
        return "-".join(filter(None, ("worker", plain, digest)))

    def variables(self) -> dict[str, str]:
        """What its workers are set to, besides what all processes share."""
        return {
            "PENSTOCK_QUEUES": self.queue,
            "PENSTOCK_CONCURRENCY": str(self.concurrency),
            "PENSTOCK_STOP_SECONDS": f"{self.stop_seconds:g}",
        }


def fleets_of(
    settings: Settings,
    registry: Registry,
    *,
    runtimes: Sequence[str],
    workers_min: int,
    workers_max: int,
) -> list[Fleet]:
    """The fleets of these runtimes, or of all of them, by the names of their queues."""
    if workers_min > workers_max:
        raise InvalidInput(f"{workers_min} workers at least are more than {workers_max} at most.")
    served = {
        name: registry.placement(name, {})
        for name in registry.names()
        if registry.runtime(name).delivery is Delivery.WAKE
    }
    for name in runtimes:
        if name not in served:
            near = nearest(name, served)
            raise InvalidInput(
                f"No workers run {name!r}; they run {', '.join(served)}.",
                hint=f"Is {near} meant?" if near else "Register it in the settings.",
            )
    wanted = {served[name].queue for name in runtimes} or {each.queue for each in served.values()}
    made = []
    for queue in sorted(wanted):
        of_queue = {name: each for name, each in served.items() if each.queue == queue}
        made.append(
            Fleet(
                queue=queue,
                image=_one("image", queue, of_queue) or f"penstock:{version('penstock')}",
                command=_one("command", queue, of_queue) or ("worker",),
                concurrency=settings.concurrency,
                stop_seconds=settings.stop_seconds,
                memory_bytes=_WORKER_BYTES + max(_memory(settings, registry, of_queue)),
                cpu=max(_cpu(each, settings.concurrency) for each in of_queue.values()),
                workers_min=workers_min,
                workers_max=workers_max,
            )
        )
    return made


def _one(field: str, queue: str, placements: dict[str, Placement]) -> Any:
    """What the runtimes of a queue say of their workers, which are the same for all of them."""
    said = {name: found for name, each in placements.items() if (found := getattr(each, field))}
    if len(set(said.values())) > 1:
        raise InvalidInput(
            f"The runtimes {' and '.join(sorted(said))} share the queue {queue}, and so workers,"
            f" and have more than one {field}.",
            hint=f"Give one of them a queue of its own, or all of them the same {field}.",
        )
    return next(iter(said.values()), None)


def _memory(
    settings: Settings, registry: Registry, placements: dict[str, Placement]
) -> Iterable[int]:
    for name, each in placements.items():
        if registry.uses(name) == "spark":
            table = settings.runtimes.get(name, {})
            # As much again as the heap: Python's workers are beside the JVM.
            yield 2 * heap_bytes(table.get("driver_memory", SparkSettings().driver_memory))
        else:
            said = each.resources.get("memory")
            found = _TASK_BYTES if said is None else memory_bytes(said)
            if found is None:
                raise InvalidInput(
                    f"The runtime {name} has {str(said)[:100]!r} as memory.",
                    hint="Write how much, as in 512MiB or 2GiB.",
                )
            yield settings.concurrency * found


def _cpu(placement: Placement, concurrency: int) -> float:
    said = placement.resources.get("cpu", _TASK_CPU)
    if isinstance(said, bool) or not isinstance(said, int | float) or not 0 < said < math.inf:
        raise InvalidInput(f"{str(said)[:100]!r} is no number of CPUs; write it as 2 or 0.5.")
    return float(said) * concurrency
