"""The same race from two processes: clients that share nothing, not even a connection.

The doctor starts this module as a second process and tells it, a line of JSON a round, what to
race for; both put their writers in at once, and the second answers with how many of its own
believe that they won. The second process ends when the doctor closes the pipe.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from penstock.kernel.entropy import Entropy, system_entropy
from penstock.kernel.errors import PenstockError
from penstock.kernel.service import Service
from penstock.store.base import CREATE, ObjectStore, PutMode, Swap, Version
from penstock.store.opening import Opening, open_backend, wrapped
from penstock.store.races import bodies_of, lay, winners_among

ANSWER_SECONDS_MAX: Final = 120.0


class SecondProcess(Service):
    """Another process with clients of the same store."""

    def __init__(self, url: str, *, environment: Mapping[str, str]) -> None:
        self._url = url
        self._environment = environment
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            __name__,
            self._url,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**self._environment},
        )
        answer = await self._answer()
        if not answer.get("ready"):
            raise _failed(answer)

    async def stop(self) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(10):
                await self._process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        self._process = None

    async def race(
        self, clients: Sequence[ObjectStore], key: str, *, swap: bool, entropy: Entropy
    ) -> int:
        """How many writers of both processes believe that they won."""
        version = ""
        if swap:
            version = await lay(clients[0], key, bodies_of(1, entropy)[0])
        await self._ask({"key": key, "version": version, "writers": len(clients)})
        mode = _mode(version)
        ours = await winners_among(clients, key, mode, bodies_of(len(clients), entropy))
        answer = await self._answer()
        theirs = answer.get("winners")
        if not isinstance(theirs, int):
            raise _failed(answer)
        return sum(ours) + theirs

    async def _ask(self, question: Mapping[str, object]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question).encode() + b"\n")
        # If it has ended, its missing answer says so.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            await self._process.stdin.drain()

    async def _answer(self) -> Mapping[str, object]:
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(ANSWER_SECONDS_MAX):
                line = await self._process.stdout.readline()
        except TimeoutError:
            line = b""
        answer: Mapping[str, object] = json.loads(line) if line else {}
        return answer


def _failed(answer: Mapping[str, object]) -> PenstockError:
    why = answer.get("error", "it did not answer")
    return PenstockError(f"The second process of the examination failed: {why}")


def _mode(version: str) -> PutMode:
    return Swap(Version(version)) if version else CREATE


async def _serve(url: str) -> None:
    entropy = system_entropy()
    opening = Opening(environment=os.environ)
    stores = [wrapped(await open_backend(url, opening), opening) for _ in range(2)]
    try:
        _say({"ready": True})
        while line := await asyncio.to_thread(sys.stdin.readline):
            question = json.loads(line)
            writers = int(question["writers"])
            clients = [stores[number % len(stores)] for number in range(writers)]
            won = await winners_among(
                clients, question["key"], _mode(question["version"]), bodies_of(writers, entropy)
            )
            _say({"winners": sum(won)})
    finally:
        for store in stores:
            await store.close()


def _say(answer: Mapping[str, object]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main(url: str) -> int:
    """Serve the doctor's questions until the pipe closes."""
    # A Ctrl-C in the terminal reaches us too, but it is for the doctor to say when we end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        asyncio.run(_serve(url))
    except BrokenPipeError:
        return 1
    except PenstockError as error:
        _say({"error": error.message})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
