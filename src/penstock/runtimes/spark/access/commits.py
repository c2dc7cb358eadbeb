"""What Spark's own writer has committed, told by the jar: `penstock.spark.AttemptCommit`.

Each Spark task writes under names of its own, straight to where they belong, and names its files in
the message that Spark takes from an attempt that succeeded, with rows, bytes and SHA-256, which are
taken as a file is written, and with its footer, if that is small. Nothing is moved, and nothing is
read again. A crash leaves files that no manifest names, which are swept with the attempt.

`Direct` has it write to a bucket, and `Local` to a folder.
"""

from __future__ import annotations

import threading
from base64 import b64decode
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import Any, BinaryIO, Final
from weakref import WeakKeyDictionary

from msgspec.structs import replace

from penstock.datasets.layout import part
from penstock.datasets.manifest import File
from penstock.kernel.errors import WorkFailed
from penstock.runtimes.spark.access.base import Divided
from penstock.runtimes.spark.internals import jvm_of

PROTOCOL: Final = "penstock.spark.AttemptCommit"
_SETTING: Final = "spark.sql.sources.commitProtocolClass"
_MARK: Final = b"PAR1"
"""What a Parquet file begins with, and before its footer nothing else is looked for."""


@dataclass(frozen=True, slots=True)
class Committed:
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


class Commits:
    """Writes of the sessions of one driver. Several threads may write at once."""

    def __init__(self, session: Any) -> None:
        self._registry = registry_of(session)
        self._writing: WeakKeyDictionary[Any, tuple[int, str]] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def write(self, session: Any, writer: Any, path: str) -> list[Committed]:
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
                session.conf.set(_SETTING, PROTOCOL)
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


def by_key(made: Iterable[tuple[str, File]]) -> Divided:
    """Files of a commit, each with its key, by key: a file is named in the folder of its own."""
    found: dict[str, list[File]] = {}
    for key, file in made:
        folder, _, name = file.name.rpartition("/")
        if folder != part(key):
            raise WorkFailed(f"The rows of {key!r} were written to {folder!r}: a bug.")
        found.setdefault(key, []).append(replace(file, name=name))
    return {key: tuple(found[key]) for key in sorted(found)}


def _committed(line: str) -> Committed:
    rows, size, sha256, footer, name, key = line.split(" ", 5)
    return Committed(name, int(rows), int(size), sha256, key, footer)


def _restore(session: Any, before: str) -> None:
    session.conf.unset(_SETTING)
    if session.conf.get(_SETTING) != before:
        session.conf.set(_SETTING, before)
