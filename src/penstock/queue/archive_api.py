"""The archive as its users see it: list and fetch its files, flush to it, set its retention.

    for batch in await queue.archive.batches():
        print(batch.key, batch.last_submitted_at)
    await queue.archive.retain(archive_days=30, dead_letter_days=365)

A file is gzip of JSON Lines, one row a settled task, for Spark and pandas as it is; the columns
are in `penstock.queue.archive_rows`. To list is one LIST for every 1,000 files of each folder,
to fetch is a GET, and to flush is one pass of the monitor (`penstock.queue.maintenance`).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import msgspec

from penstock.kernel.errors import InvalidInput, NotFound
from penstock.queue import archive
from penstock.queue.archive_rows import ENDING, packed, unpacked
from penstock.queue.config import change_config, read_config
from penstock.queue.context import QueueContext
from penstock.queue.maintenance import MonitorPass, run_monitor
from penstock.queue.retention import ArchiveRetention, RetentionResult
from penstock.store.base import find
from penstock.store.metered import labelled


@dataclass(frozen=True, slots=True)
class ArchivedBatch:
    """A file of the archive. Times are the store's, in seconds."""

    key: str
    """In the store."""
    name: str
    """A name for a file of it, also if it is from before there were rows."""
    is_dead_letters: bool
    first_submitted_at: float
    last_submitted_at: float
    archived_at: float
    bytes: int


class QueueArchive:
    """The archive of one queue."""

    def __init__(self, access: QueueContext) -> None:
        self._access = access

    async def batches(
        self,
        *,
        dead_letters: bool | None = None,
        since: float | None = None,
        until: float | None = None,
    ) -> list[ArchivedBatch]:
        """The files, oldest first: all, or those with dead letters, or those without.

        With `since` and `until`, times in seconds, those that may have tasks submitted between.
        """
        layout = self._access.layout
        wanted = {None: (layout.archive, layout.dead), True: (layout.dead,)}
        found: list[ArchivedBatch] = []
        with labelled("archive"):
            for prefix in wanted.get(dead_letters, (layout.archive,)):
                start = layout.after_submits_before(prefix, int(since * 1000)) if since else ""
                async for entry in archive.batches(
                    self._access.store, layout, prefix, start_after=start
                ):
                    first_ms, last_ms = layout.read_batch(entry.key) or (0, 0)
                    if until is not None and first_ms > until * 1000:
                        continue
                    name = entry.key.rpartition("/")[2].removesuffix(ENDING) + ENDING
                    found.append(
                        ArchivedBatch(
                            entry.key,
                            name,
                            prefix == layout.dead,
                            first_ms / 1000,
                            last_ms / 1000,
                            entry.modified,
                            entry.size,
                        )
                    )
        return sorted(found, key=lambda batch: (batch.last_submitted_at, batch.key))

    async def fetch(self, key: str) -> bytes:
        """A file as it is, or as rows if it is from before there were rows."""
        layout = self._access.layout
        if not key.startswith((layout.archive, layout.dead)) or layout.read_batch(key) is None:
            raise InvalidInput(
                f"{key[:200]!r} is not a file of this queue's archive.",
                hint="'penstock queue archive list' shows them.",
            )
        with labelled("archive"):
            found = await find(self._access.store, key)
        if found is None:
            raise NotFound(
                f"There is no {key!r} in the archive any more.",
                key=key,
                hint="'penstock queue archive list' shows what there is.",
            )
        if key.endswith(ENDING):
            return found.body
        return b"".join(packed(unpacked(found.body, where=key)))

    async def flush(self) -> MonitorPass:
        """Archive at once what may leave: settled for W at least, or for a key's lifetime."""
        passes: list[MonitorPass] = []
        await run_monitor(self._access, tell=passes.append, stopping=asyncio.Event(), passes_max=1)
        return passes[0]

    async def retain(
        self, *, archive_days: int | None, dead_letter_days: int | None
    ) -> RetentionResult:
        """Set for how many days records are kept, None for ever, and forget what is older now."""
        with labelled("retention"):
            config = await change_config(
                self._access.store,
                self._access.layout,
                lambda present: msgspec.structs.replace(
                    present, archive_days=archive_days, dead_letter_days=dead_letter_days
                ),
                entropy=self._access.entropy,
            )
        return await ArchiveRetention(self._access).retain(
            archive_days=config.archive_days, dead_letter_days=config.dead_letter_days
        )

    async def retention(self) -> tuple[int | None, int | None]:
        """For how many days records and dead letters are kept by now."""
        with labelled("retention"):
            config = await read_config(self._access.store, self._access.layout)
        config = config or self._access.config
        return config.archive_days, config.dead_letter_days
