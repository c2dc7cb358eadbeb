"""The pack: one immutable object that holds the inputs of 1 to 1,000 tasks of one type.

`Pack` is the stored document, `PackObject` reads and deletes one in the bucket. Whoever reads a
void pack (QUEUE-2) deletes it. Every delete is conditional on the version that was read (QUEUE-4)
and may fail: the next reader deletes it then.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar, Final

import msgspec

from penstock.kernel.document_format import Document, decode
from penstock.kernel.errors import NotFound, NotOurs, StoreError
from penstock.queue.ids import PackAt
from penstock.store.base import ObjectStore, Version

RESEND_SECONDS: Final = 300.0
"""W (QUEUE-2): no submit is sent again later than this, on the store's clock."""


class PayloadReference(msgspec.Struct, frozen=True):
    """Where a payload is that is too large for its pack or ledger, and what it must be."""

    key: str
    """Below the folder of the queue."""
    bytes: int
    sha256: str


class Pack(Document, frozen=True, kw_only=True):
    """What was submitted. Written once, never changed, deleted when all of it is settled.

    `nonce` makes the bodies of equal submits differ, so that their versions do; the pointer to a
    pack with a key has the same nonce. `submitted_ms` is the store's time at the first send: a
    pack that the store dates `RESEND_SECONDS` or more after it came too late, is void, and is
    never run.
    """

    kind: ClassVar[str] = "pack"

    type: str
    nonce: str
    submitted_ms: int
    due_ms: int = 0
    inputs: tuple[msgspec.Raw, ...]
    """Each task's input, as the JSON it was submitted as."""
    key: str | None = None
    key_seconds: int = 0
    """How long the key stays taken after the task is settled."""
    refs: tuple[int, ...] = ()
    """The places whose input is a `PayloadReference` to a payload."""
    priority: int = 0
    limit: str = ""
    expires_ms: int = 0
    """What has not begun by then never will; 0 for no such time."""
    tags: dict[str, str] = msgspec.field(default_factory=dict)
    batch: str = ""
    """The batch that its tasks belong to."""
    trace: str = ""
    """The span that submitted it, as in the header `traceparent`."""


def is_void(submitted_ms: int | None, modified: float) -> bool:
    """Whether a pack that the store dates so came too late (QUEUE-2)."""
    return submitted_ms is not None and modified * 1000 >= submitted_ms + RESEND_SECONDS * 1000


def forgotten_ms(submitted_ms: int) -> int:
    """From when on a pack of this submit can only be void: nobody has to remember it (QUEUE-3)."""
    # Stores date to the second: a pack that is dated before W may have come a second after it.
    return submitted_ms + int(RESEND_SECONDS * 1000) + 1000


def check_pack(at: PackAt, pack: Pack) -> None:
    """Raises `NotOurs` unless the pack is what its key says."""
    is_named = at.submitted_ms is None or (pack.priority, pack.limit) == (at.priority, at.limit)
    if len(pack.inputs) != at.count or pack.type != at.type or not is_named:
        raise NotOurs(f"The pack {at.path} does not match its name.")


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
