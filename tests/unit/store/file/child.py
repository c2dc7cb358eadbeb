"""A process that uses a file store, for tests of what several processes do, and of their death.

child.py crash                   for each line on standard input, does one operation in a
                                      process of its own, which dies before its nth call
child.py count ROOT KEY TIMES    increments a counter
child.py create ROOT KEY TASKS   creates one key in many tasks, and prints how many could
child.py churn ROOT FOLDER TIMES creates and deletes one key of its own in a shared folder
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from penstock.kernel.clock import SystemClock
from penstock.kernel.entropy import system_entropy
from penstock.kernel.errors import AlreadyExists, NotFound, VersionConflict
from penstock.store.base import CREATE, REPLACE, PutMode, Swap, Version
from penstock.store.file.backend import FileStore
from penstock.store.file.disk import Disk


class DyingDisk(Disk):
    """A disk that kills its process just before the nth call that would change something."""

    def __init__(self, dies_at: int) -> None:
        super().__init__()
        self._left = dies_at

    def before(self, call: str, target: bytes | int) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def _store(root: str, disk: Disk | None = None) -> FileStore:
    return FileStore(
        Path(root), clock=SystemClock(), entropy=system_entropy(), fsync=False, disk=disk
    )


async def _operate(order: dict[str, Any]) -> None:
    store = _store(order["root"], DyingDisk(order["dies_at"]))
    key = order["key"]
    version = None if order["version"] is None else Version(order["version"])
    match order["operation"]:
        case "touch":
            assert version is not None
            await store.touch(key, version=version, metadata=order["metadata"])
        case "delete":
            await store.delete(key, version=version)
        case how:
            mode: PutMode = CREATE if how == "create" else REPLACE
            if version is not None:
                mode = Swap(version)
            await store.put(key, order["body"].encode(), mode, metadata=order["metadata"])
    await store.close()


def crash() -> None:
    """Say for each order whether the process was killed, or was done before."""
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                asyncio.run(_operate(json.loads(line)))
                status = 0
            finally:
                os._exit(status)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        answer = {0: "done", -signal.SIGKILL: "killed"}.get(code, f"failed with {code}")
        print(answer, flush=True)  # noqa: T201 - the answer


async def count(root: str, key: str, times: int) -> None:
    store = _store(root)
    for _ in range(times):
        while True:
            try:
                found = await store.get(key)
                assert found is not None
                body = str(int(found.body) + 1).encode()
                await store.put(key, body, Swap(found.version))
            except VersionConflict:
                continue
            break
    await store.close()


async def create(root: str, key: str, tasks: int) -> None:
    store = _store(root)

    async def wins(number: int) -> bool:
        try:
            await store.put(key, f"{os.getpid()} {number}".encode(), CREATE)
        except AlreadyExists:
            return False
        return True

    won = await asyncio.gather(*(wins(number) for number in range(tasks)))
    await store.close()
    print(sum(won))  # noqa: T201 - the answer


async def churn(root: str, folder: str, times: int) -> None:
    store = _store(root)
    key = f"{folder}/{os.getpid()}"
    for number in range(times):
        await store.put(key, str(number).encode(), CREATE)
        found = await store.get(key)
        assert found is not None
        assert found.body == str(number).encode()
        await store.delete(key, version=found.version)
        try:
            await store.head(key)
        except NotFound:
            continue
        raise AssertionError(key)
    await store.close()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["crash"]:
            crash()
        case ["count", root, key, times]:
            asyncio.run(count(root, key, int(times)))
        case ["create", root, key, tasks]:
            asyncio.run(create(root, key, int(tasks)))
        case ["churn", root, folder, times]:
            asyncio.run(churn(root, folder, int(times)))
