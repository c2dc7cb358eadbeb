"""Footers of Parquet files that Penstock publishes: field ids, and equal bytes for equal rows.

**Field ids.** Engines of others know columns by ids. Those of a dataset are functions of names and
types (`iceberg.schemas.field_id`), so who writes a file needs nobody to know them, and no writer of
Parquet gives all of them: Spark's has none for what is in lists and maps. So they are set here, in
the footer, whoever wrote it: at every depth, or nowhere, because a reader that finds some believes
that the others mean nothing. Ids that a library has copied from another file are overwritten.

**Encodings.** Of each column a footer lists the encodings that were used; Spark's writer keeps them
in a set whose order is that of addresses in the JVM. They have no order that means anything, so
they are put into that of their numbers: each is one byte, and nothing else moves.

A footer is a Thrift struct in the compact protocol, at the end of the file. Its schema is a list of
elements, of which each is read, and written again with its id; all else is kept as it is, so only
the length of the footer changes. What cannot be read so is left alone. No more is believed of a
file than that: numbers and depths have bounds, and reading ends where the footer does.

Done in the folder of an attempt, before sums are taken and the manifest is written; a crash leaves
a file that nobody names. Called by the runtimes.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, Final

from penstock.datasets.iceberg.schemas import (
    ListType,
    MapType,
    SchemaField,
    Struct,
    fields_of,
    inner_of,
)
from penstock.datasets.parquet_child import ODD, word
from penstock.datasets.schema import Column
from penstock.kernel.errors import InvalidInput

FOOTER_BYTES_MAX: Final = 256 * 2**20
_MAGIC: Final = b"PAR1"
_ARROW_SCHEMA: Final = b"\x18\x0cARROW:schema\x18"
"""The key of what Arrow says of a file, as a footer has it before the length of the value."""
_TAIL_BYTES: Final = 8
# FileMetaData.schema, and its row_groups[].columns[].meta_data.encodings, by the numbers of fields.
_SCHEMA: Final = (2,)
_ENCODINGS: Final = (4, 1, 3, 2)
# Of an element of the schema.
_REPETITION, _NAME, _CHILDREN, _FIELD_ID = 3, 4, 5, 9
_REPEATED: Final = 2
_STOP, _TRUE, _FALSE, _BYTE, _I32 = 0, 1, 2, 3, 5
_DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = 7, 8, 9, 10, 11, 12
_NUMBERS: Final = (4, 5, 6)
_LONG_LIST: Final = 15
_DEPTH_MAX: Final = 100
_SHIFT_MAX: Final = 63
_UNREADABLE: Final = (IndexError, ValueError, RecursionError, StopIteration)


def settle_file(path: Path, columns: Sequence[Column]) -> None:
    """Put the footer of a file that Spark has written in order, with the ids of its columns."""

    def settled(footer: bytes) -> bytes:
        made = settled_footer(footer)
        return with_ids(made, columns) or made

    with path.open("r+b") as file:
        _rewrite(file, settled)


def identify_file(path: Path, columns: Sequence[Column]) -> None:
    """Give a file that was written here the ids of its columns."""
    with path.open("r+b") as file:
        identify(file, columns)


def identify(file: BinaryIO, columns: Sequence[Column], *, is_trusted: bool = True) -> bool:
    """Give a file the ids of its columns; whether it has them.

    A file that has another name too is not changed: it is somebody else's as well. Arrow's schema
    is read by a large program: only that of trusted code has them too.
    """
    set_ids = _everywhere if is_trusted else with_ids
    return _rewrite(file, lambda footer: set_ids(footer, columns))


def identified_file(body: bytes, columns: Sequence[Column]) -> bytes:
    """A whole file with the ids of its columns."""
    start = _start(body[-_TAIL_BYTES:], len(body))
    if start is None:
        return body
    footer = _everywhere(body[start:-_TAIL_BYTES], columns)
    return body if footer is None else b"".join((memoryview(body)[:start], _tailed(footer)))


def settled_footer(footer: bytes) -> bytes:
    """A footer with its encodings in order."""
    settled = bytearray(footer)
    try:
        for place in encodings(footer):
            settled[place] = bytes(sorted(footer[place]))
    except _UNREADABLE:
        return footer
    return bytes(settled)


def with_ids(footer: bytes, columns: Sequence[Column]) -> bytes | None:
    """A footer with the ids of these columns; None if they are not all of its own."""
    try:
        return _identified(footer, fields_of(tuple(columns)))
    except (*_UNREADABLE, InvalidInput):
        return None


def _everywhere(footer: bytes, columns: Sequence[Column]) -> bytes | None:
    made = with_ids(footer, columns)
    return None if made is None else _with_arrow(made, columns)


def _with_arrow(footer: bytes, columns: Sequence[Column]) -> bytes:
    """A footer with the ids in Arrow's own schema too, if there is one.

    Readers in Rust take that for the schema of the file, and have lists and structs as null if they
    find no ids there.
    """
    start = footer.rfind(_ARROW_SCHEMA) + len(_ARROW_SCHEMA)
    if start < len(_ARROW_SCHEMA):
        return footer
    walk = _Walk(footer, start)
    try:
        length = walk.number()
        body = footer[walk.at : walk.at + length]
        pa = import_module("pyarrow")
        schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(body, validate=True)))
        if [each.name for each in schema] != [each.name for each in columns]:
            return footer
        fields = [
            _arrow_field(*each) for each in zip(schema, fields_of(tuple(columns)), strict=True)
        ]
        said = pa.schema(fields, metadata=schema.metadata).serialize().to_pybytes()
    except (*ODD, IndexError):
        return footer
    made = base64.b64encode(said)
    return footer[:start] + _varint(len(made)) + made + footer[walk.at + length :]


def _arrow_field(field: Any, known: SchemaField) -> Any:
    pa = import_module("pyarrow")
    kind, inner = field.type, inner_of(known.type)
    match known.type:
        case Struct():
            kind = pa.struct(
                [_arrow_field(kind.field(place), each) for place, each in enumerate(inner)]
            )
        case ListType(element):
            made = pa.large_list if pa.types.is_large_list(kind) else pa.list_
            kind = made(_arrow_field(kind.value_field, element))
        case MapType(key, value):
            both = (_arrow_field(kind.key_field, key), _arrow_field(kind.item_field, value))
            kind = pa.map_(*both, keys_sorted=kind.keys_sorted)
    said = {**(field.metadata or {}), b"PARQUET:field_id": str(known.id).encode()}
    return pa.field(field.name, kind, nullable=field.nullable, metadata=said)


def columns_in(schema: Any) -> tuple[Column, ...]:
    """The columns of a schema of Arrow's; none if there is no word for one of them."""
    try:
        return tuple(Column(each.name, word(each.type)) for each in schema)
    except ODD:
        return ()


def encodings(footer: bytes) -> Iterator[slice]:
    """Where in a footer the encodings of each column stand, one byte each."""
    return (place for path, place in _Walk(footer).struct(()) if path == _ENCODINGS)


def _rewrite(file: BinaryIO, change: Callable[[bytes], bytes | None]) -> bool:
    """Change the footer of a file; False if it is not as is wanted then."""
    size = file.seek(0, 2)
    file.seek(max(0, size - _TAIL_BYTES))
    start = _start(file.read(_TAIL_BYTES), size)
    if start is None:
        return False
    file.seek(start)
    footer = file.read(size - _TAIL_BYTES - start)
    changed = change(footer)
    if changed is None or changed == footer:
        return changed is not None
    if os.fstat(file.fileno()).st_nlink > 1:
        return False
    file.seek(start)
    file.write(_tailed(changed))
    file.truncate()
    return True


def _start(tail: bytes, size: int) -> int | None:
    """Where the footer of a file begins; None for what is no plain Parquet."""
    length = int.from_bytes(tail[:4], "little")
    start = size - _TAIL_BYTES - length
    return start if tail[4:] == _MAGIC and start >= 0 and length <= FOOTER_BYTES_MAX else None


def _tailed(footer: bytes) -> bytes:
    return footer + len(footer).to_bytes(4, "little") + _MAGIC


def _identified(footer: bytes, fields: Sequence[SchemaField]) -> bytes:
    """A footer with ids. Raises `ValueError` if its schema is not that of the fields."""
    place = next(place for path, place in _Walk(footer).struct(()) if path == _SCHEMA)
    elements = _Elements([_Element.read(each) for each in _structs(footer[place])])
    root = elements.next()
    made = [root.with_id(None), *_members(elements, root, fields)]
    if elements.left:
        raise ValueError("The schema has more elements than its root.")
    return footer[: place.start] + b"".join(made) + footer[place.stop :]


@dataclass(slots=True)
class _Element:
    """An element of a schema: its fields, by their numbers, as they are written."""

    values: dict[int, tuple[int, bytes]]
    name: str
    children: int
    is_repeated: bool

    @classmethod
    def read(cls, body: bytes) -> _Element:
        values = {
            number: (kind, body[place]) for number, kind, place in _Walk(body).fields_at_top()
        }

        def number(field: int) -> int:
            return _signed(_Walk(values[field][1]).number()) if field in values else 0

        named = _Walk(values[_NAME][1]) if _NAME in values else _Walk(b"\0")
        length = named.number()
        name = named.body[named.at : named.at + length].decode()
        return cls(values, name, number(_CHILDREN), number(_REPETITION) == _REPEATED)

    def with_id(self, identity: int | None) -> bytes:
        """It as it is written, with this id, or with none."""
        values = dict(self.values)
        values.pop(_FIELD_ID, None)
        if identity is not None:
            values[_FIELD_ID] = (_I32, _varint(identity << 1))
        made, before = bytearray(), 0
        for number in sorted(values):
            kind, body = values[number]
            if not 0 < number - before <= _LONG_LIST:
                raise ValueError("A field that no element has.")
            made += bytes(((number - before) << 4 | kind,)) + body
            before = number
        return bytes(made) + b"\0"


@dataclass(slots=True)
class _Elements:
    """The elements of a schema, each group before what is in it."""

    every: list[_Element]
    at: int = 0

    @property
    def left(self) -> int:
        return len(self.every) - self.at

    def next(self) -> _Element:
        self.at += 1
        return self.every[self.at - 1]


def _members(
    elements: _Elements, group: _Element, fields: Sequence[SchemaField]
) -> Iterator[bytes]:
    """What is in a group, each with the id of the field of its name."""
    named = {each.name: each for each in fields}
    if group.children != len(named) or len(named) != len(fields):
        raise ValueError("It has other columns.")
    for _ in fields:
        yield from _one(elements, named)


def _one(elements: _Elements, named: dict[str, SchemaField]) -> Iterator[bytes]:
    """The next element and what is in it; it is one of these, each of which is there once."""
    element = elements.next()
    field = named.pop(element.name, None)
    if field is None or element.is_repeated:
        raise ValueError("It has other columns.")
    yield element.with_id(field.id)
    match field.type:
        case Struct(fields):
            yield from _members(elements, element, fields)
        case ListType(inner):
            yield from _repeated(elements, element, [inner])
        case MapType(key, value):
            yield from _repeated(elements, element, [key, value])
        case _ if element.children:
            raise ValueError("It has a group where a value is.")


def _repeated(
    elements: _Elements, element: _Element, fields: Sequence[SchemaField]
) -> Iterator[bytes]:
    """What is in a list or a map: a group that is repeated, and has no id, with these in it."""
    middle = elements.next()
    if element.children != 1 or not middle.is_repeated or middle.children != len(fields):
        raise ValueError("It has lists in an old form.")
    yield middle.with_id(None)
    for each in fields:
        # By their places: writers have other names for them.
        yield from _one(elements, {elements.every[elements.at].name: each})


def _structs(body: bytes) -> Iterator[bytes]:
    """The structs of a list, without its head."""
    walk = _Walk(body)
    while walk.at < len(body):
        start = walk.at
        for _ in walk.struct(()):
            pass
        yield body[start : walk.at]


@dataclass(slots=True)
class _Walk:
    """Goes through a struct from its beginning to its end."""

    body: bytes
    at: int = 0

    def struct(self, path: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], slice]]:
        """The lists in it with their paths, of fields, and where their items stand."""
        for number, kind in self._heads():
            yield from self._value(kind, (*path, number))

    def fields_at_top(self) -> Iterator[tuple[int, int, slice]]:
        """Its own fields: number, kind, and where the value stands."""
        for number, kind in self._heads():
            start = self.at
            for _ in self._value(kind, ()):
                pass
            if self.at > len(self.body):
                raise ValueError("It is cut off.")
            yield number, kind, slice(start, self.at)

    def _heads(self) -> Iterator[tuple[int, int]]:
        field = 0
        while (head := self._byte()) != _STOP:
            delta, kind = head >> 4, head & 15
            field = field + delta if delta else _signed(self.number())
            yield field, kind

    def _value(self, kind: int, path: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], slice]]:
        if len(path) > _DEPTH_MAX:
            raise ValueError("It is nested too deeply.")
        if kind in _NUMBERS:
            self.number()
        elif kind == _BYTE:
            self.at += 1
        elif kind == _DOUBLE:
            self.at += 8
        elif kind == _BINARY:
            length = self.number()
            self.at += length
        elif kind in (_LIST, _SET):
            yield from self._list(path)
        elif kind == _MAP:
            yield from self._map(path)
        elif kind == _STRUCT:
            yield from self.struct(path)
        elif kind not in (_TRUE, _FALSE):
            raise ValueError("It has a value of no kind.")
        # Whether a field is true or false stands in its head.

    def _list(self, path: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], slice]]:
        head = self._byte()
        count, kind = head >> 4, head & 15
        if count == _LONG_LIST:
            count = self.number()
        start = self.at
        for _ in range(count):
            yield from self._item(kind, path)
            if self.at > len(self.body):
                raise ValueError("It is cut off.")
        if path != _ENCODINGS or self.at - start == count:
            yield path, slice(start, self.at)

    def _map(self, path: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], slice]]:
        count = self.number()
        kinds = self._byte() if count else 0
        for _ in range(count):
            yield from self._item(kinds >> 4, path)
            yield from self._item(kinds & 15, path)
            if self.at > len(self.body):
                raise ValueError("It is cut off.")

    def _item(self, kind: int, path: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], slice]]:
        """A value outside of a field, where being true or false takes a byte."""
        return self._value(_BYTE if kind in (_TRUE, _FALSE) else kind, path)

    def _byte(self) -> int:
        self.at += 1
        return self.body[self.at - 1]

    def number(self) -> int:
        """A number of up to ten bytes, seven bits each, the lowest first."""
        found = shift = 0
        while (byte := self._byte()) & 128:
            found |= (byte & 127) << shift
            shift += 7
            if shift > _SHIFT_MAX:
                raise ValueError("It has a number that is too long.")
        return found | byte << shift


def _signed(number: int) -> int:
    return number >> 1 ^ -(number & 1)


def _varint(number: int) -> bytes:
    made = bytearray()
    while number > 127:
        made.append(number & 127 | 128)
        number >>= 7
    return bytes((*made, number))
