"""Files of a folder that are written through the jar: many small ones in one pass.

Hadoop's own file system for folders starts a process for the permissions of each file and writes
its sum into a second one, and what it wrote would be read again here for rows, bounds and sum. For
the thousands of small files of an output with `partition_by` that is nearly all of the time. So
these are committed as `commits` says, straight to where they belong. What is left for this process
is to see to it that they are on the disk, many at a time: a disk that is asked so syncs them
together.

Files are read, and results of few files are written, as `Native` does. Executors of a cluster have
to see the same disk; a file that one of them has told of and that is not here fails the task.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from pyarrow import parquet
from pyspark.sql import DataFrame

from penstock.datasets.folders import make_folder
from penstock.datasets.layout import path_of
from penstock.datasets.manifest import File
from penstock.datasets.transfer import Transfer
from penstock.runtimes.spark.access.base import Divided, Target
from penstock.runtimes.spark.access.commits import Commits, Committed, by_key
from penstock.runtimes.spark.access.native import Native, unshared
from penstock.runtimes.spark.access.statistics import bounds_of

_AT_ONCE: Final = 8


class Local(Native):
    """Spark reads the files itself; partitions are written through the jar."""

    name = "paths that Spark opens itself; partitions are written by penstock://"

    def __init__(self, transfer: Transfer, session: Any, *, is_counted: bool = False) -> None:
        super().__init__(transfer, is_counted=is_counted)
        self._commits = Commits(session)

    def write_keys(self, frame: DataFrame, column: str, target: Target) -> Divided:
        home = path_of(target.location)
        make_folder(home, is_synced=self._transfer.is_synced)
        writer = frame.write.partitionBy(column)
        made = self._commits.write(frame.sparkSession, writer, f"penstock://_folders{home}")

        def file(one: Committed) -> tuple[str, File]:
            path = home / one.name
            try:
                size = path.stat().st_size
            except FileNotFoundError:
                size = -1
            if size != one.bytes:
                raise unshared(f"Executors have told of {path}, and it is not there")
            metadata = parquet.read_metadata(one.tail() or path)
            found = File(
                name=one.name,
                rows=metadata.num_rows,
                bytes=one.bytes,
                sha256=one.sha256,
                bounds=bounds_of(metadata),
            )
            self.wrote(f"{target.location}/{one.name}", found)
            return one.key, found

        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="penstock-keys") as pool:
            files = list(pool.map(file, made))
        self._transfer.settle(target.location, (each.name for each in made))
        return by_key(files)
