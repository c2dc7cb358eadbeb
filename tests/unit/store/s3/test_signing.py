"""Signatures: the examples of Amazon's documentation, and its own runtime as the judge."""

from __future__ import annotations

from datetime import UTC, datetime
from io import BytesIO

import pytest
from awscrt.auth import (
    AwsCredentialsProvider,
    AwsSignatureType,
    AwsSignedBodyHeaderType,
    AwsSigningAlgorithm,
    AwsSigningConfig,
    aws_sign_request,
)
from awscrt.http import HttpHeaders, HttpRequest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kernel.errors import InvalidInput
from penstock.store.s3.signing import (
    Credentials,
    Request,
    encoded_path,
    encoded_query,
    signed_headers,
)

EXAMPLE = Credentials("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
EXAMPLE_HOST = "examplebucket.s3.amazonaws.com"
EXAMPLE_TIME = datetime(2013, 5, 24, tzinfo=UTC).timestamp()


def signature(request: Request, *, credentials: Credentials = EXAMPLE, host: str) -> str:
    headers = signed_headers(
        request, host=host, region="us-east-1", credentials=credentials, at=EXAMPLE_TIME
    )
    return dict(headers)["authorization"].rpartition("Signature=")[2]


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (
            Request("GET", "/test.txt", headers=[("Range", "bytes=0-9")]),
            "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41",
        ),
        (
            Request(
                "PUT",
                "/test$file.text",
                headers=[
                    ("Date", "Fri, 24 May 2013 00:00:00 GMT"),
                    ("x-amz-storage-class", "REDUCED_REDUNDANCY"),
                ],
                body=b"Welcome to Amazon S3.",
            ),
            "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd",
        ),
        (
            Request("GET", "/", query=[("lifecycle", "")]),
            "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543",
        ),
        (
            Request("GET", "/", query=[("prefix", "J"), ("max-keys", "2")]),
            "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7",
        ),
    ],
)
def test_the_documented_examples(request_: Request, expected: str) -> None:
    assert signature(request_, host=EXAMPLE_HOST) == expected


def by_the_runtime(request: Request, *, credentials: Credentials, host: str) -> str:
    query = encoded_query(request.query)
    message = HttpRequest(
        request.method,
        encoded_path(request.path) + (f"?{query}" if query else ""),
        HttpHeaders([("Host", host), *request.headers]),
        BytesIO(request.body) if request.body else None,
    )
    config = AwsSigningConfig(
        algorithm=AwsSigningAlgorithm.V4,
        signature_type=AwsSignatureType.HTTP_REQUEST_HEADERS,
        credentials_provider=AwsCredentialsProvider.new_static(
            credentials.access_key, credentials.secret_key, credentials.session_token
        ),
        region="us-east-1",
        service="s3",
        date=datetime.fromtimestamp(EXAMPLE_TIME, tz=UTC),
        use_double_uri_encode=False,
        should_normalize_uri_path=False,
        signed_body_header_type=AwsSignedBodyHeaderType.X_AMZ_CONTENT_SHA_256,
    )
    aws_sign_request(message, config).result(timeout=10)
    return str(message.headers.get("authorization")).rpartition("Signature=")[2]


KEYS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20)
VALUES = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=20).map(str.strip)
NAMES = st.from_regex(r"[a-z0-9_-]{1,10}", fullmatch=True).map("x-amz-meta-".__add__)


REQUESTS = st.builds(
    Request,
    method=st.sampled_from(["GET", "HEAD", "PUT", "DELETE"]),
    path=KEYS.map("/bucket/".__add__),
    query=st.dictionaries(KEYS, KEYS | st.just(""), max_size=4).map(lambda pairs: [*pairs.items()]),
    headers=st.dictionaries(NAMES, VALUES, max_size=4).map(lambda pairs: [*pairs.items()]),
    body=st.binary(max_size=50),
)


@given(
    request_=REQUESTS,
    token=st.none() | st.just("a+session/token=="),
    host=st.sampled_from(["host", "127.0.0.1:8333", "[::1]:9000", "bucket.s3.example"]),
)
def test_amazons_runtime_signs_the_same(request_: Request, token: str | None, host: str) -> None:
    credentials = Credentials(EXAMPLE.access_key, EXAMPLE.secret_key, token)
    ours = signature(request_, credentials=credentials, host=host)
    assert ours == by_the_runtime(request_, credentials=credentials, host=host)


def test_what_is_sent_is_not_what_is_signed_where_spaces_are_doubled() -> None:
    request = Request("PUT", "/k", headers=[("x-amz-meta-a", "a  b")])
    headers = dict(
        signed_headers(request, host="h", region="r", credentials=EXAMPLE, at=EXAMPLE_TIME)
    )
    assert headers["x-amz-meta-a"] == "a  b"
    single = Request("PUT", "/k", headers=[("x-amz-meta-a", "a b")])
    assert signature(request, host="h") == signature(single, host="h")


@pytest.mark.parametrize("text", ["", "two words", "line\n", "x\r\nEvil: 1", "ключ", "tab\t", "\0"])
def test_credentials_that_would_break_a_header_are_refused_unseen(text: str) -> None:
    for keys in ((text, "secret", None), ("access", text, None), ("access", "secret", text)):
        with pytest.raises(InvalidInput) as caught:
            Credentials(*keys)
        assert not text or text not in f"{caught.value.message} {caught.value.hint}"
