"""The pipeline worker: claims the tasks of its runtimes, runs them, and tells how they have ended.

    worker = PipelineWorker(client, {"process": runtime}, listening, logs=logs)
    with stopped_by_signals(worker.stop):
        await worker.run()

`run` starts the client, the runtimes and the listener, and stops them in the end. It goes on until
`stop` is called. Then it claims nothing more, lets what runs go on for `stop_seconds`, gives the
rest back, tells how all of it has ended, within a bound, and says goodbye. A second `stop` gives
back at once. While no dispatcher answers the work goes on, and its end is kept until one does.
`kill -9` at any point loses nothing: the leases run out, the dispatcher gives the tasks to others,
and what this attempt has written stays in its own folders, unpublished.

| part | does |
|---|---|
| `claiming` | says hello, hears wake-ups, claims while there is room |
| `hands` | runs attempts through their runtimes |
| `handing` | gives attempts their tokens and credentials, and takes them back |
| `heartbeats` | keeps leases alive, learns of cancellations and refusals |
| `endings` | tells how attempts have ended |

Made by the wiring. `listening` makes the listener from the function that it is to call. What
attempts print is kept in files of the folder `logs`; without one, it is not kept. In the folder
`handed` attempts find their tokens and credentials; without one, they are handed none. `secrets`
finds what jobs name as secrets; without it, a job that does fails.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
from collections.abc import Callable, Collection, Mapping
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Final

from penstock.dispatcher.wakeups.base import Heard, Listener
from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.entropy import Entropy, system_entropy
from penstock.kernel.errors import InvalidInput
from penstock.runtimes.base import Runtime
from penstock.runtimes.outputs import Outputs
from penstock.worker.claiming import Claiming, hello_of
from penstock.worker.client import InternalClient
from penstock.worker.handing import Handing
from penstock.worker.hands import Hands
from penstock.worker.secrets import Resolver
from penstock.worker.settings import WorkerSettings

_log = logging.getLogger(__name__)

_LETTING_GO_SECONDS: Final = 30.0
_LAST_CLAIM_SECONDS: Final = 5.0


class PipelineWorker:
    """Runs the tasks of some runtimes. Make it and `run` it, once."""

    def __init__(
        self,
        client: InternalClient,
        runtimes: Mapping[str, Runtime],
        listening: Callable[[Heard], Listener],
        *,
        logs: Path | None = None,
        handed: Path | None = None,
        settings: WorkerSettings | None = None,
        clock: Clock | None = None,
        entropy: Entropy | None = None,
        about: Mapping[str, str] | None = None,
        secrets: Resolver | None = None,
        store_url: str = "",
    ) -> None:
        if not runtimes:
            raise InvalidInput("The worker has no runtime.", hint="Name one, such as process.")
        self.settings = settings or WorkerSettings()
        self._client = client
        self._runtimes = runtimes
        self._logs = logs
        clock, entropy = clock or SystemClock(), entropy or system_entropy()
        said = _about() if about is None else about
        self._claiming = Claiming(
            client,
            hello_of(runtimes, settings=self.settings, about=said),
            runtimes,
            settings=self.settings,
            clock=clock,
            entropy=entropy,
            listen_to=self._listen_to,
        )
        self._listener = listening(self._claiming.heard)
        folder = handed if any(each.hands_over for each in runtimes.values()) else None
        self._handing = Handing(client, folder, Outputs(store_url), clock=clock, entropy=entropy)
        self._hands = Hands(
            client,
            runtimes,
            logs=logs,
            handing=self._handing,
            settings=self.settings,
            clock=clock,
            entropy=entropy,
            claiming=self._claiming,
            secrets=secrets,
        )
        self._stopping = asyncio.Event()
        self._at_once = asyncio.Event()
        self._is_run = False

    def stop(self) -> None:
        """Begin to stop; asked a second time, give back at once what runs."""
        if self._stopping.is_set():
            _log.info("giving back what runs")
            self._at_once.set()
            return
        count, seconds = self._hands.count, self.settings.stop_seconds
        _log.info("stopping: %d running tasks may end within %.0f s", count, seconds)
        self._stopping.set()
        self._hands.drain()
        self._claiming.stop()

    async def run(self) -> None:
        """Work until stopped."""
        if self._is_run:
            raise InvalidInput("A worker runs once; make another.")
        self._is_run = True
        self._make_folder()
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._client)
            await stack.enter_async_context(self._handing)
            for runtime in self._runtimes.values():
                await stack.enter_async_context(runtime)
            await self._claiming.greet()
            if not self._stopping.is_set():
                await self._work()
                await self._claiming.say_goodbye()

    async def _work(self) -> None:
        async with asyncio.TaskGroup() as group:
            telling = [
                group.create_task(self._hands.heartbeats.run()),
                group.create_task(self._hands.endings.run()),
            ]
            asking = [
                group.create_task(self._claiming.run(self._hands)),
                group.create_task(self._claiming.keep_greeting()),
            ]
            try:
                async with self._listener:
                    await self._stopping.wait()
                await self._drain()
                # A claim that is under way may bring tasks, which are given back.
                await asyncio.wait(asking, timeout=_LAST_CLAIM_SECONDS)
                await self._flush()
            finally:
                for task in (*asking, *telling):
                    task.cancel()
                await self._hands.close()

    def _listen_to(self, operators: Collection[str]) -> None:
        self._listener.listen_to(operators)

    async def _drain(self) -> None:
        await self._until_idle(self.settings.stop_seconds, at_once=self._at_once)
        self._hands.give_back()
        await self._until_idle(self.settings.grace_seconds)
        # A source may have more time of its own; a worker that is killed could not hand it back.
        self._hands.cut_short()
        await self._until_idle(_LETTING_GO_SECONDS)

    async def _until_idle(self, seconds: float, *, at_once: asyncio.Event | None = None) -> None:
        """Wait until nothing runs, for so long, or until it has to be now."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
                idle = group.create_task(self._hands.idle())
                if at_once is not None:
                    now = group.create_task(at_once.wait())
                    await asyncio.wait((idle, now), return_when=asyncio.FIRST_COMPLETED)
                    idle.cancel()
                    now.cancel()

    async def _flush(self) -> None:
        """Tell what is left to tell, within a bound."""
        endings = self._hands.endings
        try:
            async with asyncio.timeout(self.settings.flush_seconds):
                await endings.told()
        except TimeoutError:
            _log.error("%d ends of tasks could not be told; they will run again", len(endings))

    def _make_folder(self) -> None:
        if self._logs is not None:
            # Untrusted work has a user of its own here, who is not to read what others print.
            self._logs.mkdir(mode=0o750, parents=True, exist_ok=True)


def _about() -> Mapping[str, str]:
    return {"host": platform.node()[:200], "process": str(os.getpid())}
