"""What a task reads: its inputs' parts, their manifests, the files in them, and which are pruned.

Manifests are immutable and known by their sums, so they are read once and remembered. Nothing
of the data is read here, and nothing is inferred where manifests tell the columns: the columns
of an input are those of all its parts together, and a part that lacks one has nulls there.

Which files a query can find rows in is told before its plan is made, by Spark itself: the query
is planned once over inputs that have the right columns and no files, which reads nothing, and
the optimizer moves every filter as close to its input as is right: through joins and views, and
with parameters as the values that they have. What then stands directly above an input is
compared with the bounds in the manifests (`penstock.datasets.bounds`), and a file in which none
of the uses of an input can find a row is neither verified, fetched nor named to Spark. The
query that runs is the whole one: pruning decides nothing but what is left unopened.

Nothing is pruned where that is not certain: for Connect, for texts that do more than ask, for
inputs without manifests, where a query asks for the time (it goes on between the two plans), and
where the plan cannot be read. The only user of the plan's private form is `_uses`.

Called by the engine and `operators`, in the engine's threads.
"""

from __future__ import annotations

import logging
import re
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

from py4j.protocol import Py4JNetworkError
from pyspark.errors import PySparkException

from penstock.datasets import snapshot
from penstock.datasets.bounds import (
    Bound,
    ColumnKind,
    Compared,
    Conjunction,
    Disjunction,
    Filter,
    Nullness,
    Prefixed,
    Sign,
    Unknown,
    Value,
    kind_of,
    may_hold,
)
from penstock.datasets.manifest import Manifest
from penstock.datasets.schema import Column, evolve
from penstock.datasets.snapshot import DataFile, FileContents
from penstock.datasets.transfer import Transfer
from penstock.kernel.errors import PenstockError, SchemaRefused, WorkFailed
from penstock.runtimes.base import AttemptWork, Part, WorkInput, WorkOutput
from penstock.runtimes.spark.columns import ddl, quoted
from penstock.runtimes.spark.internals import (
    PlanExpression,
    asks_for_time,
    planned_scans,
    scala_session,
)
from penstock.runtimes.spark.job_config import PARTITION

_REMEMBERED_MAX: Final = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFiles:
    """An input of a task, as files."""

    name: str
    given: WorkInput
    files: tuple[DataFile, ...]
    columns: tuple[Column, ...] | None
    """None if a part has no manifest: then Spark has to look into the files."""
    is_own: bool
    """Whether it is a slice that belongs to the task's partition; else all tasks read the same."""
    place: str = ""
    """Where it lies; if nothing of it has changed, where the task may write: a URL."""

    @property
    def bytes(self) -> int:
        return sum(each.bytes for each in self.files)

    @property
    def rows(self) -> int:
        return sum(each.rows or 0 for each in self.files)


class InputReader:
    """Turns what a task is given into files."""

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer
        self._held: OrderedDict[tuple[str, str], FileContents] = OrderedDict()
        self._lock = threading.Lock()

    def prepare(self, works: Iterable[AttemptWork]) -> None:
        """Read the manifests of many tasks at once; whose are wrong is found by `inputs`."""
        parts = {
            (part.location, part.manifest): part
            for work in works
            for given in work.inputs.values()
            for part in given.parts
        }
        try:
            self._contents(tuple(parts.values()))
        except PenstockError:
            return

    def inputs(self, work: AttemptWork) -> dict[str, InputFiles]:
        """The inputs by name. One of which nothing is published has no files and no columns."""
        return {name: self._input(name, given, work) for name, given in work.inputs.items()}

    def published(self, place: WorkOutput, work: AttemptWork) -> tuple[InputFiles, InputFiles]:
        """What is published of an output: the rows that there are, and the keys of deleted ones."""
        given = WorkInput(dataset=place.dataset, generation=work.generation, parts=place.current)
        rows = self._input("what is published", given, work)
        deleted = tuple(
            replace(each, partition_key=part.partition_key)
            for part, one in zip(place.current, self._contents(place.current), strict=True)
            for each in one.deleted
        )
        return rows, replace(rows, name="what was deleted", files=deleted)

    def manifest(self, part: Part) -> Manifest | None:
        """The manifest of a part, if it has one."""
        (found,) = self._contents((part,))
        return found.manifest

    def _input(self, name: str, given: WorkInput, work: AttemptWork) -> InputFiles:
        contents = self._contents(given.parts)
        columns = _columns(name, given, contents) or given.columns or None
        return InputFiles(
            name=name,
            given=given,
            files=tuple(
                each
                for part, found in zip(given.parts, contents, strict=True)
                for each in _files(part, found, columns)
            ),
            columns=columns,
            place=given.parts[0].location if given.parts else work.scratch,
            is_own=all(_is_own(part, work) for part in given.parts)
            and (bool(given.parts) or (given.is_there and "partition_key" in work.payload)),
        )

    def _contents(self, parts: Sequence[Part]) -> list[FileContents]:
        with self._lock:
            known = {
                part.location: self._held[part.location, part.manifest]
                for part in parts
                if part.manifest is not None and (part.location, part.manifest) in self._held
            }
        missing = [part for part in parts if part.location not in known]
        if missing:
            found = snapshot.read(missing, self._transfer)
            known |= {part.location: each for part, each in zip(missing, found, strict=True)}
            self._remember(missing, found)
        return [known[part.location] for part in parts]

    def _remember(self, parts: Sequence[Part], found: Sequence[FileContents]) -> None:
        with self._lock:
            for part, each in zip(parts, found, strict=True):
                if part.manifest is not None:
                    self._held[part.location, part.manifest] = each
            while len(self._held) > _REMEMBERED_MAX:
                self._held.popitem(last=False)


def needed(inputs: Iterable[InputFiles], work: AttemptWork) -> None:
    """Raise `WorkFailed` if nothing is published of one of these."""
    for each in inputs:
        if not each.given.is_there and each.given.has_data:
            raise missing(each, work)


def missing(given: InputFiles, work: AttemptWork) -> WorkFailed:
    """That nothing is published of an input."""
    key = work.payload.get("partition_key")
    whose = f" for the partition {key!r}" if key else ""
    return WorkFailed(
        f"Nothing is published of the input {given.name} (dataset {given.given.dataset}){whose}."
        " Run the job that makes it, or wait for it with `when: all`.",
        is_retried=False,
    )


def _columns(
    name: str, given: WorkInput, contents: Sequence[FileContents]
) -> tuple[Column, ...] | None:
    if not all(each.columns for each in contents):
        return None
    columns: tuple[Column, ...] = ()
    for each in contents:
        if each.columns == columns:
            continue
        try:
            columns = evolve(columns, each.columns)
        except SchemaRefused as error:
            raise WorkFailed(
                f"The parts of the input {name} (dataset {given.dataset}) do not fit together:"
                f" {error.message} {error.hint}",
                is_retried=False,
            ) from error
    return columns


def _files(
    part: Part, found: FileContents, columns: tuple[Column, ...] | None
) -> Iterator[DataFile]:
    """The files of a part that have rows, with the bounds of columns whose type is the input's."""
    types = {each.name: each.type for each in columns or ()}
    changed = {each.name for each in found.columns if types.get(each.name) != each.type}
    for each in found.files:
        if each.rows != 0:
            bounds = {name: one for name, one in each.bounds.items() if name not in changed}
            yield replace(
                each,
                bounds=bounds if changed else each.bounds,
                partition_key=part.partition_key,
            )


def _is_own(part: Part, work: AttemptWork) -> bool:
    key, start, end = (work.payload.get(name) for name in ("partition_key", "start", "end"))
    if part.partition_key is None or key is None:
        return False
    if part.partition_key == key:
        return True
    if start is None or end is None or part.start is None or part.end is None:
        return False
    return bool(start <= part.start and part.end <= end)


_log = logging.getLogger(__name__)

FILES_MIN: Final = 4
"""Planning twice costs more than fewer files do."""
_IN_MAX: Final = 1_000
_IN_SET: Final = "spark.sql.optimizer.inSetConversionThreshold"
_ASKS: Final = re.compile(
    r"(?:\s|--[^\n]*\n|/\*.*?\*/|\()*(?:select|with|from|values|table)\b", re.DOTALL | re.IGNORECASE
)
_FILTERS: Final = re.compile(r"\b(?:where|having|join|qualify)\b", re.IGNORECASE)
_DOES: Final = re.compile(r"\b(?:insert|update|delete|merge)\b", re.IGNORECASE)
# `DATE 'today'` is a literal to the parser. Of all else the plan says that it asks for the time.
_TIME: Final = re.compile(r"'\s*(?:now|today|tomorrow|yesterday)\b", re.IGNORECASE)
_is_told: Final = threading.Event()
"""Whether the log has it that plans cannot be read."""
_MOMENT: Final = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d{1,6})?")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_SIGNS: Final = {
    "EqualTo": Sign.EQUAL,
    "EqualNullSafe": Sign.EQUAL,
    "LessThan": Sign.LESS,
    "LessThanOrEqual": Sign.AT_MOST,
    "GreaterThan": Sign.GREATER,
    "GreaterThanOrEqual": Sign.AT_LEAST,
}
_TURNED: Final = {
    Sign.EQUAL: Sign.EQUAL,
    Sign.LESS: Sign.GREATER,
    Sign.AT_MOST: Sign.AT_LEAST,
    Sign.GREATER: Sign.LESS,
    Sign.AT_LEAST: Sign.AT_MOST,
}
_KINDS: Final = {
    "byte": ColumnKind.NUMBER,
    "short": ColumnKind.NUMBER,
    "integer": ColumnKind.NUMBER,
    "long": ColumnKind.NUMBER,
    "date": ColumnKind.DAY,
    "timestamp": ColumnKind.MOMENT,
    "timestamp_ntz": ColumnKind.LOCAL_MOMENT,
    "double": ColumnKind.DOUBLE,
    "string": ColumnKind.TEXT,
}

Tag = Callable[[DataFile], str | None]
"""What the rows of a file have as `_partition`; None if they have no such column."""


def filters_of(
    session: Any,
    sql: str,
    arguments: Mapping[str, Any] | None,
    inputs: Mapping[str, Sequence[Column]],
) -> Mapping[str, Filter]:
    """What rows of its inputs have to be like to matter to a query. Replaces views of their names.

    An input that is not in the answer may be needed as a whole.
    """
    is_classic = scala_session(session) is not None
    asks = _ASKS.match(sql) and _FILTERS.search(sql)
    if not is_classic or not asks or _DOES.search(sql) or _TIME.search(sql):
        return {}
    try:
        with tempfile.TemporaryDirectory(prefix="penstock-plan-") as folder, _lists(session):
            for place, (name, columns) in enumerate(inputs.items()):
                empty = Path(folder, str(place))
                empty.mkdir()
                reader = session.read.schema(ddl(columns))
                reader.parquet(f"file://{empty}").createOrReplaceTempView(quoted(name))
            frame = session.sql(sql, args=arguments or None)
            if asks_for_time(frame):
                return {}
            scans = planned_scans(frame, Path(folder).name)
        is_utc = session.conf.get("spark.sql.session.timeZone") == "UTC"
        filters: dict[str, Filter] = {}
        for place, (name, columns) in enumerate(inputs.items()):
            uses = [
                _wanted(scan.filter, columns, is_utc=is_utc)
                for scan in scans
                if scan.folder == str(place)
            ]
            if uses and not any(isinstance(use, Unknown) for use in uses):
                filters[name] = Disjunction(tuple(uses))
    except (PySparkException, Py4JNetworkError, OSError) as error:
        # Whatever is wrong with a query, or has ended, is told when it runs.
        _log.debug("the files of a query are not pruned: %s", error)
        return {}
    except Exception as error:  # noqa: BLE001 - a plan may have any form that is not known here
        level = logging.DEBUG if _is_told.is_set() else logging.WARNING
        _is_told.set()
        _log.log(
            level,
            "the plan of a query cannot be read, so it reads all files of its inputs, as others of"
            " its kind will; it is right, and slower than it could be (%s: %s)",
            type(error).__name__,
            error,
        )
        return {}
    return filters


def pruned(given: InputFiles, wanted: Filter | None, tag: Tag) -> InputFiles:
    """The input without the files in which no row can be wanted."""
    if wanted is None:
        return given
    kinds = {each.name: kind for each in given.columns or () if (kind := kind_of(each.type))}
    kept = tuple(
        each
        for each in given.files
        if may_hold(
            wanted, _tagged(each, tag), kinds | {PARTITION: ColumnKind.TEXT}, rows=each.rows
        )
    )
    if len(kept) == len(given.files):
        return given
    _log.info("%s of %s files of %s are read", len(kept), len(given.files), given.name)
    return replace(given, files=kept)


def _tagged(file: DataFile, tag: Tag) -> Mapping[str, Bound]:
    said = tag(file)
    return file.bounds if said is None else {**file.bounds, PARTITION: Bound(said, said, 0)}


@contextmanager
def _lists(session: Any) -> Iterator[None]:
    """Within this, a longer IN stays a list in the plan: sets cannot be read from it."""
    session.conf.set(_IN_SET, str(_IN_MAX))
    try:
        yield
    finally:
        session.conf.unset(_IN_SET)


def _wanted(condition: PlanExpression | None, columns: Sequence[Column], *, is_utc: bool) -> Filter:
    """What rows of an input have to be like for one use of it."""
    if condition is None:
        return Unknown()
    kinds = {each.name: kind_of(each.type) for each in columns}
    return _Reading(kinds, is_utc=is_utc).filter(condition)


class _Reading:
    """Reads expressions of plans as filters."""

    def __init__(self, kinds: Mapping[str, ColumnKind | None], *, is_utc: bool) -> None:
        self._kinds = kinds
        self._is_utc = is_utc

    def filter(self, said: PlanExpression) -> Filter:
        """What an expression wants of rows."""
        if said.kind in ("And", "Or"):
            parts = tuple(map(self.filter, said.below))
            return Conjunction(parts) if said.kind == "And" else Disjunction(parts)
        match said.kind, [self._operand(each) for each in said.below]:
            case (("IsNull" | "IsNotNull") as name, [str(column)]):
                return Nullness(column, name == "IsNull")
            case "StartsWith", [str(column), (ColumnKind.TEXT, str(prefix))]:
                return Prefixed(column, prefix)
            case "In", [str(column), *values]:
                return Disjunction(
                    tuple(self._compared(column, Sign.EQUAL, each) for each in values)
                )
            case name, [str(column), value] if name in _SIGNS:
                return self._compared(column, _SIGNS[name], value)
            case name, [value, str(column)] if name in _SIGNS:
                return self._compared(column, _TURNED[_SIGNS[name]], value)
            case "Literal", [] if said.type == "boolean" and said.value == "false":
                return Disjunction(())
        return Unknown()

    def _compared(self, column: str, sign: Sign, value: Any) -> Filter:
        match value:
            case (kind, said) if kind is self._kinds.get(column):
                return Compared(column, sign, said)
        return Unknown()

    def _operand(self, said: PlanExpression) -> str | tuple[ColumnKind, Value] | None:
        """A column by its name, or a value; None for all else."""
        return said.column if said.kind != "Literal" else self._literal(said.type, said.value)

    def _literal(self, said: Any, value: str | None) -> tuple[ColumnKind, Value] | None:
        kind = _KINDS.get(said) if isinstance(said, str) else None
        if isinstance(said, str) and said.startswith("decimal("):
            kind = ColumnKind.DECIMAL
        if kind is None or value is None:
            return None
        try:
            match kind:
                case ColumnKind.TEXT:
                    return kind, value
                case ColumnKind.NUMBER | ColumnKind.LOCAL_MOMENT:
                    return kind, int(value)
                case ColumnKind.DOUBLE:
                    return kind, float(value)
                case ColumnKind.DECIMAL:
                    return kind, Decimal(value)
                case ColumnKind.DAY:
                    return kind, (date.fromisoformat(value) - _EPOCH.date()).days
            if not self._is_utc or not _MOMENT.fullmatch(value):
                return None
            moment = datetime.fromisoformat(value).replace(tzinfo=UTC)
            return kind, (moment - _EPOCH) // timedelta(microseconds=1)
        except (ValueError, ArithmeticError):
            return None
