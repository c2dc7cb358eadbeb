"""From the DataFrame of an output to files and a manifest in the attempt's own folder.

What is small leaves Spark through Arrow: it is collected, sorted and written here, mostly as one
file. What is large is written by Spark (`Access.write`). Which it is, is told by how much the task
has read, and by whether the result fits into the driver after all. The manifest is written last:
until then there is nothing, and afterwards nothing changes.

Equal rows give equal bytes if the job has `sort_by`: rows that are equal in these columns are
ordered by all others, files are cut by what was read, and nothing depends on when and by whom.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
from pyarrow import parquet
from pyspark.sql import DataFrame, types
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from penstock.datasets.layout import MANIFEST
from penstock.datasets.manifest import File, Manifest, ManifestInput, encode, sums
from penstock.datasets.schema import Column
from penstock.datasets.transfer import Transfer
from penstock.kernel.errors import WorkFailed
from penstock.runtimes.base import Made, Work, facts_of, manifest_inputs
from penstock.runtimes.spark.access.base import Access, Target
from penstock.runtimes.spark.columns import columns_of, is_for_arrow, is_orderable, quoted
from penstock.runtimes.spark.configs import JobConfig, names
from penstock.runtimes.spark.internals import arrow_schema
from penstock.runtimes.spark.operators.plans import Member

_SPLIT_FROM: Final = 1.5
"""How many times the target a file may be before it becomes several."""
_SHARE_BYTES: Final = 32 * 2**20
_SHARES_MAX: Final = 4
"""What is large is written by some tasks side by side, though it would fit into one file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What an output looks like: its columns, the same in Arrow, and how it is sorted."""

    columns: tuple[Column, ...]
    is_for_arrow: bool
    arrow: Any
    order: tuple[str, ...]
    """All columns by which its rows are sorted; empty if they are not."""


def shape_of(frame: DataFrame, config: JobConfig, *, without: Sequence[str] = ()) -> Shape:
    """The shape of a result. Raises `WorkFailed` if it cannot be that of a dataset."""
    fields = [field for field in frame.schema.fields if field.name not in without]
    schema = types.StructType(fields)
    if not fields:
        what = (
            f"{config.sql_file or 'config.sql'} is no query"
            if config.sql
            else "The result is empty"
        )
        raise WorkFailed(f"{what}: it has no columns.", is_retried=False)
    unknown = [name for name in config.sort_by if name not in schema.names]
    if unknown:
        raise WorkFailed(
            f"config.sort_by: the result has no column {unknown[0]!r}; it has"
            f" {names(schema.names)}.",
            is_retried=False,
        )
    rest = (
        field.name
        for field in fields
        if field.name not in config.sort_by and is_orderable(field.dataType)
    )
    passes = is_for_arrow(schema)
    return Shape(
        columns=columns_of(schema),
        is_for_arrow=passes,
        arrow=arrow_schema(_nullable(schema)) if passes else None,
        order=(*config.sort_by, *rest) if config.sort_by else (),
    )


class Writer:
    """Writes outputs of attempts."""

    def __init__(self, transfer: Transfer, *, target_file_bytes: int) -> None:
        self._transfer = transfer
        self._target_file_bytes = target_file_bytes

    def file_bytes(self, config: JobConfig) -> int:
        """How large the files of a job should become."""
        return config.target_file_bytes or self._target_file_bytes

    def table(
        self, table: Any, shape: Shape, location: str, access: Access, *, file_bytes: int
    ) -> tuple[File, ...]:
        """Write a table, as one file or as several of about the target size."""
        if not table.num_rows:
            return ()
        table = _arranged(table, shape)
        body = _encoded(table)
        pieces = [(table, body)]
        if len(body) > _SPLIT_FROM * file_bytes:
            rows = math.ceil(table.num_rows / math.ceil(len(body) / file_bytes))
            cut = [table.slice(start, rows) for start in range(0, table.num_rows, rows)]
            pieces = [(each, _encoded(each)) for each in cut]
        made = []
        for number, (each, encoded) in enumerate(pieces):
            name = f"part-{number:05}.parquet"
            sent = self._transfer.write_bytes(f"{location}/{name}", encoded)
            file = File(name=name, rows=each.num_rows, bytes=sent.bytes, sha256=sent.sha256)
            access.wrote(f"{location}/{name}", file)
            made.append(file)
        return tuple(made)

    def frame(
        self,
        frame: DataFrame,
        shape: Shape,
        member: Member,
        output: str,
        access: Access,
        *,
        bytes_in: int,
    ) -> tuple[File, ...]:
        """Have Spark write a frame, as files of about the target size."""
        file_bytes = self.file_bytes(member.config)
        location = member.work.outputs[output].location
        count = max(1, math.ceil(bytes_in / file_bytes))
        if member.config.operator == "compact":
            spread = frame.repartition(count)
        else:
            shares = min(_SHARES_MAX, math.ceil(bytes_in / _SHARE_BYTES))
            spread = frame.coalesce(max(count, shares))
        if shape.order:
            by = [F.col(quoted(name)) for name in member.config.sort_by]
            every = [F.col(quoted(name)) for name in shape.order]
            spread = frame.repartition(count, *by).sortWithinPartitions(*every)
        staging = f"{member.work.scratch or location}/{output}"
        return access.write(
            spread, Target(location=location, staging=staging, file_bytes=file_bytes)
        )

    def manifest(
        self,
        member: Member,
        output: str,
        columns: Sequence[Column],
        files: Sequence[File],
        *,
        location: str = "",
        slice_: Mapping[str, Any] | None = None,
        inputs: tuple[ManifestInput, ...] | None = None,
    ) -> Made:
        """Write the manifest, and say what was made: the task's own partition, or this one."""
        work = member.work
        place = work.outputs[output]
        total = sums(files)
        of = work.payload if slice_ is None else slice_
        if inputs is None:
            inputs = manifest_inputs({each.name: each.given for each in member.inputs.values()})
        manifest = Manifest(
            dataset=place.dataset,
            generation=work.generation,
            job=work.job,
            task_id=work.task_id,
            attempt=work.attempt,
            partition_key=of.get("partition_key"),
            start=of.get("start"),
            end=of.get("end"),
            rows=total.rows,
            bytes=total.bytes,
            columns=tuple(columns),
            files=tuple(files),
            inputs=inputs,
        )
        body = encode(manifest)
        home = location or place.location
        self._transfer.write_bytes(f"{home}/{MANIFEST}", body)
        facts = facts_of(manifest, body)
        return Made(
            output=output,
            location=home,
            facts=facts,
            **(_slice(work) if slice_ is None else slice_),
        )


def _slice(work: Work) -> Mapping[str, Any]:
    """The partition of the task, or its cursor if it has none."""
    payload = work.payload
    if payload.get("partition_key") is None:
        return {"cursor": payload.get("cursor")}
    return {name: payload.get(name) for name in ("partition_key", "start", "end")}


def _arranged(table: Any, shape: Shape) -> Any:
    """Rows in their order and columns in their types, in one piece, so that bytes are the same."""
    if shape.order:
        table = table.sort_by([(name, "ascending") for name in shape.order])
    return table.select(shape.arrow.names).cast(shape.arrow).combine_chunks()


def _encoded(table: Any) -> bytes:
    sink = pa.BufferOutputStream()
    parquet.write_table(table, sink)
    body: bytes = sink.getvalue().to_pybytes()
    return body


def _nullable(said: types.StructType) -> types.StructType:
    """A schema in which everything may be null: what Spark concludes depends on the plan."""
    found = _loose(said)
    assert isinstance(found, types.StructType)
    return found


def _loose(said: types.DataType) -> types.DataType:
    match said:
        case types.StructType():
            return types.StructType(
                [types.StructField(each.name, _loose(each.dataType)) for each in said.fields]
            )
        case types.ArrayType():
            return types.ArrayType(_loose(said.elementType))
        case types.MapType():
            return types.MapType(_loose(said.keyType), _loose(said.valueType))
    return said
