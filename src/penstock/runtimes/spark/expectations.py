"""Checks whether an output is as its job expects, before anything of it is published.

Small outputs leave Spark through Arrow anyway: their checks are columns that Spark computes on
the way (`with_checks`), and are counted in the table (`checked_table`). Of large ones, rows
that fail are counted while they are written (`ViolationCounter`). Only what is left then is
looked at in the very files that would be published (`check_frame`): what fails, to say how many
rows do and show some of them; what is to be unique; and checks of a kind that Spark cannot
count on the way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import pyarrow.compute as pc
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from penstock.kernel.errors import WorkFailed
from penstock.runtimes.spark.access.frame_metadata import ROWS, Counts, observed
from penstock.runtimes.spark.columns import more_than_once, quoted
from penstock.runtimes.spark.job_config import Expectation, RowCheck, RowCountCheck, UniqueCheck

SHOWN_MAX: Final = 5
_VALUE_CHARACTERS_MAX: Final = 60
_COLUMNS_SHOWN_MAX: Final = 12
_FAILS: Final = "_penstock_fails_"


def with_checks(frame: DataFrame, expected: Sequence[Expectation]) -> DataFrame:
    """A frame with a column for each check, true where a row does not satisfy it."""
    added = [
        (~_holds(each)).alias(f"{_FAILS}{place}")
        for place, each in enumerate(expected)
        if isinstance(each, RowCheck)
    ]
    return frame.select("*", *added) if added else frame


def refuse_unknown(frame: DataFrame, expected: Sequence[Expectation]) -> None:
    """Raise `WorkFailed`, or a check's `PySparkException`, for what names columns that there are
    not. Nothing is computed."""
    _ = with_checks(frame, expected).schema  # A Connect server says only now what is wrong.
    for each in expected:
        if isinstance(each, UniqueCheck):
            _there(each, frame.columns)


def checked_table(table: Any, expected: Sequence[Expectation], *, output: str) -> Any:
    """The table without the columns of checks. Raises `WorkFailed` if something is not as expected.

    What is wrong with several expectations is said of each.
    """
    names = [name for name in table.column_names if not name.startswith(_FAILS)]
    rows = table.select(names)
    said = list(_table_faults(table, rows, expected))
    if said:
        raise _refused(said, output=output)
    return rows


class ViolationCounter:
    """Counts the rows that fail, of one output, while it is written."""

    def __init__(self, expected: Sequence[Expectation]) -> None:
        self._expected = tuple(expected)
        self._checks = [each for each in expected if isinstance(each, RowCheck)]
        self._counted: Counts = lambda: None

    def over(self, frame: DataFrame) -> DataFrame:
        """The frame, watched. Raises `PySparkException` for a check that is none."""
        if not self._checks:
            return frame
        with_checks(frame, self._expected)
        counts = {f"c{place}": F.count_if(~_holds(each)) for place, each in enumerate(self._checks)}
        try:
            watched, counted = observed(frame, counts)
            _ = watched.schema  # A Connect server says only now what is wrong.
        except PySparkException:
            return frame  # It is a check, and none that may be observed.
        self._counted = counted
        return watched

    def left(self, *, rows: int) -> tuple[Expectation, ...]:
        """What has to be looked at in the files, in which are so many rows."""
        counted = (self._counted() if self._checks else None) or {}
        is_counted = counted.get(ROWS) == rows
        failing = [
            each
            for place, each in enumerate(self._checks)
            if not is_counted or not each.allows(failed=counted[f"c{place}"], rows=rows)
        ]
        return tuple(
            each
            for each in self._expected
            if (each in failing if isinstance(each, RowCheck) else not _is_enough(each, rows=rows))
        )


def _is_enough(each: UniqueCheck | RowCountCheck, *, rows: int) -> bool:
    """Whether the number of rows says that all is well."""
    return isinstance(each, RowCountCheck) and not _rows_fault(each, rows)


def check_frame(frame: DataFrame, expected: Sequence[Expectation], *, output: str) -> None:
    """Raise `WorkFailed` if the rows of a frame are not as expected."""
    checks = [each for each in expected if isinstance(each, RowCheck)]
    counts = frame.agg(
        F.count(F.lit(1)).alias("rows"),
        *(F.count_if(~_holds(each)).alias(f"c{place}") for place, each in enumerate(checks)),
    ).collect()[0]
    said = [
        _check_fault(
            each,
            failed=counts[f"c{place}"],
            rows=counts["rows"],
            some=frame.where(~_holds(each)).limit(SHOWN_MAX).toArrow().to_pylist(),
        )
        for place, each in enumerate(checks)
        if not each.allows(failed=counts[f"c{place}"], rows=counts["rows"])
    ]
    said += [
        fault
        for each in expected
        if isinstance(each, RowCountCheck) and (fault := _rows_fault(each, counts["rows"]))
    ]
    for each in expected:
        if isinstance(each, UniqueCheck):
            columns = [F.col(quoted(name)) for name in _there(each, frame.columns)]
            # A column of theirs may be called `count`, too.
            shown = "_penstock_count" if "count" in each.columns else "count"
            counted = frame.groupBy(*columns).agg(F.count(F.lit(1)).alias(shown))
            doubled = counted.where(F.col(shown) > 1)
            some = doubled.limit(SHOWN_MAX).toArrow().to_pylist()
            if some:
                said.append(_unique_fault(each, groups=doubled.count(), some=some))
    if said:
        raise _refused(said, output=output)


def _table_faults(table: Any, rows: Any, expected: Sequence[Expectation]) -> Iterator[str]:
    for place, each in enumerate(expected):
        match each:
            case RowCheck():
                mask = table.column(f"{_FAILS}{place}")
                failed = pc.sum(mask).as_py() or 0
                if not each.allows(failed=failed, rows=table.num_rows):
                    some = rows.filter(mask).slice(0, SHOWN_MAX).to_pylist()
                    yield _check_fault(each, failed=failed, rows=table.num_rows, some=some)
            case RowCountCheck():
                if fault := _rows_fault(each, table.num_rows):
                    yield fault
            case UniqueCheck():
                doubled = more_than_once(rows, _there(each, rows.column_names))
                if doubled.num_rows:
                    some = doubled.slice(0, SHOWN_MAX).to_pylist()
                    yield _unique_fault(each, groups=doubled.num_rows, some=some)


def _there(each: UniqueCheck, columns: Sequence[str]) -> Sequence[str]:
    missing = [name for name in each.columns if name not in columns]
    if missing:
        raise WorkFailed(
            f"The expectation {each.title!r} names the column {missing[0]!r}, which the output does"
            f" not have; it has {', '.join(columns)}.",
            is_retried=False,
        )
    return each.columns


def _holds(check: RowCheck) -> Any:
    return F.coalesce(F.expr(f"({check.sql}\n)").cast("boolean"), F.lit(False))  # noqa: FBT003


def _check_fault(check: RowCheck, *, failed: int, rows: int, some: Sequence[dict[str, Any]]) -> str:
    may = "none may" if check.share_max is None else f"at most {check.share_max * 100:f}% may"
    if check.share_max is None and check.rows_max:
        may = f"at most {check.rows_max} may"
    said = f"{check.title!r} fails for {failed} of {rows} rows, and {may}"
    return f"{said}: {_shown(some)}"


def _rows_fault(each: RowCountCheck, rows: int) -> str:
    is_few = each.least is not None and rows < each.least
    is_many = each.most is not None and rows > each.most
    return f"{each.title!r} is expected, and there are {rows}" if is_few or is_many else ""


def _unique_fault(each: UniqueCheck, *, groups: int, some: Sequence[dict[str, Any]]) -> str:
    return f"{each.title!r} fails: {groups} values are there more than once: {_shown(some)}"


def _refused(said: Sequence[str], *, output: str) -> WorkFailed:
    whole = "; ".join(said)
    return WorkFailed(
        f"Nothing was published, because the output {output} is not as expected: {whole}."
        if output
        else f"The input is not as expected: {whole}.",
        is_retried=False,
    )


def _shown(some: Sequence[dict[str, Any]]) -> str:
    return ", ".join(_row(each) for each in some)


def _row(row: dict[str, Any]) -> str:
    shown = [f"{name}={_value(value)}" for name, value in list(row.items())[:_COLUMNS_SHOWN_MAX]]
    more = ", …" if len(row) > _COLUMNS_SHOWN_MAX else ""
    return "{" + ", ".join(shown) + more + "}"


def _value(value: Any) -> str:
    said = "null" if value is None else str(value)
    return said if len(said) <= _VALUE_CHARACTERS_MAX else f"{said[:_VALUE_CHARACTERS_MAX]}…"
