"""What is wrong with the shape of a value, in our own words instead of the library's.

msgspec tells what it expected, and where, for programmers: types, lengths as inequalities, regular
expressions. `wrong_shape` makes the field and a sentence's end of that, as in ``("limit", "has to
be 1 or more")``; the caller says whose field it is. What is not known here is told as it came.
Called where people's input is decoded: requests to a dispatcher, and settings of runtimes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

_AT: Final = re.compile(r"(?s)(.*) - at `(?:key in )?(.*)`")
_NOUNS: Final = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "object": "an object",
    "array": "a list",
    "null": "null",
}
_EACH: Final = {"str": "character", "array": "element", "object": "field", "bytes": "byte"}
# Of the patterns that there are; each is known by a part that no other has.
_FORMS: Final = {
    r"\u0000": "must not contain the character NUL",
    "0-9a-f": "has to be a UUID in lower case",
}


def wrong_shape(error: msgspec.ValidationError, *, choices: Iterable[str] = ()) -> tuple[str, str]:
    """The field, empty for the value as a whole, and what is wrong with it.

    `choices` are the words that the field may be, if it is one of some.
    """
    found = _AT.fullmatch(str(error))
    said, path = (found[1], found[2]) if found else (str(error), "$")
    field = path.removeprefix("$").removeprefix(".")
    for pattern, words in _SENTENCES:
        if (match := pattern.fullmatch(said)) is not None:
            if match.re is _MISSING or match.re is _UNKNOWN:
                # They name a field below the path.
                field = f"{field}.{match[1]}" if field else match[1]
            return field, words(match)
    if said.startswith("Invalid enum value"):
        known = ", ".join(choices)
        return field, f"has to be one of {known}" if known else "is not one of the words it may be"
    return field, f"is wrong: {said[:1].lower()}{said[1:].rstrip('.')}"


def _type(match: re.Match[str]) -> str:
    wanted = " or ".join(_NOUNS.get(each, each) for each in match[1].split(" | "))
    return f"has to be {wanted}, not {_NOUNS.get(match[2], match[2])}"


def _length(match: re.Match[str]) -> str:
    count = int(match[3])
    noun = _EACH.get(match[1], "part")
    end = "at least" if match[2] == ">=" else "at most"
    return f"has to have {count:,} {noun}{'' if count == 1 else 's'} {end}"


def _bound(match: re.Match[str]) -> str:
    ends = {">=": "{} or more", "<=": "{} or less", ">": "more than {}", "<": "less than {}"}
    return f"has to be {ends[match[2]].format(match[3])}"


def _form(match: re.Match[str]) -> str:
    known = (words for part, words in _FORMS.items() if part in match[1])
    return next(known, "does not have the form that it has to have")


_MISSING: Final = re.compile(r"Object missing required field `(.*)`")
_UNKNOWN: Final = re.compile(r"Object contains unknown field `(.*)`")
_SENTENCES: Final[tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], str]], ...]] = (
    (_MISSING, lambda _: "is missing"),
    (_UNKNOWN, lambda _: "is not a field that there is"),
    (re.compile(r"Expected `(.+)`, got `(.+)`"), _type),
    (re.compile(r"Expected `(\w+)` of length (>=|<=) (\d+)"), _length),
    (re.compile(r"Expected `(\w+)` (>=|<=|>|<) (\S+)"), _bound),
    (re.compile(r"(?s)Expected `str` matching regex (.*)"), _form),
    (re.compile(r"(Integer|Number) (?:value )?out of range"), lambda _: "is too large a number"),
    (re.compile(r"Invalid RFC3339 encoded (\w+)"), lambda match: f"is not a {match[1]}"),
)
