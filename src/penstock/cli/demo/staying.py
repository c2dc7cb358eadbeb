"""The end of `penstock demo` on a terminal: it stays, with one task that has failed on purpose.

The task reads a file that was not delivered. Somebody finds out why in the console, has the file
delivered here by Enter, and replays the task there.

| where it is | what is said | goes on |
|---|---|---|
| missing | where to find out why | by Enter; a replay fails again, which is told |
| delivered | where to press Replay | by the replay |
| mended | that it is completed | by Ctrl-C, as always |

Everything is in the data folder of the demo and ends with it. Who looks away for hours is not
waited for. Called by `flights`.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import click

from penstock.dispatcher.client import Client
from penstock.dispatcher.wire.steering import TaskSummary
from penstock.kernel.clock import Clock
from penstock.kernel.errors import DispatcherUnavailable, PenstockError
from penstock.kernel.signals import stopped_by_signals

MONTH: Final = "2013-01"
REMARKS: Final = (
    "day,airport,remark\n"
    "2013-01-16,LGA,Everybody was late.\n"
    "2013-01-31,EWR,The demo has made this up; nobody has said so.\n"
)
_LOOK_SECONDS: Final = 0.25
_FAIL_SECONDS_MAX: Final = 60.0
_STAY_SECONDS_MAX: Final = 8 * 3600.0


def is_a_terminal() -> bool:
    """Whether somebody is there to press keys and to read."""
    return sys.stdin.isatty() and sys.stdout.isatty()


@dataclass(frozen=True, slots=True)
class Keys:
    """What somebody has pressed."""

    enter: asyncio.Event = field(default_factory=asyncio.Event)
    end: asyncio.Event = field(default_factory=asyncio.Event)


@contextmanager
def keys_of_terminal() -> Iterator[Keys]:
    """Enter, and Ctrl-C or the end of the input, as long as the block lasts."""
    keys, loop = Keys(), asyncio.get_running_loop()
    fd = sys.stdin.fileno()

    def read() -> None:
        pressed = os.read(fd, 1024)
        if pressed:
            keys.enter.set()
            return
        loop.remove_reader(fd)
        # Nobody is behind an input that is no terminal; a signal ends it.
        if os.isatty(fd):
            keys.end.set()

    with stopped_by_signals(keys.end.set):
        # A file, for instance, cannot be waited for.
        with suppress(OSError, NotImplementedError):
            loop.add_reader(fd, read)
        try:
            yield keys
        finally:
            loop.remove_reader(fd)


class Stay:
    """A task that has failed, until somebody has mended it and has seen enough."""

    def __init__(
        self,
        client: Client,
        *,
        url: str,
        folder: Path,
        clock: Clock,
        say: Callable[[str], None] = click.echo,
    ) -> None:
        self._client = client
        self._url = url
        self._file = folder.absolute() / "delivered" / f"{MONTH}.csv"
        self._clock = clock
        self._say = say

    async def run(self, keys: Keys) -> None:
        """Have a task fail, say so, and stay until `keys.end`."""
        task = await self._failed(keys)
        if task is None:
            return
        page = f"{self._url}/tasks/{task.id}"
        self._say(
            f"\nOne task has failed, on purpose. Find out why at {page}\n"
            "  Enter delivers what it misses; then press Replay there. Ctrl-C ends."
        )
        deadline = self._clock.monotonic() + _STAY_SECONDS_MAX
        told = task
        while not keys.end.is_set() and self._clock.monotonic() < deadline:
            if keys.enter.is_set():
                keys.enter.clear()
                self._deliver(page)
            with suppress(DispatcherUnavailable):
                now = (await self._client.task(task.id)).task
                if (said := self._news(told, now)) is not None:
                    self._say(said)
                    told = now
            await self._clock.sleep(_LOOK_SECONDS)

    async def _failed(self, keys: Keys) -> TaskSummary | None:
        """Tell of remarks that are not there; the task that has failed of it."""
        deadline = self._clock.monotonic() + _FAIL_SECONDS_MAX
        is_told = False
        while not keys.end.is_set() and self._clock.monotonic() < deadline:
            with suppress(DispatcherUnavailable):
                if not is_told:
                    # The same id is the same event, should the answer be lost.
                    await self._client.trigger(
                        "desk",
                        event_id=MONTH,
                        partition_key=MONTH,
                        payload={"file": str(self._file)},
                    )
                    is_told = True
                found = (await self._client.tasks(job="remarks", status="dead", limit=1)).tasks
                if found:
                    return found[0]
            await self._clock.sleep(_LOOK_SECONDS)
        if keys.end.is_set():
            return None
        raise PenstockError("The task that was to fail has not.", hint="Look at the console.")

    def _deliver(self, page: str) -> None:
        if self._file.exists():
            self._say(f"It is delivered already; press Replay at {page}")
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        # As a whole or not at all: somebody may press Replay now.
        part = self._file.with_suffix(".part")
        part.write_text(REMARKS)
        part.replace(self._file)
        self._say(f"The remarks are delivered: {self._file}\n  Press Replay at {page}")

    def _news(self, told: TaskSummary, now: TaskSummary) -> str | None:
        """What to say of the task, if it is not where it was told to be."""
        if now.status == "completed" and told.status != "completed":
            return (
                f"Task {now.id} is completed, by attempt {now.attempt}; what it made is published"
                f" at {self._url}/datasets/remarks\n"
                "  Look around as long as you like; Ctrl-C ends."
            )
        if now.status == "dead" and now.attempt > told.attempt:
            again = f"Task {now.id} has failed again, in attempt {now.attempt}"
            if self._file.exists():
                return f"{again}; its page says why."
            return f"{again}: the file is still missing. Enter delivers it."
        return None
