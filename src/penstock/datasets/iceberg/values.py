"""Values of Iceberg's primitive types: as bytes in manifests, and in JSON. Pure.

In Python a number, a day, and a moment in microseconds, both since 1970, are an `int`; as in
`datasets.bounds`, from which most of them come. What cannot be said in a form is None there, or
raises `InvalidInput` where somebody else has said it.
"""

from __future__ import annotations

import math
import struct
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any, Final, TypeAlias

from penstock.datasets.bounds import ColumnKind
from penstock.datasets.iceberg.schemas import FieldType, scale_of
from penstock.kernel.errors import InvalidInput

TableValue: TypeAlias = bool | int | float | str | Decimal | bytes

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_DAY: Final = date(1970, 1, 1)
_FORMS: Final = {
    "int": ("<i", (4,)),
    "date": ("<i", (4,)),
    "long": ("<q", (4, 8)),
    "timestamp": ("<q", (8,)),
    "timestamptz": ("<q", (8,)),
    "float": ("<f", (4,)),
    "double": ("<d", (4, 8)),
}
_KINDS: Final = {
    "int": ColumnKind.NUMBER,
    "long": ColumnKind.NUMBER,
    "date": ColumnKind.DAY,
    "timestamptz": ColumnKind.MOMENT,
    "timestamp": ColumnKind.LOCAL_MOMENT,
    "double": ColumnKind.DOUBLE,
    "string": ColumnKind.TEXT,
}
_NUMBERS: Final = ("int", "long")
_FRACTIONS: Final = ("float", "double")
_MOMENTS: Final = ("timestamp", "timestamptz")


def kind_in(type_: FieldType) -> ColumnKind | None:
    """How the values of a type are compared; None if they have no bounds."""
    if not isinstance(type_, str):
        return None
    return ColumnKind.DECIMAL if type_.startswith("decimal(") else _KINDS.get(type_)


def to_bytes(value: TableValue, type_: str) -> bytes | None:
    """A value as manifests have it; None for one that is not of the type."""
    try:
        if type_ in _FORMS:
            form, _ = _FORMS[type_]
            is_float = type_ in _FRACTIONS
            if isinstance(value, bool) or not isinstance(value, (int, float) if is_float else int):
                return None
            return struct.pack(form, value)
        if type_.startswith("decimal("):
            return _from_unscaled(value, scale_of(type_))
    except (struct.error, OverflowError, ArithmeticError):
        return None
    match type_, value:
        case "boolean", bool():
            return b"\x01" if value else b"\x00"
        case "string", str():
            return value.encode() if _is_text(value) else None
        case "binary", bytes():
            return value
    return None


def from_bytes(body: bytes, type_: str) -> TableValue | None:
    """What `to_bytes` has made, also of a type that this one was promoted from."""
    if type_ in _FORMS:
        form, sizes = _FORMS[type_]
        if len(body) not in sizes:
            return None
        narrow = {"<q": "<i", "<d": "<f"}
        form = narrow.get(form, form) if len(body) == 4 else form
        value: TableValue = struct.unpack(form, body)[0]
        return value
    if type_.startswith("decimal("):
        unscaled = int.from_bytes(body, "big", signed=True)
        if abs(unscaled) >= 10**38:
            return None
        # Arithmetic would round to the digits of the context.
        sign, digits, _ = Decimal(unscaled).as_tuple()
        return Decimal((sign, digits, -scale_of(type_)))
    match type_:
        case "boolean":
            return body != b"\x00"
        case "string":
            return body.decode("utf-8", "replace")
        case "binary":
            return body
    return None


def to_json(value: TableValue, type_: str) -> Any:
    """A value as JSON; None for one that has no such form, as a day of the year 12,000."""
    try:
        if type_ == "date":
            return (_DAY + timedelta(days=int(value))).isoformat()
        if type_ in _MOMENTS:
            # Not `strftime`: it writes years before 1000 with fewer digits.
            moment = _EPOCH + timedelta(microseconds=int(value))
            text = moment.replace(tzinfo=None).isoformat(timespec="microseconds")
            return f"{text}+00:00" if type_ == "timestamptz" else text
    except OverflowError:
        return None
    match value:
        case Decimal():
            return format(value, "f")
        case bytes():
            return value.hex().upper()
        case float() if not math.isfinite(value):
            return None
    return value


def from_json(said: Any, type_: str) -> TableValue:
    """A literal of a filter on a column of this type.

    Days and moments are ISO 8601, or numbers as clients have them. Raises `InvalidInput`.
    """
    try:
        found = _parsed(said, type_)
    except (ValueError, OverflowError, ArithmeticError, TypeError):
        found = None
    if found is None:
        raise InvalidInput(f"The filter compares a {type_} with {str(said)[:100]!r}.")
    return found


def _parsed(said: Any, type_: str) -> TableValue | None:
    match said:
        case bool():
            return said if type_ == "boolean" else None
        case int() | float() if type_ in (*_NUMBERS, *_FRACTIONS):
            return said
        case int() if type_ in ("date", *_MOMENTS):
            return said
        case int() | float() | str() if type_.startswith("decimal("):
            value = Decimal(str(said))
            return value if value.is_finite() else None
        case str():
            return _read(said, type_)
    return None


def _read(said: str, type_: str) -> TableValue | None:
    match type_:
        case "string":
            return said
        case "binary":
            return bytes.fromhex(said)
        case "date":
            return (date.fromisoformat(said) - _DAY).days
        case "timestamp" | "timestamptz":
            moment = datetime.fromisoformat(said)
            if moment.tzinfo is not None and type_ == "timestamp":
                return None
            # PyIceberg leaves the zone out, which is UTC.
            moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
            return (moment - _EPOCH) // timedelta(microseconds=1)
    return None


def _from_unscaled(value: TableValue, scale: int) -> bytes | None:
    if not isinstance(value, Decimal) or not value.is_finite():
        return None
    sign, digits, exponent = value.as_tuple()
    assert isinstance(exponent, int)
    places = exponent + scale
    number = int("".join(map(str, digits)) or "0")
    if places < 0:
        if number % 10**-places:
            return None
        number //= 10**-places
    else:
        number *= 10**places
    number = -number if sign else number
    size = ((number + 1 if number < 0 else number).bit_length() + 8) // 8
    body: bytes = number.to_bytes(size, "big", signed=True)
    return body


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
