"""The rules for one client at a time. Each raises `Broken` with what was seen, or returns it."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Final

from penstock.kernel.entropy import Entropy, new_id
from penstock.kernel.errors import AlreadyExists, NotFound, StoreError, VersionConflict
from penstock.store.base import CREATE, ObjectStore, Swap, Version, pages

_WRONG: Final = Version("00000000000000000000000000000000")
LISTED_KEYS: Final = 25


class Broken(Exception):
    """A promise does not hold."""


async def creates_are_conditional(store: ObjectStore, key: str, entropy: Entropy) -> str:
    one, two = _bodies(entropy)
    await store.put(key, one, CREATE)
    await _refused(store.put(key, two, CREATE), AlreadyExists, "a second create took effect")
    await _holds(store, key, one)
    return "a second create is refused"


async def swaps_are_conditional(store: ObjectStore, key: str, entropy: Entropy) -> str:
    one, two = _bodies(entropy)
    first = await store.put(key, one)
    second = await store.put(key, two, Swap(first))
    if first == second:
        raise Broken("two bodies got the same version")
    for version in (first, _WRONG):
        swap = store.put(key, one, Swap(version))
        await _refused(swap, VersionConflict, "a swap from an old version took effect")
    await _holds(store, key, two)
    return "a swap from an old version is refused"


async def swaps_need_an_object(store: ObjectStore, key: str, entropy: Entropy) -> str:
    one, two = _bodies(entropy)
    version = await store.put(key, one)
    await store.delete(key)
    await _refused(
        store.put(key, two, Swap(version)), VersionConflict, "a swap brought a deleted object back"
    )
    await store.put(key, two, CREATE)
    await _holds(store, key, two)
    return "a swap of a deleted object is refused, a create after it is not"


async def deletes_are_conditional(store: ObjectStore, key: str, entropy: Entropy) -> str:
    one, two = _bodies(entropy)
    first = await store.put(key, one)
    second = await store.put(key, two)
    await _refused(
        store.delete(key, version=first), VersionConflict, "a delete of an old version took effect"
    )
    await _holds(store, key, two)
    await store.delete(key, version=second)
    await _refused(store.get(key), NotFound, "a deleted object is still there")
    return "a delete of an old version is refused"


async def gets_are_conditional(store: ObjectStore, key: str, entropy: Entropy) -> str:
    one, two = _bodies(entropy)
    version = await store.put(key, one)
    if await store.get(key, unless=version) is not None:
        raise Broken("an unchanged object was sent again")
    await store.put(key, two)
    if await store.get(key, unless=version) is None:
        raise Broken("a changed object was reported as unchanged")
    return "an unchanged object is not sent again, a changed one is"


async def touches_are_conditional(store: ObjectStore, key: str, entropy: Entropy) -> str:
    one, two = _bodies(entropy)
    first = await store.put(key, one, metadata={"owner": "first"})
    touched = await store.touch(key, version=first, metadata={"owner": "second"})
    found = await store.get(key)
    if found is None or found.body != one or dict(found.metadata) != {"owner": "second"}:
        raise Broken("a touch did not keep the body and replace the metadata")
    await store.put(key, two, Swap(touched))
    await _refused(
        store.touch(key, version=touched, metadata={"owner": "late"}),
        VersionConflict,
        "a touch of an old version took effect",
    )
    await _holds(store, key, two)
    return "a touch of an old version is refused and brings no body back"


async def lists_follow_writes(store: ObjectStore, key: str, entropy: Entropy) -> str:
    keys = [f"{key}/{number:04}" for number in range(LISTED_KEYS)]
    for number, each in enumerate(keys):
        await store.put(each, new_id(entropy).encode())
        seen = [entry.key for entry in (await store.list(f"{key}/")).entries]
        if seen != keys[: number + 1]:
            raise Broken(f"a list after {number + 1} writes shows {len(seen)} of them")
    paged = [
        entry.key async for page in pages(store, f"{key}/", page_keys=7) for entry in page.entries
    ]
    if paged != keys:
        raise Broken("pages of 7 keys show something else than one page")
    after = [entry.key for entry in (await store.list(f"{key}/", start_after=keys[9])).entries]
    if after != keys[10:]:
        raise Broken("a list that starts after a key shows the wrong keys")
    for each in keys:
        await store.delete(each)
    if (await store.list(f"{key}/")).entries:
        raise Broken("a list shows deleted objects")
    return f"{LISTED_KEYS} writes and deletes were listed at once, in order, in pages"


def _bodies(entropy: Entropy) -> tuple[bytes, bytes]:
    return new_id(entropy).encode(), new_id(entropy).encode()


async def _refused(request: Awaitable[object], expected: type[StoreError], otherwise: str) -> None:
    try:
        await request
    except expected:
        return
    raise Broken(otherwise)


async def _holds(store: ObjectStore, key: str, body: bytes) -> None:
    found = await store.get(key)
    if found is None or found.body != body:
        raise Broken("the object does not hold what the accepted write put there")
