"""Signatures equal those that Amazon publishes as examples for S3."""

from __future__ import annotations

from calendar import timegm

import pytest

from penstock.store.s3.signing import Credentials, SignedRequest, encoded_query, signed_headers

CREDENTIALS = Credentials("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
MOMENT = float(timegm((2013, 5, 24, 0, 0, 0)))

EXAMPLES = {
    "get an object": (
        SignedRequest("GET", "/test.txt", headers=[("Range", "bytes=0-9")]),
        "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41",
    ),
    "put an object": (
        SignedRequest(
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
    "get the life cycle": (
        SignedRequest("GET", "/", query=[("lifecycle", "")]),
        "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543",
    ),
    "list": (
        SignedRequest("GET", "/", query=[("prefix", "J"), ("max-keys", "2")]),
        "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7",
    ),
}


def _signed(request: SignedRequest, credentials: Credentials = CREDENTIALS) -> dict[str, str]:
    return dict(
        signed_headers(
            request,
            host="examplebucket.s3.amazonaws.com",
            region="us-east-1",
            credentials=credentials,
            at=MOMENT,
        )
    )


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_published_examples(name: str) -> None:
    request, signature = EXAMPLES[name]
    authorization = _signed(request)["authorization"]
    assert authorization.endswith(f"Signature={signature}")
    assert "Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request" in authorization


def test_every_header_is_signed_and_sent_as_it_is() -> None:
    request = SignedRequest(
        "PUT", "/k", headers=[("x-amz-meta-a", "two  spaces"), ("If-Match", '"v"')]
    )
    headers = _signed(request)
    assert headers["x-amz-meta-a"] == "two  spaces"
    assert (
        "SignedHeaders=host;if-match;x-amz-content-sha256;x-amz-date;x-amz-meta-a,"
        in headers["authorization"]
    )


def test_temporary_credentials_send_and_sign_their_token() -> None:
    temporary = Credentials("key", "secret", "token")
    headers = _signed(SignedRequest("GET", "/k"), temporary)
    assert headers["x-amz-security-token"] == "token"
    assert "x-amz-security-token" in headers["authorization"]
    assert "secret" not in repr(temporary)
    assert "token" not in repr(temporary)


def test_queries_are_encoded_and_in_order() -> None:
    assert encoded_query([("prefix", "a b/+é"), ("delimiter", "/"), ("versions", "")]) == (
        "delimiter=%2F&prefix=a%20b%2F%2B%C3%A9&versions="
    )
