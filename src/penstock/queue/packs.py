"""A pack in the bucket, in the hands of one process: read, judged, and deleted when it is over.

What is void (R2) is deleted by whoever reads it. Every delete is conditional on the version that
was seen (R4), and may fail: whoever comes next deletes it then.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from penstock.kernel.errors import NotFound, StoreError
from penstock.kernel.wire import decode
from penstock.queue.pack import Pack, check_pack, is_void
from penstock.queue.places import PackAt
from penstock.store.base import ObjectStore, Version


@dataclass(frozen=True, slots=True)
class FoundPack:
    """A pack as it was read."""

    pack: Pack
    version: Version
    modified: float


class PackObject:
    """One pack."""

    def __init__(self, store: ObjectStore, key: str, at: PackAt) -> None:
        self._store = store
        self.key = key
        self._at = at
        self.is_gone = False
        """Whether it was seen not to be there."""

    async def read(self) -> FoundPack | None:
        """The pack; None if there is none, or one that is void. Raises `UnreadableObject`."""
        try:
            found = await self._store.get(self.key)
        except NotFound:
            self.is_gone = True
            return None
        assert found is not None
        pack = decode(Pack, found.body, where=self.key)
        check_pack(self._at, pack)
        if is_void(pack.submitted_ms, found.modified):
            await self.delete(found.version)
            return None
        return FoundPack(pack, found.version, found.modified)

    async def is_there(self, version: Version, submitted_ms: int | None) -> bool:
        """Whether it is there in this version, and not void."""
        try:
            head = await self._store.head(self.key)
        except NotFound:
            return False
        return head.version == version and not is_void(submitted_ms, head.modified)

    async def delete(self, version: Version) -> None:
        """Delete it, if it is in this version and the store lets us."""
        # Whoever comes next deletes it if we cannot: what was recorded stands all the same.
        with suppress(StoreError):
            await self._store.delete(self.key, version=version)
            self.is_gone = True
