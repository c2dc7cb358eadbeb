"""The runtimes of an installation as DAG validation sees them.

`dispatcher.dag` knows runtimes by the protocol `dag.model.Runtimes`; this is the registry of
`penstock.runtimes` behind it. A job is validated with the defaults that it would run with. No
code of users is imported or run. Made by `app`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from penstock.dispatcher.dag.model import (
    DISPATCHER_RUNTIME,
    OPERATOR_CHARACTERS_MAX,
    Dag,
    Job,
    JobFault,
    UpdateMode,
    in_queue,
)
from penstock.kernel.errors import InvalidInput
from penstock.runtimes import DEFAULT_QUEUE
from penstock.runtimes.registry import RuntimeRegistry


class RegisteredRuntimes:
    """The runtimes that a DAG may name, besides `dispatcher`."""

    def __init__(self, registry: RuntimeRegistry) -> None:
        self._registry = registry

    def names(self) -> Collection[str]:
        """All runtimes."""
        return self._registry.names()

    def operators(self, runtime: str) -> Collection[str] | None:
        """The operators of a runtime; None if any operator may be the name of a user's code."""
        return self._registry.runtime(runtime).operators()

    def faults(self, job: Job) -> Iterator[JobFault]:
        """What the job's runtime says against it, with the defaults that it would run with."""
        try:
            placement = self._registry.placement(job.runtime, job.resources)
        except InvalidInput as error:
            yield JobFault("resources", error.message)
            return
        if len(in_queue(job.operator, placement.queue)) > OPERATOR_CHARACTERS_MAX:
            message = (
                f"The operator and the queue {placement.queue} have more than"
                f" {OPERATOR_CHARACTERS_MAX} characters together; shorten one of them."
            )
            yield JobFault("resources", message)
        runtime = self._registry.runtime(job.runtime)
        for fault in runtime.faults(job.operator, config=job.config, resources=placement.resources):
            yield JobFault(fault.field, fault.message)
        if job.untrusted and (why := runtime.untrusted_refused()):
            yield JobFault("untrusted", why)
        if any(each.partition_by for each in job.outputs) and (
            why := runtime.partition_by_refused(job.config)
        ):
            yield JobFault("outputs", why)
        if job.update is UpdateMode.MERGE and not runtime.merges:
            message = (
                f"The runtime {job.runtime} writes files of its own making, whose rows cannot be"
                " merged; write runtime: spark, or update: append."
            )
            yield JobFault("update", message)
        if any(each.maintain is not None for each in job.outputs) and not runtime.merges:
            message = (
                f"The runtime {job.runtime} writes files of its own making, which nobody else can"
                " rewrite; write runtime: spark, or take `maintain` out."
            )
            yield JobFault("outputs", message)
        if job.secrets and (why := runtime.secrets_refused(job.operator)):
            yield JobFault("secrets", why)

    def queued(self, dag: Dag) -> Dag:
        """The DAG, whose jobs say in which queue their tasks wait, unless it is the default."""
        return replace(dag, jobs=tuple(self._queued(job) for job in dag.jobs))

    def _queued(self, job: Job) -> Job:
        if not job.runs or job.runtime == DISPATCHER_RUNTIME:
            return job
        queue = self._registry.placement(job.runtime, job.resources).queue
        resources = {name: each for name, each in job.resources.items() if name != "queue"}
        if queue != DEFAULT_QUEUE:
            resources["queue"] = queue
        return replace(job, resources=resources)
