"""The evaluator that judges our policies is judged by cases of its own."""

from __future__ import annotations

import json
import re

import pytest

from penstock.kernel.entropy import seeded_entropy
from tests.iam import Policy


def policy(*statements: dict[str, object]) -> Policy:
    return Policy(json.dumps({"Version": "2012-10-17", "Statement": list(statements)}))


def allowing(resource: str, **fields: object) -> Policy:
    return policy({"Effect": "Allow", "Action": "s3:GetObject", "Resource": resource, **fields})


@pytest.mark.parametrize(
    ("pattern", "text", "is_match"),
    [
        ("a", "a", True),
        ("a", "ab", False),
        ("a*", "a", True),
        ("a*", "ab/c\nd", True),
        ("a*", "ba", False),
        ("a*b*c", "a-b-c", True),
        ("a*b*c", "acb", False),
        ("a*bc*c", "abc", False),
        ("a?c", "abc", True),
        ("a?c", "ac", False),
        ("a${*}", "a*", True),
        ("a${*}", "ab", False),
        ("a${?}*", "a?b", True),
        ("a${$}", "a$", True),
        ("${aws:username}/*", "me/x", True),
        ("${aws:username}/*", "you/x", False),
        ("${nobody}*", "x", False),
    ],
)
def test_patterns(pattern: str, text: str, is_match: bool) -> None:
    assert allowing(pattern).allows("s3:GetObject", text, {"aws:username": "me"}) is is_match


def test_the_quick_way_is_the_slow_way() -> None:
    chance = seeded_entropy(7)
    for _ in range(20_000):
        pattern = "".join(chance.choice("ab*") for _ in range(chance.randrange(6)))
        text = "".join(chance.choice("ab") for _ in range(chance.randrange(6)))
        meant = re.fullmatch(pattern.replace("*", ".*"), text) is not None
        assert allowing(pattern).allows("s3:GetObject", text) is meant, (pattern, text)


def test_a_denial_wins() -> None:
    found = policy(
        {"Effect": "Allow", "Action": "s3:*", "Resource": "*"},
        {"Effect": "Deny", "NotAction": "S3:getobject", "Resource": "*"},
        {"Effect": "Deny", "Action": "*", "NotResource": ["a/*", "b"]},
    )
    assert found.allows("s3:GetObject", "a/x")
    assert found.denies("s3:PutObject", "a/x")
    assert found.denies("s3:GetObject", "c")
    assert not found.allows("s3:GetObject", "c")
    assert found.verdict("sts:AssumeRole", "a/x") == "Deny"


def test_conditions() -> None:
    like = allowing("*", Condition={"StringLike": {"s3:prefix": ["a/*", "b"]}})
    assert like.allows("s3:GetObject", "x", {"s3:prefix": "a/"})
    assert like.allows("s3:GetObject", "x", {"s3:prefix": "b"})
    assert not like.allows("s3:GetObject", "x", {"s3:prefix": "a"})
    assert not like.allows("s3:GetObject", "x")
    unlike = allowing("*", Condition={"StringNotLike": {"s3:prefix": "a/*"}})
    assert unlike.allows("s3:GetObject", "x")
    assert not unlike.allows("s3:GetObject", "x", {"s3:prefix": "a/b"})
    both = allowing("*", Condition={"Bool": {"tls": "true"}, "StringEquals": {"k": "v"}})
    assert both.allows("s3:GetObject", "x", {"tls": "true", "k": "v"})
    assert not both.allows("s3:GetObject", "x", {"tls": "true", "k": "V"})
    assert not both.allows("s3:GetObject", "x", {"k": "v"})


def test_principals() -> None:
    found = allowing("*", Principal={"AWS": ["me", "you"]})
    assert found.allows("s3:GetObject", "x", by="me")
    assert not found.allows("s3:GetObject", "x", by="them")
    assert allowing("*", Principal="*").allows("s3:GetObject", "x", by="them")


@pytest.mark.parametrize(
    "wrong",
    [
        {"Effect": "allow", "Action": "a"},
        {"Effect": "Allow", "Action": "a", "Unless": "b"},
        {"Effect": "Allow"},
        {"Effect": "Allow", "Action": "a", "Condition": {"NumericEquals": {"a": "1"}}},
    ],
)
def test_what_it_does_not_know_is_an_error(wrong: dict[str, object]) -> None:
    with pytest.raises((AssertionError, KeyError)):
        policy(wrong)
