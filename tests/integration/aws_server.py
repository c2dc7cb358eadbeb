"""A server that speaks the protocols of AWS: SQS, Lambda, KMS, CloudWatch and more.

It is ministack, run by hypercorn on a free loopback port, in a process that ends with the one that
started it. It judges no credentials, so it is of no use to test those.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from pathlib import Path

import httpx

from penstock.kernel.aws import Aws
from penstock.kernel.child_process import ChildProcess
from penstock.kernel.clock import SystemClock
from penstock.kernel.errors import PenstockError
from penstock.kernel.service import Service
from tests.leftovers import VARIABLE

_START_SECONDS_MAX = 60.0


class AwsServer(Service):
    """One server. `aws` is how to reach it, once it is started."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._server: ChildProcess | None = None
        self.endpoint = ""

    @property
    def aws(self) -> Aws:
        return Aws(
            region="us-east-1", endpoint=self.endpoint, access_key="test", secret_key="testtest"
        )

    async def start(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as held:
            port = held.getsockname()[1]
        self.endpoint = f"http://127.0.0.1:{port}"
        command = [
            *(sys.executable, "-m", "hypercorn", "ministack.app:app"),
            *("--bind", f"127.0.0.1:{port}", "--graceful-timeout", "0"),
        ]
        environment = {
            "PATH": "",
            "GATEWAY_PORT": str(port),
            "HOME": str(self._folder),
            "TMPDIR": str(self._folder),
            "LOG_LEVEL": "WARNING",
            VARIABLE: os.environ[VARIABLE],
        }
        log = self._folder / "aws.log"
        self._server = ChildProcess(command, log=log, environment=environment, grace_seconds=2)
        await self._server.start()
        clock = SystemClock()
        deadline = clock.monotonic() + _START_SECONDS_MAX
        async with httpx.AsyncClient() as client:
            while clock.monotonic() < deadline and self._server.running:
                with contextlib.suppress(httpx.HTTPError):
                    answer = await client.get(f"{self.endpoint}/_ministack/health")
                    if answer.status_code < 500:
                        return
                await clock.sleep(0.1)
        said = log.read_text()[-2000:]
        raise PenstockError("The AWS server did not start.", hint=f"It said: {said}")

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop()
            self._server = None
