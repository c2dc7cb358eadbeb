"""A whole installation as separate processes, on free ports, that a test may kill one by one.

Dispatchers, workers and a Postgres of their own, started with the installed command. Processes that
are killed are started again by the test; nobody else looks after them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.dispatcher.database.local_server import LocalPostgres
from penstock.kernel.clock import SystemClock
from penstock.kernel.ports import free_port
from penstock.settings import Settings, variables_of

CLOCK = SystemClock()
SECRET = "the secret of a fleet in a test"
STOP_SECONDS_MAX = 30.0


@dataclass(slots=True)
class Fleet:
    """The processes of one installation."""

    folder: Path
    """Where workers find the user's modules, and everything is kept."""
    dispatchers: int
    workers: int
    postgres: LocalPostgres
    told: Mapping[str, Any] = field(default_factory=dict)
    """Settings besides those that every fleet has."""
    variables: Mapping[str, str] = field(default_factory=dict)
    sinks: int = 0
    """Workers of buffered datasets alone."""
    live: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)
    ports: dict[str, tuple[int, int]] = field(default_factory=dict)

    def internal_urls(self) -> tuple[str, ...]:
        return tuple(f"http://127.0.0.1:{internal}" for _, internal in self.ports.values())

    def public_urls(self) -> tuple[str, ...]:
        return tuple(f"http://127.0.0.1:{public}" for public, _ in self.ports.values())

    def names(self) -> tuple[str, ...]:
        return (
            *(f"dispatcher-{number}" for number in range(self.dispatchers)),
            *(f"worker-{number}" for number in range(self.workers)),
            *(f"sink-{number}" for number in range(self.sinks)),
        )

    async def start(self, name: str) -> None:
        assert name not in self.live
        kind = name if name == "query-service" else name.partition("-")[0]
        public, internal = self.ports.get(name, (0, 0))
        told = {"worker_secret": SECRET, "concurrency": 4, "stop_seconds": 5, **self.told}
        settings = Settings(
            data=self.folder / "data",
            postgres=self.postgres.dsn,
            port=public,
            internal_port=internal,
            dispatchers=self.internal_urls(),
            **told,
        )
        with (self.folder / f"{name}.err").open("ab") as said:
            self.live[name] = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "penstock",
                kind,
                *(["--name", name] if kind in ("worker", "sink") else []),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                cwd=self.folder,
                env={**os.environ, **self.variables, **variables_of(settings)},
                start_new_session=True,
            )

    async def kill(self, name: str) -> None:
        """As `kill -9` does."""
        process = self.live.pop(name)
        assert process.returncode is None, f"{name} has ended by itself: {self.said(name)}"
        process.kill()
        await _end_of(process)

    async def stop(self, name: str) -> int:
        """As an operator does; returns the exit code."""
        process = self.live.pop(name)
        assert process.returncode is None, f"{name} has ended by itself: {self.said(name)}"
        process.terminate()
        return await _end_of(process)

    async def kill_postgres(self) -> None:
        """Kill the server and all that it has started, and start it again."""
        file = self.folder / "postgres" / "data" / "postmaster.pid"
        number = int(file.read_text().splitlines()[0])
        os.kill(number, signal.SIGKILL)
        await until(lambda: not self.postgres.running, seconds=STOP_SECONDS_MAX)
        await self.postgres.stop()
        await self.postgres.start()

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.err").read_text()[-4000:]


@contextlib.asynccontextmanager
async def fleet_of(
    folder: Path,
    *,
    dispatchers: int,
    workers: int,
    modules: Mapping[str, str],
    told: Mapping[str, Any] | None = None,
    variables: Mapping[str, str] | None = None,
    database: Mapping[str, str] | None = None,
    sinks: int = 0,
) -> AsyncIterator[Fleet]:
    """A fleet that runs until the block ends; `modules` are the user's, by file name.

    `database` has settings of its Postgres.
    """
    for name, text in modules.items():
        (folder / name).write_text(text)
    settings = {"fsync": "off", **(database or {})}
    postgres = LocalPostgres(folder / "postgres", settings=settings, grace_seconds=5)
    fleet = Fleet(folder, dispatchers, workers, postgres, told or {}, variables or {}, sinks)
    async with postgres:
        for number in range(dispatchers):
            fleet.ports[f"dispatcher-{number}"] = (free_port(), free_port())
        try:
            for name in fleet.names():
                await fleet.start(name)
            yield fleet
        finally:
            for process in fleet.live.values():
                if process.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        process.kill()
                await _end_of(process)


async def until(holds: Callable[[], object], *, seconds: float) -> None:
    """Wait until a condition holds."""
    began = CLOCK.monotonic()
    while not holds():
        assert CLOCK.monotonic() - began < seconds, f"it does not hold after {seconds:.0f} s"
        await CLOCK.sleep(0.02)


async def _end_of(process: asyncio.subprocess.Process) -> int:
    async with asyncio.timeout(STOP_SECONDS_MAX):
        return await process.wait()
