"""Removing the tombstones of names that are used once, when no late request can come back to them.

Only where deletes are by tombstone (`penstock.store.tombstoned`), and only for registrations of
workers, whose names end in a random id, and for batches, whose names are one: nobody creates
them twice. Names that are not reused, and beside whose delete nothing is written that counts,
leave no tombstone at all (`penstock.queue.layout.is_used_once`). All other names are reused,
and keep theirs: keys, limits, the inboxes of named workers, the election.

A tombstone stays for W, in which late requests come, and the longest lease that may be set: then
every process that knew the object has learned that it is gone. To remove it is a plain delete;
several at once, or one that fails, do no harm.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from penstock.kernel.errors import StoreError
from penstock.queue.pack import RESEND_SECONDS
from penstock.queue.settings import LEASE_SECONDS_MAX
from penstock.store.base import Entry, ObjectStore

KEPT_SECONDS: Final = RESEND_SECONDS + LEASE_SECONDS_MAX
REMOVED_MAX: Final = 100
"""So many of a page at a time; the next look finds the others."""


async def remove_old(store: ObjectStore, tombstones: Sequence[Entry]) -> None:
    """Remove those that are old enough. For names that nobody creates again."""
    if not tombstones:
        return
    now = await store.now()
    old = [each.key for each in tombstones if each.modified + KEPT_SECONDS <= now.earliest]

    async def remove(key: str) -> None:
        with suppress(StoreError):
            await store.delete(key)

    await asyncio.gather(*(remove(key) for key in old[:REMOVED_MAX]))
