"""A bucket that shows every change to a witness, with the name of whoever made it.

Each machine has its own client, `NamedStore`. A request takes effect at one instant, right after
the client's `_send`: there the client puts its name on the bucket. The witness is called after the
change, with the object before and after it, and after every reading; it must not change the bucket.
A tombstone (`penstock.store.tombstoned`) is shown as no object.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from penstock.kernel.clock import Clock
from penstock.store.base import Object, Version
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.store.tombstoned import is_tombstone


class Witness(Protocol):
    """Sees every change. `before` and `after` are bodies; None where there is no object."""

    def saw(
        self,
        who: str,
        key: str,
        *,
        before: bytes | None,
        after: bytes | None,
        version: Version | None,
    ) -> None: ...

    def read(self, who: str, key: str, modified: float) -> None:
        """Somebody has read an object of this date."""


class WatchedBucket(MemoryBucket):
    """A bucket with a witness. Dates its objects to the second, as S3 does."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock, date_resolution_seconds=1.0)
        self.witness: Witness | None = None
        self.hand = ""
        """Who makes the present change."""

    def write(self, key: str, body: bytes, metadata: Mapping[str, str]) -> Version:
        known = self.objects.get(key)
        version = super().write(key, body, metadata)
        before = None if known is None or is_tombstone(known.body) else known.body
        if not is_tombstone(body):
            self._show(key, before, body, version)
        elif known is not None:
            self._show(key, before, None, known.version)
        return version

    def remove(self, key: str) -> None:
        known = self.objects[key]
        super().remove(key)
        self._show(key, None if is_tombstone(known.body) else known.body, None, known.version)

    def _show(self, key: str, before: bytes | None, after: bytes | None, version: Version) -> None:
        if self.witness is not None and not (before is None and after is None):
            self.witness.saw(self.hand, key, before=before, after=after, version=version)


class NamedStore(MemoryStore):
    """A client of a watched bucket."""

    def __init__(self, bucket: WatchedBucket, *, clock: Clock, name: str) -> None:
        super().__init__(bucket, clock=clock)
        self._watched = bucket
        self._name = name

    async def get(self, key: str, *, unless: Version | None = None) -> Object | None:
        found = await super().get(key, unless=unless)
        is_there = found is not None and not is_tombstone(found.body)
        if found is not None and is_there and self._watched.witness is not None:
            self._watched.witness.read(self._name, key, found.modified)
        return found

    async def _send(self) -> float:
        sent = await super()._send()
        # Nothing else runs between here and the change.
        self._watched.hand = self._name
        return sent
