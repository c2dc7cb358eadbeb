"""Tokens as text: what is taken is what was signed, in its one form, and nothing else."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from itertools import product
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernel.errors import InvalidInput
from penstock.tokens.claims import (
    TOKEN_BYTES_MAX,
    Grants,
    ReadGrant,
    decode,
    encode,
    public_key,
    read,
    token_bytes,
)
from penstock.tokens.signer import from_base64url, is_signed, to_base64url
from tests.contract.signer_contract import claims_of_task
from tests.sizes import some
from tests.unit.tokens.forging import (
    HEADER,
    KEYS,
    OTHER,
    SIGNER,
    b64,
    body_of,
    forged,
    refusal,
    token_of,
)

TOKEN = token_of()
ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551


def test_a_token_says_what_was_signed() -> None:
    claims = claims_of_task()
    assert decode(TOKEN, KEYS) == claims
    assert decode(forged(), KEYS) == claims
    header = json.loads(from_base64url(TOKEN.split(".")[0]))
    assert header == {"alg": "ES256", "kid": SIGNER.kid, "typ": "JWT"}


def test_what_is_not_known_in_the_claims_is_passed_over() -> None:
    assert decode(forged(None, body_of(new={"a": 1})), KEYS) == claims_of_task()


def test_a_token_may_lack_its_type() -> None:
    assert refusal(forged({"alg": "ES256", "kid": SIGNER.kid})) == ""


# Headers


@pytest.mark.parametrize(
    "header",
    [
        *({**HEADER, "alg": each} for each in ("none", "None", "NONE", "nOnE", "", "es256", None)),
        *({**HEADER, "alg": each} for each in ("HS256", "RS256", "ES384", "ES256K", "EdDSA")),
        *({**HEADER, "alg": each} for each in (["ES256"], {"ES256": 1}, 256, True)),
        {"kid": SIGNER.kid, "typ": "JWT"},
        {"alg": "ES256", "typ": "JWT"},
        *({**HEADER, "kid": each} for each in (None, "", 7, [SIGNER.kid], "a b", "x" * 201, "\n")),
        *({**HEADER, "typ": each} for each in ("jwt", "JWS", "at+jwt", None, ["JWT"], "")),
        {**HEADER, "crit": ["exp"]},
        {**HEADER, "crit": []},
        {**HEADER, "b64": False, "crit": ["b64"]},
        {**HEADER, "b64": True},
        {**HEADER, "jwk": SIGNER.jwk},
        {**HEADER, "jwk": OTHER.jwk},
        {**HEADER, "jku": "https://attacker.example/jwks"},
        {**HEADER, "x5u": "https://attacker.example/chain"},
        {**HEADER, "x5c": ["MIIB"]},
        {**HEADER, "x5t": "x"},
        {**HEADER, "cty": "JWT"},
        {**HEADER, "zip": "DEF"},
        {**HEADER, "enc": "A256GCM"},
        *("[]", '"ES256"', "null", "7", "", "{", "{}"),
        pytest.param("\ufeff" + json.dumps(HEADER), id="a byte order mark"),
    ],
)
def test_a_header_of_another_form_is_refused_though_it_is_signed(header: Any) -> None:
    assert refusal(forged(header)) == "malformed"


@pytest.mark.parametrize("signature", [b"", bytes(64), b"x"])
def test_a_token_of_no_algorithm_is_refused(signature: bytes) -> None:
    for alg in ("none", "None", "NONE"):
        header = json.dumps({**HEADER, "alg": alg})
        assert refusal(f"{b64(header)}.{TOKEN.split('.')[1]}.{b64(signature)}") == "malformed"
    # And under the right name, without or with nothing.
    assert refusal(f"{TOKEN.rpartition('.')[0]}.{b64(signature)}") == "bad signature"


def test_the_public_key_is_no_secret() -> None:
    key = KEYS[SIGNER.kid]
    secrets = [
        key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo),
        key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).strip(),
        key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo),
        key.public_bytes(Encoding.X962, PublicFormat.UncompressedPoint),
        json.dumps(SIGNER.jwk).encode(),
    ]
    for secret in secrets:
        for alg, kind in (("HS256", "malformed"), ("ES256", "bad signature")):
            message = f"{b64(json.dumps({**HEADER, 'alg': alg}))}.{b64(json.dumps(body_of()))}"
            digest = hmac.digest(secret, message.encode(), "sha256")
            assert refusal(f"{message}.{b64(digest)}") == kind
            assert refusal(f"{message}.{b64(digest * 2)}") == kind


def test_a_key_is_found_by_its_name_alone() -> None:
    # Rightly signed by the other key, in the name of the first; and by one that nobody knows.
    assert refusal(forged(HEADER, signer=OTHER)) == "bad signature"
    for kid in ("x", SIGNER.kid.swapcase(), SIGNER.kid[:-1], "../keys/x", "https://a.example/k"):
        assert refusal(forged({**HEADER, "kid": kid})) == "unknown key"


# JSON


@pytest.mark.parametrize("place", ["header", "claims"])
def test_members_are_there_once(place: str) -> None:
    for twice in (
        '"alg":"ES256","alg":"ES256"',
        '"alg":"none","alg":"ES256"',
        '"alg":"ES256","al\\u0067":"ES256"',
    ):
        header = f'{{{twice},"kid":"{SIGNER.kid}","typ":"JWT"}}'
        if place == "header":
            assert refusal(forged(header)) == "malformed"
    body = json.dumps(body_of())
    for again in (
        '"task_id":8',
        '"task_i\\u0064":8',
        '"exp":9999999999',
        '"unknown":1,"unknown":2',
    ):
        if place == "claims":
            assert refusal(forged(None, f"{body[:-1]},{again}}}")) == "malformed"
    if place == "claims":
        nested = body.replace('"scratch":', '"scratch":"s3://lake/other/","scratch":')
        assert nested != body
        assert refusal(forged(None, nested)) == "malformed"


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", b"null", b"7", b'"x"', b"\xff", b"{}x", b"\xef\xbb\xbf{}", b"[" * 9000),
        *(json.dumps(body_of()).encode(each) for each in ("utf-16", "utf-32")),
        json.dumps(body_of()).replace("1700000060", "NaN"),
        json.dumps(body_of()).replace("1700000060", "Infinity"),
        json.dumps(body_of()).replace("1700000060", "9" * 5000),
        json.dumps(body_of()).replace('"default"', '"\\ud800"'),
    ],
)
def test_claims_that_are_no_json_are_refused_though_they_are_signed(body: str | bytes) -> None:
    assert refusal(forged(None, body)) == "malformed"


_NO_NUMBERS: list[Any] = ["1", 1.0, 1.5, True, [1], {}, -1, 2**63, 10**30]
_NO_TEXTS: list[Any] = [7, True, ["penstock:task"], {"a": 1}]
_WRONG: list[tuple[str, Any]] = [
    *product(("iat", "nbf", "exp", "task_id", "attempt"), _NO_NUMBERS),
    *product(("iss", "aud", "sub", "jti", "org"), _NO_TEXTS),
    ("grants", "all"),
    ("grants", []),
    ("grants", {"write": "s3://lake/a/"}),
    ("grants", {"write": [{"dataset": "d", "version": "1", "prefix": 7}]}),
    ("grants", {"write": [{"dataset": "d", "version": "1"}]}),
    ("grants", {"read": [{"dataset": "d", "version": "1", "prefixes": "s3://lake/a/"}]}),
    ("grants", {"read": {"dataset": "d"}}),
    ("grants", {"scratch": ["s3://lake/a/"]}),
]


@pytest.mark.parametrize(("name", "value"), _WRONG)
def test_claims_of_wrong_types_are_refused_though_they_are_signed(name: str, value: Any) -> None:
    assert refusal(forged(None, body_of(**{name: value}))) == "malformed"


@pytest.mark.parametrize("name", [each for each in body_of() if each != "grants"])
def test_no_claim_may_be_missing(name: str) -> None:
    assert refusal(forged(None, body_of(**{name: None}))) == "malformed"
    assert refusal(forged(None, json.dumps({**body_of(), name: None}))) == "malformed"


# Text


@pytest.mark.parametrize(
    "token",
    [
        *(".", "..", "...", "a", "a.b", "a.b.c.d", TOKEN + ".", "." + TOKEN, TOKEN + "." + TOKEN),
        *(TOKEN + "=", TOKEN + "==", TOKEN + " ", " " + TOKEN, TOKEN + "\n", "Bearer " + TOKEN),
        *(TOKEN.replace(".", " . "), TOKEN.replace(".", "=."), TOKEN.replace(".", "\n.", 1)),
        *(TOKEN[:5] + "\n" + TOKEN[5:], TOKEN[:5] + "!" + TOKEN[5:], TOKEN[:5] + "é" + TOKEN[5:]),
        *(TOKEN.replace("-", "+").replace("_", "/") + "+/", TOKEN + "\x00", '{"payload":""}'),
        *(f"{TOKEN.split('.')[0]}.\ud800.{b64(bytes(64))}", TOKEN + "\udcff", TOKEN + "\u212a"),
        *("x" * (TOKEN_BYTES_MAX + 1), f"{b64('x' * TOKEN_BYTES_MAX)}.{b64('x')}.{b64('x')}"),
    ],
)
def test_what_is_no_token(token: str) -> None:
    assert refusal(token) == "malformed"


def test_no_token_is_missing() -> None:
    assert refusal("") == "missing"


def test_a_huge_token_is_not_looked_at() -> None:
    huge = forged({**HEADER, "kid": SIGNER.kid}, body_of(padding="x" * TOKEN_BYTES_MAX))
    assert refusal(huge) == "malformed"
    prefixes = tuple(f"s3://lake/{number:0200}/" for number in range(100))
    grants = Grants(read=(ReadGrant(dataset="d", version="1", prefixes=prefixes),))
    with pytest.raises(InvalidInput, match="may have 16384"):
        asyncio.run(encode(msgspec.structs.replace(claims_of_task(), grants=grants), SIGNER))


def test_the_length_of_a_token_is_known_before() -> None:
    assert token_bytes(claims_of_task(), kid=SIGNER.kid) == len(TOKEN)


def test_a_key_of_an_odd_name_signs_nothing() -> None:
    with pytest.raises(InvalidInput, match="cannot be the name"):
        token_bytes(claims_of_task(), kid="a b")


@pytest.mark.parametrize("length", range(0, len(TOKEN), 7))
def test_a_truncated_token_is_refused(length: int) -> None:
    assert refusal(TOKEN[:length]) in {"missing", "malformed", "bad signature"}


@settings(max_examples=some(300))
@given(st.integers(0, len(TOKEN) - 1), st.sampled_from("AQgw0_-.=+/ \nzB"))
def test_a_token_with_another_character_is_refused(place: int, letter: str) -> None:
    changed = TOKEN[:place] + letter + TOKEN[place + 1 :]
    assert (refusal(changed) == "") == (changed == TOKEN)


@given(st.text(max_size=200) | st.binary(max_size=200).map(b64))
def test_no_text_breaks_it(text: str) -> None:
    for token in (text, f"{text}.{text}.{text}", f"{TOKEN.split('.')[0]}.{text}.{text}"):
        assert refusal(token) in {"missing", "malformed", "bad signature"}


@pytest.mark.parametrize("part", [0, 1, 2])
def test_the_bits_at_the_end_of_base64_are_zero(part: int) -> None:
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    parts = TOKEN.split(".")
    if len(parts[part]) % 4 == 0:
        # A whole number of bytes: make the last part of the claims longer by one.
        parts = forged(None, body_of(jti="0123456789abcdefghjkmnp")).split(".")
    last = parts[part][-1]
    for letter in letters:
        changed = [*parts]
        changed[part] = parts[part][:-1] + letter
        assert (refusal(".".join(changed)) == "") == (letter == last)


@given(st.binary(max_size=50))
def test_base64_has_one_spelling(data: bytes) -> None:
    text = to_base64url(data)
    assert text == b64(data)
    assert from_base64url(text) == data
    for wrong in (
        text + "=",
        text + "==",
        text + "\n",
        " " + text,
        text + "A" * 4 + "=",
        text + "*",
    ):
        with pytest.raises(ValueError, match="base64url"):
            from_base64url(wrong)


# Signatures


def _with(signature: bytes) -> str:
    return f"{TOKEN.rpartition('.')[0]}.{b64(signature)}"


def test_a_signature_is_in_the_raw_form_only() -> None:
    raw = from_base64url(TOKEN.rpartition(".")[2])
    r, s = int.from_bytes(raw[:32], "big"), int.from_bytes(raw[32:], "big")
    assert refusal(_with(raw)) == ""
    assert refusal(_with(encode_dss_signature(r, s))) == "bad signature"
    for wrong in (raw[:-1], raw + b"\x00", b"\x00" + raw, raw[1:], raw[32:] + raw[:32], raw * 2):
        assert refusal(_with(wrong)) == "bad signature"


@pytest.mark.parametrize("r", [0, 1, ORDER - 1, ORDER, ORDER + 1, 2**256 - 1])
@pytest.mark.parametrize("s", [0, 1, ORDER - 1, ORDER, ORDER + 1, 2**256 - 1])
def test_no_numbers_sign_everything(r: int, s: int) -> None:
    assert refusal(_with(r.to_bytes(32, "big") + s.to_bytes(32, "big"))) == "bad signature"


def test_numbers_beyond_the_order_are_refused() -> None:
    raw = from_base64url(TOKEN.rpartition(".")[2])
    r, s = int.from_bytes(raw[:32], "big"), int.from_bytes(raw[32:], "big")
    for left, right in ((r + ORDER, s), (r, s + ORDER), (ORDER - r, s)):
        if max(left, right) < 2**256:
            changed = left.to_bytes(32, "big") + right.to_bytes(32, "big")
            assert refusal(_with(changed)) == "bad signature"


class _Credulous:
    """A key of a library that takes every signature."""

    def verify(self, signature: bytes, data: bytes, algorithm: object) -> None:
        """It is right."""


def test_a_library_that_forgets_to_look_is_not_relied_upon() -> None:
    credulous: Any = _Credulous()
    zero, one, order = (each.to_bytes(32, "big") for each in (0, 1, ORDER))
    assert is_signed(b"x", signature=one + one, key=credulous)
    wrong = (zero + zero, zero + one, one + zero, order + one, one + order, b"\xff" * 64)
    for signature in (*wrong, b"", one, one + one[1:], one + one + b"\x00", zero + one + one):
        assert not is_signed(b"x", signature=signature, key=credulous)


def test_the_claims_are_not_read_before_the_signature() -> None:
    header = TOKEN.split(".")[0]
    assert refusal(f"{header}.{b64('not json')}.{b64(bytes(64))}") == "bad signature"
    assert refusal(f"{header}.!!.{b64(bytes(64))}") == "bad signature"


def test_the_parts_of_a_token_are_not_shown() -> None:
    shown = repr(read(TOKEN))
    assert SIGNER.kid in shown
    assert not any(part in shown for part in TOKEN.split(".")[1:])


# Keys

JWK = dict(SIGNER.jwk)


@pytest.mark.parametrize(
    "jwk",
    [
        {},
        {**JWK, "kty": "RSA"},
        {**JWK, "kty": "oct", "k": "AAAA"},
        {**JWK, "crv": "P-384"},
        {**JWK, "crv": "secp256k1"},
        {**JWK, "alg": "HS256"},
        {**JWK, "alg": "none"},
        {**JWK, "use": "enc"},
        {**JWK, "d": "AAAA"},
        {**JWK, "x": JWK["y"], "y": JWK["x"]},
        {**JWK, "x": b64(bytes(32)), "y": b64(bytes(32))},
        {**JWK, "x": b64(b"\xff" * 32)},
        {**JWK, "x": JWK["x"] + "="},
        {**JWK, "x": b64(b"\x00" + from_base64url(JWK["x"]))},
        {**JWK, "x": b64(from_base64url(JWK["x"])[1:])},
        {**JWK, "x": 7},
        {name: each for name, each in JWK.items() if name != "y"},
    ],
)
def test_what_is_no_key_for_tokens(jwk: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        public_key(jwk)


def test_a_digest_of_a_digest_is_another_signature() -> None:
    # As KMS servers do that hash what is a digest already.
    message = TOKEN.rpartition(".")[0].encode()
    wrong = asyncio.run(SIGNER.sign(hashlib.sha256(message).digest()))
    assert refusal(_with(wrong)) == "bad signature"
