"""Whether a server minds its conditions, tried before they are trusted.

Some servers ignore a condition that they do not know, which would let two writers win. So each is
tried on a marker object of Penstock's own, with a version that cannot be right: CREATE and swap
when a store is opened, delete and the copy of `touch` before their first use, once a client. A
server that lets the wrong version pass raises `Unsupported`. What such a trial cannot see, races,
is for `penstock doctor`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import ClassVar, Final

from penstock.kernel.errors import AlreadyExists, Unsupported, VersionConflict
from penstock.kernel.wire import Document, encode
from penstock.store.base import CREATE, REPLACE, RESERVED_FOLDER, Swap, Version
from penstock.store.s3.answers import bucket_not_found
from penstock.store.s3.bucket import Bucket

MARKER: Final = f"{RESERVED_FOLDER}/marker"
_WRONG_VERSION: Final = Version("00000000000000000000000000000000")


class _Marker(Document, frozen=True):
    """What the trials are made on."""

    kind: ClassVar[str] = "marker"


class Trials:
    """What one client has found out about its server."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._marker = encode(_Marker())
        self._passed: set[str] = set()
        self._trying = asyncio.Lock()

    async def puts(self) -> None:
        """The bucket is there, may be written, and minds conditions on puts."""
        # Some servers make a missing bucket on the first put; that is not what was asked for.
        if (await self._bucket.ask("HEAD", None)).status == 404:
            raise bucket_not_found(self._bucket.config.bucket)
        try:
            await self._bucket.put(MARKER, self._marker, CREATE)
            await self._bucket.put(MARKER, self._marker, CREATE)
        except AlreadyExists:
            pass
        else:
            raise self._ignored("create-if-absent (If-None-Match)")
        swap = self._bucket.put(MARKER, self._marker, Swap(_WRONG_VERSION))
        await self._must_fail(swap, "compare-and-swap (If-Match)")

    async def deletes(self) -> None:
        """The server minds the condition on a delete."""
        async with self._trying:
            if "deletes" not in self._passed:
                await self._bucket.put(MARKER, self._marker, REPLACE)
                delete = self._bucket.delete(MARKER, _WRONG_VERSION)
                await self._must_fail(delete, "the condition on a delete")
                self._passed.add("deletes")

    async def copies(self) -> None:
        """The server minds the condition on a copy's destination.

        There is none on the source here: it could refuse in the place of the other.
        """
        async with self._trying:
            if "copies" not in self._passed:
                await self._bucket.put(MARKER, self._marker, REPLACE)
                copy = self._bucket.copy_onto_itself(MARKER, target=_WRONG_VERSION, source=None)
                await self._must_fail(copy, "the condition on a copy's destination")
                self._passed.add("copies")

    async def _must_fail(self, request: Awaitable[object], what: str) -> None:
        try:
            await request
        except VersionConflict:
            return
        raise self._ignored(what)

    def _ignored(self, what: str) -> Unsupported:
        bucket = self._bucket.config.bucket
        return Unsupported(
            f"The server of bucket {bucket!r} ignores {what}: two writers could win.",
            hint="Use a server with conditional writes; 'penstock doctor URL' tells more.",
        )
