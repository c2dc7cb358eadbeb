"""Which keys, limits and metadata a store takes, and what a wrapper passes on."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernel.clock import SystemClock
from penstock.kernel.errors import InvalidInput
from penstock.store.base import (
    CREATE,
    ObjectStore,
    Page,
    Wrapper,
    _key_problem,
    check_key,
    check_limit,
    check_metadata,
    pages,
)
from penstock.store.memory import MemoryBucket, MemoryStore
from tests.sizes import some
from tests.unit.store.scripted import ScriptedStore

GOOD_KEYS = [
    "a",
    "a/b/c",
    "a=b/c-d_e.f",
    "-",
    "...",
    ".hidden",
    "a/.hidden",
    "a/..b",
    ".penstock2/a",
    "a/.penstock",
    "a/.penstock/b",
    " ",
    "a b",
    "a:b?c*d",
    "\N{LATIN SMALL LETTER E WITH ACUTE}",
    "\N{WATER WAVE}" * 63,
    "x" * 255,
    "/".join([*["x" * 255] * 3, "x" * 253, "yy"]),
    "a/" * 511 + "ab",
]

BAD_KEYS = {
    "": "must have 1 to 1024 bytes",
    "x" * 256: "must not have more than 255 bytes between slashes",
    "\N{LATIN SMALL LETTER E WITH ACUTE}" * 128: "must not have more than 255 bytes",
    "\N{WATER WAVE}" * 64: "must not have more than 255 bytes between slashes",
    "a/" * 512 + "a": "must have 1 to 1024 bytes",
    "/".join([*["x" * 255] * 3, "x" * 253, "yyy"]): "must have 1 to 1024 bytes",
    "/": "must not contain an empty part",
    "/a": "must not contain an empty part",
    "a/": "must not contain an empty part",
    "a//b": "must not contain an empty part",
    ".": "must not contain an empty part",
    "..": "must not contain an empty part",
    "a/./b": "must not contain an empty part",
    "a/../b": "must not contain an empty part",
    "a/..": "must not contain an empty part",
    "a\\b": "backslash or a control character",
    "a\n": "backslash or a control character",
    "a\x00b": "backslash or a control character",
    "a\x1fb": "backslash or a control character",
    "a\x7fb": "backslash or a control character",
    "\ud800": "is not valid Unicode",
    ".penstock": "which Penstock keeps for itself",
    ".penstock/a": "which Penstock keeps for itself",
}


@pytest.mark.parametrize("key", GOOD_KEYS, ids=lambda key: ascii(key[:20]))
def test_good_keys(key: str) -> None:
    assert check_key(key) is key


@pytest.mark.parametrize("key", BAD_KEYS, ids=lambda key: ascii(key[:20]))
def test_bad_keys(key: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_key(key)
    assert BAD_KEYS[key] in caught.value.message
    assert len(caught.value.message) < 250


_plain = st.text("abz09AZ_=-./", max_size=12)
_any_key = st.one_of(
    _plain,
    st.text(max_size=12),
    st.lists(_plain, max_size=5).map("/".join),
    st.builds(
        lambda size, end: "x" * size + end,
        st.integers(250, 260) | st.integers(1015, 1030),
        st.text("a/.", max_size=4),
    ),
    st.builds(lambda part, times: "/".join([part] * times), _plain, st.integers(0, 300)),
)


@settings(max_examples=some(1000), deadline=None)
@given(key=_any_key)
def test_the_fast_check_of_keys_agrees_with_the_slow_one(key: str) -> None:
    problem = _key_problem(key)
    if problem:
        with pytest.raises(InvalidInput):
            check_key(key)
    else:
        assert check_key(key) == key


@pytest.mark.parametrize("limit", [1, 2, 1000])
def test_good_limits(limit: int) -> None:
    assert check_limit(limit) == limit


@pytest.mark.parametrize("limit", [-1, 0, 1001, 10**9])
def test_bad_limits(limit: int) -> None:
    with pytest.raises(InvalidInput, match=f"1 to 1000 keys, not {limit}"):
        check_limit(limit)


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"a": ""},
        {"owner": "worker 7; a=b"},
        {"under_score": "x", "da-sh": "y", "0": "z"},
        {"a": "~!@#$%^&*()"},
        {"a": "x" * 2047},
        {"a" * 24: "b" * 1000, "b" * 24: "c" * 1000},
    ],
    ids=lambda metadata: str(metadata)[:20],
)
def test_good_metadata(metadata: dict[str, str]) -> None:
    assert check_metadata(metadata) is metadata


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ({"": "x"}, "name ''"),
        ({"A": "x"}, "name 'A'"),
        ({"a b": "x"}, "name 'a b'"),
        ({"a\n": "x"}, "name"),
        ({"a.b": "x"}, "name 'a.b'"),
        ({"\N{LATIN SMALL LETTER E WITH ACUTE}": "x"}, "name"),
        ({"a": " x"}, "value of 'a'"),
        ({"a": "x "}, "value of 'a'"),
        ({"a": "x\ny"}, "value of 'a'"),
        ({"a": "x\ty"}, "value of 'a'"),
        ({"a": "x\x00"}, "value of 'a'"),
        ({"a": "\N{LATIN SMALL LETTER E WITH ACUTE}"}, "value of 'a'"),
        ({"a": "x" * 2048}, "2049 bytes; at most 2048"),
        ({"a": "x" * 1024, "b": "x" * 1024}, "2050 bytes; at most 2048"),
    ],
    ids=lambda value: ascii(value)[:20],
)
def test_bad_metadata(metadata: dict[str, str], problem: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_metadata(metadata)
    assert problem in caught.value.message


@settings(max_examples=some(300), deadline=None)
@given(metadata=st.dictionaries(st.text("ab-_ A.", max_size=3), st.text(max_size=5), max_size=3))
def test_metadata_that_is_taken_survives_headers(metadata: dict[str, str]) -> None:
    try:
        check_metadata(metadata)
    except InvalidInput:
        return
    for name, value in metadata.items():
        line = f"x-amz-meta-{name}: {value}\r\n".encode("ascii")
        assert line.count(b"\n") == 1
        assert line.split(b":", 1)[1].strip().decode() == value
        assert line.split(b":", 1)[0].decode().removeprefix("x-amz-meta-") == name == name.lower()


def _store() -> MemoryStore:
    return MemoryStore(MemoryBucket(SystemClock()), clock=SystemClock())


async def _taken(found: AsyncIterator[Page]) -> list[Page]:
    """The pages, of which there are not many."""
    taken = []
    async for page in found:
        taken.append(page)
        assert len(taken) < 10
    return taken


@pytest.mark.parametrize("page_keys", [1, 2, 3, 7, 1000])
def test_pages_shows_everything_once(page_keys: int) -> None:
    async def main() -> None:
        store = _store()
        for number in range(7):
            await store.put(f"a/{number}/x", b"", CREATE)
        found = await _taken(pages(store, "a/", page_keys=page_keys))
        keys = [entry.key for page in found for entry in page.entries]
        assert keys == [f"a/{number}/x" for number in range(7)]
        assert all(page.cursor is not None for page in found[:-1])
        assert found[-1].cursor is None
        found = await _taken(
            pages(store, "a/", delimiter="/", start_after="a/2/", page_keys=page_keys)
        )
        folded = [folder for page in found for folder in page.folders]
        assert folded == [f"a/{number}/" for number in range(3, 7)]

    asyncio.run(main())


def test_pages_asks_no_further_than_the_caller_goes() -> None:
    async def main() -> None:
        store = ScriptedStore(_store())
        for number in range(10):
            await store.inner.put(str(number), b"")
        async for page in pages(store, page_keys=2):
            if page.entries[-1].key == "3":
                break
        assert store.sent == ["list", "list"]

    asyncio.run(main())


def test_a_wrapper_passes_everything_on() -> None:
    """Every method of the protocol is passed on with all of its arguments."""

    async def main() -> None:
        inner = _store()
        store = Wrapper(inner)
        assert store.clock is inner.clock
        version = await store.put("a/b", b"one", CREATE, metadata={"a": "b"})
        assert await store.get("a/b", unless=version) is None
        version = await store.touch("a/b", version=version, metadata={"c": "d"})
        assert dict((await store.head("a/b")).metadata) == {"c": "d"}
        await store.put("a/c", b"two")
        page = await store.list("a/", start_after="a/a", delimiter="/", limit=1)
        assert [entry.key for entry in page.entries] == ["a/b"]
        page = await store.list("a/", cursor=page.cursor)
        assert [entry.key for entry in page.entries] == ["a/c"]
        await store.delete("a/b", version=version)
        assert (await store.sample()).resolution == 0
        assert (await store.now()).width < 60
        assert (await store.calibrate()).width < 60
        await store.close()

    asyncio.run(main())
    abstract = {name for name, _ in inspect.getmembers(ObjectStore, inspect.isfunction)}
    own = {"now", "calibrate"}  # These ask `sample` of the wrapper itself, so that it can count.
    assert {name for name in abstract if not name.startswith("_")} - own <= set(vars(Wrapper))


def test_a_body_is_not_shown() -> None:
    async def main() -> None:
        store = _store()
        await store.put("a", b"secret")
        assert "secret" not in repr(await store.get("a"))

    asyncio.run(main())
