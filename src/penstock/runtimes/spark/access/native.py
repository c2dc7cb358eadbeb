"""Files of a folder that Spark and this process both see: `file://`, read and written by Spark.

The sum of a file is verified once while this process lives: what was verified, or written here, is
remembered by its size and the time it was changed.

Spark's writer commits into a folder of the attempt's own; what it has left there is then renamed to
where it belongs. A crash leaves that folder, which is swept with the attempt.

On a cluster, executors have to see the same disk. One that does not fails to read; what it writes
would be on its own disk, and missed by nobody, so rows are counted where they are written.
"""

from __future__ import annotations

import itertools
import shutil
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from pyspark.sql import DataFrame

from penstock.datasets.folders import make_folder
from penstock.datasets.layout import path_of
from penstock.datasets.manifest import File
from penstock.datasets.schema import Column
from penstock.datasets.snapshot import DataFile
from penstock.datasets.transfer import Transfer
from penstock.kernel.errors import Damaged, WorkFailed
from penstock.runtimes.spark.access.base import (
    Divided,
    PathReader,
    Slice,
    Target,
    nothing_inside,
)
from penstock.runtimes.spark.access.counting import ROWS, observed
from penstock.runtimes.spark.access.divided import left_by_keys
from penstock.runtimes.spark.access.folders import left_by_spark
from penstock.runtimes.spark.access.statistics import file_bounds

_REMEMBERED_MAX: Final = 100_000
_AT_ONCE: Final = 4


class Native:
    """Spark reads and writes the files itself."""

    name = "paths that Spark opens itself"

    def __init__(self, transfer: Transfer, *, is_counted: bool = False) -> None:
        """`is_counted` if rows are written by other processes than that of the session."""
        self._transfer = transfer
        self._is_counted = is_counted
        self._reader = PathReader()
        self._verified: OrderedDict[tuple[str, int, int], str] = OrderedDict()
        self._lock = threading.Lock()

    def frame(
        self,
        session: Any,
        slices: Sequence[Slice],
        columns: Sequence[Column] | None,
        held: ExitStack,
    ) -> DataFrame:
        del held  # what is published stays while a task that was given it runs
        self._verify([each for some in slices for each in some.files])
        paths = [
            (f"file://{path_of(each.location)}", some.tag) for some in slices for each in some.files
        ]
        if not paths:
            is_tagged = any(some.tag is not None for some in slices)
            return nothing_inside(session, columns, is_tagged=is_tagged)
        return self._reader.frame(session, paths, columns)

    def write(self, frame: DataFrame, target: Target) -> tuple[File, ...]:
        folder = path_of(target.staging) / "spark"
        watched, counted = observed(frame, {}) if self._is_counted else (frame, lambda: None)
        watched.write.mode("overwrite").parquet(f"file://{folder}")
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

        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="penstock-sum") as pool:
            numbers = itertools.count(target.first)
            made = tuple(pool.map(placed, numbers, *zip(*left, strict=True))) if left else ()
        shutil.rmtree(folder, ignore_errors=True)
        return made

    def write_keys(self, frame: DataFrame, column: str, target: Target) -> Divided:
        folder = path_of(target.staging) / "spark"
        watched, counted = observed(frame, {}) if self._is_counted else (frame, lambda: None)
        watched.write.mode("overwrite").partitionBy(column).parquet(f"file://{folder}")

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

    def _verify(self, files: Iterable[DataFile]) -> None:
        todo = [each for each in files if each.sha256 is None or not self._is_known(each)]
        if len(todo) == 1:
            self._look(todo[0])
        elif todo:
            with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="penstock-verify") as pool:
                for _ in pool.map(self._look, todo):
                    pass

    def _is_known(self, file: DataFile) -> bool:
        try:
            stamp = _stamp(path_of(file.location))
        except OSError:
            return False
        with self._lock:
            return self._verified.get(stamp) == file.sha256

    def _look(self, file: DataFile) -> None:
        if file.sha256 is None:
            # Nothing to compare; but a link is not for Spark either, which would follow it.
            self._transfer.open(file.location).close()
            return
        sent = self._transfer.verify(file.location, sha256=file.sha256)
        if sent.bytes != file.bytes:
            raise Damaged(f"{file.location} has another size than its manifest says.")
        found = File(name="-", rows=0, bytes=sent.bytes, sha256=sent.sha256)
        self.wrote(file.location, found)


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
