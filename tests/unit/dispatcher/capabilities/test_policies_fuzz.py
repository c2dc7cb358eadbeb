"""Folders, plain and hostile: what a policy allows is what its folders hold.

Texts are made from pieces that mean something somewhere: to IAM, to a shell, to a URL, to a file
system. Those that are scopes go into policies, a handful each; an evaluator that shares nothing
with what makes them (`tests.iam`) is asked about keys inside, beside and far from every one. The
answer has to be the same as that of a plain look at the texts: never more, never less.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final

import pytest

from penstock.dispatcher.capabilities.credentials import POLICY_CHARACTERS_MAX, session_policy
from penstock.kernel.entropy import Entropy, seeded_entropy
from penstock.kernel.errors import CredentialsRefused, InvalidInput
from penstock.tokens.scopes import Scope
from tests.iam import Policy
from tests.sizes import SIZES

SEED: Final = 20_260_117
SCOPES: Final = SIZES.folders_of_a_policy
PARTS: Final = 4
"""Tests that share them, so that a slow machine has time for each."""
IN_A_POLICY_MAX: Final = 16

_BUCKETS: Final = ("lake", "lake", "lake", "lake", "lake", "lake", "lake2", "lak", "lake.eu")
_PLAIN: Final = (
    *("a", "ab", "a-b", "a.b", "a~b", "abc", "b", "datasets", "scratch", "trips", "0", "=", "~all"),
    *("year=2026", "7-1-0123456789abcdef01234567", "a:b", "a@b", "a,b", "(a)", "a!", "..a"[2:]),
    *("A", "~2E~2E", "manifest.json", "-", "_", "a_b", "aa", "datasetsa", "7-1-0", "~"),
)
_HOSTILE: Final = (
    *("*", "?", "a*", "*a", "a?", "[a]", "{a,b}", "${aws:username}", "${*}", "${?}", "${$}", "$"),
    *("..", ".", "", "...", "a..b", "%2e%2e", "%2E%2E", "%252e", "%00", "%2f", "a%2Fb", "%", "$a"),
    *("\\", "\\..\\", "a\\b", "a\x00b", "a\nb", "a\rb", "a\tb", "\x7f", "\x1b[0m", " ", " a", "a "),
    # Full-width dots and slashes and other letters that look like plain ones, and unseen ones.
    *("\uff0e\uff0e", "\u2024\u2024", "\uff0f", "\u2215", "\uff41", "\u0430", "\U0001d4b6"),
    *("\u202ea", "a\u200b", "\ufeff", "\xe9", "e\u0301", "\ud800", "a\x85", "\u2028"),
    *('"', '","Resource":"*', "'", "a;b", "a&b", "a#b", "a+b", "<a>", "a|b", "`a`", "a^b", "a%b"),
)
_BEGINNINGS: Final = (
    "S3://",
    "s3:/",
    "s3a://",
    "file://",
    "https://",
    "",
    "//",
    "s3://*",
    " s3://",
)
_SUFFIXES: Final = ("", "x", "part-0.parquet", "a/x", "*", "?", "../x", "${aws:userid}", "é", "b/")
# What a scope says, read without what is to be judged.
_READ: Final = re.compile(r"s3://([a-z0-9.-]+)/((?:[^/]+/)+)")


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder as its text says it."""

    bucket: str
    prefix: str
    scope: Scope


def texts(chance: Entropy) -> Iterator[str]:
    """Texts without an end. Most are scopes; in a third of them something is hostile."""
    bits = chance.getrandbits
    while True:
        word = bits(40)
        parts = [_PLAIN[(word >> shift) % len(_PLAIN)] for shift in range(0, 6 * (1 + word % 4), 6)]
        beginning, ending, bucket = "s3://", "/", _BUCKETS[(word >> 24) % len(_BUCKETS)]
        match (word >> 30) % 24:
            case 0 | 1 | 2 | 3 | 4:
                parts[(word >> 35) % len(parts)] = chance.choice(_HOSTILE)
            case 5:
                beginning = chance.choice(_BEGINNINGS)
            case 6:
                ending = chance.choice(("", "//", "/*", "*", "/.", "/..", "?"))
            case 7:
                bucket = chance.choice(("", "*", "Lake", "la*", "..", "lake:1", "u@lake", "l", "é"))
            case 8:
                parts = []
        yield f"{beginning}{bucket}/{'/'.join(parts)}{ending if parts else ''}"


def folders(some: Iterator[str]) -> tuple[list[Folder], int]:
    """Those of some texts that are scopes, and how many were refused."""
    found: list[Folder] = []
    refused = 0
    for text in some:
        try:
            scope = Scope.parse(text)
        except InvalidInput:
            refused += 1
            continue
        read = _READ.fullmatch(text)
        assert read is not None, text
        assert str(scope) == text, text
        found.append(Folder(read[1], read[2], scope))
    return found, refused


def places(some: list[Folder]) -> dict[str, tuple[str, ...]]:
    """The prefixes of folders, by their buckets."""
    found: dict[str, tuple[str, ...]] = {}
    for each in some:
        found[each.bucket] = (*found.get(each.bucket, ()), each.prefix)
    return found


def probes(some: list[Folder], chance: Entropy) -> Iterator[tuple[str, str]]:
    """Buckets and keys: inside, on the edge, next door, and elsewhere."""
    for each in some:
        word = chance.getrandbits(16)
        prefix = each.prefix
        yield each.bucket, prefix + _SUFFIXES[word % len(_SUFFIXES)]
        match (word >> 4) % 6:
            case 0:
                yield each.bucket, prefix[:-1]
            case 1:
                yield each.bucket, f"{prefix[:-1]}b/x"
            case 2:
                yield each.bucket, prefix[: len(prefix) // 2] + "x"
            case 3:
                yield f"{each.bucket}2", f"{prefix}x"
            case 4:
                yield each.bucket, f"x/{prefix}x"
            case _:
                yield each.bucket, prefix.upper() + "x"


def judge(reads: list[Folder], writes: list[Folder], chance: Entropy) -> int:
    """How many requests were answered as they should, which is all of them."""
    text = session_policy(
        read=[each.scope for each in reads], write=[each.scope for each in writes]
    )
    assert len(text) <= POLICY_CHARACTERS_MAX
    policy = Policy(text)
    both = reads + writes
    to_read, to_write, to_list = places(reads), places(writes), places(both)
    count = 0
    for bucket, key in probes(both, chance):
        arn = f"arn:aws:s3:::{bucket}/{key}"
        of_bucket = f"arn:aws:s3:::{bucket}"
        said = (
            policy.allows("s3:GetObject", arn),
            policy.allows("s3:PutObject", arn),
            policy.allows("s3:ListBucket", of_bucket, {"s3:prefix": key}),
        )
        meant = (
            key.startswith(to_read.get(bucket, ())),
            key.startswith(to_write.get(bucket, ())),
            key.startswith(to_list.get(bucket, ())),
        )
        assert said == meant, (text, bucket, key)
        count += 1
    first = both[0]
    inside = f"arn:aws:s3:::{first.bucket}/{first.prefix}x"
    assert not policy.allows("s3:DeleteObject", inside)
    assert not policy.allows("s3:PutObjectAcl", inside)
    assert not policy.allows("s3:ListBucket", f"arn:aws:s3:::{first.bucket}")
    assert not policy.allows("s3:ListBucket", f"arn:aws:s3:::{first.bucket}", {"s3:prefix": ""})
    return count


@pytest.mark.proof
@pytest.mark.parametrize("number", range(PARTS))
def test_folders_allow_what_they_hold_and_nothing_else(number: int) -> None:
    chance = seeded_entropy(SEED + number)
    made = texts(chance)
    seen = refused = asked = policies = too_long = 0
    while seen < SCOPES / PARTS:
        count = 1 + chance.getrandbits(8) % IN_A_POLICY_MAX
        some, no = folders(islice(made, count))
        seen += count
        refused += no
        if not some:
            continue
        middle = chance.getrandbits(8) % (len(some) + 1)
        try:
            asked += judge(some[:middle], some[middle:], chance)
        except CredentialsRefused as error:
            if error.kind != "too many folders":
                raise
            too_long += 1
        policies += 1
    # That the fuzz has met what it is for: about a quarter of the texts are no scopes.
    assert seen * 0.1 < refused < seen * 0.5
    assert policies > SCOPES * 0.08 / PARTS
    assert too_long < policies * 0.05
    assert asked > seen


def test_longer_ones_are_refused_only_if_they_do_not_fit() -> None:
    chance = seeded_entropy(SEED + PARTS)
    fitting = refused = 0
    for _ in range(2_000):
        names = [f"{chance.getrandbits(300):x}" for _ in range(1 + chance.getrandbits(8) % 14)]
        scopes = [Scope(bucket="lake", prefix=f"datasets/{each}/") for each in names]
        some = [Folder(each.bucket, each.prefix, each) for each in scopes]
        middle = chance.getrandbits(8) % (len(some) + 1)
        # What has to be said of the folders, and what has to be said once.
        length = sum(2 * len(each.prefix) + len("arn:aws:s3:::lake/*''*'',,") for each in some)
        once = 190 + (60 if middle else 0) + (130 if middle < len(some) else 0)
        try:
            judge(some[:middle], some[middle:], chance)
        except CredentialsRefused:
            refused += 1
            assert length + once > POLICY_CHARACTERS_MAX
        else:
            fitting += 1
    assert min(fitting, refused) > 100
