"""Scopes have one spelling, and nothing that could mean more passes for one."""

from __future__ import annotations

import string
from itertools import product
from urllib.parse import quote, unquote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.datasets.layout import attempt_prefix
from penstock.kernel.errors import InvalidInput
from penstock.tokens.scopes import (
    FILE,
    PREFIX_BYTES_MAX,
    S3,
    Root,
    Scope,
    scope_of_location,
    without_covered,
)

BOTH = (S3, FILE)


def is_refused(text: str) -> bool:
    try:
        Scope.parse(text, schemes=BOTH)
    except InvalidInput:
        return True
    return False


_LETTERS = string.ascii_letters + string.digits + "_.=~:@,!()-"
PARTS = st.text(_LETTERS, min_size=1, max_size=12).filter(
    lambda text: ".." not in text and text != "."
)
PREFIXES = st.lists(PARTS, min_size=1, max_size=5).map(lambda parts: "/".join(parts) + "/")
BUCKETS = st.sampled_from(["lake", "lak", "lakes", "a.b-c", "0lake0"])
SCOPES = st.builds(lambda bucket, prefix: Scope(bucket=bucket, prefix=prefix), BUCKETS, PREFIXES)
# Few letters, so that one is often the beginning of another.
NEAR = st.lists(st.sampled_from(["a", "ab", "b"]), min_size=1, max_size=4).map(
    lambda parts: Scope(bucket="lake", prefix="/".join(parts) + "/")
)


@given(SCOPES)
def test_a_scope_is_what_it_is_written_as(scope: Scope) -> None:
    assert Scope.parse(str(scope)) == scope
    assert str(scope) == f"s3://{scope.bucket}/{scope.prefix}"
    assert scope_of_location(str(scope)) == scope_of_location(str(scope)[:-1]) == scope


@given(st.text(max_size=60))
@example("s3://lake/a/")
@example("s3://lake//")
@example("s3://lake/a//b/")
@example("s3://lake/./a/")
@example("s3:///a/")
def test_whatever_is_taken_is_canonical(text: str) -> None:
    for candidate in (text, f"s3://lake/{text}", f"s3://lake/{text}/", f"s3://{text}/a/"):
        if not is_refused(candidate):
            scope = Scope.parse(candidate, schemes=BOTH)
            assert str(scope) == candidate
            assert scope.prefix.endswith("/")
            assert scope.prefix.isascii()
            assert not set(scope.prefix) & set("*?$%\\{}[]\"'`<>|^#&+; ")
            assert not {"", ".", ".."} & set(scope.prefix[:-1].split("/"))


@given(SCOPES, st.data())
def test_nothing_can_be_put_into_a_scope_that_means_more(scope: Scope, data: st.DataObject) -> None:
    text = str(scope)
    place = data.draw(st.integers(len("s3://") + len(scope.bucket) + 1, len(text)))
    wrong = data.draw(
        st.sampled_from(
            [
                *("..", "/../", "/..", "../", "//", "/./", "*", "?", "**", "${aws:username}", "$"),
                *("\\", "..\\", "%", "%2e%2e", "%2E%2E/", "%2f", "%252e%252e", "%00", "%c0%ae"),
                *("\x00", "\n", "\r\n", "\t", " ", "\x7f", "\x85", "\u200b", "\u202e", "\ufeff"),
                *(
                    "\uff0e\uff0e",
                    "\u2024\u2024",
                    "\uff0f",
                    "\u2215",
                    "\uff0a",
                    "\uff1f",
                    "\u0430",
                    "é",
                    "\ud800",
                    '"',
                    "'",
                    "#",
                    "?x=1",
                ),
            ]
        )
    )
    changed = text[:place] + wrong + text[place:]
    assert is_refused(changed), changed


DOTS = [".", "%2e", "%2E", "%252e", "%u002e", "\u002e", "\uff0e", "\u2024", "\ufe52", "%c0%ae"]


@pytest.mark.parametrize("root", ["s3://lake/a/", "file:///store/a/"])
@pytest.mark.parametrize("end", ["/", "/b/", "%2fb/", "%5cb/", "\\b/", "\uff0fb/", "%00/"])
def test_the_folder_above_is_refused_in_every_encoding(root: str, end: str) -> None:
    for one, other in product(DOTS, DOTS):
        assert is_refused(f"{root}{one}{other}{end}"), (one, other)
        assert is_refused(f"{root}x{one}{other}{end}"), (one, other)


@pytest.mark.parametrize(
    "text",
    [
        *("", "s3", "s3:", "s3:/lake/a/", "s3://", "s3:///", "s3:///a/", "s3://lake", "s3://lake/"),
        *("s3://lake/a", "lake/a/", "/lake/a/", "://lake/a/", " s3://lake/a/", "s3://lake/a/ "),
        *("S3://lake/a/", "s3a://lake/a/", "s3n://lake/a/", "gs://lake/a/", "http://lake/a/"),
        *("s3:\\\\lake\\a\\", "s3://lake\\a/", "s3://lake?/a/", "s3://lake#/a/", "s3://lake/a/#"),
        *("s3://key:secret@lake/a/", "s3://lake:443/a/", "s3://*/a/", "s3://lake*/a/"),
        *("s3://lake//a/", "s3://lake/a//", "s3://lake/a/?versionId=1", "s3://lake%2fa/b/"),
        *("file://", "file:///", "file:////", "file://host/a/", "file://localhost/a/", "file:/a/"),
        *("file:///a", "file:///a//b/", "file:///a/./b/", "file:///a/?x/", "file:///a/#/"),
        *("file:///a%/", "file:///a%2/", "file:///a%2Fb/", "file:///%ff/", "file:///a%00/"),
        *("file:///a*/", "file:///a%2A/", "file:///a%5C/", "file:///a%25/", "file:///a%0A/"),
        *("file:///a%E2%80%8B/", "file:///a%E2%80%AE/", "file:///{a,b}/", "file:///[ab]/"),
        *("file:///\ud800/", "file:///a%ED%A0%80/"),
    ],
)
def test_what_is_no_scope(text: str) -> None:
    assert is_refused(text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("file:///a%2/", "not followed by two hexadecimal digits"),
        ("file:///a%2Fb/", "a slash in it is escaped"),
        ("file:///%ff/", "not UTF-8"),
        ("file:///a%25/", "a wildcard, a backslash or a '%'"),
        ("s3://lake/a..b/", "it has '..' in it"),
        ("s3://lake/", "the name of a folder is missing"),
        ("s3://lake/a", "does not end with a slash"),
        ("s3://L/a/", "no name of a bucket"),
    ],
)
def test_it_is_said_what_is_wrong(text: str, problem: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        Scope.parse(text, schemes=BOTH)
    assert problem in caught.value.message


def test_only_the_schemes_that_are_asked_for() -> None:
    with pytest.raises(InvalidInput, match="does not begin with s3://"):
        Scope.parse("file:///store/a/")
    assert Scope.parse("file:///store/a/", schemes=(FILE,)).bucket == ""
    with pytest.raises(InvalidInput, match="does not begin with file://"):
        Scope.parse("s3://lake/a/", schemes=(FILE,))


@pytest.mark.parametrize(
    "bucket",
    [
        *("ab", "a" * 64, "Lake", "la_ke", "-lake", "lake-", ".lake", "lake.", "la..ke", "la ke"),
        *("192.168.5.4", "300.1.2.3", "xn--lake", "sthree-lake", "amzn-s3-demo-lake"),
        *("lake-s3alias", "lake--ol-s3", "lake.mrap", "lake--x-s3", "lake--table-s3"),
        *("läke", "l\u0430ke", "\uff4cake", "lake\n", "${aws}", "l%61ke", "arn:aws:s3:::lake"),
    ],
)
def test_names_that_no_bucket_has(bucket: str) -> None:
    assert is_refused(f"s3://{bucket}/a/")
    with pytest.raises(InvalidInput):
        Scope(bucket=bucket, prefix="a/")
    with pytest.raises(InvalidInput):
        Root.parse(f"s3://{bucket}")


@pytest.mark.parametrize("bucket", ["lak", "a" * 63, "my.lake-1", "1lake1", "192.168.5.4a"])
def test_names_that_a_bucket_has(bucket: str) -> None:
    assert Scope.parse(f"s3://{bucket}/a/").bucket == bucket


@pytest.mark.parametrize("prefix", ["", "a", "/", "/a/", "a//", "../", "a/../", "*/", "a\n/"])
def test_a_scope_that_is_not_canonical_cannot_be_made(prefix: str) -> None:
    with pytest.raises(InvalidInput):
        Scope(bucket="lake", prefix=prefix)


def test_a_scope_leaves_room_for_a_key() -> None:
    parts = "/".join(["x" * 249] * 4)
    longest = f"{parts}/"[:PREFIX_BYTES_MAX]
    assert Scope(bucket="lake", prefix=longest).prefix == longest
    assert is_refused(f"s3://lake/{longest[:-1]}x/")
    assert is_refused(f"s3://lake/{'x' * 256}/")


def test_an_error_does_not_repeat_all_of_a_long_text() -> None:
    with pytest.raises(InvalidInput) as caught:
        Scope.parse("s3://lake/" + "x" * 100_000)
    assert len(caught.value.message) < 400
    with pytest.raises(InvalidInput) as caught:
        Scope.parse("s3://lake/a\n\x1b[2J/")
    assert caught.value.message.isprintable()


# What covers what


def test_a_folder_covers_itself_and_what_is_below_it() -> None:
    a = Scope.parse("s3://lake/a/")
    below = ["s3://lake/a/", "s3://lake/a/b/", "s3://lake/a/b/c/"]
    beside = ["s3://lake/ab/", "s3://lake/b/", "s3://lake/b/a/", "s3://lakes/a/", "s3://lake/A/"]
    assert all(a.covers(Scope.parse(text)) for text in below)
    assert not any(a.covers(Scope.parse(text)) for text in beside)
    assert not Scope.parse("s3://lake/a/b/").covers(a)
    assert not a.covers(scope_of_location("file:///a/"))


@given(NEAR | SCOPES, NEAR | SCOPES)
def test_covering_is_by_whole_parts(one: Scope, other: Scope) -> None:
    ours, theirs = one.prefix[:-1].split("/"), other.prefix[:-1].split("/")
    assert one.covers(other) == (one.bucket == other.bucket and theirs[: len(ours)] == ours)


@given(st.lists(NEAR | SCOPES, max_size=8))
def test_merged_scopes_hold_what_they_held_and_no_more(scopes: list[Scope]) -> None:
    merged = without_covered(scopes)
    assert set(merged) <= set(scopes)
    assert all(any(each.covers(scope) for each in merged) for scope in scopes)
    assert not any(one.covers(other) for one in merged for other in merged if one != other)
    assert merged == without_covered(reversed(scopes))


# Folders of a machine


@pytest.mark.parametrize(
    ("location", "canonical"),
    [
        ("file:///srv/store/a", "file:///srv/store/a/"),
        ("file:///srv/store/date=1", "file:///srv/store/date=1/"),
        ("file:///srv/store/date%3D1", "file:///srv/store/date=1/"),
        ("file:///srv/store/%7Eall", "file:///srv/store/~all/"),
        ("file:///my%20files/a", "file:///my%20files/a/"),
        ("file:///my files/a", "file:///my%20files/a/"),
        ("file:///jörg/a", "file:///j%C3%B6rg/a/"),
        ("file:///j%c3%b6rg/a", "file:///j%C3%B6rg/a/"),
        ("file:///a%23b/c", "file:///a%23b/c/"),
        ("file:///%61bc/", "file:///abc/"),
    ],
)
def test_a_location_has_one_spelling(location: str, canonical: str) -> None:
    scope = scope_of_location(location)
    assert str(scope) == canonical
    assert Scope.parse(canonical, schemes=BOTH) == scope


@given(st.text(max_size=20))
def test_what_is_taken_of_a_machine_names_one_folder(text: str) -> None:
    spelt = quote(text, safe="", errors="surrogatepass")
    for location in (f"file:///store/{text}", f"file:///store/{spelt}"):
        try:
            scope = scope_of_location(location)
        except InvalidInput:
            continue
        assert scope.prefix == unquote(location.removeprefix("file://")).rstrip("/") + "/"
        assert scope_of_location(str(scope)) == scope
        assert Root.parse("file:///store").covers(scope)


def test_letters_that_look_alike_are_not_the_same_folder() -> None:
    latin, cyrillic = (scope_of_location(f"file:///store/{each}") for each in ("a", "\u0430"))
    assert not latin.covers(cyrillic)
    assert not cyrillic.covers(latin)


# Roots of stores


@pytest.mark.parametrize(
    ("url", "text", "folder"),
    [
        ("s3://lake", "s3://lake/", "s3://lake/datasets/x/"),
        ("s3://lake/", "s3://lake/", "s3://lake/datasets/x/"),
        ("s3://lake/pre/fix", "s3://lake/pre/fix/", "s3://lake/pre/fix/datasets/x/"),
        ("file:///my%20store", "file:///my%20store/", "file:///my%20store/datasets/x/"),
    ],
)
def test_a_root_is_a_bucket_or_a_folder(url: str, text: str, folder: str) -> None:
    root = Root.parse(url)
    assert str(root) == text
    assert str(root.folder("datasets/x")) == str(root.folder("datasets/x/")) == folder
    assert root.covers(root.folder("datasets/x"))
    assert not root.covers(Scope.parse("s3://other/datasets/x/"))


def test_a_roots_neighbour_is_not_below_it() -> None:
    root = Root.parse("s3://lake/pre")
    assert not root.covers(Scope.parse("s3://lake/prefix/a/"))
    assert root.covers(Scope.parse("s3://lake/pre/"))


@pytest.mark.parametrize("key", ["", "/", "../x", "a//b", "a/../../b", "*"])
def test_a_folder_below_a_root_is_judged_too(key: str) -> None:
    with pytest.raises(InvalidInput):
        Root.parse("s3://lake/pre").folder(key)


@pytest.mark.parametrize("url", ["file:///", "s3://lake/a b", "s3://lake/a%20b", "memory://x", ""])
def test_a_root_below_which_nothing_can_be_granted(url: str) -> None:
    with pytest.raises(InvalidInput, match="Nothing can be granted below"):
        Root.parse(url)


@given(st.text(min_size=1, max_size=30), st.text(max_size=30))
@example("a..b", "2013..2014")
@example("..", "...")
def test_every_name_of_a_dataset_can_be_granted(dataset: str, partition: str) -> None:
    key = attempt_prefix(
        dataset, generation="g1", partition_key=partition, attempt=f"7-2-{'x' * 24}"
    )
    scope = Root.parse("s3://lake/pre").folder(key)
    assert scope.prefix == f"pre/{key}/"
