"""Which tasks of a batch share a Spark job, how their plans become one, and the rows several again.

Tasks share a job if their inputs have the same columns, so that their results have too, and if all
that they read together is small enough to leave Spark through Arrow. A task that is larger than
that gains nothing from company, and runs by itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from penstock.kernel.errors import WorkFailed
from penstock.runtimes.spark.operators.plans import Member

MEMBER: Final = "_penstock_member"
"""The column that tells tasks apart. Its values are texts: a number would be part of the code that
Spark generates, which would then be compiled for every task anew."""


def bundles(members: Sequence[Member], *, bytes_max: int) -> list[list[Member]]:
    """The tasks that share a job, in their order."""
    alike: dict[object, list[Member]] = {}
    for member in members:
        alike.setdefault(_likeness(member), []).append(member)
    made: list[list[Member]] = []
    for some in alike.values():
        size, bundle = 0, list[Member]()
        for member in some:
            if bundle and size + member.bytes_in > bytes_max:
                made.append(bundle)
                size, bundle = 0, []
            bundle.append(member)
            size += member.bytes_in
        made.append(bundle)
    return made


def _likeness(member: Member) -> object:
    """What is equal for tasks whose results have the same columns."""
    columns = tuple((name, each.columns) for name, each in sorted(member.inputs.items()))
    if any(each.columns is None for each in member.inputs.values()):
        return member.work.task_id
    return columns


def share_files(members: Sequence[Member]) -> bool:
    """Whether a file is of several of these partitions, as a day is of its month and its year.

    Then no plan can serve all: each row is of one partition there.
    """
    read = [
        (name, file.location)
        for member in members
        for name, given in member.inputs.items()
        if given.is_own
        for file in given.files
    ]
    return len(set(read)) < len(read)


def united(frames: Sequence[DataFrame]) -> DataFrame:
    """The rows of all frames, each with its place in the column `MEMBER`.

    Raises `WorkFailed` if their columns differ. A union goes by position, and what a function
    returns, or a query reads by a parameter (`csv.` and the path of a day), may have other columns
    for each task, or the same ones in another order.
    """
    first = _signature(frames[0])
    if any(_signature(each) != first for each in frames[1:]):
        raise WorkFailed("The tasks of a batch returned different columns.")
    tagged = [
        frame.select("*", F.lit(str(place)).alias(MEMBER)) for place, frame in enumerate(frames)
    ]
    # In pairs: a chain of unions as long as the batch would be as deep, too.
    while len(tagged) > 1:
        pairs = zip(tagged[::2], tagged[1::2], strict=False)
        odd = tagged[-1:] if len(tagged) % 2 else []
        tagged = [*(one.unionAll(other) for one, other in pairs), *odd]
    return tagged[0]


def split(table: Any, column: str, wanted: Collection[str]) -> Mapping[str, Any]:
    """The rows of each value of a column, without that column, in the order they had."""
    rest = table.drop_columns([column])
    if not table.num_rows:
        return dict.fromkeys(wanted, rest)
    found = table.column(column).combine_chunks().dictionary_encode()
    values = found.dictionary.to_pylist()
    unknown = [value for value in values if value not in wanted]
    if unknown or found.null_count:
        what = repr(unknown[0]) if unknown else "null"
        raise WorkFailed(
            f"The result has rows whose {column} is {what}, which is none of the partitions that"
            " were to be made.",
            is_retried=False,
        )
    places = found.indices.to_numpy(zero_copy_only=False)
    if np.any(np.diff(places) < 0):
        order = np.argsort(places, kind="stable")
        rest, places = rest.take(order), places[order]
    bounds = np.searchsorted(places, np.arange(len(values) + 1))
    pieces = {
        value: rest.slice(int(bounds[place]), int(bounds[place + 1] - bounds[place]))
        for place, value in enumerate(values)
    }
    return {value: pieces.get(value, rest.slice(0, 0)) for value in wanted}


def _signature(frame: DataFrame) -> list[tuple[str, str]]:
    return frame.dtypes
