"""How deletes are made safe in a bucket: a record in it, so that all its clients agree.

A client that does not know of tombstones would take them for objects (`penstock.store.tombstoned`).
So whoever opens a store with `deletes=tombstone` leaves a record below `.penstock/`, for good, and
whoever opens it later goes by the record, with the option or without. A client that was open before
the record was written does not know of it: a bucket in use is changed while nobody uses it. Release
0.1.0 knows no record, and refuses a URL that has the option.
"""

from __future__ import annotations

from contextlib import suppress
from typing import ClassVar, Final

from penstock.kernel.errors import AlreadyExists, InvalidInput, Refused
from penstock.kernel.wire import Document, decode, encode
from penstock.store.base import CREATE, RESERVED_FOLDER
from penstock.store.s3.bucket import Bucket

RECORD: Final = f"{RESERVED_FOLDER}/deletes"


class DeletesRecord(Document, frozen=True):
    """That deletes in this store are by tombstone. There is none where they are conditional."""

    kind: ClassVar[str] = "deletes-by-tombstone"


async def are_by_tombstone(bucket: Bucket) -> bool:
    """Whether deletes in this store are by tombstone: by its record, or by the URL."""
    wanted = bucket.config.deletes
    recorded = await _is_recorded(bucket)
    if recorded and wanted == "conditional":
        raise InvalidInput(
            f"Deletes in bucket {bucket.config.bucket!r} are by tombstone, and cannot be"
            " conditional any more.",
            hint="Drop deletes=conditional from the URL, or use another prefix.",
        )
    return recorded or wanted == "tombstone"


async def _is_recorded(bucket: Bucket) -> bool:
    response = await bucket.ask("GET", RECORD)
    if response.status == 200:
        decode(DeletesRecord, response.body, where=RECORD)
        return True
    # Who may not list is told that what is missing is forbidden.
    if response.status == 404 or isinstance(bucket.error(response, RECORD), Refused):
        return False
    raise bucket.error(response, RECORD)


async def record(bucket: Bucket) -> None:
    """Leave the record, unless it is there."""
    with suppress(AlreadyExists):
        await bucket.put(RECORD, encode(DeletesRecord()), CREATE)
