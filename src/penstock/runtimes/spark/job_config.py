"""What the config of a Spark job may say, and what is wrong with it. Pure: needs no Spark, no Java.

`config_faults` judges a job when its DAG is applied. `read_config` gives the engine the same
config as a value; what it refuses has been refused before, unless the DAG was applied by an
older release. `sql_tokens` is what comments and layout leave of a query, so that an edit of those
defines nothing new, and nothing that follows from a query's text follows from its comments.

What a job expects of its output stands under `expect`; `expectations` checks the data:

expect:
  - check: distance > 0              # every row has to satisfy it: null is not enough
  - check: arr_delay < 1440
    name: delays are below a day
    at_most: 0.1%                    # or a number of rows
  - unique: [carrier, flight, day]
  - rows: {min: 1, max: 100000}
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import lru_cache
from typing import Any, Final, TypeGuard

from penstock.kernel.errors import WorkReleased
from penstock.kernel.units import memory_bytes
from penstock.runtimes.base import MAINTAIN, RuntimeFault
from penstock.runtimes.user_code import FUNCTION_FORM, FunctionReference, reference

_FORM: Final = (
    "Write {check: SQL that every row has to satisfy}, {unique: [columns]} or {rows: {min: 1}}."
)
_PERCENT: Final = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,6})?)\s?%")
_KINDS: Final = ("check", "unique", "rows")
_EXPECTATIONS_MAX: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCheck:
    """A predicate that every row has to satisfy, but for some."""

    sql: str
    name: str = ""
    rows_max: int = 0
    share_max: Decimal | None = None
    """The part of all rows that may fail, 0 to 1; instead of `rows_max`."""

    @property
    def title(self) -> str:
        return self.name or self.sql

    def allows(self, *, failed: int, rows: int) -> bool:
        """Whether so many rows may fail."""
        return failed <= (self.rows_max if self.share_max is None else self.share_max * rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class UniqueCheck:
    """Columns of which no two rows have the same values."""

    columns: tuple[str, ...]
    name: str = ""

    @property
    def title(self) -> str:
        return self.name or f"unique {', '.join(self.columns)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCountCheck:
    """How many rows there have to be."""

    least: int | None = None
    most: int | None = None
    name: str = ""

    @property
    def title(self) -> str:
        if self.name:
            return self.name
        least = "" if self.least is None else f"at least {self.least}"
        most = "" if self.most is None else f"at most {self.most}"
        return " and ".join(each for each in (least, most) if each) + " rows"


Expectation = RowCheck | UniqueCheck | RowCountCheck


def expectation_faults(said: object) -> Iterator[RuntimeFault]:
    """What is wrong with what a config says under `expect`."""
    if not isinstance(said, list | tuple):
        yield RuntimeFault("config.expect", f"Write a list. {_FORM}")
        return
    if len(said) > _EXPECTATIONS_MAX:
        yield RuntimeFault("config.expect", f"There are more than {_EXPECTATIONS_MAX} of them.")
        return
    for place, each in enumerate(said):
        yield from _faults(f"config.expect[{place}]", each)


def read_expectations(said: Sequence[Mapping[str, Any]]) -> tuple[Expectation, ...]:
    """What is expected; nothing is wrong with it."""
    return tuple(_read(each) for each in said)


def _read(said: Mapping[str, Any]) -> Expectation:
    name = said.get("name", "")
    if "unique" in said:
        return UniqueCheck(columns=tuple(said["unique"]), name=name)
    if "rows" in said:
        return RowCountCheck(least=said["rows"].get("min"), most=said["rows"].get("max"), name=name)
    most = said.get("at_most", 0)
    share = _share(most)
    return RowCheck(
        sql=said["check"], name=name, rows_max=0 if share is not None else most, share_max=share
    )


def _faults(where: str, said: object) -> Iterator[RuntimeFault]:
    kinds = [each for each in _KINDS if isinstance(said, Mapping) and each in said]
    if not isinstance(said, Mapping) or len(kinds) != 1:
        yield RuntimeFault(where, _FORM)
        return
    allowed = (kinds[0], "name", *(("at_most",) if kinds[0] == "check" else ()))
    for name in said:
        if name not in allowed:
            message = f"It has no field {name!r}; it has {', '.join(allowed)}."
            yield RuntimeFault(f"{where}.{name}", message)
    if not isinstance(said.get("name", ""), str):
        yield RuntimeFault(f"{where}.name", "Write a text.")
    value = said[kinds[0]]
    match kinds[0]:
        case "check":
            if not isinstance(value, str) or not value.strip():
                yield RuntimeFault(
                    f"{where}.check", "Write a predicate in SQL, as in distance > 0."
                )
            yield from _at_most_faults(f"{where}.at_most", said.get("at_most", 0))
        case "unique":
            is_list = isinstance(value, list | tuple) and value
            if not is_list or not all(isinstance(name, str) and name for name in value):
                yield RuntimeFault(
                    f"{where}.unique", "Write a list of columns, as in [carrier, day]."
                )
        case _:
            yield from _rows_faults(f"{where}.rows", value)


def _at_most_faults(where: str, said: object) -> Iterator[RuntimeFault]:
    is_count = isinstance(said, int) and not isinstance(said, bool) and said >= 0
    share = _share(said)
    if not is_count and (share is None or share > 1):
        yield RuntimeFault(
            where, "Write how many rows may fail, as in 10, or a part of them, as in 0.1%."
        )


def _rows_faults(where: str, said: object) -> Iterator[RuntimeFault]:
    form = "Write {min: 1}, {max: 1000} or both."
    if not isinstance(said, Mapping) or not said or not set(said) <= {"min", "max"}:
        yield RuntimeFault(where, form)
        return
    for name, value in said.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            yield RuntimeFault(f"{where}.{name}", "Write a whole number.")
            return
    if said.get("min", 0) > said.get("max", said.get("min", 0)):
        yield RuntimeFault(where, "min is more than max.")


def _share(said: object) -> Decimal | None:
    found = _PERCENT.fullmatch(said) if isinstance(said, str) else None
    return None if found is None else Decimal(found[1]) / 100


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
    transform: FunctionReference | None = None
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


def config_faults(operator: str, config: Mapping[str, Any]) -> Iterator[RuntimeFault]:
    """What is wrong with a job's config, as far as that can be told without running it."""
    if operator not in _OWN:
        there = ", ".join(OPERATORS)
        yield RuntimeFault("operator", f"The runtime spark has {there}; it has no {operator!r}.")
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
                yield RuntimeFault("config.expect", message)
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


def _unknown(operator: str, config: Mapping[str, Any]) -> Iterator[RuntimeFault]:
    known = (*_OWN[operator], *_EVERY)
    for name in config:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            meant = f" Did you mean {near[0]}?" if near else f" It has {', '.join(known)}."
            yield RuntimeFault(f"config.{name}", f"{operator} has no field {name!r}.{meant}")


def _sql_faults(config: Mapping[str, Any]) -> Iterator[RuntimeFault]:
    text, file = config.get("sql"), config.get("sql_file")
    if file is not None and (not isinstance(file, str) or not file):
        yield RuntimeFault("config.sql_file", "Write the name of a file, as in clean.sql.")
    elif text is None and file is not None:
        message = f"The text of {file!r} is not here; apply the DAG where the file is."
        yield RuntimeFault("config.sql_file", message)
    elif text is None:
        message = "spark.sql needs sql, a text, or sql_file, the name of a file beside the DAG."
        yield RuntimeFault("config.sql", message)
    if text is not None and (not isinstance(text, str) or not _without_comments(text)):
        where = "config.sql" if file is None else "config.sql_file"
        yield RuntimeFault(
            where, "There is no SQL in it: write a query, as in SELECT * FROM INPUT."
        )
    yield from _parameter_faults(config, is_sql=True)
    if config.get("partition_wise") and isinstance(text, str):
        used = _OF_ONE.search(_without_comments(text))
        if used is not None:
            message = f":{used[1]} is of one partition, and partition_wise handles many at once."
            yield RuntimeFault(
                "config.partition_wise", f"{message} Use the column {PARTITION} instead."
            )


def _python_faults(config: Mapping[str, Any]) -> Iterator[RuntimeFault]:
    said = config.get("transform")
    if not isinstance(said, str) or reference(said) is None:
        message = f"Write your function as {FUNCTION_FORM}, as in flights:clean."
        yield RuntimeFault("config.transform", message)
    yield from _parameter_faults(config, is_sql=False)


def _parameter_faults(config: Mapping[str, Any], *, is_sql: bool) -> Iterator[RuntimeFault]:
    said = config.get("parameters")
    if said is None:
        return
    if not isinstance(said, Mapping):
        yield RuntimeFault("config.parameters", "Write names and values, as in {minutes: 15}.")
        return
    for name, value in said.items() if is_sql else ():
        where = f"config.parameters.{name}"
        if not isinstance(name, str) or not _MARKER.fullmatch(name):
            message = f"{name!r} cannot be a parameter: in the SQL it stands as :name."
            yield RuntimeFault("config.parameters", message)
        elif name in MARKERS:
            yield RuntimeFault(
                where, f"Every task has a parameter {name!r} of its own; take another."
            )
        elif value is not None and not isinstance(value, str | int | float | bool):
            message = "A parameter of SQL is a text, a number, true, false or null."
            yield RuntimeFault(where, message)


def _rollup_faults(config: Mapping[str, Any]) -> Iterator[RuntimeFault]:
    by, measures = config.get("by"), config.get("measures")
    if by is not None:
        yield from _names_faults("config.by", by)
    if measures is None:
        if by:
            message = "Say what to compute for each group, as in {flights: count(*)}."
            yield RuntimeFault("config.measures", message)
        return
    if not isinstance(measures, Mapping) or not measures:
        yield RuntimeFault("config.measures", "Write names and SQL, as in {flights: count(*)}.")
        return
    for name, text in measures.items():
        if not isinstance(text, str) or not text.strip():
            message = "Write an aggregate in SQL, as in sum(flights)."
            yield RuntimeFault(f"config.measures.{name}", message)


def _every_faults(operator: str, config: Mapping[str, Any]) -> Iterator[RuntimeFault]:
    for name in ("sort_by", "cluster_by"):
        if name in config:
            yield from _names_faults(f"config.{name}", config[name])
    if "sort_by" in config and "cluster_by" in config:
        message = "Write sort_by, for equal bytes, or cluster_by, for ranges; not both."
        yield RuntimeFault("config.cluster_by", message)
    size = config.get("target_file_bytes")
    if size is not None and (memory_bytes(size) or 0) < _FILE_BYTES_MIN:
        message = "Write how large files should become, 64KiB or more, as in 128MiB."
        yield RuntimeFault("config.target_file_bytes", message)
    wise = config.get("partition_wise", False)
    if not isinstance(wise, bool):
        yield RuntimeFault("config.partition_wise", "Write true or false.")
    elif wise and operator in (*_ROW_BY_ROW, "rollup"):
        message = f"{operator} handles many partitions at once by itself; leave this out."
        yield RuntimeFault("config.partition_wise", message)
    if config.get("expect") is not None:
        yield from expectation_faults(config["expect"])


def _names_faults(where: str, said: object) -> Iterator[RuntimeFault]:
    if not _is_names(said):
        yield RuntimeFault(where, "Write a list of columns, as in [carrier, day].")
    elif len(set(said)) < len(said):
        yield RuntimeFault(where, "A column is there twice.")


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


_SQL_TOKEN: Final = re.compile(
    r"""(?P<space>\s+|--(?:\\\r?\n|[^\r\n])*)
    | (?P<comment>/\*(?!\+))
    | [rR]'[^']*' | [rR]"[^"]*"
    | '(?:[^'\\]|\\.|'')*' | "(?:[^"\\]|\\.|"")*" | `(?:[^`]|``)*`
    | \d+(?:\.\d*)?(?:[eE][+-]?\d+)?\w* | \.\d+(?:[eE][+-]?\d+)?\w* | \w+
    | /\*\+ | \*/ | [<>=!|&^~:+*/%@\#$?-]+? (?=\s|--|/\*|\*/|[^<>=!|&^~:+*/%@\#$?-]|$)
    | [^'"`]""",
    re.DOTALL | re.VERBOSE,
)
"""What Spark's lexer cuts a query into, and runs of operators as one: `a=-1` is not `a = -1`, which
only means that such an edit counts. A quote that is not closed matches nothing."""
_COMMENT_EDGE: Final = re.compile(r"/\*(?!\+)|\*/")


@lru_cache(maxsize=1024)
def sql_tokens(sql: str) -> tuple[str, ...] | None:
    """The tokens of a query without its comments, of which hints are none.

    None if a quote or a comment is not closed.
    """
    tokens: list[str] = []
    at = 0
    while at < len(sql):
        found = _SQL_TOKEN.match(sql, at)
        if found is None:
            return None
        at = found.end()
        if found["comment"]:
            depth = 1
            while depth:
                edge = _COMMENT_EDGE.search(sql, at)
                if edge is None:
                    return None
                depth += 1 if edge[0] == "/*" else -1
                at = edge.end()
        elif not found["space"]:
            tokens.append(found[0])
    return tuple(tokens)
