"""Published vectors: those of RFC 7515, RFC 7519 and RFC 7638, and Wycheproof's for ES256.

What is published as wrong is refused; so is all that is right for others and of another form than
ours. Signatures that are published as right are verified.
"""

from __future__ import annotations

import json

import pytest

from penstock.kernel.errors import TokenRefused
from penstock.tokens.claims import claims_of, decode, public_key, read
from penstock.tokens.signer import from_base64url, is_signed, thumbprint

# RFC 7515, A.3: its key and its token.
KEY = {
    "kty": "EC",
    "crv": "P-256",
    "x": "f83OJ3D2xF1Bg8vub9tLe1gHMzV76e8Tus9uPHvRVEU",
    "y": "x_FEzRu9m36HLN_tue659LNpXW6pCyStikYjKIWI5a0",
}
PAYLOAD = (
    "eyJpc3MiOiJqb2UiLA0KICJleHAiOjEzMDA4MTkzODAsDQogImh0dHA6Ly9leGFtcGxlLmNvbS9pc19yb290Ijp0cnVlfQ"
)
SIGNED = (
    f"eyJhbGciOiJFUzI1NiJ9.{PAYLOAD}."
    "DtEhU3ljbEg8L38VWAfUAqOyKAM6-Xx-F4GawxaepmXFCgfTjDxw5djxLa8ISlSApmWQxfKTUJqPP3-Kg6NU1Q"
)

# Wycheproof, json_web_signature_test.json, the group es256.
WYCHEPROOF_KEY = {
    "kty": "EC",
    "crv": "P-256",
    "x": "04N0xi21hshyvBp7I167sbE_bXqyqkAPfefdklMO7wY",
    "y": "UI8exy-C06a7DUnjIdENkxeFtHM4-l_41LqEw9nVgmw",
    "alg": "ES256",
    "use": "sig",
    "kid": "kid-ec-sign",
}
HEAD = "eyJhbGciOiJFUzI1NiIsImtpZCI6ImtpZC1lYy1zaWduIn0"
MODIFIED_HEAD = "eyJhbGciOiJFUzI1NiIsImtpZCI6IlhpZC1lYy1zaWduIn0"
SIGNATURE = "5cA0OHyMP7ezamUd5c9kV-FrGxdx4hbGXOdplQkutrqWrte5P-pAvsE3Ve6xSyU3YDQwUHjVVOtvcrEbbnZ8yA"
SYMMETRIC = (
    "eyJhbGciOiJIUzI1NiIsImtpZCI6ImtpZC1lYy1zaWduIn0.Zm9v."
    "TgWtz2FIRukBQ_mA5sgHa0Ybtgn7bl-YBPAi7Z0XdHU"
)
EMBEDDED = (
    "eyJhbGciOiJFUzI1NiIsImtpZCI6ImtpZC1lYy1zaWduIiwiandrIjp7Imt0eSI6IkVDIiwia2lkIjoi"
    "a2lkLWVjLXNpZ24iLCJ1c2UiOiJzaWciLCJhbGciOiJFUzI1NiIsIngiOiJNZG5UWkRJaERKYmZBU2RG"
    "cWFtY3BPMkNoOUdOS0sybTBNUWxoNDAyU3BvIiwieSI6Ijdhdko0bHFfV3l4LW5MUERCUTJZcHl0dUh5"
    "TWlvMDdCVXl2bDNqYUMtMVkiLCJjcnYiOiJQLTI1NiJ9fQ.Zm9v.4jmsollQD8ZxvySzXYnIEYA4fwaZ"
    "i2ZbC0aI1J4LYmW2Bn31NhKdjms2N6o51Dff5-InWXQF9m45VtTexl6yjg"
)
WYCHEPROOF_KEYS = {"kid-ec-sign": public_key(WYCHEPROOF_KEY)}


def _kind(token: str) -> str:
    with pytest.raises(TokenRefused) as caught:
        decode(token, {**WYCHEPROOF_KEYS, "rfc": public_key(KEY)})
    return caught.value.kind


def test_the_example_of_es256_verifies_with_its_own_key() -> None:
    message, _, signature = SIGNED.rpartition(".")
    raw, key = from_base64url(signature), public_key(KEY)
    assert is_signed(message.encode(), signature=raw, key=key)
    assert not is_signed(message.encode() + b"A", signature=raw, key=key)
    assert not is_signed(message.encode(), signature=raw, key=WYCHEPROOF_KEYS["kid-ec-sign"])
    # It names no key and is no token of a task.
    assert _kind(SIGNED) == "malformed"


def test_the_example_of_an_unsecured_token_is_refused() -> None:
    # RFC 7519, 6.1, which is A.5 of RFC 7515.
    assert _kind(f"eyJhbGciOiJub25lIn0.{PAYLOAD}.") == "malformed"


def test_the_example_of_hmac_is_refused() -> None:
    # RFC 7515, A.1.
    assert (
        _kind(
            "eyJ0eXAiOiJKV1QiLA0KICJhbGciOiJIUzI1NiJ9."
            f"{PAYLOAD}.dBjftJeZ4CVP-mB92K27uhbUJU1p1r_wW1gFWFOEjXk"
        )
        == "malformed"
    )


def test_the_negative_case_of_critical_headers_is_refused() -> None:
    # RFC 7515, appendix E.
    token = (
        "eyJhbGciOiJub25lIiwNCiAiY3JpdCI6WyJodHRwOi8vZXhhbXBsZS5jb20vVU5ERUZJTkVEIl0sDQog"
        "Imh0dHA6Ly9leGFtcGxlLmNvbS9VTkRFRklORUQiOnRydWUNCn0.RkFJTA."
    )
    assert json.loads(from_base64url(token.partition(".")[0]))["crit"]
    assert from_base64url(token.split(".")[1]) == b"FAIL"
    assert _kind(token) == "malformed"


def test_a_thumbprint_is_the_one_of_the_standard() -> None:
    # RFC 9449 has one of a key of P-256: the key of its section 4.1, the thumbprint of 6.1.
    key = {
        "kty": "EC",
        "x": "l8tFrhx-34tV3hRICRDY9zCkDlpBhF42UQUfWVAWBFs",
        "y": "9VE4jf_Ok_o64zbTTlcuNJajHmt6v9TDVrU0CdvGRDA",
        "crv": "P-256",
    }
    assert thumbprint(key) == "0ZcOCORZNYy-DWpqq30jZyJGHTN0d2HglBV3uiguA4I"
    assert thumbprint({**key, "kid": "any", "use": "sig"}) == thumbprint(key)


def test_the_valid_vector_is_signed_and_is_no_token_of_a_task() -> None:
    token = f"{HEAD}.Zm9v.{SIGNATURE}"
    unverified = read(token)
    key = WYCHEPROOF_KEYS[unverified.kid]
    assert is_signed(unverified.message, signature=unverified.signature, key=key)
    with pytest.raises(TokenRefused, match="not JSON"):
        claims_of(unverified, key)


@pytest.mark.parametrize(
    ("token", "kind"),
    [
        (f"{HEAD}.Zm9v.X{SIGNATURE[1:]}", "bad signature"),
        (f"{HEAD}.Zm9v.", "bad signature"),
        (f"{HEAD}.Zm9v", "malformed"),
        (f"{HEAD}.WG9v.{SIGNATURE}", "bad signature"),
        (f"{HEAD}..{SIGNATURE}", "bad signature"),
        (f"{HEAD}.{SIGNATURE}", "malformed"),
        (f"{MODIFIED_HEAD}.Zm9v.{SIGNATURE}", "unknown key"),
        (f".Zm9v.{SIGNATURE}", "malformed"),
        (f"Zm9v.{SIGNATURE}", "malformed"),
        (".Zm9v.", "malformed"),
        ("Zm9v", "malformed"),
        ("", "missing"),
        (f"{HEAD}.Zm9v.{SIGNATURE}.", "malformed"),
        (f"{HEAD}.Zm9v.{SIGNATURE}.foo", "malformed"),
        # An HMAC whose key is the public one.
        (SYMMETRIC, "malformed"),
        # It brings its own key along.
        (EMBEDDED, "malformed"),
    ],
)
def test_the_invalid_vectors_are_refused(token: str, kind: str) -> None:
    assert _kind(token) == kind
