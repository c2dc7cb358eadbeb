"""An installation with a victim and hostile jobs in it, as who runs the test sees it.

The database, the bucket by its owner's keys, and processes that use what a task has kept. Used by
`tests.e2e.hostile_story`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import boto3
import httpx
import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import dict_row

from penstock.dispatcher.client import Client
from penstock.store.s3.local import LocalS3
from tests.architecture.source import ROOT
from tests.e2e.command import penstock
from tests.e2e.fleet import CLOCK, Fleet, until

API_TOKEN: Final = "the-token-of-the-API-in-a-hostile-test"
SECONDS_MAX: Final = 60.0

Row = Mapping[str, Any]


class Stage:
    """The installation while the story is played."""

    def __init__(self, fleet: Fleet, client: Client, server: LocalS3) -> None:
        self.fleet = fleet
        self.client = client
        self.root = "s3://penstock/lake"
        self._server = server
        self._s3 = boto3.client(
            "s3",
            endpoint_url=server.endpoint,
            region_name="us-east-1",
            aws_access_key_id=server.credentials.access_key,
            aws_secret_access_key=server.credentials.secret_key,
        )

    async def rows(self, sql: str, **asked: Any) -> list[dict[str, Any]]:
        dsn = self.fleet.postgres.dsn
        async with await psycopg.AsyncConnection.connect(dsn, row_factory=dict_row) as connection:
            return await (await connection.execute(sql.encode(), asked)).fetchall()

    async def task(self, job: str, partition: str) -> dict[str, Any]:
        """A task as the database has it, with the lease of its last attempt; empty without one."""
        rows = await self.rows(
            "SELECT task.id AS task_id, task.status, task.attempt, task.reason,"
            " task.generation::text, attempt.lease_token"
            " FROM task JOIN job ON job.id = task.job_id"
            " LEFT JOIN attempt ON attempt.task_id = task.id AND attempt.number = task.attempt"
            " WHERE job.name = %(job)s AND task.payload ->> 'partition_key' = %(partition)s",
            job=job,
            partition=partition,
        )
        return rows[0] if rows else {}

    async def until_task(self, job: str, partition: str, *statuses: str) -> dict[str, Any]:
        deadline = CLOCK.monotonic() + SECONDS_MAX
        while (found := await self.task(job, partition)).get("status") not in statuses:
            assert CLOCK.monotonic() < deadline, f"{job} {partition}: {found} {self.said()}"
            await CLOCK.sleep(0.05)
        return found

    async def published(self, dataset: str) -> dict[str, str]:
        """What is published, by partition: where, by which attempt, for the how-many-eth time."""
        rows = await self.rows(
            "SELECT partition_key, location, task_id, attempt, publication.revision"
            " FROM publication JOIN dataset ON dataset.id = dataset_id WHERE name = %(name)s",
            name=dataset,
        )
        return {row.pop("partition_key"): json.dumps(row, sort_keys=True) for row in rows}

    async def location(self, dataset: str, partition: str) -> str:
        where: str = json.loads((await self.published(dataset))[partition])["location"]
        return where

    def objects(self, prefix: str) -> dict[str, str]:
        """The versions of objects, by their keys."""
        pages = self._s3.get_paginator("list_objects_v2").paginate(
            Bucket="penstock", Prefix=f"lake/{prefix}"
        )
        return {each["Key"]: each["ETag"] for page in pages for each in page.get("Contents", ())}

    def read(self, url: str) -> str:
        bucket, _, key = url.removeprefix("s3://").partition("/")
        text: str = self._s3.get_object(Bucket=bucket, Key=key)["Body"].read().decode()
        return text

    async def victims(self) -> Mapping[str, Any]:
        """All that is the victim's, and must not change."""
        where = await self.location("precious", "open")
        return {
            "open": (await self.published("precious"))["open"],
            "objects": self.objects(f"{where.removeprefix(f'{self.root}/')}/"),
            "data": self.read(f"{where}/data.txt"),
            "batches": await self.rows("SELECT seq, dataset_id FROM buffer_batch ORDER BY seq"),
        }

    async def targets(self) -> dict[str, Any]:
        """What a hostile task is told: all that could be known, and more."""
        held = await self.until_task("victim", "held", "running")
        await until(lambda: "printed" in self._log(held), seconds=SECONDS_MAX)
        data = self.fleet.folder / "data"
        (handed,) = data.glob(f"handed/*/{held['task_id']}-{held['attempt']}-*")
        (key,) = data.glob("keys/*.pem")
        (dataset,) = await self.rows("SELECT id::text FROM dataset WHERE name = 'precious'")
        (running,) = {
            each.rpartition("/")[0]
            for each in self.objects("datasets/precious/")
            if f"/{held['task_id']}-{held['attempt']}-" in each
        }
        worker = self.fleet.live["worker-0"].pid
        (public, internal) = self.fleet.ports["dispatcher-0"]
        socket = conninfo_to_dict(self.fleet.postgres.dsn)
        # Where wake-ups go another way there is none, and that is not to be seen either.
        queued = sorted(self.objects("queues/wake-ups/")) or ["lake/queues/wake-ups/state"]
        return {
            "root": self.root,
            "role": self._server.task_role,
            "public": f"http://127.0.0.1:{public}",
            "internal": f"http://127.0.0.1:{internal}",
            "queries": f"http://127.0.0.1:{self.fleet.told['query_port']}",
            "worker": worker,
            "code": str(self.fleet.folder),
            "postgres": f"{socket['host']}/.s.PGSQL.{socket['port']}",
            "queued": f"s3://penstock/{queued[-1]}",
            "victim": {
                **{name: held[name] for name in ("task_id", "attempt", "lease_token")},
                "dataset": dataset["id"],
                "location": await self.location("precious", "open"),
                "running": f"s3://penstock/{running}",
            },
            "files": {
                "the victim's token": f"{handed}/token",
                "the victim's credentials": f"{handed}/credentials.json",
                "the victim's log": f"{data}/logs/{held['task_id']}-{held['attempt']}.log",
                "the worker's secret": f"{data}/worker.secret",
                "the signing key": str(key),
                "the file of a secret": f"{data}/secrets/vault",
                "the keys of the bucket": str(self._server.log.with_name("identities.json")),
            },
            "folders": {
                "the victim's files": str(handed),
                "all that is handed": str(handed.parent),
                "all runs of workers": str(handed.parent.parent),
                "the signing keys": str(key.parent),
                "the secrets": f"{data}/secrets",
                "the logs": f"{data}/logs",
                "the users that are taken": str(self.fleet.folder / "users"),
                "Postgres": str(self.fleet.folder / "postgres"),
            },
        }

    async def bait(self, partition: str, targets: Mapping[str, Any] | None = None) -> None:
        payload = {**(targets or {}), "none": not targets}
        await self.client.trigger("bait", partition_key=partition, payload=payload)

    async def use(
        self, kept: Any, targets: Any, *, lease_token: str, only: Sequence[str] = ()
    ) -> dict[str, list[Any]]:
        """Have another process use what a task has kept."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-W", "error", "-m", "tests.e2e.hostile_operator"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=ROOT,
        )
        asked = {"kept": kept, "targets": targets, "lease_token": lease_token, "only": only}
        async with asyncio.timeout(SECONDS_MAX):
            out, err = await process.communicate(json.dumps(asked).encode())
        assert process.returncode == 0, err.decode()
        said: dict[str, list[Any]] = json.loads(out)
        return said

    async def audited(self) -> list[Row]:
        """All notes of the audit, as people see them; the last is one that is made here."""
        # From another address: of one only so many are noted in a minute.
        elsewhere = httpx.AsyncHTTPTransport(local_address="127.0.0.2")
        async with httpx.AsyncClient(transport=elsewhere) as stranger:
            asked = f"{self.fleet.public_urls()[0]}/v1/operators"
            await stranger.get(asked, headers={"Authorization": "Bearer wrong"})
        deadline = CLOCK.monotonic() + SECONDS_MAX
        notes = await self._audit()
        while not any("operators" in each["what"] for each in notes):
            assert CLOCK.monotonic() < deadline, notes
            notes = await self._audit()
        return notes

    async def _audit(self) -> list[Row]:
        words = ("audit", "--json", "--limit", "1000")
        told = {"PENSTOCK_URL": self.fleet.public_urls()[0], "PENSTOCK_API_TOKEN": API_TOKEN}
        done = await asyncio.to_thread(penstock, *words, environment=told)
        assert done.returncode == 0, done.stderr
        notes: list[Row] = json.loads(done.stdout)["notes"]
        return notes

    def said(self) -> str:
        """The last words of every process."""
        return "\n".join(f"== {each.name}\n{each.read_text()[-4000:]}" for each in self.logs())

    def logs(self) -> list[Path]:
        return sorted(self.fleet.folder.glob("*.err"))

    def _log(self, held: Row) -> str:
        log = self.fleet.folder / "data" / "logs" / f"{held['task_id']}-{held['attempt']}.log"
        return log.read_text() if log.exists() else ""
