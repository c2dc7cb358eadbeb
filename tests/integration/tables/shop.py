"""A dataset with files on `file://` or in a bucket, and the catalog that tells of it, over HTTP."""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.datasets.layout import attempt_name, attempt_prefix
from penstock.datasets.manifest import File, Manifest, digest, encode
from penstock.datasets.parquet import footers
from penstock.datasets.parquet_footer import columns_in
from penstock.datasets.schema import Column
from penstock.dispatcher.api.context import ApiContext
from penstock.dispatcher.api.routes import public_app
from penstock.dispatcher.api.server import HttpListener, HttpServer
from penstock.dispatcher.tasks.model import ClaimedTask
from penstock.runtimes.base import Facts
from penstock.store.base import ObjectStore
from penstock.store.opening import open_store
from tests.integration.dispatcher.api.stage import parts_of
from tests.integration.dispatcher.world import Job, World, done


@dataclass
class Shop:
    """A world whose jobs have written files."""

    world: World
    store: ObjectStore
    root: str
    parts: ApiContext
    url: str

    async def claimed(self, job: Job, partition: str | None) -> tuple[ClaimedTask, str]:
        """A task of a job that was just claimed, and where it writes a partition."""
        count = await self.world.value("SELECT count(*) FROM task")
        held = await job.claimed(f"task-{count}")
        name = attempt_name(
            task_id=held.task_id, attempt=held.attempt, lease_token=held.lease_token
        )
        prefix = attempt_prefix(
            "totals", generation=held.generation, partition_key=partition, attempt=name
        )
        return held, prefix

    async def publish(
        self, job: Job, table: pa.Table, *, partition: str | None = "a", key: str | None = None
    ) -> None:
        """Publish a table as a partition of a job's dataset, or as a part that is appended."""
        held, prefix = await self.claimed(job, partition)
        columns = _columns(table.schema)
        files = []
        if table.num_rows:
            opened = io.BytesIO()
            pq.write_table(table, opened)
            body = opened.getvalue()
            await self.store.put(f"{prefix}/part-0.parquet", body)
            sha = hashlib.sha256(body).hexdigest()
            (footer,) = footers([opened], seconds_max=60, is_trusted=True)
            assert footer is not None
            files = [
                File(
                    name="part-0.parquet",
                    rows=footer.rows,
                    bytes=len(body),
                    sha256=sha,
                    bounds=dict(footer.bounds),
                    unfit=footer.unfit,
                )
            ]
        manifest = Manifest(
            dataset="totals",
            generation=held.generation,
            job="totals",
            task_id=held.task_id,
            attempt=held.attempt,
            partition_key=partition,
            rows=table.num_rows,
            bytes=sum(each.bytes for each in files),
            columns=columns,
            files=tuple(files),
        )
        body = encode(manifest)
        await self.store.put(f"{prefix}/manifest.json", body)
        said = Facts(
            manifest=digest(body),
            files=len(files),
            rows=table.num_rows,
            bytes=manifest.bytes,
            columns=columns,
        )
        location = f"{self.root}/{prefix}"
        output = job.output(partition, location, facts=said, append_key=key)
        await self.world.tasks.complete(done(held.fence, output))


def _columns(schema: pa.Schema) -> tuple[Column, ...]:
    """As a runtime tells of them; and one without a type, as Spark does."""
    odd = {each.name for each in schema if pa.types.is_null(each.type)}
    known = columns_in(pa.schema([each for each in schema if each.name not in odd]))
    return (*known, *(Column(name, "void") for name in sorted(odd)))


@contextlib.asynccontextmanager
async def opened_shop(world: World, where: Path | str, **fields: Any) -> AsyncIterator[Shop]:
    """A shop whose files are in a folder, or in a bucket."""
    url = where.as_uri() if isinstance(where, Path) else where
    store = await open_store(url)
    root = url.partition("?")[0].rstrip("/")
    parts = parts_of(world, store=store, root=root, **fields)
    serving = HttpServer([HttpListener("public", public_app(parts), "127.0.0.1", 0)])
    try:
        async with serving:
            yield Shop(world, store, root, parts, serving.url("public"))
    finally:
        await store.close()
