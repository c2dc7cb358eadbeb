"""A bucket that Spark's own reader and writer reach: `penstock://BUCKET/KEY`, by a jar of ours.

The jar (`java/`, made by `make jar`) is a file system of Hadoop's. The files of a frame are told to
the driver's JVM with their sizes and sums, as a folder of names, so that Spark lists them without a
request; executors ask the driver for an entry when they open a file, and for the keys to a bucket,
by Spark's own RPC. Keys are in no plan, setting, argument or file: this process tells them to the
JVM through its gateway, and again every minute where they are renewed.

A read sees parts of files. So what is compared is: the size, that all ranges are of one object (its
ETag), the SHA-256 of files of up to 1 MiB, and the checksum that every page of a Parquet file has
from Spark's writer and from ours. What does not fit is `penstock.spark.Damaged`.

A write is committed as `commits` says: straight to where it belongs.

Where the cluster has Hadoop's own S3A, that reads (`S3a`); what it renames at its commit is neither
quick nor reported, so ours writes there too.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from py4j.protocol import Py4JError
from pyarrow import parquet
from pyspark.sql import DataFrame

from penstock.datasets.manifest import File
from penstock.datasets.schema import Column
from penstock.datasets.transfer import Transfer
from penstock.kernel.entropy import new_id, system_entropy
from penstock.kernel.errors import PenstockError
from penstock.runtimes.spark.access.base import (
    Divided,
    PathReader,
    Slice,
    Target,
    nothing_inside,
)
from penstock.runtimes.spark.access.commits import Commits, Committed, by_key, registry_of
from penstock.runtimes.spark.access.statistics import file_bounds
from penstock.runtimes.spark.internals import jvm_of

_log = logging.getLogger(__name__)

CHECKED: Final = {"parquet.page.verify-checksum.enabled": "true"}
_TELL_AGAIN_SECONDS: Final = 60.0


class Direct:
    """Spark reads ranges of objects, and writes objects."""

    name = "penstock://, by which Spark itself reads and writes the bucket"

    def __init__(self, transfer: Transfer, session: Any) -> None:
        self._transfer = transfer
        self._registry = registry_of(session)
        self._keys = Keys(transfer, self._registry)
        self._reader = PathReader(CHECKED)
        self._commits = Commits(session)

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
        for bucket in {_bucket(each.location) for each, _ in every}:
            self._keys.tell(bucket)
        name = new_id(system_entropy(), characters=16)
        lines = (
            f"{each.bytes} {each.sha256 or '-'} {each.location.removeprefix('s3://')}"
            for each, _ in every
        )
        listed = self._registry.list(name, "\n".join(lines))
        held.callback(self._registry.forget, name)
        paths = [(_penstock(each.location), tag) for each, tag in every]
        return self._reader.frame(session, paths, columns, listed=listed)

    def write(self, frame: DataFrame, target: Target) -> tuple[File, ...]:
        return self.committed(frame.sparkSession, frame.write, target.location)

    def committed(self, session: Any, writer: Any, location: str) -> tuple[File, ...]:
        """Write what a writer of Spark's has, as Parquet below a location; the files, in order."""
        return tuple(file for _, file in self._committed(session, writer, location))

    def write_keys(self, frame: DataFrame, column: str, target: Target) -> Divided:
        writer = frame.write.partitionBy(column)
        return by_key(self._committed(frame.sparkSession, writer, target.location))

    def wrote(self, location: str, file: File) -> None:
        del location, file  # it is read like any other

    def _committed(self, session: Any, writer: Any, location: str) -> list[tuple[str, File]]:
        self._keys.tell(_bucket(location))
        made = self._commits.write(session, writer, _penstock(location))
        return [(each.key, self._file(each, location)) for each in made]

    def _file(self, made: Committed, location: str) -> File:
        rows, tail = made.rows, made.tail()
        if rows < 0:
            # A footer of many megabytes, which was on its way before anybody knew it was one.
            with self._transfer.open(f"{location}/{made.name}") as opened:
                rows = parquet.ParquetFile(opened).metadata.num_rows
        bounds = {} if tail is None else file_bounds(tail)
        return File(name=made.name, rows=rows, bytes=made.bytes, sha256=made.sha256, bounds=bounds)


class S3a(Direct):
    """Spark reads the bucket by Hadoop's own S3A, with the settings and keys that it was given."""

    name = "s3a:// for reading, and penstock:// for writing"

    def frame(
        self,
        session: Any,
        slices: Sequence[Slice],
        columns: Sequence[Column] | None,
        held: ExitStack,
    ) -> DataFrame:
        del held
        paths = [
            (f"s3a://{each.location.removeprefix('s3://')}", some.tag)
            for some in slices
            for each in some.files
        ]
        if not paths:
            is_tagged = any(some.tag is not None for some in slices)
            return nothing_inside(session, columns, is_tagged=is_tagged)
        return self._reader.frame(session, paths, columns)


class Keys:
    """Tells the JVM how buckets are reached, and again while it lives, where keys are renewed."""

    def __init__(
        self, transfer: Transfer, registry: Any, *, again_seconds: float = _TELL_AGAIN_SECONDS
    ) -> None:
        self._transfer = transfer
        self._registry = registry
        self._again_seconds = again_seconds
        self._told: set[str] = set()
        self._lock = threading.Lock()

    def tell(self, bucket: str) -> None:
        """See to it that the driver knows of a bucket."""
        with self._lock:
            if bucket in self._told:
                return
            again = self._tell_of(bucket)
            self._told.add(bucket)
        if again is not None:
            threading.Thread(
                target=self._renew, args=(bucket, again), name="penstock-keys", daemon=True
            ).start()

    def _tell_of(self, bucket: str) -> Any:
        """Tell it once; returns what tells it again, if keys are not given once for all."""
        # Only now: it is the client of buckets.
        from awscrt.exceptions import AwsCrtError  # noqa: PLC0415

        from penstock.datasets import buckets  # noqa: PLC0415
        from penstock.store.s3.config import s3_config  # noqa: PLC0415

        transfer = self._transfer
        config = s3_config(
            transfer.bucket_url(bucket),
            environment=transfer.environment,
            credentials=transfer.credentials,
        )
        given = config.keyring.given
        provider = buckets.Provider(given)
        endpoint = config.endpoint
        scheme = "https" if endpoint.tls else "http"
        authorities = Path(endpoint.ca_bundle).read_text() if endpoint.ca_bundle else ""

        def tell() -> None:
            try:
                found = provider()
            except (AwsCrtError, OSError, ValueError) as error:
                # Whoever gives keys is away, and not the JVM.
                raise RuntimeError(str(error)) from error
            self._registry.reach(
                bucket,
                f"{scheme}://{endpoint.host_header}",
                f"/{bucket}" if config.path_style else "",
                endpoint.region,
                authorities,
                found["access_key_id"],
                found["secret_access_key"],
                found.get("token") or "",
            )

        tell()
        return None if given is not None else tell

    def _renew(self, bucket: str, tell: Any) -> None:
        pause = threading.Event()
        while not pause.wait(self._again_seconds):
            try:
                tell()
            except (Py4JError, ConnectionError):
                return  # the JVM has ended
            except (PenstockError, RuntimeError, OSError, TimeoutError) as error:
                # What it has is good for some time; the next minute is another chance.
                _log.warning("failed to renew the keys of the bucket %s: %s", bucket, error)


def has_class(session: Any, name: str) -> bool:
    """Whether the driver has a class."""
    jvm = jvm_of(session)
    if jvm is None:
        return False
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    path = name.replace(".", "/") + ".class"
    return loader is not None and loader.getResource(path) is not None


def _bucket(location: str) -> str:
    return location.removeprefix("s3://").partition("/")[0]


def _penstock(location: str) -> str:
    return f"penstock://{location.removeprefix('s3://')}"
