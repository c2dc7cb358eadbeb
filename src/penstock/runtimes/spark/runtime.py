"""The runtime `spark`: work on a warm session of Spark, in a process beside the worker's.

The worker imports no Spark: its event loop sends heartbeats whatever Spark and users' code do.
What runs, runs in a *host* (`host_pool` decides in which); a batch becomes one run there. How a
job is judged (`faults`) needs neither Spark nor Java, so a dispatcher can do it that has none.

Of the promise that nothing of cancelled work runs on, one case is left: the code of a user that
does not let go of its thread, in a host that others use too. `run` ends then after the grace,
the Spark jobs of that work are cancelled, what it writes is in a folder that nobody reads, and
the thread ends with its host, as soon as the others in it have ended.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from penstock.kernel.clock import Clock
from penstock.runtimes.base import AttemptWork, Runtime, RuntimeFault, WorkReporter, WorkResult
from penstock.runtimes.spark.host_pool import HostPool, ProfilePools, stopped
from penstock.runtimes.spark.host_process import BatchCollector, Ticket, temporary_data
from penstock.runtimes.spark.job_config import OPERATORS, config_faults
from penstock.runtimes.spark.settings import SparkSettings, profile_faults, read_spark_settings

PYTHON: Final = "spark.python"
ENGINE: Final = "penstock.runtimes.spark.engine:Engine"


class SparkRuntime(Runtime):
    """Runs jobs on Spark."""

    name = "spark"
    merges = True

    def __init__(
        self,
        settings: SparkSettings | None = None,
        *,
        engine: str = ENGINE,
        clock: Clock | None = None,
    ) -> None:
        """`engine` is what runs work in the host; another one is for tests."""
        self._settings = settings if settings is not None else SparkSettings()
        self._engine = engine
        self._clock = clock
        self._pools: ProfilePools | None = None
        self._gathering: BatchCollector | None = None
        self._temporary = ""

    @property
    def hosts(self) -> HostPool | None:
        """The hosts of jobs without settings of their own, from `start` to `stop`."""
        return self._pools.base if self._pools is not None else None

    @property
    def data(self) -> str:
        """The data folder that is in use."""
        return self._temporary or self._settings.data

    @property
    def pids(self) -> tuple[int, ...]:
        """The host processes there are."""
        every = self._pools.every if self._pools is not None else ()
        return tuple(pid for hosts in every for pid in hosts.pids)

    @property
    def jvms(self) -> tuple[int, ...]:
        """The JVMs of hosts that are ready."""
        every = self._pools.every if self._pools is not None else ()
        return tuple(jvm for hosts in every for jvm in hosts.jvms)

    async def start(self) -> None:
        settings = self._settings
        if not settings.data:
            self._temporary = await asyncio.to_thread(temporary_data)
            # What is thrown away with this runtime is made for nothing.
            settings = replace(settings, data=self._temporary, archive=False)
        self._pools = ProfilePools(settings, engine=self._engine, clock=self._clock)
        self._gathering = BatchCollector(self._pools.submit)
        await self._pools.start()

    async def stop(self) -> None:
        pools, self._pools = self._pools, None
        if pools is not None:
            assert self._gathering is not None
            self._gathering.close()
            await pools.stop()
        if self._temporary:
            await asyncio.to_thread(shutil.rmtree, self._temporary, ignore_errors=True)
            self._temporary = ""

    def expect(self) -> None:
        if self._pools is not None:
            self._pools.base.expect()

    def operators(self) -> Collection[str]:
        return OPERATORS

    def faults(
        self, operator: str, *, config: Mapping[str, Any], resources: Mapping[str, Any]
    ) -> Iterator[RuntimeFault]:
        yield from config_faults(operator, config)
        yield from profile_faults(resources, runtime=self.name)

    def secrets_refused(self, operator: str) -> str:
        if operator == PYTHON:
            return ""
        return f"{operator} runs no code of yours that could use secrets; take them out."

    def untrusted_refused(self) -> str:
        return (
            f"Tasks of the runtime {self.name} share a session that has the worker's own rights, so"
            " it runs no untrusted code; write runtime: process or runtime: lambda."
        )

    def partition_by_refused(self, config: Mapping[str, Any]) -> str:
        if not config.get("partition_wise"):
            return ""
        return (
            "partition_wise makes the partition of each task, and `partition_by` whichever are in"
            " the result; take one of the two out."
        )

    async def run(self, work: AttemptWork, reporter: WorkReporter) -> WorkResult:
        pools, gathering = self._pools, self._gathering
        if pools is None or gathering is None:
            raise stopped()
        ticket = Ticket(work, reporter, asyncio.get_running_loop().create_future())
        reporter.timed(is_running=False)
        bundle = gathering.add(ticket)
        try:
            return await ticket.end
        except asyncio.CancelledError:
            if not gathering.drop(ticket):
                await pools.drop(bundle, ticket)
            raise


def spark(settings: Mapping[str, Any]) -> SparkRuntime:
    """The runtime of these settings."""
    return SparkRuntime(read_spark_settings(settings, runtime=SparkRuntime.name))
