"""The contract of lists: order, prefixes, starts, folders, pages."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

from penstock.kernel.errors import InvalidInput
from penstock.store.base import Delimiter, ObjectStore, pages
from penstock.testing.store_contract.check import Check, OpenClient, refused

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


CHECKS: Final[tuple[Check, ...]] = (
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
