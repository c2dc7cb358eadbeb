"""What is wrong with a value is told in our words, whatever the library says."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import msgspec
import pytest
from msgspec import Meta

from penstock.kernel.validation import wrong_shape
from penstock.protocol.base import Name, PartitionKey, Uuid


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Part(msgspec.Struct, forbid_unknown_fields=True):
    number: Annotated[int, Meta(ge=1)]


class Thing(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    limit: Annotated[int, Meta(ge=1, le=1000)] = 1
    share: Annotated[float, Meta(gt=0, lt=1)] = 0.5
    key: PartitionKey = "k"
    name: Name = "n"
    uuid: Uuid = "0" * 8
    colour: Colour | None = None
    parts: Annotated[list[Part], Meta(max_length=2)] = []
    is_on: bool = False
    odd: Annotated[str, Meta(pattern="^x+$")] = "x"
    maybe: int | None = None


@pytest.mark.parametrize(
    ("said", "field", "words"),
    [
        ({"limit": 0}, "limit", "has to be 1 or more"),
        ({"limit": 1001}, "limit", "has to be 1000 or less"),
        ({"limit": "x"}, "limit", "has to be a whole number, not a text"),
        ({"share": 0}, "share", "has to be more than 0.0"),
        ({"share": 1.0}, "share", "has to be less than 1.0"),
        ({"key": ""}, "key", "has to have 1 character at least"),
        ({"key": "x" * 501}, "key", "has to have 500 characters at most"),
        ({"name": "a\0"}, "name", "must not contain the character NUL"),
        ({"uuid": "X" * 36}, "uuid", "has to be a UUID in lower case"),
        ({"colour": "green"}, "colour", "has to be one of red, blue"),
        ({"parts": [{}]}, "parts[0].number", "is missing"),
        ({"parts": [{"number": 1, "x": 1}]}, "parts[0].x", "is not a field that there is"),
        ({"parts": [{"number": 1}] * 3}, "parts", "has to have 2 elements at most"),
        ({"parts": {}}, "parts", "has to be a list, not an object"),
        ({"is_on": 1}, "is_on", "has to be true or false, not a whole number"),
        ({"odd": "y"}, "odd", "does not have the form that it has to have"),
        ({"maybe": "y"}, "maybe", "has to be a whole number or null, not a text"),
        ({"nope": 1}, "nope", "is not a field that there is"),
        ([], "", "has to be an object, not a list"),
    ],
)
def test_what_is_wrong(said: Any, field: str, words: str) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.json.decode(msgspec.json.encode(said), type=Thing)
    assert wrong_shape(caught.value, choices=list(Colour)) == (field, words)


def test_what_is_not_known_is_told_as_it_came() -> None:
    error = msgspec.ValidationError("Something new - at `$.x`")
    assert wrong_shape(error) == ("x", "is wrong: something new")
    enum = msgspec.ValidationError("Invalid enum value 'y' - at `$.x`")
    assert wrong_shape(enum) == ("x", "is not one of the words it may be")
