"""Folders as grants name them: one spelling for each, and nothing that could mean more.

A scope is a folder of a bucket, `s3://BUCKET/PREFIX/`, or of a machine, `file:///PATH/`. It always
ends with a slash, and it holds what lies below it: `s3://b/a/` does not hold `s3://b/ab/`. There is
no scope of a whole bucket. Two scopes are of one folder if and only if their texts are the same.

What has a second reading somewhere is refused, never repaired: `..` anywhere, empty parts and `.`,
wildcards and the variables of policies, backslashes, control characters, what is not ASCII and
percent signs in a bucket (there a `%` is a character of the key, which some servers decode), a name
that no bucket can have. In a bucket the characters are those of a short list.

In a folder of a machine names are people's own: letters of any language and spaces are allowed, and
`%` and two hexadecimal digits are read once, as every reader of locations does; what they hide is
judged like the rest. Letters that look like ASCII ones to those who normalize (as in full-width
dots and slashes) are refused. Links in a file system are not looked at here: nothing is.

Pure. Used by whoever derives grants, makes policies of them, or judges what was written where.
"""

from __future__ import annotations

import ipaddress
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Self
from urllib.parse import quote, unquote_to_bytes

from penstock.kernel.errors import InvalidInput

S3: Final = "s3"
FILE: Final = "file"
PREFIX_BYTES_MAX: Final = 1_000
"""Below the 1,024 bytes of a key, so that there can be one below every folder."""
PART_BYTES_MAX: Final = 255

_PLAIN: Final = re.compile(r"[A-Za-z0-9_.=~:@,!()-]+")
_WILD: Final = re.compile(r"[*?\[\]{}\\%]")
_ESCAPE: Final = re.compile(r"%(?![0-9A-Fa-f]{2})")
_BUCKET: Final = re.compile(r"[a-z0-9](?:[a-z0-9-]|\.(?!\.)){1,61}[a-z0-9]")
# Names that Amazon keeps for itself, and names of what is reached like a bucket and is none.
_BUCKET_BEGINS: Final = ("xn--", "sthree-", "amzn-s3-demo-")
_BUCKET_ENDS: Final = ("-s3alias", "--ol-s3", ".mrap", "--x-s3", "--table-s3")
_SHOWN_MAX: Final = 200
_FORM: Final = "A scope is a folder, as in s3://BUCKET/PREFIX/."


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """A folder in its only spelling. One that is not canonical cannot be made."""

    bucket: str
    """Empty for a folder of a machine."""
    prefix: str
    """Ends with a slash. For a machine it begins with one, and is the path itself, decoded."""
    scheme: str = S3

    def __post_init__(self) -> None:
        problem = _place_problem(self.scheme, self.bucket) or _prefix_problem(
            self.scheme, self.prefix
        )
        if problem:
            raise InvalidInput(f"{_shown(str(self))} is no scope: {problem}.", hint=_FORM)

    @classmethod
    def parse(cls, text: str, *, schemes: Sequence[str] = (S3,)) -> Self:
        """The scope of a text, or `InvalidInput` with what is wrong in it.

        >>> str(Scope.parse("s3://lake/datasets/trips/"))
        's3://lake/datasets/trips/'
        """
        scheme, bucket, prefix, problem = _read(text, schemes)
        if problem:
            raise InvalidInput(f"{_shown(text)} is no scope: {problem}.", hint=_FORM)
        return cls(scheme=scheme, bucket=bucket, prefix=prefix)

    def __str__(self) -> str:
        return _written(self.scheme, self.bucket, self.prefix)

    def covers(self, other: Scope) -> bool:
        """Whether a folder is this one or lies below it."""
        same_place = (self.scheme, self.bucket) == (other.scheme, other.bucket)
        return same_place and other.prefix.startswith(self.prefix)


@dataclass(frozen=True, slots=True, kw_only=True)
class Root:
    """Where a store is: a folder, or a whole bucket. It is never granted, so it is no scope."""

    bucket: str
    prefix: str
    """Empty, or ends with a slash."""
    scheme: str

    @classmethod
    def parse(cls, url: str) -> Self:
        """The root of a store's URL, without its options; the slash at its end may be missing."""
        text = url if url.endswith("/") else f"{url}/"
        scheme, bucket, prefix, problem = _read(text, (S3, FILE))
        problem = problem or _place_problem(scheme, bucket)
        if not problem and (prefix or scheme == FILE):
            problem = _prefix_problem(scheme, prefix)
        if problem:
            raise InvalidInput(
                f"Nothing can be granted below the store {_shown(url)}: {problem}.",
                hint="Choose s3://BUCKET/PREFIX or file:///FOLDER with a plain name.",
            )
        return cls(scheme=scheme, bucket=bucket, prefix=prefix)

    def __str__(self) -> str:
        return _written(self.scheme, self.bucket, self.prefix)

    def covers(self, scope: Scope) -> bool:
        """Whether a folder is the store's own or lies below it."""
        same_place = (self.scheme, self.bucket) == (scope.scheme, scope.bucket)
        return same_place and scope.prefix.startswith(self.prefix)

    def folder(self, key: str) -> Scope:
        """The folder of this key, which is relative to the root; its last slash may be missing."""
        name = key if key.endswith("/") else f"{key}/"
        return Scope(scheme=self.scheme, bucket=self.bucket, prefix=self.prefix + name)


def scope_of_location(location: str) -> Scope:
    """The folder at a location, which may or may not end with a slash, in a bucket or not."""
    text = location if location.endswith("/") else f"{location}/"
    return Scope.parse(text, schemes=(S3, FILE))


def without_covered(scopes: Iterable[Scope]) -> tuple[Scope, ...]:
    """The scopes, each once and sorted, without those that another one covers.

    Together they hold exactly what all of them held.
    """
    kept: list[Scope] = []
    # A folder sorts right before what lies below it: the last one kept is the only candidate.
    for each in sorted(set(scopes), key=lambda one: (one.scheme, one.bucket, one.prefix)):
        if not kept or not kept[-1].covers(each):
            kept.append(each)
    return tuple(kept)


def _read(text: str, schemes: Sequence[str]) -> tuple[str, str, str, str]:
    """Scheme, bucket, prefix and what is wrong; judged only so far as to tell them apart."""
    scheme, colon, rest = text.partition("://")
    if not colon or scheme not in schemes:
        wanted = " or ".join(f"{each}://" for each in schemes)
        return "", "", "", f"it does not begin with {wanted}"
    bucket, _, prefix = rest.partition("/")
    if not prefix.endswith("/") and prefix:
        return scheme, bucket, prefix, "it does not end with a slash"
    if scheme == FILE:
        path, problem = _decoded(f"/{prefix}")
        return scheme, bucket, path, problem
    return scheme, bucket, prefix, ""


def _decoded(path: str) -> tuple[str, str]:
    """A path of a `file://` URL as the file system has it, and what is wrong with its writing."""
    if _ESCAPE.search(path):
        return path, "a '%' in it is not followed by two hexadecimal digits"
    if "?" in path or "#" in path:
        return path, "it has a '?' or a '#'"
    if not path.isascii() and not _is_encodable(path):
        return path, "it is not valid Unicode"
    try:
        plain = unquote_to_bytes(path).decode()
    except UnicodeDecodeError:
        return path, "what is escaped in it is not UTF-8"
    if plain.count("/") != path.count("/"):
        return path, "a slash in it is escaped"
    return plain, ""


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _written(scheme: str, bucket: str, prefix: str) -> str:
    if scheme == FILE:
        # `surrogatepass`, because what is refused is shown too.
        return f"{FILE}://{bucket}{quote(prefix, safe='/=', errors='surrogatepass')}"
    return f"{scheme}://{bucket}/{prefix}"


def _place_problem(scheme: str, bucket: str) -> str:
    if scheme == FILE:
        return "it names another machine" if bucket else ""
    if scheme != S3:
        return f"it does not begin with {S3}://"
    if not _BUCKET.fullmatch(bucket):
        return "that is no name of a bucket"
    if bucket.startswith(_BUCKET_BEGINS) or bucket.endswith(_BUCKET_ENDS) or _is_address(bucket):
        return "no bucket can have that name"
    return ""


def _is_address(bucket: str) -> bool:
    try:
        ipaddress.IPv4Address(bucket)
    except ValueError:
        # Also what only looks like one, as 300.1.2.3 does.
        return re.fullmatch(r"[0-9]+(?:\.[0-9]+){3}", bucket) is not None
    return True


def _prefix_problem(scheme: str, prefix: str) -> str:
    path = prefix
    if scheme == FILE:
        if not prefix.startswith("/"):
            return "its path does not begin with a slash"
        path = prefix[1:]
    if not path or path == "/":
        return "the name of a folder is missing"
    if not path.endswith("/"):
        return "it does not end with a slash"
    if ".." in path:
        return "it has '..' in it"
    if not _is_encodable(path):
        return "it is not valid Unicode"
    if len(path.encode()) > PREFIX_BYTES_MAX:
        return f"it has more than {PREFIX_BYTES_MAX} bytes"
    for part in path[:-1].split("/"):
        if problem := _part_problem(scheme, part):
            return problem
    return ""


@lru_cache(maxsize=4096)
def _part_problem(scheme: str, part: str) -> str:
    if part in ("", "."):
        return "it has an empty part or '.' between slashes"
    if len(part.encode()) > PART_BYTES_MAX:
        return f"it has more than {PART_BYTES_MAX} bytes between slashes"
    if _PLAIN.fullmatch(part):
        return ""
    if _WILD.search(part):
        return "it has a wildcard, a backslash or a '%'"
    if scheme == S3:
        return "it has a control or special character"
    if scheme == FILE and not all(map(_is_visible, part)):
        return "it has an invisible character"
    if scheme == FILE and _is_disguised(part):
        return "it has a character that looks like another"
    return ""


def _is_visible(letter: str) -> bool:
    return letter == " " or unicodedata.category(letter)[0] not in "CZ"


def _is_disguised(part: str) -> bool:
    """Whether a letter that is not ASCII becomes one when the text is normalized."""
    return any(
        not letter.isascii()
        and any(each.isascii() for each in unicodedata.normalize("NFKC", letter))
        for letter in part
    )


def _shown(text: str) -> str:
    shown = repr(text[:_SHOWN_MAX])
    return shown if len(text) <= _SHOWN_MAX else f"{shown}…"
