"""An archive of loaded classes, with which a JVM starts in about half the time. Imports no Spark.

Made once for each Java, Spark and folder of the interpreter, into `{data}/spark/`, by a process of
its own that is started when a host has been idle for a while (`archiving`). It is written beside
its place and renamed when it is whole, so what is there is usable; a JVM that it does not fit
starts without it. A host that did not start with it removes it (`forget`).
"""

from __future__ import annotations

import hashlib
import importlib.util
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from penstock.runtimes.spark.java import Java
from penstock.runtimes.spark.settings import SparkSettings


@dataclass(frozen=True, slots=True)
class Archive:
    """Where an archive is, or would be; `path` is None if there is to be none."""

    path: Path | None

    @property
    def is_there(self) -> bool:
        return self.path is not None and self.path.is_file()

    @property
    def is_missing(self) -> bool:
        """Whether one should be made."""
        return self.path is not None and not self.path.is_file()

    def forget(self) -> None:
        """It is of no use."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def archive_of(settings: SparkSettings, java: Java) -> Archive:
    """The archive for hosts of these settings."""
    if not settings.archive or not settings.data:
        return Archive(None)
    try:
        spark = version("pyspark")
    except PackageNotFoundError:
        return Archive(None)
    found = importlib.util.find_spec("pyspark")
    # The JVM takes an archive only for the very same jars.
    said = "\n".join((java.version, str(java.home), spark, str(found.origin if found else "")))
    key = hashlib.sha256(said.encode()).hexdigest()[:8]
    name = f"classes-java{java.version}-spark{spark}-{key}.jsa"
    return Archive(Path(settings.data) / "spark" / name)
