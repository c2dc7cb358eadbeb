"""Which way of access fits: by where the data lies, where Spark runs, and what it has."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any, Final

from penstock.datasets.cache import Cache
from penstock.datasets.transfer import Transfer
from penstock.kernel.errors import WorkFailed
from penstock.runtimes.spark.access.base import Access
from penstock.runtimes.spark.access.direct import Direct, S3a, has_class
from penstock.runtimes.spark.access.fetched import Fetched
from penstock.runtimes.spark.access.local import Local
from penstock.runtimes.spark.access.native import Native
from penstock.runtimes.spark.access.remote import Remote
from penstock.runtimes.spark.settings import SparkSettings

_log = logging.getLogger(__name__)
_S3A: Final = "org.apache.hadoop.fs.s3a.S3AFileSystem"
_OURS: Final = "penstock.spark.Buckets"


class Accesses:
    """The ways of access of one host, each made when it is needed first, and said in the log."""

    def __init__(self, settings: SparkSettings, transfer: Transfer, session: Any) -> None:
        self._settings = settings
        self._transfer = transfer
        self._session = session
        self._made: dict[str, Access] = {}
        self._lock = threading.Lock()

    def to(self, location: str) -> Access:
        """The way to this location."""
        scheme = location.partition(":")[0]
        with self._lock:
            if scheme not in self._made:
                made = self._choose(scheme, location)
                _log.info("data at %s:// is reached through %s", scheme, made.name)
                self._made[scheme] = made
            return self._made[scheme]

    def _choose(self, scheme: str, location: str) -> Access:
        if scheme == "file":
            is_counted = not self._settings.is_local
            if has_class(self._session, _OURS):
                return Local(self._transfer, self._session, is_counted=is_counted)
            return Native(self._transfer, is_counted=is_counted)
        if scheme != "s3":
            raise WorkFailed(
                f"Spark jobs read and write file:// and s3://, and not {location!r}.",
                is_retried=False,
            )
        if self._settings.is_local:
            folder = Path(self._settings.data) / "spark" / "cache"
            cache = Cache(folder, self._transfer, bytes_max=self._settings.cache_bytes_max)
            return Fetched(self._transfer, self._session, cache)
        if has_class(self._session, _S3A):
            return S3a(self._transfer, self._session)
        if has_class(self._session, _OURS):
            return Direct(self._transfer, self._session)
        return Remote(self._transfer)
