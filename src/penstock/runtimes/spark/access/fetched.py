"""A bucket and a local master: little is fetched into a cache, and much is read in parts.

What a frame reads of up to `FETCHED_BYTES_MAX` is fetched whole, verified, and kept for the tasks
that read it next: many small files cost fewer requests so, and none the second time. What is held
stays until the task has ended. More than that is not waited for: Spark itself reads the columns and
row groups that a query needs, and begins with the first, by the jar (`Direct`), which also writes
what Spark writes. Nothing of that lies on this machine on its way.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from pyspark.sql import DataFrame

from penstock.datasets.cache import Cache, Wanted
from penstock.datasets.schema import Column
from penstock.datasets.transfer import Transfer
from penstock.runtimes.spark.access.base import PathReader, Slice
from penstock.runtimes.spark.access.direct import Direct

FETCHED_BYTES_MAX: Final = 32 * 2**20
"""What is fetched whole at most: a second at the speed of a slow network."""


class Fetched(Direct):
    """Spark reads local copies of little, and ranges of what is more."""

    name = "files fetched to this machine where they are small, and penstock:// where they are not"

    def __init__(self, transfer: Transfer, session: Any, cache: Cache) -> None:
        super().__init__(transfer, session)
        self._cache = cache
        self._local_reader = PathReader()

    def frame(
        self,
        session: Any,
        slices: Sequence[Slice],
        columns: Sequence[Column] | None,
        held: ExitStack,
    ) -> DataFrame:
        every = [(each, some.tag) for some in slices for each in some.files]
        if not every or sum(each.bytes for each, _ in every) > FETCHED_BYTES_MAX:
            return super().frame(session, slices, columns, held)
        wanted = [
            Wanted(location=each.location, bytes=each.bytes, sha256=each.sha256)
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
