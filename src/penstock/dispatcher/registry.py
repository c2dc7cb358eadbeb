"""The runtime registry as the dispatcher uses it: to judge DAGs, and to tell what jobs need.

`penstock.dispatcher.dag` knows runtimes by a protocol of its own (`dag.runtimes.Runtimes`); this
is the registry of `penstock.runtimes` behind it. A job is judged with the defaults that it would
run with. Nothing of a user is imported or run. Made by `app`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from penstock.dispatcher.dag.model import DISPATCHER_RUNTIME, Job
from penstock.dispatcher.dag.runtimes import Fault, Partial
from penstock.kernel.errors import InvalidInput
from penstock.runtimes.base import Delivery
from penstock.runtimes.registry import Placement, Registry


class RegisteredRuntimes:
    """The runtimes that a DAG may name, besides `dispatcher`."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def names(self) -> Collection[str]:
        """All runtimes."""
        return self._registry.names()

    def operators(self, runtime: str) -> Collection[str] | None:
        """The operators of a runtime; None if any operator may be the name of a user's code."""
        return self._registry.runtime(runtime).operators()

    def faults(self, job: Job) -> Iterator[Fault]:
        """What the job's runtime says against it, with the defaults that it would run with."""
        try:
            placement = self._registry.placement(job.runtime, job.resources)
        except InvalidInput as error:
            yield Fault("resources", error.message)
            return
        runtime = self._registry.runtime(job.runtime)
        for fault in runtime.faults(job.operator, config=job.config, resources=placement.resources):
            yield Fault(fault.field, fault.message)
        if job.untrusted and (why := runtime.untrusted_refused()):
            yield Fault("untrusted", why)
        if job.secrets and (why := runtime.secrets_refused(job.operator)):
            yield Fault("secrets", why)

    def placement(self, job: Job) -> Placement | None:
        """Which worker a job needs, and what it provides; None for what needs no worker."""
        if not job.runs or job.runtime == DISPATCHER_RUNTIME:
            return None
        return self._registry.placement(job.runtime, job.resources)

    def delivery(self, runtime: str) -> Delivery:
        """How a task of a runtime reaches whatever runs it."""
        return self._registry.runtime(runtime).delivery


class BuiltInRuntimes(RegisteredRuntimes, Partial):
    """The runtimes that come with Penstock, as they are by default, where the dispatcher's settings
    are not known."""

    def __init__(self, others: Collection[str] = ()) -> None:
        """`others` are names of runtimes that the settings here have."""
        super().__init__(Registry(installed=()))
        self._others = others

    def others(self) -> Collection[str]:
        return self._others
