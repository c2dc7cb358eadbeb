"""The contract of single objects: puts, swaps, gets, deletes, touches, metadata, keys, sizes."""

from __future__ import annotations

from typing import Final

from penstock.kernel.errors import (
    AlreadyExists,
    InvalidInput,
    NotFound,
    OutcomeUnknown,
    VersionConflict,
)
from penstock.kernel.wire import encode
from penstock.store.base import CREATE, REPLACE, Swap, Version
from penstock.store.races import Entrant
from penstock.testing.store_contract.check import Check, OpenClient, read, refused

_WRONG: Final = Version("ffffffffffffffffffffffffffffffff")

UNUSUAL_KEYS: Final = (
    "space in the middle",
    "trailing space ",
    "a+b%20c&d=e?f#g;h",
    "%2e%2e/%2F",
    "quotes'\"`<>|^",
    "brackets()[]{}!@$,:~*",
    "ünïcödé/ключ/鍵",
    "emoji/\N{WATER WAVE}",
    ".hidden/..almost/...",
    "UPPER/lower",
    "s" * 255,
    "/".join(["deep"] * 100),
    "k" * 200 + "/" + "m" * 200 + "/" + "n" * 200 + "/" + "o" * 200,
)

INVALID_KEYS: Final = (
    "",
    "/a",
    "a/",
    "a//b",
    "a/./b",
    "a/../b",
    "..",
    "a\\b",
    "a\nb",
    "a\x00b",
    "a\x7f",
    "s" * 256,
    "k/" * 512 + "k",
    "\ud800",
    ".penstock/x",
)


def _stamped(text: str) -> bytes:
    """A body that tells its writer: after lost answers, only such bodies show who won."""
    return encode(Entrant().stamped(writer=text, write=text))


async def create_then_get(open_client: OpenClient) -> None:
    store = await open_client()
    version = await store.put("a/b", b"one", CREATE)
    found = await read(store, "a/b")
    assert (found.key, found.body, found.version, found.size) == ("a/b", b"one", version, 3)


async def create_refuses_an_existing_object(open_client: OpenClient) -> None:
    store = await open_client()
    await store.put("a", _stamped("one"), CREATE)
    with refused(AlreadyExists, what="CREATE of an existing object"):
        await store.put("a", _stamped("two"), CREATE)
    assert (await read(store, "a")).body == _stamped("one")


async def replace_writes_whatever_is_there(open_client: OpenClient) -> None:
    store = await open_client()
    first = await store.put("a", b"one", REPLACE)
    second = await store.put("a", b"two", REPLACE)
    found = await read(store, "a")
    assert found.body == b"two"
    assert found.version == second != first


async def swap_replaces_the_version_named(open_client: OpenClient) -> None:
    store = await open_client()
    first = await store.put("a", b"one")
    second = await store.put("a", b"two", Swap(first))
    third = await store.put("a", b"three", Swap(second))
    found = await read(store, "a")
    assert (found.body, found.version) == (b"three", third)
    assert len({first, second, third}) == 3


async def swap_refuses_another_version(open_client: OpenClient) -> None:
    store = await open_client()
    first = await store.put("a", _stamped("one"))
    await store.put("a", _stamped("two"))
    for version in (first, _WRONG):
        with refused(VersionConflict, what="Swap from a version that is gone"):
            await store.put("a", _stamped("three"), Swap(version))
    assert (await read(store, "a")).body == _stamped("two")


async def swap_refuses_a_missing_object(open_client: OpenClient) -> None:
    store = await open_client()
    version = await store.put("a", b"one")
    await store.delete("a")
    # When an answer is lost and nothing is left to read back, nobody can tell.
    with refused(VersionConflict, OutcomeUnknown, what="Swap of a missing object"):
        await store.put("a", b"two", Swap(version))
    with refused(NotFound, what="get after a refused Swap"):
        await store.get("a")


async def get_unless_unchanged(open_client: OpenClient) -> None:
    store = await open_client()
    first = await store.put("a", b"one")
    assert await store.get("a", unless=first) is None
    second = await store.put("a", b"two")
    found = await store.get("a", unless=first)
    assert found is not None
    assert (found.body, found.version) == (b"two", second)


async def missing_objects_are_not_found(open_client: OpenClient) -> None:
    store = await open_client()
    with refused(NotFound, what="get of a missing object"):
        await store.get("nothing/here")
    with refused(NotFound, what="get of a missing object, unless unchanged"):
        await store.get("nothing/here", unless=_WRONG)
    with refused(NotFound, what="head of a missing object"):
        await store.head("nothing/here")


async def a_folder_is_not_an_object(open_client: OpenClient) -> None:
    store = await open_client()
    await store.put("folder/object", b"x")
    with refused(NotFound, what="get of a folder"):
        await store.get("folder")
    with refused(NotFound, what="head of a folder"):
        await store.head("folder")
    with refused(VersionConflict, OutcomeUnknown, what="Swap of a folder"):
        await store.put("folder", b"y", Swap(_WRONG))


async def head_is_get_without_the_body(open_client: OpenClient) -> None:
    store = await open_client()
    await store.put("a", b"one", metadata={"owner": "me"})
    head, found = await store.head("a"), await read(store, "a")
    assert (head.key, head.version, head.size) == (found.key, found.version, found.size)
    assert (head.modified, dict(head.metadata)) == (found.modified, {"owner": "me"})


async def delete_removes(open_client: OpenClient) -> None:
    store = await open_client()
    await store.put("a/b", b"one")
    await store.delete("a/b")
    await store.delete("a/b")
    with refused(NotFound, what="get of a deleted object"):
        await store.get("a/b")
    assert (await store.list()).entries == ()
    await store.put("a/b", b"again", CREATE)
    assert (await read(store, "a/b")).body == b"again"


async def delete_refuses_another_version(open_client: OpenClient) -> None:
    store = await open_client()
    first = await store.put("a", b"one")
    second = await store.put("a", b"two")
    for version in (first, _WRONG):
        with refused(VersionConflict, what="delete of a version that is gone"):
            await store.delete("a", version=version)
    assert (await read(store, "a")).body == b"two"
    await store.delete("a", version=second)
    with refused(NotFound, what="get of a deleted object"):
        await store.get("a")


async def touch_refreshes_without_the_body(open_client: OpenClient) -> None:
    store = await open_client()
    version = await store.put("a", b"one", metadata={"owner": "me", "old": "yes"})
    before = await store.head("a")
    touched = await store.touch("a", version=version, metadata={"owner": "you"})
    found = await read(store, "a")
    assert (found.body, dict(found.metadata)) == (b"one", {"owner": "you"})
    assert found.version == touched
    assert found.modified >= before.modified
    await store.put("a", b"two", Swap(touched))


async def touch_refuses_another_version(open_client: OpenClient) -> None:
    store = await open_client()
    first = await store.put("a", b"one", metadata={"owner": "me"})
    second = await store.put("a", b"two", metadata={"owner": "you"})
    with refused(VersionConflict, what="touch of a version that is gone"):
        await store.touch("a", version=first, metadata={"owner": "me"})
    found = await read(store, "a")
    assert (found.body, found.version, dict(found.metadata)) == (b"two", second, {"owner": "you"})
    await store.delete("a")
    with refused(VersionConflict, what="touch of a missing object"):
        await store.touch("a", version=second, metadata={"owner": "you"})


async def metadata_comes_back_and_is_replaced_whole(open_client: OpenClient) -> None:
    store = await open_client()
    metadata = {"owner": 'worker 7; a=b, "c"', "expires-at": "1794742928.25", "under_score": "%7E"}
    version = await store.put("a", b"one", CREATE, metadata=metadata)
    assert dict((await store.head("a")).metadata) == metadata
    version = await store.put("a", b"two", Swap(version), metadata={"owner": "you"})
    assert dict((await read(store, "a")).metadata) == {"owner": "you"}
    await store.put("a", b"three", Swap(version))
    assert dict((await store.head("a")).metadata) == {}


async def metadata_that_would_not_survive_is_refused(open_client: OpenClient) -> None:
    store = await open_client()
    bad = (
        {"Upper": "x"},
        {"": "x"},
        {"a b": "x"},
        {"a:b": "x"},
        {"ä": "x"},
        {"a": "line\nbreak"},
        {"a": "ünïcode"},
        {"a": " outer"},
        {"a": "x" * 3000},
    )
    for metadata in bad:
        with refused(InvalidInput, what=f"the metadata {str(metadata)[:40]}"):
            await store.put("a", b"one", metadata=metadata)
    with refused(NotFound, what="get after refused puts"):
        await store.get("a")


async def unusual_keys_are_kept(open_client: OpenClient) -> None:
    store = await open_client()
    for number, key in enumerate(UNUSUAL_KEYS):
        await store.put(key, str(number).encode(), CREATE)
    for number, key in enumerate(UNUSUAL_KEYS):
        assert (await read(store, key)).body == str(number).encode(), key
    listed = (await store.list()).entries
    assert sorted(entry.key for entry in listed) == sorted(UNUSUAL_KEYS)
    for entry in listed:
        await store.touch(entry.key, version=entry.version, metadata={"touched": "yes"})
        await store.delete(entry.key)
    assert (await store.list()).entries == ()


async def invalid_keys_are_refused(open_client: OpenClient) -> None:
    store = await open_client()
    for key in INVALID_KEYS:
        with refused(InvalidInput, what=f"put of {key[:20]!r}"):
            await store.put(key, b"x")
        with refused(InvalidInput, what=f"get of {key[:20]!r}"):
            await store.get(key)
        with refused(InvalidInput, what=f"head of {key[:20]!r}"):
            await store.head(key)
        with refused(InvalidInput, what=f"touch of {key[:20]!r}"):
            await store.touch(key, version=_WRONG)
        with refused(InvalidInput, what=f"delete of {key[:20]!r}"):
            await store.delete(key)


async def empty_and_large_bodies(open_client: OpenClient) -> None:
    store = await open_client()
    for name, body in (("empty", b""), ("large", bytes(range(256)) * 32 * 1024)):
        version = await store.put(name, body, CREATE)
        found = await read(store, name)
        assert found.body == body
        assert (found.size, found.version) == (len(body), version)
        assert (await store.head(name)).size == len(body)
        assert (await store.list(name)).entries[0].size == len(body)


CHECKS: Final[tuple[Check, ...]] = (
    create_then_get,
    create_refuses_an_existing_object,
    replace_writes_whatever_is_there,
    swap_replaces_the_version_named,
    swap_refuses_another_version,
    swap_refuses_a_missing_object,
    get_unless_unchanged,
    missing_objects_are_not_found,
    a_folder_is_not_an_object,
    head_is_get_without_the_body,
    delete_removes,
    delete_refuses_another_version,
    touch_refreshes_without_the_body,
    touch_refuses_another_version,
    metadata_comes_back_and_is_replaced_whole,
    metadata_that_would_not_survive_is_refused,
    unusual_keys_are_kept,
    invalid_keys_are_refused,
    empty_and_large_bodies,
)
