"""What the config of a Spark job may say, and what is wrong with it. Pure: needs no Spark, no Java.

`config_faults` judges a job when its DAG is applied. `read_config` gives the engine the same config
as a value; what it refuses has been refused before, unless the DAG was applied by an older release.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeGuard

from penstock.kernel.errors import WorkReleased
from penstock.runtimes.base import MAINTAIN, Fault
from penstock.runtimes.references import FUNCTION_FORM, Reference, reference
from penstock.runtimes.resources import memory_bytes
from penstock.runtimes.spark.expecting import Expectation, expectation_faults, read_expectations

PARTITION: Final = "_partition"
"""The column that tells partitions apart where a transform handles many of them at once."""
MARKERS: Final = ("partition_key", "start", "end", "cursor")
"""The parameters that every SQL text has."""

_EVERY: Final = ("expect", "sort_by", "cluster_by", "target_file_bytes", "partition_wise")
_OWN: Final[Mapping[str, tuple[str, ...]]] = {
    "spark.sql": ("sql", "sql_file", "parameters"),
    "spark.python": ("transform", "parameters"),
    "compact": (),
    "integrity_check": (),
    "rollup": ("by", "measures"),
}
OPERATORS: Final = tuple(_OWN)
_ROW_BY_ROW: Final = ("compact", "integrity_check")
"""Operators that can say by themselves how they handle many partitions."""
_FILE_BYTES_MIN: Final = 2**16
_MARKER: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OF_ONE: Final = re.compile(rf":({'|'.join(MARKERS)})\b")
_LISTED_MAX: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConfig:
    """The config of a job, read."""

    operator: str
    sql: str = ""
    sql_file: str = ""
    """The name of the file that the text came from; empty if it stands in the DAG."""
    transform: Reference | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    by: tuple[str, ...] = ()
    measures: Mapping[str, str] = field(default_factory=dict)
    expect: tuple[Expectation, ...] = ()
    sort_by: tuple[str, ...] = ()
    cluster_by: tuple[str, ...] = ()
    target_file_bytes: int | None = None
    partition_wise: bool = False

    @property
    def ordered_by(self) -> tuple[str, ...]:
        """The columns that come first in the order of rows."""
        return self.cluster_by or self.sort_by


def config_faults(operator: str, config: Mapping[str, Any]) -> Iterator[Fault]:
    """What is wrong with a job's config, as far as that can be told without running it."""
    if operator not in _OWN:
        there = ", ".join(OPERATORS)
        yield Fault("operator", f"The runtime spark has {there}; it has no {operator!r}.")
        return
    yield from _unknown(operator, config)
    match operator:
        case "spark.sql":
            yield from _sql_faults(config)
        case "spark.python":
            yield from _python_faults(config)
        case "rollup":
            yield from _rollup_faults(config)
        case "integrity_check":
            if not config.get("expect"):
                message = "An integrity_check needs a list of what is expected, under expect."
                yield Fault("config.expect", message)
    yield from _every_faults(operator, config)


def read_config(operator: str, config: Mapping[str, Any]) -> JobConfig:
    """The config as a value. Raises `WorkReleased` for the first thing that is wrong with it.

    It was right where its DAG was applied: this worker is of another release.
    """
    faults = config_faults(operator, config)
    if operator == MAINTAIN:
        faults = _every_faults(operator, config)
    for fault in faults:
        raise WorkReleased(f"{fault.field}: {fault.message}")
    size = config.get("target_file_bytes")
    return JobConfig(
        operator=operator,
        sql=config.get("sql", ""),
        sql_file=config.get("sql_file", ""),
        transform=reference(config.get("transform", "")),
        parameters=dict(config.get("parameters") or {}),
        by=tuple(config.get("by") or ()),
        measures=dict(config.get("measures") or {}),
        expect=read_expectations(config.get("expect") or ()),
        sort_by=tuple(config.get("sort_by") or ()),
        cluster_by=tuple(config.get("cluster_by") or ()),
        target_file_bytes=None if size is None else memory_bytes(size),
        partition_wise=bool(config.get("partition_wise")),
    )


def _unknown(operator: str, config: Mapping[str, Any]) -> Iterator[Fault]:
    known = (*_OWN[operator], *_EVERY)
    for name in config:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            meant = f" Did you mean {near[0]}?" if near else f" It has {', '.join(known)}."
            yield Fault(f"config.{name}", f"{operator} has no field {name!r}.{meant}")


def _sql_faults(config: Mapping[str, Any]) -> Iterator[Fault]:
    text, file = config.get("sql"), config.get("sql_file")
    if file is not None and (not isinstance(file, str) or not file):
        yield Fault("config.sql_file", "Write the name of a file, as in clean.sql.")
    elif text is None and file is not None:
        message = f"The text of {file!r} is not here; apply the DAG where the file is."
        yield Fault("config.sql_file", message)
    elif text is None:
        message = "spark.sql needs sql, a text, or sql_file, the name of a file beside the DAG."
        yield Fault("config.sql", message)
    if text is not None and (not isinstance(text, str) or not _without_comments(text)):
        where = "config.sql" if file is None else "config.sql_file"
        yield Fault(where, "There is no SQL in it: write a query, as in SELECT * FROM INPUT.")
    yield from _parameter_faults(config, is_sql=True)
    if config.get("partition_wise") and isinstance(text, str):
        used = _OF_ONE.search(_without_comments(text))
        if used is not None:
            message = f":{used[1]} is of one partition, and partition_wise handles many at once."
            yield Fault("config.partition_wise", f"{message} Use the column {PARTITION} instead.")


def _python_faults(config: Mapping[str, Any]) -> Iterator[Fault]:
    said = config.get("transform")
    if not isinstance(said, str) or reference(said) is None:
        message = f"Write your function as {FUNCTION_FORM}, as in flights:clean."
        yield Fault("config.transform", message)
    yield from _parameter_faults(config, is_sql=False)


def _parameter_faults(config: Mapping[str, Any], *, is_sql: bool) -> Iterator[Fault]:
    said = config.get("parameters")
    if said is None:
        return
    if not isinstance(said, Mapping):
        yield Fault("config.parameters", "Write names and values, as in {minutes: 15}.")
        return
    for name, value in said.items() if is_sql else ():
        where = f"config.parameters.{name}"
        if not isinstance(name, str) or not _MARKER.fullmatch(name):
            message = f"{name!r} cannot be a parameter: in the SQL it stands as :name."
            yield Fault("config.parameters", message)
        elif name in MARKERS:
            yield Fault(where, f"Every task has a parameter {name!r} of its own; take another.")
        elif value is not None and not isinstance(value, str | int | float | bool):
            message = "A parameter of SQL is a text, a number, true, false or null."
            yield Fault(where, message)


def _rollup_faults(config: Mapping[str, Any]) -> Iterator[Fault]:
    by, measures = config.get("by"), config.get("measures")
    if by is not None:
        yield from _names_faults("config.by", by)
    if measures is None:
        if by:
            message = "Say what to compute for each group, as in {flights: count(*)}."
            yield Fault("config.measures", message)
        return
    if not isinstance(measures, Mapping) or not measures:
        yield Fault("config.measures", "Write names and SQL, as in {flights: count(*)}.")
        return
    for name, text in measures.items():
        if not isinstance(text, str) or not text.strip():
            message = "Write an aggregate in SQL, as in sum(flights)."
            yield Fault(f"config.measures.{name}", message)


def _every_faults(operator: str, config: Mapping[str, Any]) -> Iterator[Fault]:
    for name in ("sort_by", "cluster_by"):
        if name in config:
            yield from _names_faults(f"config.{name}", config[name])
    if "sort_by" in config and "cluster_by" in config:
        message = "Write sort_by, for equal bytes, or cluster_by, for ranges; not both."
        yield Fault("config.cluster_by", message)
    size = config.get("target_file_bytes")
    if size is not None and (memory_bytes(size) or 0) < _FILE_BYTES_MIN:
        message = "Write how large files should become, 64KiB or more, as in 128MiB."
        yield Fault("config.target_file_bytes", message)
    wise = config.get("partition_wise", False)
    if not isinstance(wise, bool):
        yield Fault("config.partition_wise", "Write true or false.")
    elif wise and operator in (*_ROW_BY_ROW, "rollup"):
        message = f"{operator} handles many partitions at once by itself; leave this out."
        yield Fault("config.partition_wise", message)
    if config.get("expect") is not None:
        yield from expectation_faults(config["expect"])


def _names_faults(where: str, said: object) -> Iterator[Fault]:
    if not _is_names(said):
        yield Fault(where, "Write a list of columns, as in [carrier, day].")
    elif len(set(said)) < len(said):
        yield Fault(where, "A column is there twice.")


def _is_names(said: object) -> TypeGuard[Sequence[str]]:
    return (
        isinstance(said, list | tuple)
        and 0 < len(said) <= _LISTED_MAX
        and all(isinstance(name, str) and name for name in said)
    )


def _without_comments(text: str) -> str:
    """What is left of a SQL text for a look whether there is any."""
    plain = re.sub(r"/\*.*?\*/", " ", text, flags=re.DOTALL)
    return re.sub(r"--[^\n]*", " ", plain).strip().strip(";").strip()


def names(said: Iterable[str]) -> str:
    """Columns or inputs for a message, not too many of them."""
    every = list(said)
    more = f" and {len(every) - 12} more" if len(every) > 12 else ""
    return ", ".join(every[:12]) + more
