"""A bucket and a local master: files are fetched into a cache of this machine, and sent from it.

Spark reads and writes local files at its own speed; the bucket is the business of `Transfer`. The
cache verifies what it fetches. What is held stays until the task has ended.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from pyspark.sql import DataFrame

from penstock.datasets.cache import Cache, Wanted
from penstock.datasets.manifest import File
from penstock.datasets.schema import Column
from penstock.datasets.transfer import Transfer
from penstock.runtimes.spark.access.base import (
    Divided,
    PathReader,
    Slice,
    Target,
    nothing_inside,
)
from penstock.runtimes.spark.access.divided import left_by_keys
from penstock.runtimes.spark.access.folders import left_by_spark
from penstock.runtimes.spark.access.statistics import file_bounds

_AT_ONCE: Final = 4


class Fetched:
    """Spark reads and writes local copies."""

    name = "files fetched from the bucket to this machine"

    def __init__(self, transfer: Transfer, cache: Cache, *, folder: Path) -> None:
        self._transfer = transfer
        self._cache = cache
        self._reader = PathReader()
        self._folder = folder

    def frame(
        self,
        session: Any,
        slices: Sequence[Slice],
        columns: Sequence[Column] | None,
        held: ExitStack,
    ) -> DataFrame:
        every = [(each, some.tag) for some in slices for each in some.files]
        if not every:
            is_tagged = any(some.tag is not None for some in slices)
            return nothing_inside(session, columns, is_tagged=is_tagged)
        wanted = [
            Wanted(location=each.location, bytes=each.bytes, sha256=each.sha256)
            for each, _ in every
        ]
        paths = held.enter_context(self._cache.holding(wanted))
        tags = _tagged(held, paths, [tag for _, tag in every])
        return self._reader.frame(session, tags, columns)

    def write(self, frame: DataFrame, target: Target) -> tuple[File, ...]:
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._folder, prefix="out-") as name:
            folder = Path(name, "spark")
            frame.write.parquet(f"file://{folder}")
            with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="penstock-send") as pool:
                coming = [
                    pool.submit(
                        self._sent, path, f"{target.location}/part-{number:05}.parquet", rows=rows
                    )
                    for number, (path, rows) in enumerate(left_by_spark(folder), target.first)
                ]
                return tuple(each.result() for each in coming)

    def write_keys(self, frame: DataFrame, column: str, target: Target) -> Divided:
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._folder, prefix="out-") as name:
            folder = Path(name, "spark")
            frame.write.partitionBy(column).parquet(f"file://{folder}")
            return left_by_keys(
                folder,
                column,
                location=target.location,
                place=lambda path, location, rows: self._sent(path, location, rows=rows),
            )

    def wrote(self, location: str, file: File) -> None:
        del location, file  # it is fetched like any other

    def _sent(self, path: Path, location: str, *, rows: int) -> File:
        sent = self._transfer.send(path, location)
        name = location.rpartition("/")[2]
        return File(
            name=name,
            rows=rows,
            bytes=sent.bytes,
            sha256=sent.sha256,
            bounds=file_bounds(path),
        )


def _tagged(
    held: ExitStack, paths: Sequence[Path], tags: Sequence[str | None]
) -> list[tuple[str, str | None]]:
    """Paths with their tags. Equal files are one in the cache, and may have several tags."""
    seen: set[Path] = set()
    found = []
    for path, tag in zip(paths, tags, strict=True):
        once = path
        if path in seen:
            folder = tempfile.TemporaryDirectory(dir=path.parent.parent, prefix="again-")
            once = Path(held.enter_context(folder), path.name)
            once.hardlink_to(path)
        seen.add(path)
        found.append((f"file://{once}", tag))
    return found
