"""Lists of a folder tree: in the order of keys, page by page, without walking the whole tree."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kernel.errors import InvalidInput, NotFound
from penstock.store.base import CREATE, Delimiter, ObjectStore, pages
from penstock.store.file.backend import FileStore
from tests.unit.store.file.stores import opened

SEGMENTS = ["a", "a.", "a-b", "a0", "b", "é", ".x", "z z"]


def plant(root: Path, keys: list[str]) -> None:
    for key in keys:
        path = root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(key.encode())


async def names(
    store: ObjectStore,
    prefix: str = "",
    *,
    start_after: str = "",
    delimiter: Delimiter = "",
    page_keys: int = 1000,
) -> list[str]:
    """Everything that the pages of a list have, in the order in which it sorts."""
    found: list[str] = []
    async for page in pages(
        store, prefix, start_after=start_after, delimiter=delimiter, page_keys=page_keys
    ):
        keys = [entry.key for entry in page.entries]
        assert keys == sorted(keys)
        assert list(page.folders) == sorted(page.folders)
        assert len(keys) + len(page.folders) <= page_keys
        together = sorted([*keys, *page.folders])
        assert not found or not together or found[-1] < together[0]
        found += together
    return found


def expected(keys: list[str], prefix: str, start_after: str, delimiter: str) -> list[str]:
    """The same by brute force."""
    found = set()
    for key in keys:
        if key.startswith(prefix):
            rest = key[len(prefix) :]
            folded = prefix + rest.split("/")[0] + "/" if delimiter and "/" in rest else key
            if folded > start_after:
                found.add(folded)
    return sorted(found, key=str.encode)


@st.composite
def trees(draw: st.DrawFn) -> list[str]:
    """Keys none of which is the folder of another."""
    paths = draw(st.lists(st.lists(st.sampled_from(SEGMENTS), min_size=1, max_size=4), max_size=25))
    keys: list[str] = []
    for path in paths:
        key = "/".join(path)
        if not any(f"{a}/".startswith(f"{b}/") for k in keys for a, b in ((k, key), (key, k))):
            keys.append(key)
    return keys


borders = st.builds(
    lambda path, end: "/".join(path)[: end or None],
    st.lists(st.sampled_from([*SEGMENTS, ""]), max_size=4),
    st.integers(0, 6),
)


@given(trees(), borders, borders, st.sampled_from(["", "/"]), st.integers(1, 5))
def test_a_list_is_what_brute_force_finds(
    keys: list[str], prefix: str, start_after: str, delimiter: Delimiter, page_keys: int
) -> None:
    async def main(root: Path) -> list[str]:
        async with opened(root) as store:
            return await names(
                store,
                prefix,
                start_after=start_after,
                delimiter=delimiter,
                page_keys=page_keys,
            )

    with TemporaryDirectory() as folder:
        plant(Path(folder), keys)
        found = asyncio.run(main(Path(folder)))
    assert found == expected(keys, prefix, start_after, delimiter)


def test_the_order_is_that_of_whole_keys(tmp_path: Path) -> None:
    keys = ["a-b/x", "a.x", "a/x", "a/y/z", "a0", "aé", "a日", "a🚰"]
    plant(tmp_path, list(reversed(keys)))

    async def main() -> None:
        async with opened(tmp_path) as store:
            assert [entry.key for entry in (await store.list()).entries] == keys
            page = await store.list(delimiter="/", start_after="a-b/")
            assert page.folders == ("a/",)
            assert [entry.key for entry in page.entries] == ["a.x", "a0", "aé", "a日", "a🚰"]

    asyncio.run(main())


def test_many_keys_come_in_many_pages(tmp_path: Path) -> None:
    keys = [f"{folder}/{number:04}" for folder in ("one", "two") for number in range(1300)]
    plant(tmp_path, [*keys, *(f"three/{number}/x" for number in range(50))])

    async def main() -> None:
        async with opened(tmp_path) as store:
            first = await store.list("one/")
            assert len(first.entries) == 1000
            assert first.cursor is not None
            second = await store.list("one/", cursor=first.cursor)
            assert [entry.key for entry in first.entries + second.entries] == keys[:1300]
            assert second.cursor is None
            assert await names(store, "t", page_keys=7) == sorted(
                [*keys[1300:], *(f"three/{number}/x" for number in range(50))]
            )
            assert await names(store, page_keys=2, delimiter="/") == ["one/", "three/", "two/"]
            assert len(await names(store, "three/", page_keys=7, delimiter="/")) == 50
            exact = await store.list("three/", limit=50)
            assert (len(exact.entries), exact.cursor) == (50, None)

    asyncio.run(main())


def test_what_is_no_key_is_not_listed(tmp_path: Path) -> None:
    plant(tmp_path, ["good/key", "back\\slash", "back\\folder/key", "new\nline", ".penstock/x"])
    with suppress(OSError):  # macOS refuses such a name itself.
        os.close(os.open(os.fsencode(tmp_path) + b"/\xff\xfe", os.O_CREAT))
    for folder in ("empty/er", "only/back\\folder"):
        (tmp_path / folder).mkdir(parents=True)
    plant(tmp_path, ["only/back\\folder/key", "only/bad\x01"])

    async def main() -> None:
        async with opened(tmp_path) as store:
            assert await names(store) == ["good/key"]
            assert await names(store, delimiter="/") == ["good/"]
            for prefix in (
                ".penstock",
                ".penstock/",
                ".penstock/x",
                "../",
                "a//",
                "/",
                "a\0/",
                "\0",
            ):
                assert await names(store, prefix) == []
                assert await names(store, prefix, delimiter="/") == []
            assert await names(store, "\ud800") == []
            assert await names(store, start_after="\ud800") == []
            assert await names(store, "x" * 2000 + "/") == []
            assert await names(store, "good/key/") == []

    asyncio.run(main())


def test_bad_cursors_and_limits_are_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as store:
            for cursor in ("x", "ä"):
                with pytest.raises(InvalidInput, match="cursor"):
                    await store.list(cursor=cursor)
            for limit in (0, 1001):
                with pytest.raises(InvalidInput):
                    await store.list(limit=limit)

    asyncio.run(main())


def test_a_page_opens_only_the_folders_that_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(
        tmp_path,
        [f"top/{one:02}/{two:02}/{key}" for one in range(10) for two in range(10) for key in "abc"],
    )
    opened_folders: list[str] = []
    scandir = os.scandir

    def noting(path: bytes) -> os._ScandirIterator[bytes]:
        opened_folders.append(os.path.relpath(os.fsdecode(path), tmp_path))
        return scandir(path)

    async def main(store: FileStore) -> Iterator[list[str]]:
        async def opens(prefix: str = "", start_after: str = "", cursor: str | None = None) -> None:
            opened_folders.clear()
            await store.list(prefix, start_after=start_after, limit=2, cursor=cursor)
            answers.append(list(opened_folders))

        answers: list[list[str]] = []
        await opens()
        await opens("top/07/03/")
        await opens("top/07/03/b")
        await opens("top/0", "top/07/03/a")
        await opens("", "top/07/03/c")
        await opens("", "top/09/09/c")
        await opens("", "zzz")
        await opens("zzz")
        cursor = (await store.list("top/08", limit=4)).cursor
        await opens("top/08", cursor=cursor)
        return iter(answers)

    async def run() -> Iterator[list[str]]:
        async with opened(tmp_path) as store:
            monkeypatch.setattr(os, "scandir", noting)
            try:
                return await main(store)
            finally:
                monkeypatch.undo()

    answers = asyncio.run(run())
    assert next(answers) == [".", "top", "top/00", "top/00/00"]
    assert next(answers) == ["top/07/03"]
    assert next(answers) == ["top/07/03"]
    assert next(answers) == ["top", "top/07", "top/07/03", "top/07/04"]
    assert next(answers) == [".", "top", "top/07", "top/07/03", "top/07/04"]
    assert next(answers) == [".", "top", "top/09", "top/09/09"]
    assert next(answers) == ["."]
    assert next(answers) == ["."]
    assert next(answers) == ["top", "top/08", "top/08/01", "top/08/02"]


def test_lists_do_not_mind_what_others_create_and_delete(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as writer, opened(tmp_path) as reader:
            staying = [f"folder/{number}/stays" for number in range(0, 20, 2)]
            for key in staying:
                await writer.put(key, b"")
            finished = asyncio.Event()

            async def churn(number: int) -> None:
                for turn in range(40):
                    key = f"folder/{number}/{turn}"
                    await writer.put(key, b"", CREATE)
                    await writer.delete(key)

            async def churn_all() -> None:
                async with asyncio.TaskGroup() as tasks:
                    for number in range(20):
                        tasks.create_task(churn(number))
                finished.set()

            async def read(delimiter: Delimiter) -> int:
                lists = 0
                while not finished.is_set():
                    found = await names(reader, "folder/", delimiter=delimiter, page_keys=7)
                    wanted = staying if not delimiter else [key[:-5] for key in staying]
                    assert set(wanted) <= set(found)
                    lists += 1
                return lists

            async with asyncio.TaskGroup() as tasks:
                flat, folded = tasks.create_task(read("")), tasks.create_task(read("/"))
                tasks.create_task(churn_all())
            assert min(flat.result(), folded.result()) > 3
            assert await names(reader) == sorted(staying)

    asyncio.run(main())


def test_a_file_that_vanishes_during_a_list_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(tmp_path, ["a/1", "a/2", "b/1", "c"])
    lstat = os.lstat

    def vanishing(path: bytes) -> os.stat_result:
        if path.endswith(b"/a/1"):
            (tmp_path / "a/2").unlink(missing_ok=True)
            (tmp_path / "b/1").unlink(missing_ok=True)
            if (tmp_path / "b").exists():
                (tmp_path / "b").rmdir()
        return lstat(path)

    async def main() -> None:
        async with opened(tmp_path) as store:
            monkeypatch.setattr(os, "lstat", vanishing)
            try:
                assert [entry.key for entry in (await store.list()).entries] == ["a/1", "c"]
            finally:
                monkeypatch.undo()
            with pytest.raises(NotFound):
                await store.get("a/2")

    asyncio.run(main())
