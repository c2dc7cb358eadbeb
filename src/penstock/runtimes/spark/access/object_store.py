"""A bucket that Spark's own reader and writer reach: `penstock://BUCKET/KEY`, by a jar of ours.

The jar (`java/`, made by `make jar`) is a file system of Hadoop's. The files of a frame are
told to the driver's JVM with their sizes and sums, as a folder of names, so that Spark lists
them without a request; executors ask the driver for an entry when they open a file, and for the
credentials of a bucket, by Spark's own RPC. Credentials are in no plan, setting, argument or
file: this process gives them to the JVM through its gateway, and again every five seconds where
they are renewed, because the chain looks for new ones ten seconds before what it has expires.

A read sees parts of files. So what is compared is: the size, that all ranges are of one object
(its ETag), the SHA-256 of files of up to 1 MiB, and the checksum that every page of a Parquet
file has from Spark's writer and from ours. What does not fit is `penstock.spark.Damaged`.

A write is committed by the jar (`penstock.spark.AttemptCommit`): each Spark task writes under
names of its own, straight to where they belong, and names its files in the message that Spark
takes from an attempt that succeeded, with rows, bytes and SHA-256, which are taken as a file is
written, and with its footer, if that is small. Nothing is moved, and nothing is read again. A
crash leaves files that no manifest names, which are swept with the attempt. `folder` commits in
the same way.

Where the cluster has Hadoop's own S3A, that reads (`S3aAccess`); what it renames at its commit
is neither quick nor reported, so ours writes there too.

On a local master little is fetched into a cache (`CachedBucketAccess`): what a frame reads of
up to `WHOLE_BYTES_MAX` is fetched whole, verified, and kept for the tasks that read it next.
What is held stays until the task has ended. Of more than that Spark itself reads the columns
and row groups that a query needs, by the jar, and nothing of that lies on this machine on its
way.
"""

from __future__ import annotations

import logging
import tempfile
import threading
from base64 import b64decode
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, Final
from weakref import WeakKeyDictionary

from msgspec.structs import replace
from py4j.protocol import Py4JError
from pyarrow import parquet
from pyspark.sql import DataFrame

from penstock.datasets.cache import Cache, WantedFile
from penstock.datasets.layout import part
from penstock.datasets.manifest import File
from penstock.datasets.schema import Column
from penstock.datasets.transfer import Transfer
from penstock.kernel.entropy import new_id, system_entropy
from penstock.kernel.errors import PenstockError, WorkFailed
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
from penstock.runtimes.spark.access.parquet import file_bounds
from penstock.runtimes.spark.internals import COMMIT_PROTOCOL, jvm_of

_SETTING: Final = "spark.sql.sources.commitProtocolClass"
_MARK: Final = b"PAR1"
"""What a Parquet file begins with, and before its footer nothing else is looked for."""


@dataclass(frozen=True, slots=True)
class CommittedFile:
    """A file of a commit; `key` is the value that Spark's writer divided by, or empty."""

    name: str
    """Below the location that was written to."""
    rows: int
    """-1 if its footer was too large to be looked at."""
    bytes: int
    sha256: str
    key: str
    footer: str

    def tail(self) -> BinaryIO | None:
        """As much of it as its metadata is read from; None if nobody told it."""
        return None if self.footer == "-" else BytesIO(_MARK + b64decode(self.footer))


class CommitTracker:
    """Writes of the sessions of one driver. Several threads may write at once."""

    def __init__(self, session: Any) -> None:
        self._registry = registry_of(session)
        self._writing: WeakKeyDictionary[Any, tuple[int, str]] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def write(self, session: Any, writer: Any, path: str) -> list[CommittedFile]:
        """Write what a writer of Spark's has, as Parquet below a path; the files, by name."""
        with self._protocol(session):
            writer.mode("append").parquet(path)
        said = self._registry.committed(path)
        if said is None:
            raise WorkFailed("Spark's writer ended and has not committed what it wrote.")
        # Not by `splitlines`: keys may have what Python takes for the end of a line.
        made = [_committed(line) for line in said.split("\n") if line]
        return sorted(made, key=lambda each: each.name)

    @contextmanager
    def _protocol(self, session: Any) -> Iterator[None]:
        """Within this, what the session writes is committed by ours."""
        with self._lock:
            count, before = self._writing.get(session) or (0, session.conf.get(_SETTING))
            if not count:
                session.conf.set(_SETTING, COMMIT_PROTOCOL)
            self._writing[session] = count + 1, before
        try:
            yield
        finally:
            with self._lock:
                count, before = self._writing.pop(session)
                if count > 1:
                    self._writing[session] = count - 1, before
                else:
                    _restore(session, before)


def registry_of(session: Any) -> Any:
    """What the driver's JVM was told, and has to tell."""
    return jvm_of(session).penstock.spark.Registry


def by_key(made: Iterable[tuple[str, File]]) -> PartitionedFiles:
    """Files of a commit, each with its key, by key: a file is named in the folder of its own."""
    found: dict[str, list[File]] = {}
    for key, file in made:
        folder, _, name = file.name.rpartition("/")
        if folder != part(key):
            raise WorkFailed(f"The rows of {key!r} were written to {folder!r}: a bug.")
        found.setdefault(key, []).append(replace(file, name=name))
    return {key: tuple(found[key]) for key in sorted(found)}


def _committed(line: str) -> CommittedFile:
    rows, size, sha256, footer, name, key = line.split(" ", 5)
    return CommittedFile(name, int(rows), int(size), sha256, key, footer)


def _restore(session: Any, before: str) -> None:
    session.conf.unset(_SETTING)
    if session.conf.get(_SETTING) != before:
        session.conf.set(_SETTING, before)


_log = logging.getLogger(__name__)

_TELL_AGAIN_SECONDS: Final = 5.0


class BucketAccess:
    """Spark reads ranges of objects, and writes objects."""

    name = "penstock://, by which Spark itself reads and writes the bucket"

    def __init__(self, transfer: Transfer, session: Any) -> None:
        self._transfer = transfer
        self._registry = registry_of(session)
        self._keys = BucketCredentials(transfer, self._registry)
        self._reader = PathReader(CHECKED)
        self._commits = CommitTracker(session)

    def frame(
        self,
        session: Any,
        slices: Sequence[FileSlice],
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

    def write(self, frame: DataFrame, target: WriteTarget) -> tuple[File, ...]:
        return self.committed(frame.sparkSession, identified(frame).write, target.location)

    def committed(self, session: Any, writer: Any, location: str) -> tuple[File, ...]:
        """Write what a writer of Spark's has, as Parquet below a location; the files, in order."""
        return tuple(file for _, file in self._committed(session, writer, location))

    def write_keys(self, frame: DataFrame, column: str, target: WriteTarget) -> PartitionedFiles:
        writer = identified(frame, column).write.partitionBy(column)
        return by_key(self._committed(frame.sparkSession, writer, target.location))

    def wrote(self, location: str, file: File) -> None:
        del location, file  # it is read like any other

    def _committed(self, session: Any, writer: Any, location: str) -> list[tuple[str, File]]:
        self._keys.tell(_bucket(location))
        made = self._commits.write(session, writer, _penstock(location))
        return [(each.key, self._file(each, location)) for each in made]

    def _file(self, made: CommittedFile, location: str) -> File:
        rows, tail = made.rows, made.tail()
        if rows < 0:
            # A footer of many megabytes, which was on its way before anybody knew it was one.
            with self._transfer.open(f"{location}/{made.name}") as opened:
                rows = parquet.ParquetFile(opened).metadata.num_rows
        bounds = {} if tail is None else file_bounds(tail)
        return File(name=made.name, rows=rows, bytes=made.bytes, sha256=made.sha256, bounds=bounds)


class S3aAccess(BucketAccess):
    """Spark reads the bucket by Hadoop's own S3A, with the settings and keys that it was given."""

    name = "s3a:// for reading, and penstock:// for writing"

    def frame(
        self,
        session: Any,
        slices: Sequence[FileSlice],
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


class BucketCredentials:
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
                # What it has may be good for some time; there is another chance in a moment.
                _log.warning("failed to renew the keys of the bucket %s: %s", bucket, error)


def _bucket(location: str) -> str:
    return location.removeprefix("s3://").partition("/")[0]


def _penstock(location: str) -> str:
    return f"penstock://{location.removeprefix('s3://')}"


class CachedBucketAccess(BucketAccess):
    """Spark reads local copies of little, and ranges of what is more."""

    name = "files fetched to this machine where they are small, and penstock:// where they are not"

    def __init__(self, transfer: Transfer, session: Any, cache: Cache) -> None:
        super().__init__(transfer, session)
        self._cache = cache
        self._local_reader = PathReader()

    def frame(
        self,
        session: Any,
        slices: Sequence[FileSlice],
        columns: Sequence[Column] | None,
        held: ExitStack,
    ) -> DataFrame:
        every = [(each, some.tag) for some in slices for each in some.files]
        if not every or sum(each.bytes for each, _ in every) > WHOLE_BYTES_MAX:
            return super().frame(session, slices, columns, held)
        wanted = [
            WantedFile(location=each.location, bytes=each.bytes, sha256=each.sha256)
            for each, _ in every
        ]
        paths = held.enter_context(self._cache.holding(wanted))
        tags = _tagged(held, paths, [tag for _, tag in every])
        return self._local_reader.frame(session, tags, columns)


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
