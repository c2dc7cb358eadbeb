"""Deletes by tombstone, for servers whose conditional delete is not atomic.

Some servers check the version that a DELETE names and remove the object later (Ceph's RGW), or do
not look at the version at all. Then a delete and a swap of one version both win, and the swapped
object is gone although its writer was told that it stands. Creates and swaps of such servers are
atomic, and out of them this wrapper makes a delete that is, too: the object is swapped for a
*tombstone*, which everybody who reads through this wrapper takes for absent.

States of a key, and the requests that move it

    absent ──CREATE──▶ object ──Swap──▶ object
                        │   ▲
          Swap(version) │   │ Swap(tombstone)          delete(version) is the first,
                        ▼   │                          CREATE over a tombstone the second
                      tombstone ──DELETE──▶ absent     delete without a version

- Every arrow is one atomic request. Of a delete and a swap that name one version, one wins.
- A tombstone has a nonce, so that two of one key never have the same version: a swap that was sent
  to one and comes late does not fit the next. (An empty body would repeat its ETag.)
- `CREATE` is sent as it is. If that is refused, and what stands there is a tombstone, that very
  tombstone is swapped for the object. If it is no longer there, all of it is tried again.
- `get`, `head` and `list` do not show tombstones; a swap, a touch or a delete that names a version
  fails on one as it does on nothing, since nobody was ever told a tombstone's version.
- Deletes without a version hold no condition that could be broken, and stay DELETEs.

How a list tells a tombstone from an object

A list shows sizes and versions. All tombstones have one size, and what has that size is known by
its version or is read, once. A client writes the same body for many keys, a new one when a key
comes again. So where versions are the MD5 of the body, as S3's are, one reading tells the
tombstones of a thousand keys; elsewhere, with SSE-KMS say, each one is read once, as is whatever
else has that size. `KNOWN_MAX` of those are remembered, and what is beyond is read in every list.

What a crash leaves: the object or the tombstone, before or after any arrow. What a late or doubled
request can do: nothing that it could not do without tombstones, and less: as long as a tombstone
stands, a CREATE that comes late is refused.

Which tombstones go

A tombstone may be removed only if its name is never created again: to remove it is a plain DELETE,
which would take with it what was created meanwhile. So names that are used again keep theirs. Whose
names are not says so in one of two ways:

- `declare_used_once`: where a version may be deleted, nothing that counts is ever written over it.
  These names get no tombstone in the first place: that a delete is checked is enough, also if what
  comes between the check and the removal is lost. Where the server does not check, we do.
- `Page.tombstones` shows a list's tombstones to whoever deletes old ones, without a version.

Between `retrying`, which settles the answers that are lost, and `metered`, which counts: a delete
is a put here, a `CREATE` over a tombstone two puts and a HEAD. All who use a bucket have to use it
so: `penstock.store.s3.backend` keeps a record of it in the bucket, and `open_store` goes by that.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import ClassVar, Final, TypeVar

from penstock.kernel.document_format import Document, encode
from penstock.kernel.entropy import Entropy, new_id
from penstock.kernel.errors import (
    AlreadyExists,
    InvalidInput,
    NotFound,
    Unavailable,
    Unsupported,
    VersionConflict,
)
from penstock.store.base import (
    CREATE,
    NO_METADATA,
    PAGE_KEYS_MAX,
    REPLACE,
    Delimiter,
    Entry,
    Head,
    Object,
    ObjectStore,
    Page,
    PutMode,
    Swap,
    Version,
    Wrapper,
)

KEYS_PER_NONCE_MAX: Final = 1_000
KNOWN_MAX: Final = 50_000
RECENT_MAX: Final = 5_000
_NONCE_CHARACTERS: Final = 60
_CREATES_MAX: Final = 8
_AT_ONCE: Final = 16

Names = Callable[[str], bool]
Known = TypeVar("Known")
Value = TypeVar("Value")


class Tombstone(Document, frozen=True):
    """What stands where an object was deleted."""

    kind: ClassVar[str] = "tombstone"
    nonce: str


_START: Final = encode(Tombstone(nonce="")).removesuffix(b'"}')
TOMBSTONE_BYTES: Final = len(encode(Tombstone(nonce="0" * _NONCE_CHARACTERS)))


def is_tombstone(body: bytes) -> bool:
    """Whether a body is a tombstone's."""
    return len(body) == TOMBSTONE_BYTES and body.startswith(_START)


def declare_used_once(store: ObjectStore, names: Names) -> None:
    """Say that under these names nothing that counts is written over a version that may be deleted.

    Then a delete has to be checked, but need not be atomic, and leaves no tombstone. Does nothing
    where deletes are conditional.
    """
    while isinstance(store, Wrapper):
        if isinstance(store, TombstonedStore):
            store.used_once.add(names)
        store = store.inner


class TombstonedStore(Wrapper):
    """An `ObjectStore` whose conditional deletes are swaps to tombstones."""

    def __init__(self, inner: ObjectStore, *, entropy: Entropy) -> None:
        super().__init__(inner)
        self.used_once: set[Names] = set()
        self._entropy = entropy
        self._server_checks = True
        """Whether the server looks at the version that a delete names, as far as is known."""
        self._body = b""
        self._buried: set[str] = set()
        """The keys that have got a tombstone of this body."""
        self._bodies: dict[Version, None] = {}
        """Versions of tombstones of any key: they are made from the body alone."""
        self._known: dict[str, tuple[Version, bool]] = {}
        """Of other keys the version, and whether it is a tombstone's. When it is full it stays so:
        who lists more keys than that, again and again, would push each out before it comes again.
        """
        self._recent: dict[str, tuple[Version, bool]] = {}
        """The same of keys for which there was no room: those of the last pages."""

    async def get(self, key: str, *, unless: Version | None = None) -> Object | None:
        found = await self.inner.get(key, unless=unless)
        if found is not None and self._judge(found):
            raise _not_found(key)
        return found

    async def head(self, key: str) -> Head:
        head = await self.inner.head(key)
        if head.size != TOMBSTONE_BYTES:
            return head
        known = self._recall(head)
        if known is None:
            return await self._read(key)
        if known:
            raise _not_found(key)
        return head

    async def put(
        self,
        key: str,
        body: bytes,
        mode: PutMode = REPLACE,
        *,
        metadata: Mapping[str, str] = NO_METADATA,
    ) -> Version:
        if is_tombstone(body):
            raise InvalidInput(
                f"The body for {key!r} is that of a tombstone and would read as deleted.",
                hint="Change it by a byte.",
            )
        if mode is not CREATE:
            return await self.inner.put(key, body, mode, metadata=metadata)
        for _ in range(_CREATES_MAX):
            try:
                return await self.inner.put(key, body, CREATE, metadata=metadata)
            except AlreadyExists:
                # What was in the way may go, or be created over by others: then once more.
                with suppress(NotFound, VersionConflict):
                    tombstone = await self._tombstone_at(key)
                    if tombstone is None:
                        raise
                    return await self.inner.put(key, body, Swap(tombstone), metadata=metadata)
        raise Unavailable(
            f"The object {key!r} was created and deleted by others in each of"
            f" {_CREATES_MAX} tries.",
            key=key,
        )

    async def delete(self, key: str, *, version: Version | None = None) -> None:
        if version is None:
            await self.inner.delete(key)
            return
        if any(names(key) for names in self.used_once):
            await self._delete_checked(key, version)
            return
        body = self._body_for(key)
        written = await self.inner.put(key, body, Swap(version))
        self._learn(key, written, body)

    async def list(
        self,
        prefix: str = "",
        *,
        start_after: str = "",
        delimiter: Delimiter = "",
        limit: int = PAGE_KEYS_MAX,
        cursor: str | None = None,
    ) -> Page:
        page = await self.inner.list(
            prefix, start_after=start_after, delimiter=delimiter, limit=limit, cursor=cursor
        )
        doubtful = [entry for entry in page.entries if entry.size == TOMBSTONE_BYTES]
        if not doubtful:
            return page
        shown = await self._shown(doubtful)
        entries = (shown.get(entry.key, entry) for entry in page.entries)
        gone = (entry for entry in doubtful if shown[entry.key] is None)
        return Page(
            entries=tuple(entry for entry in entries if entry is not None),
            folders=page.folders,
            cursor=page.cursor,
            tombstones=tuple(entry for entry in gone if self._recall(entry)),
        )

    async def _delete_checked(self, key: str, version: Version) -> None:
        """Delete this version; what is written between the check and the delete goes with it."""
        if self._server_checks:
            try:
                await self.inner.delete(key, version=version)
            except Unsupported:
                self._server_checks = False
            else:
                return
        try:
            found = await self.inner.head(key)
        except NotFound:
            return
        if found.version != version:
            raise VersionConflict(f"The object {key!r} is not there in the version named.", key=key)
        await self.inner.delete(key)

    async def _shown(self, doubtful: Sequence[Entry]) -> dict[str, Entry | None]:
        """By key, what a list shows of entries that may be tombstones; None for nothing."""
        slots = asyncio.Semaphore(_AT_ONCE)

        async def look(entry: Entry) -> Entry | None:
            async with slots:
                known = self._recall(entry)
                if known is not None:
                    return None if known else entry
                try:
                    found = await self._read(entry.key)
                except NotFound:
                    return None
                # As it is now: it may have changed since the list.
                return Entry(found.key, found.version, found.size, found.modified)

        new: dict[Version, Entry] = {}
        for entry in doubtful:
            if self._recall(entry) is None:
                new.setdefault(entry.version, entry)
        # One of each version first: where versions are made from bodies, that tells the others.
        await asyncio.gather(*(look(entry) for entry in new.values()))
        answers = await asyncio.gather(*(look(entry) for entry in doubtful))
        return {entry.key: answer for entry, answer in zip(doubtful, answers, strict=True)}

    async def _tombstone_at(self, key: str) -> Version | None:
        """The version of the tombstone there, None if it is an object; raises `NotFound`."""
        head = await self.inner.head(key)
        if head.size == TOMBSTONE_BYTES and self._recall(head) is None:
            found = await self.inner.get(key)
            assert found is not None, "nothing was said to be known"
            self._judge(found)
            head = found
        return head.version if self._recall(head) else None

    async def _read(self, key: str) -> Head:
        """The object as it is; raises `NotFound` for a tombstone."""
        found = await self.get(key)
        assert found is not None, "nothing was said to be known"
        return Head(found.key, found.version, found.size, found.modified, found.metadata)

    def _judge(self, found: Object) -> bool:
        """Whether this is a tombstone, from now on known by its version."""
        if found.size != TOMBSTONE_BYTES:
            return False
        buried = is_tombstone(found.body)
        if buried:
            self._learn(found.key, found.version, found.body)
        else:
            self._remember(found.key, found.version, buried=False)
        return buried

    def _recall(self, entry: Entry) -> bool | None:
        """Whether this entry is a tombstone, if that is known."""
        if entry.size != TOMBSTONE_BYTES:
            return False
        if entry.version in self._bodies:
            return True
        version, is_buried = (
            self._known.get(entry.key) or self._recent.get(entry.key) or (None, False)
        )
        return is_buried if version == entry.version else None

    def _learn(self, key: str, version: Version, body: bytes) -> None:
        digest = hashlib.md5(body, usedforsecurity=False).hexdigest()
        if version == digest:
            _keep(self._bodies, version, None, most=KNOWN_MAX)
        else:
            self._remember(key, version, buried=True)

    def _remember(self, key: str, version: Version, *, buried: bool) -> None:
        if key in self._known or len(self._known) < KNOWN_MAX:
            self._known[key] = version, buried
        else:
            _keep(self._recent, key, (version, buried), most=RECENT_MAX)

    def _body_for(self, key: str) -> bytes:
        """A tombstone for this key, of a body that it has not had before."""
        if not self._body or key in self._buried or len(self._buried) == KEYS_PER_NONCE_MAX:
            self._body = encode(
                Tombstone(nonce=new_id(self._entropy, characters=_NONCE_CHARACTERS))
            )
            self._buried.clear()
        self._buried.add(key)
        return self._body


def _keep(known: dict[Known, Value], what: Known, value: Value, *, most: int) -> None:
    """Remember this as the latest; the oldest goes if there are too many."""
    known.pop(what, None)
    known[what] = value
    if len(known) > most:
        del known[next(iter(known))]


def _not_found(key: str) -> NotFound:
    return NotFound(f"There is no object {key!r}.", key=key)
