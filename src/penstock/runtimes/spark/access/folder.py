"""Files of a folder that Spark and this process both see: `file://`, read and written by Spark.

What a frame reads of up to `WHOLE_BYTES_MAX` is compared with its sums, each file once while
this process lives: what was verified, or written here, is remembered by its size and the time
it was changed. A pass over more than that would take as long as the query, or longer: of such
files the size is compared, and Spark compares the checksum of every page that it reads.

Without the jar (`FolderAccess`), Spark's writer commits into a folder of the attempt's own;
what it has left there is then renamed to where it belongs. A crash leaves that folder, which is
swept with the attempt. On a cluster, executors have to see the same disk. One that does not
fails to read; what it writes would be on its own disk, and missed by nobody, so rows are
counted where they are written.

With the jar (`JarFolderAccess`), files are committed as in `object_store`, straight to where
they belong, with their sums. Hadoop's own file system for folders starts a process for the
permissions of each file and writes its sum into a second one, and what it wrote would be read
again here for rows, bounds and sum: by one process, however many executors have written. What
is left for this process is to see to it that they are on the disk, many at a time: a disk that
is asked so syncs them together. A file that an executor has reported and that is not here fails
the task.
"""

from __future__ import annotations

import itertools
import os
import shutil
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from pyarrow import parquet
from pyspark.sql import DataFrame

from penstock.datasets.folders import make_folder
from penstock.datasets.layout import path_of
from penstock.datasets.manifest import File
from penstock.datasets.schema import Column
from penstock.datasets.snapshot import DataFile
from penstock.datasets.transfer import Transfer
from penstock.kernel.errors import Damaged, NotFound, WorkFailed
from penstock.runtimes.spark.access.base import (
    CHECKED,
    WHOLE_BYTES_MAX,
    FileSlice,
    PartitionedFiles,
    PathReader,
    WriteTarget,
    identified,
    nothing_inside,
)
from penstock.runtimes.spark.access.frame_metadata import ROWS, observed
from penstock.runtimes.spark.access.object_store import CommittedFile, CommitTracker, by_key
from penstock.runtimes.spark.access.parquet import (
    bounds_of,
    file_bounds,
    left_by_keys,
    left_by_spark,
)

_REMEMBERED_MAX: Final = 100_000
_VERIFIED_AT_ONCE: Final = 4


class FolderAccess:
    """Spark reads and writes the files itself."""

    name = "paths that Spark opens itself"

    def __init__(self, transfer: Transfer, *, is_counted: bool = False) -> None:
        """`is_counted` if rows are written by other processes than that of the session."""
        self._transfer = transfer
        self._is_counted = is_counted
        self._reader = PathReader()
        self._checking_reader = PathReader(CHECKED)
        self._verified: OrderedDict[tuple[str, int, int], str] = OrderedDict()
        self._lock = threading.Lock()

    def frame(
        self,
        session: Any,
        slices: Sequence[FileSlice],
        columns: Sequence[Column] | None,
        held: ExitStack,
    ) -> DataFrame:
        del held  # what is published stays while a task that was given it runs
        every = [(each, some.tag) for some in slices for each in some.files]
        if not every:
            is_tagged = any(some.tag is not None for some in slices)
            return nothing_inside(session, columns, is_tagged=is_tagged)
        files = [each for each, _ in every]
        is_whole = sum(each.bytes for each in files) <= WHOLE_BYTES_MAX
        self._look_at(files, self._compare if is_whole else self._measure)
        reader = self._reader if is_whole else self._checking_reader
        paths = [(f"file://{path_of(each.location)}", tag) for each, tag in every]
        return reader.frame(session, paths, columns)

    def write(self, frame: DataFrame, target: WriteTarget) -> tuple[File, ...]:
        folder = path_of(target.staging) / "spark"
        watched, counted = observed(frame, {}) if self._is_counted else (frame, lambda: None)
        identified(watched).write.mode("overwrite").parquet(f"file://{folder}")
        left = list(left_by_spark(folder))
        _check_count(counted(), sum(rows for _, rows in left), folder)
        home = path_of(target.location)
        make_folder(home, is_synced=self._transfer.is_synced)

        def placed(number: int, path: Path, rows: int) -> File:
            name = f"part-{number:05}.parquet"
            path.replace(home / name)
            sent = self._transfer.sum(f"{target.location}/{name}")
            file = File(
                name=name,
                rows=rows,
                bytes=sent.bytes,
                sha256=sent.sha256,
                bounds=file_bounds(home / name),
            )
            self.wrote(f"{target.location}/{name}", file)
            return file

        with ThreadPoolExecutor(_VERIFIED_AT_ONCE, thread_name_prefix="penstock-sum") as pool:
            numbers = itertools.count(target.first)
            made = tuple(pool.map(placed, numbers, *zip(*left, strict=True))) if left else ()
        shutil.rmtree(folder, ignore_errors=True)
        return made

    def write_keys(self, frame: DataFrame, column: str, target: WriteTarget) -> PartitionedFiles:
        folder = path_of(target.staging) / "spark"
        watched, counted = observed(frame, {}) if self._is_counted else (frame, lambda: None)
        writer = identified(watched, column).write.mode("overwrite").partitionBy(column)
        writer.parquet(f"file://{folder}")

        def place(path: Path, location: str, rows: int) -> File:
            home = path_of(location)
            make_folder(home.parent, is_synced=self._transfer.is_synced)
            path.replace(home)
            sent = self._transfer.sum(location)
            file = File(
                name=home.name,
                rows=rows,
                bytes=sent.bytes,
                sha256=sent.sha256,
                bounds=file_bounds(home),
            )
            self.wrote(location, file)
            return file

        made = left_by_keys(folder, column, location=target.location, place=place)
        found = sum(each.rows or 0 for files in made.values() for each in files)
        _check_count(counted(), found, folder)
        shutil.rmtree(folder, ignore_errors=True)
        return made

    def wrote(self, location: str, file: File) -> None:
        path = path_of(location)
        with self._lock:
            self._verified[_stamp(path)] = file.sha256
            while len(self._verified) > _REMEMBERED_MAX:
                self._verified.popitem(last=False)

    def _look_at(self, files: Iterable[DataFile], look: Callable[[DataFile], None]) -> None:
        todo = [each for each in files if each.sha256 is None or not self._is_known(each)]
        if len(todo) == 1:
            look(todo[0])
        elif todo:
            with ThreadPoolExecutor(
                _VERIFIED_AT_ONCE, thread_name_prefix="penstock-verify"
            ) as pool:
                for _ in pool.map(look, todo):
                    pass

    def _is_known(self, file: DataFile) -> bool:
        try:
            stamp = _stamp(path_of(file.location))
        except OSError:
            return False
        with self._lock:
            return self._verified.get(stamp) == file.sha256

    def _compare(self, file: DataFile) -> None:
        """See that a file is the one of its manifest."""
        if file.sha256 is None:
            self._measure(file)
            return
        sent = self._transfer.verify(file.location, sha256=file.sha256)
        if sent.bytes != file.bytes:
            raise _resized(file)
        found = File(name="-", rows=0, bytes=sent.bytes, sha256=sent.sha256)
        self.wrote(file.location, found)

    def _measure(self, file: DataFile) -> None:
        """See that a file is there with its size, and no link, which Spark would follow."""
        try:
            with self._transfer.open(file.location) as opened:
                size = opened.seek(0, os.SEEK_END)
        except NotFound as error:
            raise Damaged(f"The file {file.location} is not there.") from error
        if file.sha256 is not None and size != file.bytes:
            raise _resized(file)


def _resized(file: DataFile) -> Damaged:
    return Damaged(f"{file.location} has another size than its manifest says.")


def _check_count(counted: Mapping[str, int] | None, found: int, folder: Path) -> None:
    if counted is not None and counted[ROWS] != found:
        raise unshared(
            f"Executors have written {counted[ROWS]} rows, and {found} of them are in {folder}"
        )


def unshared(what: str) -> WorkFailed:
    """Something is not where executors have written it."""
    return WorkFailed(
        f"{what}: they do not share this disk. Use a bucket, or a folder that all machines have as"
        " one path.",
        is_retried=False,
    )


def _stamp(path: Path) -> tuple[str, int, int]:
    found = path.stat()
    return str(path), found.st_size, found.st_mtime_ns


_SYNCED_AT_ONCE: Final = 8


class JarFolderAccess(FolderAccess):
    """Spark reads the files itself, and writes them through the jar."""

    name = "paths that Spark opens itself, and writes by penstock://"

    def __init__(self, transfer: Transfer, session: Any) -> None:
        super().__init__(transfer)
        self._commits = CommitTracker(session)

    def write(self, frame: DataFrame, target: WriteTarget) -> tuple[File, ...]:
        made = self._committed(frame.sparkSession, identified(frame).write, target.location)
        return tuple(file for _, file in made)

    def write_keys(self, frame: DataFrame, column: str, target: WriteTarget) -> PartitionedFiles:
        writer = identified(frame, column).write.partitionBy(column)
        return by_key(self._committed(frame.sparkSession, writer, target.location))

    def _committed(self, session: Any, writer: Any, location: str) -> list[tuple[str, File]]:
        """Write what a writer of Spark's has; the files, with their keys."""
        home = path_of(location)
        make_folder(home, is_synced=self._transfer.is_synced)
        made = self._commits.write(session, writer, f"penstock://_folders{home}")

        def file(one: CommittedFile) -> tuple[str, File]:
            path = home / one.name
            try:
                size = path.stat().st_size
            except FileNotFoundError:
                size = -1
            if size != one.bytes:
                raise unshared(f"Executors reported {path}, which does not exist here")
            metadata = parquet.read_metadata(one.tail() or path)
            found = File(
                name=one.name,
                rows=metadata.num_rows,
                bytes=one.bytes,
                sha256=one.sha256,
                bounds=bounds_of(metadata),
            )
            self.wrote(f"{location}/{one.name}", found)
            return one.key, found

        with ThreadPoolExecutor(_SYNCED_AT_ONCE, thread_name_prefix="penstock-files") as pool:
            files = list(pool.map(file, made))
        self._transfer.settle(location, (each.name for each in made))
        return files
