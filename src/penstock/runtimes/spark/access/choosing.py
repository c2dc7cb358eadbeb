"""Which way of access fits: by where the data lies, where Spark runs, and what it has.

Penstock's own jar is first, since it is what tests and benchmarks run on; S3A is for who asks for
it (decision 0073).
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any, Final

from penstock.datasets.cache import Cache
from penstock.datasets.transfer import Transfer
from penstock.kernel.errors import WorkFailed
from penstock.runtimes.spark.access.base import DataAccess
from penstock.runtimes.spark.access.folder import FolderAccess, JarFolderAccess
from penstock.runtimes.spark.access.object_store import (
    BucketAccess,
    CachedBucketAccess,
    S3aAccess,
)
from penstock.runtimes.spark.access.remote import RemoteAccess
from penstock.runtimes.spark.internals import has_class
from penstock.runtimes.spark.settings import SparkSettings

_log = logging.getLogger(__name__)
_S3A: Final = "org.apache.hadoop.fs.s3a.S3AFileSystem"
_OURS: Final = "penstock.spark.Buckets"


class AccessSelector:
    """The ways of access of one host, each made when it is needed first, and said in the log."""

    def __init__(self, settings: SparkSettings, transfer: Transfer, session: Any) -> None:
        self._settings = settings
        self._transfer = transfer
        self._session = session
        self._made: dict[str, DataAccess] = {}
        self._lock = threading.Lock()

    def to(self, location: str) -> DataAccess:
        """The way to this location."""
        scheme = location.partition(":")[0]
        with self._lock:
            if scheme not in self._made:
                made = self._choose(scheme, location)
                _log.info("data at %s:// is reached through %s", scheme, made.name)
                self._made[scheme] = made
            return self._made[scheme]

    def _choose(self, scheme: str, location: str) -> DataAccess:
        if scheme == "file":
            if has_class(self._session, _OURS):
                return JarFolderAccess(self._transfer, self._session)
            return FolderAccess(self._transfer, is_counted=not self._settings.is_local)
        if scheme != "s3":
            raise WorkFailed(
                f"Spark jobs read and write file:// and s3://, and not {location!r}.",
                is_retried=False,
            )
        if self._settings.is_local:
            folder = Path(self._settings.data) / "spark" / "cache"
            cache = Cache(folder, self._transfer, bytes_max=self._settings.cache_bytes_max)
            return CachedBucketAccess(self._transfer, self._session, cache)
        if self._settings.s3a:
            if not has_class(self._session, _S3A):
                raise WorkFailed(
                    f"The settings of the runtime spark ask for s3a, and its driver has no {_S3A}.",
                    is_retried=False,
                    hint="Name hadoop-aws in spark.jars.packages, or leave s3a out. With Connect"
                    " nobody can ask the server for its jars.",
                )
            return S3aAccess(self._transfer, self._session)
        if has_class(self._session, _OURS):
            return BucketAccess(self._transfer, self._session)
        return RemoteAccess(self._transfer)
