"""What every status, code and body of an S3 server means."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kernel.errors import (
    BucketNotFound,
    NotFound,
    OutcomeUnknown,
    PenstockError,
    Refused,
    StoreError,
    Throttled,
    Unavailable,
    Unsupported,
    VersionConflict,
)
from penstock.store.base import Entry, Version
from penstock.store.s3.answers import (
    RequestSubject,
    copied_version,
    error_of,
    listing_of,
    not_s3,
    unmasked,
    version_of,
)
from penstock.store.s3.connection import Response
from penstock.store.s3.transport import epoch_of

READ = RequestSubject("bucket", "us-east-1", "a/key")
WRITE = RequestSubject("bucket", "us-east-1", "a/key", writes=True)
WHOLE = RequestSubject("bucket", "us-east-1", "")
NAMESPACE = ' xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'


def body_of(code: str, text: str = "Because.", more: str = "") -> bytes:
    return (
        f'<?xml version="1.0"?>\n<Error><Code>{code}</Code><Message>{text}</Message>{more}</Error>'
    ).encode()


def answer(status: int, code: str = "", **headers: str) -> Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Response(status, named, body_of(code) if code else b"")


def one_sentence(error: PenstockError) -> bool:
    return error.message.endswith(".") and "\n" not in error.message and "AWS_" not in error.message


@pytest.mark.parametrize(
    ("status", "code", "read", "write"),
    [
        (301, "", StoreError, StoreError),
        (302, "", StoreError, StoreError),
        (304, "", Unavailable, OutcomeUnknown),
        (204, "", Unavailable, OutcomeUnknown),
        (400, "", StoreError, StoreError),
        (400, "InvalidArgument", StoreError, StoreError),
        (400, "RequestTimeout", Unavailable, Unavailable),
        (400, "ExpiredToken", Refused, Refused),
        (400, "InvalidToken", Refused, Refused),
        (400, "TokenRefreshRequired", Refused, Refused),
        (400, "AuthorizationHeaderMalformed", Refused, Refused),
        (400, "KMS.ThrottlingException", Throttled, Throttled),
        (401, "", Refused, Refused),
        (403, "", Refused, Refused),
        (403, "AccessDenied", Refused, Refused),
        (403, "InvalidAccessKeyId", Refused, Refused),
        (403, "SignatureDoesNotMatch", Refused, Refused),
        (403, "RequestTimeTooSkewed", Refused, Refused),
        (404, "", NotFound, NotFound),
        (404, "NoSuchKey", NotFound, NotFound),
        (404, "NoSuchBucket", BucketNotFound, BucketNotFound),
        (405, "MethodNotAllowed", StoreError, StoreError),
        (408, "", Unavailable, Unavailable),
        (409, "", Unavailable, Unavailable),
        (409, "ConditionalRequestConflict", Unavailable, Unavailable),
        (409, "OperationAborted", Unavailable, Unavailable),
        (412, "", VersionConflict, VersionConflict),
        (412, "PreconditionFailed", VersionConflict, VersionConflict),
        (429, "", Throttled, Throttled),
        (500, "", Unavailable, OutcomeUnknown),
        (500, "InternalError", Unavailable, OutcomeUnknown),
        (500, "RequestTimeout", Unavailable, Unavailable),
        (501, "NotImplemented", Unsupported, Unsupported),
        (502, "", Unavailable, OutcomeUnknown),
        (503, "", Unavailable, OutcomeUnknown),
        (503, "ServiceUnavailable", Unavailable, OutcomeUnknown),
        (503, "SlowDown", Throttled, Throttled),
        (503, "SlowDownWrite", Throttled, Throttled),
        (504, "", Unavailable, OutcomeUnknown),
    ],
)
def test_an_answer_is_one_error(
    status: int, code: str, read: type[StoreError], write: type[StoreError]
) -> None:
    for asked, expected in ((READ, read), (WRITE, write)):
        error = error_of(answer(status, code), asked)
        assert type(error) is expected
        assert one_sentence(error)
        assert isinstance(error, BucketNotFound) or error.key == "a/key"


@pytest.mark.parametrize("body", [b"<html><body>Not here</body></html>", b"<html><br>", b"Nope."])
def test_a_proxys_404_does_not_say_that_an_object_is_missing(body: bytes) -> None:
    assert type(error_of(Response(404, {}, body), READ)) is Unavailable
    assert type(error_of(Response(404, {}, body), WRITE)) is OutcomeUnknown


def test_a_404_to_a_list_means_the_bucket() -> None:
    assert type(error_of(Response(404), WHOLE)) is BucketNotFound


@pytest.mark.parametrize("status", [301, 307, 400])
def test_a_bucket_elsewhere_names_its_region(status: int) -> None:
    error = error_of(answer(status, x_amz_bucket_region="eu-west-1"), WHOLE)
    assert type(error) is Refused
    assert "another region, eu-west-1." in error.message
    assert error.hint.startswith("Set AWS_REGION=eu-west-1")


def test_a_region_in_the_body_counts() -> None:
    body = body_of("AuthorizationHeaderMalformed", more="<Region>eu-west-1</Region>")
    assert "eu-west-1" in error_of(Response(400, {}, body), READ).message


def test_our_own_region_is_not_elsewhere() -> None:
    error = error_of(answer(400, "InvalidArgument", x_amz_bucket_region="us-east-1"), READ)
    assert "region" not in error.message


@pytest.mark.parametrize(
    ("after", "seconds"),
    [
        ("", 0),
        ("7", 7),
        (" 7 ", 7),
        ("-1", 0),
        ("1.5", 0),
        ("soon", 0),
        ("²", 0),
        ("9" * 400, 3600),
        ("Sun, 08 Nov 2026 08:50:07 GMT", 30),
        ("Sun, 08 Nov 2026 08:40:07 GMT", 0),
    ],
)
def test_retry_after_is_a_number_or_a_date(after: str, seconds: float) -> None:
    headers = {"retry-after": after, "date": "Sun, 08 Nov 2026 08:49:37 GMT"}
    error = error_of(Response(503, headers, body_of("SlowDown")), WRITE)
    assert isinstance(error, Throttled)
    assert error.retry_after_seconds == seconds


def test_a_long_message_is_made_a_sentence() -> None:
    error = error_of(Response(400, {}, body_of("Odd", "one\n  two  " + "x" * 5000)), READ)
    assert "(400 Odd: one two xxx" in error.message
    assert len(error.message) < 300
    assert one_sentence(error)


BODIES = st.binary(max_size=50) | st.text(max_size=50).map(lambda text: f"<Error>{text}".encode())


@given(
    status=st.integers(100, 599),
    body=BODIES,
    headers=st.dictionaries(
        st.sampled_from(["retry-after", "date", "x-amz-bucket-region"]), st.text(max_size=20)
    ),
    asked=st.sampled_from([READ, WRITE, WHOLE]),
)
def test_whatever_comes_is_an_error_with_a_sentence(
    status: int, body: bytes, headers: dict[str, str], asked: RequestSubject
) -> None:
    error = error_of(Response(status, headers, body), asked)
    assert isinstance(error, StoreError)
    assert error.message.endswith(".")
    unmasked(Response(200, headers, body))
    listing_of(body)
    copied_version(body)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("PreconditionFailed", 412),
        ("NoSuchKey", 404),
        ("NoSuchBucket", 404),
        ("AccessDenied", 403),
        ("SlowDown", 500),
        ("InternalError", 500),
    ],
)
def test_an_error_behind_a_200_is_seen(code: str, status: int) -> None:
    assert unmasked(Response(200, {}, b"\n  \n" + body_of(code))).status == status


def test_an_honest_200_stays() -> None:
    for body in (b"", b"hello", b"<CopyObjectResult/>", b"<html>"):
        response = Response(200, {}, body)
        assert unmasked(response) is response


def test_throttling_behind_a_200_is_throttling() -> None:
    assert type(error_of(unmasked(Response(200, {}, body_of("SlowDown"))), WRITE)) is Throttled
    lost = error_of(unmasked(Response(200, {}, body_of("InternalError"))), WRITE)
    assert type(lost) is OutcomeUnknown


@pytest.mark.parametrize(
    ("etag", "version"),
    [
        ('"abc"', "abc"),
        ("abc", "abc"),
        ('W/"abc"', "abc"),
        (' "a-2" ', "a-2"),
        ("", ""),
        ('""', ""),
    ],
)
def test_an_etag_is_read_with_and_without_quotes(etag: str, version: str) -> None:
    assert version_of(etag) == version


@pytest.mark.parametrize(
    ("body", "version"),
    [
        (b"<CopyObjectResult><ETag>&quot;abc&quot;</ETag></CopyObjectResult>", "abc"),
        (f"<CopyObjectResult{NAMESPACE}><ETag>abc</ETag></CopyObjectResult>".encode(), "abc"),
        (b"\n <?xml version='1.0'?>\n<CopyObjectResult><ETag>a</ETag></CopyObjectResult>", "a"),
        (b"<CopyObjectResult></CopyObjectResult>", None),
        (b"<CopyObjectResult><ETag>abc</ETag>", None),
        (b"<html><ETag>abc</ETag></html>", None),
        (b"", None),
    ],
)
def test_a_copys_version(body: bytes, version: str | None) -> None:
    assert copied_version(body) == version


def row(key: str = "k", modified: str = "2026-11-08T08:49:37.000Z", size: str = "3") -> str:
    return (
        f"<Contents><Key>{key}</Key><LastModified>{modified}</LastModified>"
        f"<ETag>&quot;e&quot;</ETag><Size>{size}</Size><Owner><ID>x</ID></Owner></Contents>"
    )


def page(*inner: str, more: str = "<IsTruncated>false</IsTruncated>", space: str = "") -> bytes:
    return f"<ListBucketResult{space}>{more}{''.join(inner)}</ListBucketResult>".encode()


@pytest.mark.parametrize("space", ["", NAMESPACE])
def test_a_list_is_read_with_and_without_a_namespace(space: str) -> None:
    folder = "<CommonPrefixes><Prefix>p/</Prefix></CommonPrefixes>"
    found = listing_of(page(row(), folder, space=space))
    assert found is not None
    when = datetime(2026, 11, 8, 8, 49, 37, tzinfo=UTC).timestamp()
    assert found.entries == (Entry("k", Version("e"), 3, when),)
    assert (found.folders, found.token) == (("p/",), None)


def test_keys_are_decoded_only_if_the_server_says_so() -> None:
    encoded = "<EncodingType>url</EncodingType>"
    one = listing_of(page(row("a+b%2Bc%C3%A4"), more=encoded))
    assert one is not None
    assert one.entries[0].key == "a b+cä"
    two = listing_of(page(row("a+b%2Bc")))
    assert two is not None
    assert two.entries[0].key == "a+b%2Bc"


def test_a_date_without_a_zone_is_utc() -> None:
    one, two = listing_of(page(row(modified="2026-11-08T08:49:37"))), listing_of(page(row()))
    assert one is not None
    assert one == two


def test_pages_follow_each_other() -> None:
    more = "<IsTruncated>true</IsTruncated><NextContinuationToken>t/=</NextContinuationToken>"
    found = listing_of(page(more=more))
    assert found is not None
    assert (found.entries, found.token) == ((), "t/=")


def test_an_empty_list_is_a_list() -> None:
    found = listing_of(b"<ListBucketResult/>")
    assert found is not None
    assert (found.entries, found.folders, found.token) == ((), (), None)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"hello",
        b"<html><body>Sign in</body></html>",
        b"<html><br></html>",
        page(row())[:-1],
        page(row())[:60],
        page(row(modified="yesterday")),
        page(row(modified="")),
        page(row(size="many")),
        page("<Contents><Key>k</Key></Contents>"),
        page("<CommonPrefixes/>"),
        page(row("%FF"), more="<EncodingType>url</EncodingType>"),
        page(more="<IsTruncated>true</IsTruncated>"),
        page(more="<IsTruncated>true</IsTruncated><NextContinuationToken/>"),
        b"<?xml version='1.0' encoding='klingon'?><ListBucketResult/>",
        b"<Error><Code>InternalError</Code></Error>",
    ],
)
def test_what_is_not_a_whole_list_is_none(body: bytes) -> None:
    assert listing_of(body) is None


@pytest.mark.parametrize(
    "date",
    [
        "",
        "yesterday",
        "0",
        "Mon, 01 Jan 1900 00:00:00 GMT",
        "Mon, 01 Jan 9999 00:00:00 GMT",
        "Mon, 99 Jan 2026 00:00:00 GMT",
        "Sun, 08 Nov 2026 08:49:37 +9999999999999",
    ],
)
def test_a_garbage_date_is_none(date: str) -> None:
    assert epoch_of(date) is None


@pytest.mark.parametrize("zone", ["GMT", "+0000", "-0000", ""])
def test_a_date_is_utc_whatever_it_says(zone: str) -> None:
    when = datetime(2026, 11, 8, 8, 49, 37, tzinfo=UTC).timestamp()
    assert epoch_of(f"Sun, 08 Nov 2026 08:49:37 {zone}".strip()) == when


@given(st.text(max_size=40))
def test_no_date_raises(date: str) -> None:
    epoch_of(date)


def test_a_foreign_answer_is_unknown_to_a_writer() -> None:
    assert type(not_s3(READ, "why")) is Unavailable
    assert type(not_s3(WRITE, "why")) is OutcomeUnknown
