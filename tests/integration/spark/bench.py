"""An engine on a session of the tests: what it reads, what it is told, and what it has made."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet
from pyspark.sql.pandas.types import from_arrow_schema

from penstock.datasets.manifest import Manifest, decode
from penstock.datasets.snapshot import read
from penstock.datasets.transfer import Transfer
from penstock.runtimes.base import (
    AttemptWork,
    Part,
    ProducedOutput,
    WorkInput,
    WorkOutput,
    WorkResult,
)
from penstock.runtimes.spark.access.remote import RemoteAccess
from penstock.runtimes.spark.columns import columns_of
from penstock.runtimes.spark.engine import Engine
from penstock.runtimes.spark.engine_protocol import WorkFailure, WorkOutcome
from penstock.runtimes.spark.job_config import JobConfig
from penstock.runtimes.spark.operators import PlannedTask
from penstock.runtimes.spark.output_writer import OutputShape, OutputWriter
from penstock.runtimes.spark.settings import SparkSettings


def settings_of(folder: Path, **more: Any) -> SparkSettings:
    return SparkSettings(**{"master": "local[2]", "data": str(folder), **more})


class Told:
    """What the engine has told, and whom it may leave out."""

    def __init__(self, dropped: Collection[int] = ()) -> None:
        self.dropped = set(dropped)
        self.begun: list[list[int]] = []
        self.phases: list[str] = []
        self.ended: dict[int, WorkOutcome] = {}

    def is_dropped(self, task_id: int) -> bool:
        return task_id in self.dropped

    def begin(self, task_ids: Collection[int]) -> None:
        self.begun.append(sorted(task_ids))

    def phase(self, name: str) -> None:
        self.phases.append(name)

    def end(self, task_id: int, ended: WorkOutcome) -> None:
        assert task_id not in self.ended, "told twice"
        self.ended[task_id] = ended


class Bench:
    """Publishes, runs, and reads back."""

    def __init__(
        self, session: Any, root: Path | str, data: Path, *, store_url: str = "", **more: Any
    ) -> None:
        self.session = session
        self.root = root.as_uri() if isinstance(root, Path) else root
        self.transfer = Transfer(store_url or "file:///?fsync=off")
        self.settings = settings_of(data, store_url=self.transfer.store_url, **more)
        self.engine = Engine(self.settings, session)
        self.told = Told()
        self.number = 0

    def work(
        self,
        operator: str,
        config: Mapping[str, Any],
        *,
        inputs: Mapping[str, Sequence[Part]] | None = None,
        outputs: Sequence[str] = ("out",),
        key: str | None = "2013-01-01",
        **more: Any,
    ) -> AttemptWork:
        self.number += 1
        folder = f"{self.number}-1-{self.number:024}"
        return AttemptWork(
            task_id=self.number,
            attempt=1,
            job="job",
            operator=operator,
            generation="g1",
            config=config,
            payload={"partition_key": key} if key else {"cursor": 7},
            inputs={
                name: WorkInput(dataset=name, generation="g1", parts=tuple(parts))
                for name, parts in (inputs or {}).items()
            },
            outputs={
                name: WorkOutput(
                    dataset=name,
                    uuid=name,
                    location=f"{self.root}/datasets/{name}/g1/{key or '~all'}/{folder}",
                )
                for name in outputs
            },
            scratch=f"{self.root}/scratch/{folder}",
            **more,
        )

    def ended(self, *works: AttemptWork) -> Mapping[int, WorkOutcome]:
        for work in works:
            # The same work may be run again.
            self.told.ended.pop(work.task_id, None)
        self.engine.run(self.session, works, self.told)
        return {
            work.task_id: self.told.ended[work.task_id]
            for work in works
            if work.task_id in self.told.ended
        }

    def finished(self, work: AttemptWork) -> WorkResult:
        ended = self.ended(work)[work.task_id]
        assert isinstance(ended, WorkResult), ended
        return ended

    def made(self, work: AttemptWork) -> ProducedOutput:
        (made,) = self.finished(work).made
        return made

    def failure(self, work: AttemptWork) -> WorkFailure:
        ended = self.ended(work)[work.task_id]
        assert isinstance(ended, WorkFailure), ended
        return ended

    def publish(
        self,
        rows: Mapping[str, Any],
        *,
        key: str | None = "2013-01-01",
        start: int | None = None,
        end: int | None = None,
    ) -> Part:
        """A part as a job of Penstock makes it."""
        work = self.work("compact", {}, key=key)
        table = pa.table(dict(rows))
        columns = columns_of(from_arrow_schema(table.schema))
        shape = OutputShape(columns=columns, is_for_arrow=True, arrow=table.schema, order=())
        writer = OutputWriter(self.transfer, target_file_bytes=2**27)
        location = work.outputs["out"].location
        files = writer.table(table, shape, location, RemoteAccess(self.transfer), file_bytes=2**27)
        member = PlannedTask(work=work, config=JobConfig(operator="compact"))
        return part(writer.manifest(member, "out", columns, files), start=start, end=end)

    def manifest(self, made: ProducedOutput) -> Manifest:
        assert made.facts is not None
        return decode(self.transfer.read_bytes(f"{made.location}/manifest.json"))

    def rows(self, made: ProducedOutput) -> list[dict[str, Any]]:
        """What a reader of the manifest sees."""
        found: list[dict[str, Any]] = []
        for contents in read([part(made)], self.transfer):
            for each in contents.files:
                with self.transfer.open(each.location) as file:
                    found += parquet.ParquetFile(file).read().to_pylist()
        return found


def part(made: ProducedOutput, **more: Any) -> Part:
    """What was made, as it is given to the next job."""
    assert made.facts is not None
    found = Part(
        location=made.location,
        partition_key=made.partition_key,
        start=made.start,
        end=made.end,
        revision=1,
        manifest=made.facts.manifest,
        rows=made.facts.rows,
        bytes=made.facts.bytes,
    )
    return replace(found, **more)
