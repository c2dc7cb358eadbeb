"""What a way of access is. `choosing` takes one for where data lies and where Spark runs.

An access makes a DataFrame of files that are named, each with its sum, and brings the rows of a
DataFrame into files below a location that only this attempt writes to. It says which files those
are: the ones that Spark's own commit has left there, or that its tasks have reported. It writes no
manifest, and publishes nothing.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final, Protocol

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from penstock.datasets.manifest import File
from penstock.datasets.schema import Column
from penstock.datasets.snapshot import DataFile
from penstock.kernel.errors import WorkFailed
from penstock.runtimes.spark.access.fractions import READ_WITHOUT, has_fractions
from penstock.runtimes.spark.access.tags import tagged
from penstock.runtimes.spark.columns import ddl
from penstock.runtimes.spark.configs import PARTITION

_WILD: Final = re.compile(r"[\[\]{}*?\\]")
"""What is a pattern to Spark, and may be in the name of somebody's folder."""
_READERS_MAX: Final = 16

Divided = Mapping[str, tuple[File, ...]]
"""The files of each partition, by key, in the order of the keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Some files. With a tag, each of their rows has it in the column `_partition`."""

    files: Sequence[DataFile]
    tag: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where rows go."""

    location: str
    staging: str
    """A location that only this attempt writes to, for what is on its way."""
    file_bytes: int
    first: int = 0
    """The number of the first file, where files have numbers: those before it are there."""


class Access(Protocol):
    """A way of access. Its methods may be called from several threads at once."""

    name: str
    """In a few words, for the log."""

    def frame(
        self,
        session: Any,
        slices: Sequence[Slice],
        columns: Sequence[Column] | None,
        held: ExitStack,
    ) -> DataFrame:
        """The rows of these files. What has to stay while they are read is put into `held`."""
        ...

    def write(self, frame: DataFrame, target: Target) -> tuple[File, ...]:
        """Write all rows of a frame; returns the files, without empty ones."""
        ...

    def write_keys(self, frame: DataFrame, column: str, target: Target) -> Divided:
        """Write all rows of a frame that is sorted by this column, which has the keys of partitions
        and is in no file; the files of each lie in its folder below the target's location."""
        ...

    def wrote(self, location: str, file: File) -> None:
        """A file was written there by this process, which knows its sum."""
        ...


def nothing_inside(session: Any, columns: Sequence[Column] | None, *, is_tagged: bool) -> DataFrame:
    """A frame without rows."""
    if columns is None:
        raise WorkFailed(
            "An input has neither a manifest nor a Parquet file, so nobody knows its columns.",
            is_retried=False,
        )
    frame: DataFrame = session.createDataFrame([], ddl(columns))
    return frame.withColumn(PARTITION, F.lit("")) if is_tagged else frame


class PathReader:
    """Reads files that Spark opens itself. For any number of sessions, each in its own thread."""

    def __init__(self, options: Mapping[str, str] | None = None) -> None:
        """`options` are Spark's and Parquet's own, for every file that is read."""
        self._options = dict(options or {})
        self._readers: OrderedDict[Any, tuple[str, Any]] = OrderedDict()
        self._lock = threading.Lock()

    def frame(
        self,
        session: Any,
        paths: Sequence[tuple[str, str | None]],
        columns: Sequence[Column] | None,
        *,
        listed: str = "",
    ) -> DataFrame:
        """The rows of these files, each with its tag, if there are any.

        `listed` is a folder in which Spark finds just these files, where there is one.
        """
        _refuse_hidden(paths)
        reader = self._reader(session, columns)
        named = [listed] if listed else [path for path, _ in paths]
        frame: DataFrame = reader.parquet(*(_WILD.sub(r"\\\g<0>", path) for path in named))
        tags = {tag for _, tag in paths}
        if tags == {None}:
            return frame
        if len(tags) == 1:
            return frame.withColumn(PARTITION, F.lit(tags.pop()))
        return tagged(frame, paths)

    def _reader(self, session: Any, columns: Sequence[Column] | None) -> Any:
        # Asking Spark for a reader is a third of what a small file takes, and a batch has many.
        said = "" if columns is None else ddl(columns)
        with self._lock:
            known, reader = self._readers.get(session, (None, None))
        if known != said:
            # Otherwise a folder that is called `day=1` would be a column.
            reader = session.read.option("recursiveFileLookup", "true").options(**self._options)
            reader = reader.schema(said) if said else reader.option("mergeSchema", "true")
            if has_fractions(columns):
                reader = reader.option(READ_WITHOUT, "false")
            with self._lock:
                self._readers[session] = said, reader
                # A reader keeps its session: those that nobody uses any more have to go.
                while len(self._readers) > _READERS_MAX:
                    self._readers.popitem(last=False)
        return reader


def _refuse_hidden(paths: Sequence[tuple[str, str | None]]) -> None:
    """Spark leaves such files out without a word, and a manifest that names one means its rows."""
    for path, _ in paths:
        name = path.rpartition("/")[2]
        if name.startswith(("_", ".")) or name.endswith("._COPYING_"):
            raise WorkFailed(
                f"Spark would leave out {path}: names that begin with _ or . are no data to it.",
                is_retried=False,
                hint="Make the partition again, with another name for the file.",
            )
