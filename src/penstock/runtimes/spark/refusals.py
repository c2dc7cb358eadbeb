"""What is refused of a result before anything of it is computed: all that its plan tells.

| what | is refused if |
|---|---|
| the columns | they cannot become those of the generation, by `penstock.datasets.schema` |
| `expect` | it names a column that there is not, or is no SQL over the columns |
| `unique_key`, `version_by`, `delete_when` | likewise, or the type of a column does not serve |
| `partition_by` | likewise |
| `sort_by`, `cluster_by` | it names a column that there is not (`writing.shape_of`) |

All outputs of a task are looked at before the first of them is computed.

Only what is certain is refused (`refuse_for_good`): the columns of a generation are those of the
claim, and may have grown when the task publishes. The publication judges everything once more.
Called by the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame

from penstock.datasets.schema import refuse_for_good
from penstock.runtimes.spark.errors import in_field
from penstock.runtimes.spark.expectations import refuse_unknown
from penstock.runtimes.spark.keys import keyed
from penstock.runtimes.spark.merging import is_gone, refuse_result
from penstock.runtimes.spark.operators.plans import Member
from penstock.runtimes.spark.writing import Shape, shape_of


def shapes_of(
    session: Any, member: Member, results: Mapping[str, DataFrame], *, without: Sequence[str] = ()
) -> dict[str, Shape]:
    """What the outputs of a task look like, `without` some columns.

    Raises `SchemaRefused` or `WorkFailed` if it is certain that one cannot be published.
    """
    shapes: dict[str, Shape] = {}
    for output, frame in results.items():
        shapes[output] = shape_of(frame, member.config, without=without)
        _refuse(session, member, output, frame=frame, shape=shapes[output])
    return shapes


def _refuse(session: Any, member: Member, output: str, *, frame: DataFrame, shape: Shape) -> None:
    try:
        refuse_unknown(frame, member.config.expect)
    except PySparkException as error:
        raise in_field(error, "config.expect") from error
    if not output:
        return
    work, place = member.work, member.work.outputs[output]
    refuse_for_good(place.columns, shape.columns)
    if work.merge is not None:
        refuse_result(frame.schema, work.merge)
        is_gone(frame, work.merge)
    if place.partition_by:
        keyed(session, frame, place.partition_by, output=output)
