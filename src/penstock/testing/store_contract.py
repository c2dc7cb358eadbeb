"""What every `ObjectStore` must do, as checks that run on any of them.

A check opens one or more clients of one empty store, and raises `AssertionError` where a promise
of `penstock.store.base` does not hold. No test framework is needed; with pytest:

    @pytest.mark.parametrize("name", STORE_CHECKS)
    def test_my_store(name):
        asyncio.run(STORE_CHECKS[name](open_client))

where `open_client` is an async function that opens another client of the same store each time it
is called, and the store is empty at first. The checks close no client.

They cover single objects (puts, swaps, gets, deletes, touches, metadata, keys, sizes), lists
(order, prefixes, starts, folders, pages), and races of several clients (one winner, no lost
update, reads after writes, time).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Protocol

from penstock.kernel.document_format import encode
from penstock.kernel.entropy import seeded_entropy
from penstock.kernel.errors import (
    AlreadyExists,
    InvalidInput,
    NotFound,
    OutcomeUnknown,
    PenstockError,
    VersionConflict,
)
from penstock.store.base import (
    CREATE,
    REPLACE,
    Delimiter,
    Object,
    ObjectStore,
    Swap,
    Version,
    pages,
)
from penstock.store.races import (
    Entrant,
    count_race,
    create_race,
    delete_against_swap,
    swap_race,
    touch_against_swap,
)

__all__ = ["STORE_CHECKS", "Check", "OpenClient"]

OpenClient = Callable[[], Awaitable[ObjectStore]]


class StoreCheck(Protocol):
    """One promise, tried on one store."""

    __name__: str

    async def __call__(self, open_client: OpenClient, /) -> None: ...


@contextmanager
def refused(*expected: type[PenstockError], what: str) -> Iterator[None]:
    """The block must raise one of these errors."""
    try:
        yield
    except expected:
        return
    names = " or ".join(error.__name__ for error in expected)
    raise AssertionError(f"{what} must raise {names}")


async def read(store: ObjectStore, key: str) -> Object:
    """The object, which must be there."""
    found = await store.get(key)
    assert found is not None
    return found


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


_OBJECT_CHECKS: Final[tuple[StoreCheck, ...]] = (
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


_IN_FLIGHT: Final = 32


async def _fill(store: ObjectStore, keys: Iterable[str]) -> None:
    slots = asyncio.Semaphore(_IN_FLIGHT)

    async def put(key: str) -> None:
        async with slots:
            await store.put(key, b"")

    await asyncio.gather(*(put(key) for key in keys))


async def _listed(
    store: ObjectStore,
    prefix: str = "",
    *,
    start_after: str = "",
    delimiter: Delimiter = "",
    page_keys: int = 1000,
) -> tuple[list[str], list[str]]:
    """All keys and all folders, page by page."""
    keys: list[str] = []
    folders: list[str] = []
    async for page in pages(
        store, prefix, start_after=start_after, delimiter=delimiter, page_keys=page_keys
    ):
        assert len(page.entries) + len(page.folders) <= page_keys
        keys += [entry.key for entry in page.entries]
        folders += page.folders
    return keys, folders


async def a_list_shows_versions_and_sizes(open_client: OpenClient) -> None:
    store = await open_client()
    one = await store.put("p/one", b"1")
    two = await store.put("p/two", b"22", metadata={"owner": "me"})
    entries = (await store.list("p/")).entries
    assert [(e.key, e.version, e.size) for e in entries] == [("p/one", one, 1), ("p/two", two, 2)]
    for entry in entries:
        assert abs(entry.modified - (await store.head(entry.key)).modified) <= 1


async def a_list_follows_every_write(open_client: OpenClient) -> None:
    store = await open_client()
    for number in range(20):
        await store.put(f"p/{number:02}", b"")
        assert len((await store.list("p/")).entries) == number + 1
    for number in range(20):
        await store.delete(f"p/{number:02}")
        assert len((await store.list("p/")).entries) == 19 - number


async def lists_are_in_byte_order(open_client: OpenClient) -> None:
    store = await open_client()
    keys = [
        "a.b",
        "a0",
        "B",
        "b",
        "z",
        "ä",
        "\uffee",
        "\N{WATER WAVE}",
        "a-b",
        "a_b",
        "a b",
        "10",
        "9",
    ]
    await _fill(store, (f"p/{key}" for key in keys))
    listed, _ = await _listed(store, "p/")
    assert listed == sorted((f"p/{key}" for key in keys), key=str.encode)


async def a_prefix_is_a_string_not_a_folder(open_client: OpenClient) -> None:
    store = await open_client()
    await _fill(store, ["ab", "abc", "ac", "b/1", "b/2/3"])
    assert (await _listed(store, "ab"))[0] == ["ab", "abc"]
    assert (await _listed(store, "b/"))[0] == ["b/1", "b/2/3"]
    assert (await _listed(store, "b"))[0] == ["b/1", "b/2/3"]
    assert (await _listed(store, "b/2/3"))[0] == ["b/2/3"]
    assert await _listed(store, "c") == ([], [])
    assert await _listed(store, "b/9/") == ([], [])


async def a_list_starts_after_a_key(open_client: OpenClient) -> None:
    store = await open_client()
    keys = [f"tasks/{slot:04}/{name}" for slot in range(5) for name in ("x", "x.ledger", "y")]
    await _fill(store, [*keys, "other/1", "zzz"])
    for start in (
        "tasks/0001/x",
        "tasks/0001/x.ledger",
        "tasks/0001/xa",
        "tasks/0002/",
        "tasks/0002/zzz",
        "tasks/0004/y",
        "tasks/9",
    ):
        listed, _ = await _listed(store, "tasks/", start_after=start)
        assert listed == [key for key in keys if key > start], start
    assert (await _listed(store, "tasks/", start_after="a"))[0] == keys
    assert (await _listed(store, start_after="tasks/0004/y"))[0] == ["zzz"]


async def folders_are_folded(open_client: OpenClient) -> None:
    store = await open_client()
    await _fill(store, ["p/1/a", "p/1/b", "p/2/a/b", "p/3", "p/4/a", "q"])
    assert await _listed(store, "p/", delimiter="/") == (["p/3"], ["p/1/", "p/2/", "p/4/"])
    assert await _listed(store, delimiter="/") == (["q"], ["p/"])
    assert await _listed(store, "p", delimiter="/") == ([], ["p/"])
    assert await _listed(store, "p/2/", delimiter="/") == ([], ["p/2/a/"])
    assert await _listed(store, "p/", delimiter="/", start_after="p/2/") == (["p/3"], ["p/4/"])
    assert await _listed(store, "p/", delimiter="/", start_after="p/3") == ([], ["p/4/"])


async def pages_have_no_gaps_and_no_doubles(open_client: OpenClient) -> None:
    store = await open_client()
    keys = [f"p/{number // 7}/{number % 7}" for number in range(70)]
    await _fill(store, keys)
    for page_keys in (1, 3, 7, 69, 70, 71):
        assert (await _listed(store, "p/", page_keys=page_keys))[0] == keys, page_keys
        _, folders = await _listed(store, "p/", delimiter="/", page_keys=page_keys)
        assert folders == [f"p/{folder}/" for folder in range(10)], page_keys
        after, _ = await _listed(store, "p/", start_after="p/4/5", page_keys=page_keys)
        assert after == [key for key in keys if key > "p/4/5"], page_keys


async def more_than_a_thousand_keys(open_client: OpenClient) -> None:
    store = await open_client()
    keys = [f"p/{number:05}" for number in range(1050)]
    await _fill(store, keys)
    first = await store.list("p/")
    assert len(first.entries) == 1000
    assert first.cursor is not None
    assert (await _listed(store, "p/"))[0] == keys
    assert (await _listed(store, "p/", start_after=keys[1000]))[0] == keys[1001:]


async def a_page_survives_changes_around_it(open_client: OpenClient) -> None:
    store = await open_client()
    await _fill(store, [f"p/{number:02}" for number in range(20)])
    first = await store.list("p/", limit=10)
    seen = [entry.key for entry in first.entries]
    await store.delete(seen[0])
    await store.delete(seen[-1])
    await store.delete("p/15")
    await store.put("p/00a", b"")
    second = await store.list("p/", limit=10, cursor=first.cursor)
    kept = [f"p/{number:02}" for number in range(10, 20) if number != 15]
    assert [entry.key for entry in second.entries] == kept


async def a_senseless_limit_is_refused(open_client: OpenClient) -> None:
    store = await open_client()
    for limit in (0, -1, 1001):
        with refused(InvalidInput, what=f"a list with limit {limit}"):
            await store.list(limit=limit)


_LIST_CHECKS: Final[tuple[StoreCheck, ...]] = (
    a_list_shows_versions_and_sizes,
    a_list_follows_every_write,
    lists_are_in_byte_order,
    a_prefix_is_a_string_not_a_folder,
    a_list_starts_after_a_key,
    folders_are_folded,
    pages_have_no_gaps_and_no_doubles,
    more_than_a_thousand_keys,
    a_page_survives_changes_around_it,
    a_senseless_limit_is_refused,
)


WRITERS: Final = 16
_ROUNDS: Final = 3
_DATE_SECONDS: Final = 1.0
"""Stores date their objects to the second."""


async def _clients(open_client: OpenClient) -> Sequence[ObjectStore]:
    """Sixteen writers on four clients: some share one, some do not."""
    opened = [await open_client() for _ in range(4)]
    return [opened[number % 4] for number in range(WRITERS)]


async def one_creator_wins(open_client: OpenClient) -> None:
    clients = await _clients(open_client)
    entropy = seeded_entropy("one creator wins")
    for number in range(_ROUNDS):
        outcome = await create_race(clients, f"race/{number}", entropy=entropy)
        assert outcome.right, outcome


async def one_swapper_wins(open_client: OpenClient) -> None:
    clients = await _clients(open_client)
    entropy = seeded_entropy("one swapper wins")
    for _ in range(_ROUNDS):
        outcome = await swap_race(clients, "race", entropy=entropy)
        assert outcome.right, outcome


async def one_creator_wins_after_a_delete(open_client: OpenClient) -> None:
    clients = await _clients(open_client)
    entropy = seeded_entropy("one creator wins after a delete")
    for _ in range(_ROUNDS):
        outcome = await create_race(clients, "race", entropy=entropy)
        assert outcome.right, outcome
        await clients[0].delete("race")


async def no_increment_is_lost(open_client: OpenClient) -> None:
    clients = await _clients(open_client)
    entropy = seeded_entropy("no increment is lost")
    assert await count_race(clients, "counter", each=4, entropy=entropy) == 4 * WRITERS


async def a_touch_never_brings_an_old_body_back(open_client: OpenClient) -> None:
    toucher, swapper = await open_client(), await open_client()
    entropy = seeded_entropy("a touch never brings an old body back")
    for _ in range(4 * _ROUNDS):
        assert await touch_against_swap(toucher, swapper, "race", entropy=entropy)


async def a_delete_and_a_swap_never_both_win(open_client: OpenClient) -> None:
    deleter, swapper = await open_client(), await open_client()
    entropy = seeded_entropy("a delete and a swap never both win")
    for _ in range(4 * _ROUNDS):
        assert await delete_against_swap(deleter, swapper, "race", entropy=entropy)


async def readers_see_whole_objects(open_client: OpenClient) -> None:
    """While one writer replaces an object, its body and its metadata always fit together."""
    writer, reader = await open_client(), await open_client()

    async def write() -> None:
        for number in range(1, 40):
            body = f"{number}:".encode() + b"x" * (10_000 * (number % 3))
            await writer.put("a", body, metadata={"number": str(number)} if number % 2 else {})

    await writer.put("a", b"0:")
    async with asyncio.TaskGroup() as group:
        writing = group.create_task(write())
        while not writing.done():
            # A store that never suspends would starve the writer otherwise.
            await reader.clock.machine.sleep(0)
            found = await read(reader, "a")
            number = int(found.body.split(b":")[0])
            assert len(found.body) == len(f"{number}:") + 10_000 * (number % 3)
            assert dict(found.metadata) == ({"number": str(number)} if number % 2 else {})


async def the_stores_time_holds_what_it_dates(open_client: OpenClient) -> None:
    store, other = await open_client(), await open_client()
    before = await store.now()
    await store.put("a", b"one")
    modified = (await store.head("a")).modified
    after = await other.now()
    assert before.earliest <= before.latest
    assert before.earliest - _DATE_SECONDS <= modified <= after.latest
    assert before.earliest <= after.latest


_RACE_CHECKS: Final[tuple[StoreCheck, ...]] = (
    one_creator_wins,
    one_swapper_wins,
    one_creator_wins_after_a_delete,
    no_increment_is_lost,
    a_touch_never_brings_an_old_body_back,
    a_delete_and_a_swap_never_both_win,
    readers_see_whole_objects,
    the_stores_time_holds_what_it_dates,
)


Check = StoreCheck

STORE_CHECKS: Final[dict[str, StoreCheck]] = {
    check.__name__: check for check in (*_OBJECT_CHECKS, *_LIST_CHECKS, *_RACE_CHECKS)
}
