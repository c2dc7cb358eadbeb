"""Requests to try on a scripted server, and how a test of them is run."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from penstock.kernel.clock import SystemClock
from penstock.kernel.errors import PenstockError
from penstock.store.base import CREATE, Swap, Version
from penstock.store.s3.backend import S3Store
from penstock.store.s3.transport import TransportLimits
from tests.integration.scripted import Call

PATIENT = TransportLimits(connect_seconds=30, answer_seconds=60, queue_seconds=60)
BIG = 3 * 1024 * 1024

Ask = Callable[[S3Store], Awaitable[object]]
READS: dict[str, Ask] = {
    "get": lambda store: store.get("k"),
    "head": lambda store: store.head("k"),
    "list": lambda store: store.list(),
    "sample": lambda store: store.sample(),
}
WRITES: dict[str, Ask] = {
    "put": lambda store: store.put("k", b"body"),
    "put of much": lambda store: store.put("k", b"x" * BIG),
    "create": lambda store: store.put("k", b"", CREATE),
    "swap": lambda store: store.put("k", b"body", Swap(Version("v"))),
    "delete": lambda store: store.delete("k"),
}


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run a test; afterwards nothing may have been left for the loop to complain about."""
    complaints: list[dict[str, Any]] = []

    async def whole() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: complaints.append(context))
        await work
        gc.collect()
        await turns(3)

    asyncio.run(whole())
    assert complaints == []


async def turns(count: int) -> None:
    """Let the loop go round so many times."""
    for _ in range(count):
        await SystemClock().sleep(0)


def own(what: str) -> int:
    """How many files (fd) or threads (task) this process has; 0 where that cannot be told."""
    folder = Path("/proc/self") / what
    return len(list(folder.iterdir())) if folder.is_dir() else 0


async def error_of(request: Awaitable[object]) -> PenstockError:
    with pytest.raises(PenstockError) as caught:
        await request
    message = caught.value.message
    assert message.endswith((").", "closed."))
    assert "AWS_" not in message
    assert "Error" not in message
    return caught.value


async def never_answers(call: Call) -> None:
    await call.read()
    await call.gone()
