"""What the S3 backend makes of a server's answers, and which conditions it trusts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from penstock.kernel.errors import (
    AlreadyExists,
    BucketNotFound,
    NotFound,
    OutcomeUnknown,
    Refused,
    StoreError,
    Throttled,
    Unavailable,
    Unsupported,
    VersionConflict,
)
from penstock.store.base import Version
from penstock.store.s3.backend import S3Store
from tests.integration.asking import READS, WRITES, run
from tests.integration.little_s3 import LittleS3
from tests.integration.scripted import (
    MODIFIED,
    Script,
    ScriptedServer,
    answers,
    error_xml,
    fine_object,
)

V = Version("v")
NAMESPACE = ' xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
HTML = b"<html><body>Sign in</body></html>"
Ask = Callable[[S3Store], Awaitable[object]]


def outcome(script: Script, ask: Ask) -> StoreError:
    """The error that this request ends in when the server answers so."""
    caught: list[StoreError] = []

    async def check() -> None:
        async with ScriptedServer(script) as server:
            store = server.store()
            try:
                await ask(store)
            except StoreError as error:
                caught.append(error)
            await store.close()

    run(check())
    (error,) = caught
    assert error.message.endswith(".")
    return error


def with_little(
    little: LittleS3, use: Callable[[S3Store, ScriptedServer], Awaitable[None]]
) -> None:
    async def check() -> None:
        async with ScriptedServer(little) as server:
            store = server.store()
            await use(store, server)
            await store.close()

    run(check())


@pytest.mark.parametrize(
    ("status", "code", "read", "write"),
    [
        (500, "InternalError", Unavailable, OutcomeUnknown),
        (502, "", Unavailable, OutcomeUnknown),
        (503, "", Unavailable, OutcomeUnknown),
        (503, "SlowDown", Throttled, Throttled),
        (429, "", Throttled, Throttled),
        (409, "ConditionalRequestConflict", Unavailable, Unavailable),
        (400, "RequestTimeout", Unavailable, Unavailable),
        (400, "ExpiredToken", Refused, Refused),
        (403, "AccessDenied", Refused, Refused),
        (403, "", Refused, Refused),
        (404, "NoSuchBucket", BucketNotFound, BucketNotFound),
        (501, "NotImplemented", Unsupported, Unsupported),
        (200, "", Unavailable, OutcomeUnknown),
    ],
)
def test_a_failure_reaches_the_caller(
    status: int, code: str, read: type[StoreError], write: type[StoreError]
) -> None:
    async def check() -> None:
        body = error_xml(code) if code else b""
        async with ScriptedServer(answers(status, body, Retry_After="7")) as server:
            store = server.store()
            for name in ("get", "list"):
                with pytest.raises(read) as caught:
                    await READS[name](store)
                assert type(caught.value) is read
            for name in ("put", "create", "swap"):
                with pytest.raises(write) as caught:
                    await WRITES[name](store)
                assert type(caught.value) is write
                if isinstance(caught.value, Throttled):
                    assert caught.value.retry_after_seconds == 7
            assert len(server.calls) == 5
            await store.close()

    run(check())


@pytest.mark.parametrize("name", ["get", "head", "put", "create", "swap", "delete", "list"])
@pytest.mark.parametrize("status", [301, 307])
def test_a_bucket_in_another_region(name: str, status: int) -> None:
    script = answers(status, x_amz_bucket_region="eu-west-1", Location="http://elsewhere")
    error = outcome(script, (READS | WRITES)[name])
    assert type(error) is Refused
    assert "eu-west-1" in error.hint


@pytest.mark.parametrize(
    ("status", "expected"), [(403, Refused), (404, NotFound), (500, Unavailable), (400, StoreError)]
)
def test_a_head_has_no_body_to_explain_it(status: int, expected: type[StoreError]) -> None:
    assert type(outcome(answers(status), lambda store: store.head("k"))) is expected


def test_refused_conditions_have_their_names() -> None:
    for status, body in ((412, error_xml("PreconditionFailed")), (412, b"")):
        refuses = answers(status, body)
        assert type(outcome(refuses, WRITES["create"])) is AlreadyExists
        assert type(outcome(refuses, WRITES["swap"])) is VersionConflict
    for body in (error_xml("NoSuchKey"), b""):
        assert type(outcome(answers(404, body), WRITES["swap"])) is VersionConflict


def test_a_404_to_a_put_means_the_bucket() -> None:
    assert type(outcome(answers(404), WRITES["put"])) is BucketNotFound
    assert type(outcome(answers(404), WRITES["create"])) is BucketNotFound


def test_a_proxys_404_settles_nothing() -> None:
    for name in ("get",):
        assert type(outcome(answers(404, HTML), READS[name])) is Unavailable
    for name in ("put", "swap", "delete"):
        assert type(outcome(answers(404, HTML), WRITES[name])) is OutcomeUnknown


@pytest.mark.parametrize(
    "script",
    [
        answers(200, HTML),
        answers(200, b"x", ETag='"e"'),
        answers(200, b"x", Last_Modified=MODIFIED),
        answers(200, b"x", ETag='""', Last_Modified=MODIFIED),
        answers(200, b"x", ETag='"e"', Last_Modified="yesterday"),
        answers(304, length=None),
        answers(206, b"x", ETag='"e"', Last_Modified=MODIFIED),
    ],
)
def test_half_an_object_is_none(script: Script) -> None:
    assert type(outcome(script, READS["get"])) is Unavailable
    assert type(outcome(script, READS["head"])) is Unavailable


def test_a_put_without_an_etag_proves_nothing() -> None:
    assert type(outcome(answers(200, HTML), WRITES["put"])) is OutcomeUnknown


def test_unless_unchanged() -> None:
    async def check() -> None:
        async with ScriptedServer(answers(304, length=None)) as server:
            store = server.store()
            assert await store.get("k", unless=V) is None
            assert server.calls[0].headers["if-none-match"] == '"v"'
            for impossible in ("", 'a"b', "a\nb", "ä"):
                with pytest.raises(Unavailable):
                    await store.get("k", unless=Version(impossible))
                assert "if-none-match" not in server.calls[-1].headers
            await store.close()

    run(check())


RESULT = b"<CopyObjectResult><ETag>&quot;e2&quot;</ETag></CopyObjectResult>"


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (answers(200, error_xml("InternalError")), OutcomeUnknown),
        (answers(200, b"\n\n  " + error_xml("InternalError")), OutcomeUnknown),
        (answers(200, error_xml("SlowDown")), Throttled),
        (answers(200, error_xml("PreconditionFailed")), VersionConflict),
        (answers(200, error_xml("NoSuchKey")), VersionConflict),
        (answers(200, error_xml("AccessDenied")), Refused),
        (answers(200), OutcomeUnknown),
        (answers(200, HTML), OutcomeUnknown),
        (answers(200, RESULT[:-5]), OutcomeUnknown),
        (answers(200, b"<CopyObjectResult/>"), OutcomeUnknown),
        (answers(404, error_xml("NoSuchKey")), VersionConflict),
        (answers(412), VersionConflict),
        (answers(409), Unavailable),
        (answers(500), OutcomeUnknown),
    ],
)
def test_a_touch_by_copy_that_fails(script: Script, expected: type[StoreError]) -> None:
    async def check() -> None:
        async with ScriptedServer(answers(200, ETag='"e"'), answers(412), script) as server:
            store = server.store(url="s3://bucket?touch=copy")
            with pytest.raises(expected) as caught:
                await store.touch("k", version=V)
            assert type(caught.value) is expected
            assert len(server.calls) == 3
            await store.close()

    run(check())


def test_a_touch_by_copy_returns_the_new_version() -> None:
    async def check() -> None:
        scripts = (answers(200, ETag='"e"'), answers(412), answers(200, b"\n " + RESULT))
        async with ScriptedServer(*scripts) as server:
            store = server.store(url="s3://bucket/base?touch=copy")
            assert await store.touch("a b/ä", version=V, metadata={"owner": "me"}) == "e2"
            sent = server.calls[2].headers
            assert sent["x-amz-copy-source"] == "/bucket/base/a%20b/%C3%A4"
            assert sent["x-amz-copy-source-if-match"] == sent["if-match"] == '"v"'
            assert sent["x-amz-meta-owner"] == "me"
            await store.close()

    run(check())


def test_a_touch_by_swap_sends_back_what_it_read() -> None:
    async def check() -> None:
        async with ScriptedServer(fine_object(b"body"), answers(200, ETag='"e2"')) as server:
            store = server.store()
            touched = await store.touch("k", version=Version("e1"), metadata={"owner": "me"})
            assert touched == "e2"
            read, write = server.calls
            assert (read.method, write.method, write.body) == ("GET", "PUT", b"body")
            assert write.headers["if-match"] == '"e1"'
            assert write.headers["x-amz-meta-owner"] == "me"
            await store.close()

    run(check())


@pytest.mark.parametrize(
    ("scripts", "expected"),
    [
        ([fine_object()], VersionConflict),
        ([answers(404, error_xml("NoSuchKey"))], VersionConflict),
        ([answers(500)], Unavailable),
        ([fine_object(etag='"v"'), answers(412)], VersionConflict),
        ([fine_object(etag='"v"'), answers(404)], VersionConflict),
        ([fine_object(etag='"v"'), answers(409)], Unavailable),
        ([fine_object(etag='"v"'), answers(500)], OutcomeUnknown),
    ],
)
def test_a_touch_by_swap_that_fails(scripts: list[Script], expected: type[StoreError]) -> None:
    async def check() -> None:
        async with ScriptedServer(*scripts) as server:
            store = server.store()
            with pytest.raises(expected) as caught:
                await store.touch("k", version=V)
            assert type(caught.value) is expected
            assert len(server.calls) == len(scripts)
            await store.close()

    run(check())


@pytest.mark.parametrize(
    "body",
    [b"", HTML, b"<html><br></html>", b"<ListBucketResult><Contents>", error_xml("InternalError")],
)
def test_what_is_not_a_list_is_not_an_empty_one(body: bytes) -> None:
    assert type(outcome(answers(200, body), READS["list"])) is Unavailable


def test_an_error_behind_a_list_has_its_name() -> None:
    assert type(outcome(answers(200, error_xml("AccessDenied")), READS["list"])) is Refused
    assert type(outcome(answers(200, error_xml("SlowDown")), READS["list"])) is Throttled


def test_an_empty_list() -> None:
    async def check() -> None:
        async with ScriptedServer(answers(200, b"<ListBucketResult/>")) as server:
            store = server.store()
            page = await store.list()
            assert (page.entries, page.folders, page.cursor) == ((), (), None)
            await store.close()

    run(check())
