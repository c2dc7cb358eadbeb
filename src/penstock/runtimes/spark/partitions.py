"""Many partitions from one pass: a result is divided by its keys, and each part is an output.

The states of an attempt whose output has `partition_by`:

| state | what a crash leaves |
|---|---|
| Spark writes: one job, which brings the rows of a key together | files in scratch |
| files are brought to `~many/ATTEMPT/KEY/`, several at a time | folders without manifests |
| manifests are written, several at a time | some partitions that are whole, and nobody's |
| one completion tells all of them, under one fence | all are published, or none is |

Whatever a crash leaves is swept with the attempt, partition by partition; the next attempt has a
folder of its own and may find other keys. A completion whose answer was lost is told again, and has
the same answer. Expectations are checked over all rows before there is a manifest.

Without `sort_by` the rows of a key that are many become several files, as adaptive execution cuts
them; with it a partition is one sorted file, and equal rows have equal bytes. A result without rows
has no partitions, and publishes nothing. Columns are told with the first partition only: all have
the same, and ten thousand times the same would not fit into an answer.

Called by the engine, and by `merging`, for outputs with `partition_by`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from penstock.datasets.layout import part
from penstock.datasets.manifest import File
from penstock.datasets.schema import Column
from penstock.kernel.errors import WorkFailed
from penstock.runtimes.base import Made
from penstock.runtimes.spark.access.base import Access, Divided, Target
from penstock.runtimes.spark.columns import quoted
from penstock.runtimes.spark.conf import SHUFFLED_MIN
from penstock.runtimes.spark.keys import KEY
from penstock.runtimes.spark.operators.plans import Member
from penstock.runtimes.spark.writing import Shape, Writer, read_of

_MANIFESTS_AT_ONCE: Final = 32
_SHUFFLED_BYTES_MIN: Final = "1b"
"""What a task that writes partitions gets at least."""


def divide(
    frame: DataFrame,
    shape: Shape,
    member: Member,
    output: str,
    access: Access,
    *,
    file_bytes: int,
    partitions_max: int,
) -> Divided:
    """Write the rows of each key of a frame as files of its own; `WorkFailed` for too many keys."""
    work = member.work
    location = work.outputs[output].location
    target = Target(
        location=location, staging=f"{work.scratch or location}/{output}", file_bytes=file_bytes
    )
    with _on_all_cores(frame.sparkSession):
        divided = access.write_keys(_spread(frame, shape), KEY, target)
    if len(divided) > partitions_max:
        raise too_many(output, f"{len(divided):,}", partitions_max)
    return divided


def too_many(output: str, count: str, partitions_max: int) -> WorkFailed:
    """That a result has more partitions than a task may make."""
    return WorkFailed(
        f"partition_by of the output {output} has made {count} partitions of the"
        f" result, and {partitions_max:,} are allowed (partitions_max in the settings of the"
        " runtime spark).",
        is_retried=False,
        hint="Divide it more coarsely, or have a task make less at a time.",
    )


def written_files(member: Member, output: str, divided: Divided) -> list[tuple[str, File]]:
    """All files and the folders that they are in."""
    location = member.work.outputs[output].location
    return [(f"{location}/{part(key)}", file) for key, files in divided.items() for file in files]


def publishable(
    writer: Writer,
    member: Member,
    output: str,
    divided: Divided,
    *,
    columns: Sequence[Column],
    range_of: Callable[[str], tuple[int | None, int | None] | None],
    deleted: Divided | None = None,
) -> list[Made]:
    """Write the manifests, and say what was made. `deleted` are the keys of deleted rows."""
    aside = deleted or {}
    location = member.work.outputs[output].location
    read = read_of(member.work)

    def manifest(key: str) -> Made:
        start, end = range_of(key) or (None, None)
        return writer.manifest(
            member,
            output,
            columns,
            divided[key],
            location=f"{location}/{part(key)}",
            slice_={"partition_key": key, "start": start, "end": end},
            read=read,
            deleted=aside.get(key, ()),
        )

    with ThreadPoolExecutor(_MANIFESTS_AT_ONCE, thread_name_prefix="penstock-manifest") as pool:
        made = list(pool.map(manifest, divided))
    return [*made[:1], *(_without_columns(each) for each in made[1:])]


def _spread(frame: DataFrame, shape: Shape) -> DataFrame:
    """The rows of a key together and in order, as the writer wants them."""
    if shape.order:
        every = [F.col(quoted(name)) for name in shape.order]
        return frame.repartition(F.col(KEY)).sortWithinPartitions(KEY, *every)
    return frame.hint("rebalance", KEY).sortWithinPartitions(KEY)


@contextmanager
def _on_all_cores(session: Any) -> Iterator[None]:
    """Within this, adaptive execution joins little data to no fewer tasks than there are cores.

    Elsewhere a task has some megabytes at least. Here what it costs is files, not bytes: thousands
    of small ones, one after the other, take minutes.
    """
    before = session.conf.getAll.get(SHUFFLED_MIN)
    session.conf.set(SHUFFLED_MIN, _SHUFFLED_BYTES_MIN)
    try:
        yield
    finally:
        if before is None:
            session.conf.unset(SHUFFLED_MIN)
        else:
            session.conf.set(SHUFFLED_MIN, before)


def _without_columns(made: Made) -> Made:
    assert made.facts is not None
    return replace(made, facts=replace(made.facts, columns=()))
