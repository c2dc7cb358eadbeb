"""The `where` of an input: which events of a dataset reach a job.

```
where      = all { "or" all }
all        = term { "and" term }
term       = "(" where ")" | comparison
comparison = "partition_key" ( "=" | "!=" | ["not"] "glob" ) text
           | ( "start" | "end" | "cursor" ) ( "=" | "!=" | "<" | "<=" | ">" | ">=" ) integer
```

Texts stand in single or double quotes, with a doubled quote for a quote. In a glob `*` is any
run of characters and `?` is one; all else is itself. A comparison of a field that an event does
not have is false, also `!=`: so the same structure is rendered to SQL, where a comparison with
NULL is not true, and means the same. There is no `not` over groups, which would break that.

Pure: `parse_where` makes the structure, `where_text` writes it in its one canonical way, and
`accepts` decides in Python what the router decides in SQL.

`stored_filter` is the form that the router's statement decides by: the comparisons as data, and
a path over their results that is made of numbers only: `{"terms": [{"field", "operation",
"value"}, …], "path": "$c1 == true && …"}`. So nothing that a user has written becomes part of a
statement or of a path; a glob becomes the pattern of a LIKE.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from penstock.kernel.text import listed, nearest, shown

CHARACTERS_MAX: Final = 2000
DEPTH_MAX: Final = 16
INTEGER_MIN: Final = -(2**63)
INTEGER_MAX: Final = 2**63 - 1

TEXT_FIELDS: Final = ("partition_key",)
INTEGER_FIELDS: Final = ("start", "end", "cursor")
FIELDS: Final = (*TEXT_FIELDS, *INTEGER_FIELDS)


class FilterOperator(StrEnum):
    """How a field of an event is compared with a value."""

    EQUAL = "="
    UNEQUAL = "!="
    LESS = "<"
    LESS_OR_EQUAL = "<="
    GREATER = ">"
    GREATER_OR_EQUAL = ">="
    GLOB = "glob"
    NOT_GLOB = "not glob"


_TEXT_OPERATIONS: Final = (
    FilterOperator.EQUAL,
    FilterOperator.UNEQUAL,
    FilterOperator.GLOB,
    FilterOperator.NOT_GLOB,
)
_INTEGER_OPERATIONS: Final = tuple(FilterOperator)[:6]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One field against one value; a text for `partition_key`, else an integer of 64 bits."""

    field: str
    operation: FilterOperator
    value: str | int


@dataclass(frozen=True, slots=True)
class And:
    """All of at least two terms hold."""

    terms: tuple[Where, ...]


@dataclass(frozen=True, slots=True)
class Or:
    """At least one of at least two terms holds."""

    terms: tuple[Where, ...]


Where = Comparison | And | Or


class WhereError(ValueError):
    """A text that is not a filter; the message continues the sentence "it …"."""


def parse_where(text: str) -> Where:
    """The structure of a filter."""
    if len(text) > CHARACTERS_MAX:
        raise WhereError(f"is longer than {CHARACTERS_MAX} characters; filter by fewer terms")
    reader = _Reader(list(_tokens(text)))
    where = reader.either(depth=0)
    reader.end()
    # What is written back has to be readable too.
    if len(where_text(where)) > CHARACTERS_MAX:
        raise WhereError(f"is longer than {CHARACTERS_MAX} characters; filter by fewer terms")
    return where


def where_text(where: Where) -> str:
    """The one way in which a filter is written."""
    match where:
        case Comparison(field, operation, value):
            shown_value = value if isinstance(value, int) else _quoted(value)
            return f"{field} {operation} {shown_value}"
        case And(terms):
            return " and ".join(
                f"({where_text(term)})" if isinstance(term, Or) else where_text(term)
                for term in terms
            )
        case Or(terms):
            return " or ".join(map(where_text, terms))


def accepts(where: Where, event: Mapping[str, str | int | None]) -> bool:
    """Whether an event with these fields passes."""
    match where:
        case And(terms):
            return all(accepts(term, event) for term in terms)
        case Or(terms):
            return any(accepts(term, event) for term in terms)
        case Comparison(field, operation, value):
            found = event.get(field)
            if isinstance(found, str) and isinstance(value, str):
                return _holds_text(found, operation, value)
            return (
                isinstance(found, int)
                and isinstance(value, int)
                and _holds(found, operation, value)
            )


def glob_matches(pattern: str, text: str) -> bool:
    """Whether all of a text fits a glob; in time that grows with the product of their lengths."""
    at, star, resumed = 0, -1, 0
    place = 0
    while place < len(text):
        if at < len(pattern) and pattern[at] == "*":
            star, resumed = at, place
            at += 1
        elif at < len(pattern) and pattern[at] in ("?", text[place]):
            at, place = at + 1, place + 1
        elif star >= 0:
            resumed += 1
            at, place = star + 1, resumed
        else:
            return False
    return all(rest == "*" for rest in pattern[at:])


def _quoted(text: str) -> str:
    doubled = text.replace('"', '""')
    return f'"{doubled}"'


def _holds(found: int, operation: FilterOperator, value: int) -> bool:
    results = {
        FilterOperator.EQUAL: found == value,
        FilterOperator.UNEQUAL: found != value,
        FilterOperator.LESS: found < value,
        FilterOperator.LESS_OR_EQUAL: found <= value,
        FilterOperator.GREATER: found > value,
        FilterOperator.GREATER_OR_EQUAL: found >= value,
    }
    return results[operation]


def _holds_text(found: str, operation: FilterOperator, value: str) -> bool:
    match operation:
        case FilterOperator.EQUAL:
            return found == value
        case FilterOperator.UNEQUAL:
            return found != value
        case FilterOperator.GLOB:
            return glob_matches(value, found)
        case _:
            return not glob_matches(value, found)


_TOKEN = re.compile(
    r"""\s*(?:(?P<text>"(?:[^"]|"")*"|'(?:[^']|'')*')"""
    r"""|(?P<integer>[+-]?[0-9]+(?:_[0-9]{3})*)(?![\w.])"""
    r"""|(?P<word>[A-Za-z_]\w*)|(?P<sign><=|>=|!=|==|<>|[=<>()]))"""
)


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str


def _tokens(text: str) -> Iterator[_Token]:
    place, end = 0, len(text.rstrip())
    while place < end:
        found = _TOKEN.match(text, place)
        if found is None:
            raise WhereError(f"cannot be read from {shown(text[place:].strip())} on")
        kind = str(found.lastgroup)
        yield _Token(kind, found[kind])
        place = found.end()


class _Reader:
    """Recursive descent over the tokens; each step takes at least one, and depth is bounded."""

    def __init__(self, tokens: list[_Token]) -> None:
        self._tokens = tokens
        self._place = 0

    def either(self, *, depth: int) -> Where:
        return self._joined("or", depth=depth)

    def end(self) -> None:
        token = self._peek()
        if token is not None:
            raise WhereError(f"goes on with {shown(token.text)} where `and` or `or` is expected")

    def _joined(self, word: str, *, depth: int) -> Where:
        terms: list[Where] = []
        while True:
            part = self._joined("and", depth=depth) if word == "or" else self._term(depth=depth)
            # Nested groups of one kind mean the same as one, and are written as one.
            same = Or if word == "or" else And
            terms.extend(part.terms if isinstance(part, same) else (part,))
            if not self._took("word", word):
                break
        if len(terms) == 1:
            return terms[0]
        return Or(tuple(terms)) if word == "or" else And(tuple(terms))

    def _term(self, *, depth: int) -> Where:
        if not self._took("sign", "("):
            return self._comparison()
        if depth == DEPTH_MAX:
            raise WhereError(f"has more than {DEPTH_MAX} parentheses in each other")
        where = self.either(depth=depth + 1)
        if not self._took("sign", ")"):
            raise WhereError("has a parenthesis that is not closed")
        return where

    def _comparison(self) -> Where:
        field = self._next("a field")
        name = field.text
        if field.kind != "word" or name not in FIELDS:
            meant = nearest(name, FIELDS)
            ask = f"; did you mean {meant}?" if meant else ""
            raise WhereError(f"has {shown(name)} where one of {listed(FIELDS)} is expected{ask}")
        is_text = name in TEXT_FIELDS
        operation = self._operation(name, _TEXT_OPERATIONS if is_text else _INTEGER_OPERATIONS)
        value = self._next("a value")
        if is_text:
            return Comparison(name, operation, _text_of(name, value))
        return Comparison(name, operation, _integer_of(name, value))

    def _operation(self, field: str, allowed: tuple[FilterOperator, ...]) -> FilterOperator:
        token = self._next("a comparison")
        name = token.text
        if name == "not" and self._took("word", "glob"):
            name = "not glob"
        if name not in [each.value for each in allowed]:
            raise WhereError(
                f"compares {field} by {shown(name)}; {field} is compared by {listed(allowed)}"
            )
        return FilterOperator(name)

    def _peek(self) -> _Token | None:
        return self._tokens[self._place] if self._place < len(self._tokens) else None

    def _next(self, what: str) -> _Token:
        token = self._peek()
        if token is None:
            raise WhereError(f"ends where {what} is expected")
        self._place += 1
        return token

    def _took(self, kind: str, text: str) -> bool:
        if self._peek() != _Token(kind, text):
            return False
        self._place += 1
        return True


def _text_of(field: str, token: _Token) -> str:
    if token.kind != "text":
        raise WhereError(
            f"compares {field} with {shown(token.text)}; put the text in quotes,"
            f" as in {field} = 'a'"
        )
    quote = token.text[0]
    return token.text[1:-1].replace(quote * 2, quote)


def _integer_of(field: str, token: _Token) -> int:
    if token.kind != "integer":
        raise WhereError(f"compares {field} with {shown(token.text)}; write a whole number")
    value = int(token.text)
    if not INTEGER_MIN <= value <= INTEGER_MAX:
        raise WhereError(f"compares {field} with a number of more than 64 bits")
    return value


def stored_filter(where: Where) -> Mapping[str, Any]:
    """What is stored of a filter."""
    terms: list[Mapping[str, Any]] = []
    path = _path(where, terms)
    return {"terms": terms, "path": path}


def _path(where: Where, terms: list[Mapping[str, Any]]) -> str:
    match where:
        case Comparison(field, operation, value):
            is_glob = operation in (FilterOperator.GLOB, FilterOperator.NOT_GLOB)
            stored = _like(str(value)) if is_glob else value
            terms.append({"field": field, "operation": operation.value, "value": stored})
            # Numbered from 1, as the statement counts them.
            return f"$c{len(terms)} == true"
        case And(parts):
            return " && ".join(f"({_path(part, terms)})" for part in parts)
        case Or(parts):
            return " || ".join(f"({_path(part, terms)})" for part in parts)


def _like(glob: str) -> str:
    escaped = glob.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    return escaped.replace("*", "%").replace("?", "_")
