"""The pipeline worker: claims the tasks of its runtimes, runs them, and reports how they ended.

    worker = PipelineWorker(client, {"process": runtime}, listening, logs=logs)
    with stopped_by_signals(worker.stop):
        await worker.run()

`run` starts the client, the runtimes and the listener, and stops them in the end. It goes on
until `stop` is called. Then it claims nothing more, lets what runs go on for `stop_seconds`,
releases the rest, reports all completions, within a bound, and says goodbye. A second `stop`
releases at once. While no dispatcher answers the work goes on, and completions are kept until
one does. `kill -9` at any point loses nothing: whoever is started in its place reports what it
held, or the leases expire; the dispatcher gives the tasks to others, and what this attempt has
written stays in its own folders, unpublished.

| part | does |
|---|---|
| `claim_scheduler` | says hello, takes wake-ups, claims while there is room |
| `executor` | runs attempts through their runtimes |
| `sandbox` | gives attempts their folders, tokens and credentials, and takes them back |
| `heartbeat_sender` | keeps leases alive, learns of cancellations and refusals |
| `reporter` | reports events and completions |
| `recovery` | journals what is held, and ends what a killed worker of this machine held |

Made by the wiring. `listening` makes the listener, for the claim scheduler. What attempts print
is kept in files of the folder `logs`; without one, it is not kept. In the folder `locks` are
its lock and its journal; without one, leases have to expire. In the folder `handed` attempts
find their tokens and credentials; without one, they get none. `secrets` resolves what jobs name
as secrets; without it, a job that names any fails.

`LogPruner` removes old logs of attempts, so that a worker's disk does not fill up: one file an
attempt, by its name (`penstock.runtimes.base.AttemptPaths`); other files in the folder are not
ours. Their age is told by the machine's own clock. Several workers may share a folder.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Final

from penstock.dispatcher.wakeups.base import WakeUpListener
from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.entropy import Entropy, system_entropy
from penstock.kernel.errors import InvalidInput
from penstock.runtimes.base import Runtime
from penstock.runtimes.output_collector import OutputCollector
from penstock.worker.claim_scheduler import ClaimScheduler, hello_of
from penstock.worker.client import InternalClient
from penstock.worker.executor import AttemptExecutor
from penstock.worker.recovery import CrashRecovery
from penstock.worker.sandbox import CredentialProvider
from penstock.worker.secrets import SecretResolver
from penstock.worker.settings import PipelineWorkerSettings

_ATTEMPT: Final = re.compile(r"\d+-\d+\.log")
_DAY_SECONDS: Final = 86_400.0
_REMOVED_MAX: Final = 10_000


class LogPruner:
    """Looks through one folder of logs."""

    def __init__(self, folder: Path, *, days: float, clock: Clock) -> None:
        self._folder = folder
        self._seconds = days * _DAY_SECONDS
        self._clock = clock

    async def turn(self) -> float | None:
        """Remove what is old; at once again if there may be more."""
        before = self._clock.wall() - self._seconds
        removed = await asyncio.to_thread(_removed, self._folder, before)
        return 0.0 if removed == _REMOVED_MAX else None


def _removed(folder: Path, before: float) -> int:
    count = 0
    if not folder.is_dir():
        return count
    for file in folder.iterdir():
        if _ATTEMPT.fullmatch(file.name) and _is_older(file, before):
            file.unlink(missing_ok=True)
            count += 1
            if count == _REMOVED_MAX:
                break
    return count


def _is_older(file: Path, before: float) -> bool:
    try:
        return file.stat().st_mtime < before
    except FileNotFoundError:
        return False


_log = logging.getLogger(__name__)

_LETTING_GO_SECONDS: Final = 30.0
_LAST_CLAIM_SECONDS: Final = 5.0


class PipelineWorker:
    """Runs the tasks of some runtimes. Make it and `run` it, once."""

    def __init__(
        self,
        client: InternalClient,
        runtimes: Mapping[str, Runtime],
        listening: Callable[[ClaimScheduler], WakeUpListener],
        *,
        logs: Path | None = None,
        handed: Path | None = None,
        locks: Path | None = None,
        settings: PipelineWorkerSettings | None = None,
        clock: Clock | None = None,
        entropy: Entropy | None = None,
        about: Mapping[str, str] | None = None,
        secrets: SecretResolver | None = None,
        store_url: str = "",
    ) -> None:
        if not runtimes:
            raise InvalidInput("The worker has no runtime.", hint="Name one, such as process.")
        self.settings = settings or PipelineWorkerSettings()
        self._client, self._runtimes, self._logs = client, runtimes, logs
        clock, entropy = clock or SystemClock(), entropy or system_entropy()
        self._scheduler = ClaimScheduler(
            client,
            hello_of(runtimes, settings=self.settings, about=_about() if about is None else about),
            runtimes,
            settings=self.settings,
            clock=clock,
            entropy=entropy,
            listen_to=self._listen_to,
            is_present=lambda: self._listener.is_present,
        )
        self._listener = listening(self._scheduler)
        folder = handed if any(each.hands_over for each in runtimes.values()) else None
        self._credentials = CredentialProvider(
            client, folder, OutputCollector(store_url), clock=clock, entropy=entropy
        )
        self._executor = AttemptExecutor(
            client,
            runtimes,
            logs=logs,
            credentials=self._credentials,
            settings=self.settings,
            clock=clock,
            entropy=entropy,
            claims=self._scheduler,
            secrets=secrets,
        )
        self._recovery = CrashRecovery(locks, client, clock, entropy) if locks else None
        self._stopping, self._at_once = asyncio.Event(), asyncio.Event()
        self._is_run = False

    def stop(self) -> None:
        """Begin to stop; a second call releases at once what runs."""
        if self._stopping.is_set():
            _log.info("releasing running tasks")
            self._at_once.set()
            return
        count, seconds = self._executor.count, self.settings.stop_seconds
        _log.info("stopping: %d running tasks have %.0f s to finish", count, seconds)
        self._stopping.set()
        self._executor.drain()
        self._scheduler.stop()

    async def run(self) -> None:
        """Work until stopped."""
        if self._is_run:
            raise InvalidInput("A worker runs once; make another.")
        self._is_run = True
        self._make_folder()
        async with AsyncExitStack() as stack:
            if self._recovery is not None:
                # First, for what is started from now on inherits the lock.
                self._executor.journal = self._recovery.journal()
                stack.callback(self._executor.journal.close)
            await stack.enter_async_context(self._client)
            await stack.enter_async_context(self._credentials)
            for runtime in self._runtimes.values():
                await stack.enter_async_context(runtime)
            await self._scheduler.greet()
            if not self._stopping.is_set():
                await self._work()
                await self._scheduler.say_goodbye()

    async def _work(self) -> None:
        async with asyncio.TaskGroup() as group:
            reporting = [
                group.create_task(self._executor.heartbeats.run()),
                group.create_task(self._executor.completions.run()),
            ]
            if self._recovery is not None:
                reporting.append(group.create_task(self._recovery.run(self._executor.journal)))
            claims = [
                group.create_task(self._scheduler.run(self._executor)),
                group.create_task(self._scheduler.keep_greeting()),
            ]
            try:
                async with self._listener:
                    await self._stopping.wait()
                await self._drain()
                # A claim that is under way may bring tasks, which are given back.
                await asyncio.wait(claims, timeout=_LAST_CLAIM_SECONDS)
                await self._flush()
            finally:
                for task in (*claims, *reporting):
                    task.cancel()
                await self._executor.close()

    def _listen_to(self, operators: Collection[str]) -> None:
        self._listener.listen_to(operators)

    async def _drain(self) -> None:
        await self._until_idle(self.settings.stop_seconds, at_once=self._at_once)
        self._executor.give_back()
        await self._until_idle(self.settings.grace_seconds)
        # A source may have more time of its own; a killed worker could not release it.
        self._executor.cut_short()
        await self._until_idle(_LETTING_GO_SECONDS)

    async def _until_idle(self, seconds: float, *, at_once: asyncio.Event | None = None) -> None:
        """Wait until nothing runs, for so long, or until it has to be now."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
                idle = group.create_task(self._executor.idle())
                if at_once is not None:
                    now = group.create_task(at_once.wait())
                    await asyncio.wait((idle, now), return_when=asyncio.FIRST_COMPLETED)
                    idle.cancel()
                    now.cancel()

    async def _flush(self) -> None:
        """Report the completions that are left, within a bound."""
        left = self._executor.completions
        try:
            async with asyncio.timeout(self.settings.flush_seconds):
                await left.drained()
        except TimeoutError:
            _log.error("failed to report %d task completions; they will be retried", len(left))

    def _make_folder(self) -> None:
        if self._logs is not None:
            # Untrusted work has a user of its own here, who is not to read what others print.
            self._logs.mkdir(mode=0o750, parents=True, exist_ok=True)


def _about() -> Mapping[str, str]:
    return {"host": platform.node()[:200], "process": str(os.getpid())}
