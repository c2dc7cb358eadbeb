"""Which conditions of a server the S3 backend trusts, and what goes over the wire unchanged."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from penstock.kernel.errors import InvalidInput, NotFound, Throttled, Unsupported, VersionConflict
from penstock.store.base import CREATE, REPLACE, ObjectStore, Swap, Version
from penstock.store.opening import Opening, open_store
from penstock.store.s3.backend import S3Store
from penstock.testing.store_contract import UNUSUAL_KEYS
from tests.integration.asking import run
from tests.integration.little_s3 import LittleS3
from tests.integration.scripted import KEYS, Call, ScriptedServer, answers, s3_error

NAMESPACE = ' xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
COPYING = "s3://bucket?touch=copy"
Use = Callable[[S3Store, ScriptedServer], Awaitable[None]]


def with_little(little: LittleS3, use: Use, *, url: str = "s3://bucket") -> None:
    """Use a store on this server."""

    async def check() -> None:
        async with ScriptedServer(little) as server:
            store = server.store(url=url)
            await use(store, server)
            await store.close()

    run(check())


@pytest.mark.parametrize("encoded", [True, False])
@pytest.mark.parametrize("namespace", ["", NAMESPACE])
def test_every_key_survives_the_way_there_and_back(encoded: bool, namespace: str) -> None:
    little = LittleS3(encoded=encoded, namespace=namespace)

    async def use(store: S3Store, server: ScriptedServer) -> None:
        printable = [f"c/{chr(code)}x" for code in range(32, 127) if chr(code) not in "/\\"]
        keys = [*UNUSUAL_KEYS, *printable]
        for key in keys:
            version = await store.put(key, key.encode(), CREATE)
            assert await store.touch(key, version=version) == version
            found = await store.get(key)
            assert found is not None
            assert found.body == key.encode()
        assert {f"root/{key}" for key in keys} < little.objects.keys()
        listed = (await store.list()).entries
        assert [entry.key for entry in listed] == sorted(keys)
        for entry in listed:
            await store.delete(entry.key, version=entry.version)
        assert list(little.objects) == ["root/.penstock/marker"]

    with_little(little, use, url="s3://bucket/root?touch=copy")


def test_metadata_goes_and_comes_as_it_is() -> None:
    metadata = {
        "owner": 'worker 7; a=b, "c"',
        "two": "a  b",
        "odd": "%7E~!@#$^&*()[]{}<>|",
        "n": "",
    }

    async def use(store: S3Store, server: ScriptedServer) -> None:
        await store.put("k", b"", metadata=metadata)
        assert dict((await store.head("k")).metadata) == metadata

    with_little(LittleS3(), use)


@pytest.mark.parametrize("touch", ["copy", "swap"])
def test_opaque_etags_are_versions_like_any_other(touch: str) -> None:
    async def use(store: S3Store, server: ScriptedServer) -> None:
        first = await store.put("k", b"same", CREATE)
        second = await store.put("k", b"same", Swap(first))
        touched = await store.touch("k", version=second, metadata={"owner": "me"})
        assert len({first, second, touched}) == 3
        assert (await store.list()).entries[0].version == touched
        assert await store.get("k", unless=touched) is None
        for old in (first, second):
            with pytest.raises(VersionConflict):
                await store.put("k", b"new", Swap(old))
            with pytest.raises(VersionConflict):
                await store.touch("k", version=old)
            with pytest.raises(VersionConflict):
                await store.delete("k", version=old)
        await store.delete("k", version=touched)
        with pytest.raises(NotFound):
            await store.head("k")

    with_little(LittleS3(opaque=True), use, url=f"s3://bucket?touch={touch}")


def test_an_impossible_version_is_a_conflict_and_is_not_sent() -> None:
    async def use(store: S3Store, server: ScriptedServer) -> None:
        version = await store.put("k", b"")
        await store.touch("k", version=version)
        await store.delete("k", version=version)
        sent = len(server.calls)
        for impossible in map(Version, ("", 'a"b', "a\r\nb: c", "ä")):
            for request in (
                store.put("k", b"", Swap(impossible)),
                store.touch("k", version=impossible),
                store.delete("k", version=impossible),
            ):
                with pytest.raises(VersionConflict):
                    await request
        assert len(server.calls) == sent

    with_little(LittleS3(), use, url=COPYING)


def opened(server: ScriptedServer, options: str = "") -> Awaitable[ObjectStore]:
    url = f"s3://bucket?endpoint={server.endpoint}{options}"
    return open_store(url, Opening(credentials=KEYS))


@pytest.mark.parametrize(
    ("ignored", "words"),
    [
        (("create",), "create-if-absent (If-None-Match)"),
        (("swap",), "compare-and-swap (If-Match)"),
        (("create", "swap"), "create-if-absent (If-None-Match)"),
    ],
)
@pytest.mark.parametrize("opaque", [False, True])
def test_a_server_that_ignores_conditions_is_not_opened(
    ignored: tuple[str, ...], words: str, opaque: bool
) -> None:
    async def check() -> None:
        async with ScriptedServer(LittleS3(ignores=ignored, opaque=opaque)) as server:
            for _ in range(2):
                with pytest.raises(Unsupported) as caught:
                    await opened(server)
                assert f"ignores {words}: two writers could win" in caught.value.message
                assert "penstock doctor" in caught.value.hint
            await server.all_gone()

    run(check())


def test_all_who_open_a_store_agree_on_its_deletes() -> None:
    async def delete_one(server: ScriptedServer, options: str) -> bool:
        """Whether a delete leaves a tombstone."""
        store = await opened(server, options)
        await store.delete("k", version=await store.put("k", b"body", CREATE))
        with pytest.raises(NotFound):
            await store.get("k")
        await store.close()
        return "k" in little.objects

    async def check() -> None:
        async with ScriptedServer(little) as server:
            assert not await delete_one(server, "")
            assert not await delete_one(server, "&deletes=conditional")
            assert await delete_one(server, "&deletes=tombstone")
            # From now on all know, with the option or without.
            assert await delete_one(server, "")
            with pytest.raises(InvalidInput, match="cannot be conditional any more"):
                await opened(server, "&deletes=conditional")

    little = LittleS3()
    run(check())


def test_tombstones_need_no_conditional_deletes() -> None:
    async def check() -> None:
        async with ScriptedServer(LittleS3(ignores=("delete",))) as server:
            store = await opened(server, "&deletes=tombstone")
            first = await store.put("k", b"one", CREATE)
            second = await store.put("k", b"two", Swap(first))
            with pytest.raises(VersionConflict):
                await store.delete("k", version=first)
            await store.delete("k", version=second)
            assert (await store.list()).entries == ()
            await store.close()

    run(check())


def test_who_may_not_list_opens_a_store_without_a_record() -> None:
    async def answer(call: Call) -> None:
        if call.method == "GET" and call.path.endswith("/.penstock/deletes"):
            await s3_error(403, "AccessDenied")(call)
        else:
            await little(call)

    async def check() -> None:
        async with ScriptedServer(answer) as server:
            store = await opened(server)
            await store.delete("k", version=await store.put("k", b"body", CREATE))
            assert "k" not in little.objects
            await store.close()

    little = LittleS3()
    run(check())


@pytest.mark.parametrize("opaque", [False, True])
def test_a_touch_or_delete_that_would_not_be_minded_is_not_made(opaque: bool) -> None:
    async def use(store: S3Store, server: ScriptedServer) -> None:
        await store.verify()
        version = await store.put("k", b"", metadata={"owner": "me"})
        for _ in range(2):
            with pytest.raises(Unsupported, match="destination"):
                await store.touch("k", version=version, metadata={"owner": "you"})
            with pytest.raises(Unsupported, match="a delete"):
                await store.delete("k", version=version)
        assert dict((await store.head("k")).metadata) == {"owner": "me"}
        await store.delete("k")

    with_little(LittleS3(ignores=("copy", "delete"), opaque=opaque), use, url=COPYING)


def test_a_condition_is_tried_once_for_all() -> None:
    async def use(store: S3Store, server: ScriptedServer) -> None:
        version = await store.put("k", b"")
        await asyncio.gather(*(store.touch("k", version=version) for _ in range(20)))
        tried = [call for call in server.calls if call.path.endswith("/.penstock/marker")]
        assert len(tried) == 2
        assert len(server.calls) == 1 + 2 + 20

    with_little(LittleS3(), use, url=COPYING)


def test_a_trial_that_failed_is_made_again() -> None:
    async def check() -> None:
        little = LittleS3()
        scripts = (little, s3_error(503, "SlowDown"), little)
        async with ScriptedServer(*scripts) as server:
            store = server.store()
            version = await store.put("k", b"")
            with pytest.raises(Throttled):
                await store.delete("k", version=version)
            await store.delete("k", version=version)
            assert "k" not in little.objects
            await store.close()

    run(check())


def test_a_server_without_conditions_says_so() -> None:
    scripts = (answers(200), s3_error(501, "NotImplemented", "A header you provided"))

    async def check() -> None:
        async with ScriptedServer(*scripts) as server:
            with pytest.raises(Unsupported, match="501 NotImplemented: A header you provided"):
                await opened(server)
            await server.all_gone()

    run(check())


def test_the_marker_is_not_listed() -> None:
    async def use(store: S3Store, server: ScriptedServer) -> None:
        await store.verify()
        await store.put("a", b"", REPLACE)
        assert [entry.key for entry in (await store.list()).entries] == ["a"]

    with_little(LittleS3(), use)
