"""Makes equal rows equal bytes where Spark's writer does not: the footers of its Parquet files.

Of each column a footer lists the encodings that were used. Spark's writer keeps them in a set whose
order is that of addresses in the JVM: the same rows written by another JVM differ there, and in no
other byte. They have no order that means anything, so they are put into that of their numbers, in
place: each is one byte, and nothing else moves.

A footer is a Thrift struct in the compact protocol, walked here as far as that takes. Called for
what Spark has committed, before its sum is taken; files that others made are never touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_MAGIC: Final = b"PAR1"
_TAIL_BYTES: Final = 8
# FileMetaData.row_groups[].columns[].meta_data.encodings, by the numbers of their fields.
_ENCODINGS: Final = (4, 1, 3, 2)
_STOP, _TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = (
    *range(4),
    *range(7, 13),
)
_NUMBERS: Final = (4, 5, 6)
_LONG_LIST: Final = 15


def settle_footer(path: Path) -> None:
    """Put the encodings in the footer of a Parquet file in order, if they are not."""
    with path.open("r+b") as file:
        size = file.seek(-_TAIL_BYTES, 2) + _TAIL_BYTES
        tail = file.read(_TAIL_BYTES)
        start = size - _TAIL_BYTES - int.from_bytes(tail[:4], "little")
        if tail[4:] != _MAGIC or start < 0:
            return
        file.seek(start)
        footer = file.read(size - _TAIL_BYTES - start)
        settled = settled_footer(footer)
        if settled != footer:
            file.seek(start)
            file.write(settled)


def settled_footer(footer: bytes) -> bytes:
    """A footer with its encodings in order."""
    settled = bytearray(footer)
    for place in encodings(footer):
        settled[place] = bytes(sorted(footer[place]))
    return bytes(settled)


def encodings(footer: bytes) -> Iterator[slice]:
    """Where in a footer the encodings of each column stand, one byte each."""
    return _Walk(footer).struct(())


@dataclass(slots=True)
class _Walk:
    """Goes through a struct from its beginning to its end."""

    body: bytes
    at: int = 0

    def struct(self, path: tuple[int, ...]) -> Iterator[slice]:
        """Everything up to the end of the struct; `path` has the fields that it lies in."""
        field = 0
        while (head := self._byte()) != _STOP:
            delta, kind = head >> 4, head & 15
            field = field + delta if delta else _signed(self._number())
            yield from self._value(kind, (*path, field))

    def _value(self, kind: int, path: tuple[int, ...]) -> Iterator[slice]:
        if kind in _NUMBERS:
            self._number()
        elif kind == _BYTE:
            self.at += 1
        elif kind == _DOUBLE:
            self.at += 8
        elif kind == _BINARY:
            length = self._number()
            self.at += length
        elif kind in (_LIST, _SET):
            yield from self._list(path)
        elif kind == _MAP:
            yield from self._map(path)
        elif kind == _STRUCT:
            yield from self.struct(path)
        # Whether a field is true or false stands in its head.

    def _list(self, path: tuple[int, ...]) -> Iterator[slice]:
        head = self._byte()
        count, kind = head >> 4, head & 15
        if count == _LONG_LIST:
            count = self._number()
        start = self.at
        for _ in range(count):
            yield from self._item(kind, path)
        if path == _ENCODINGS and self.at - start == count:
            yield slice(start, self.at)

    def _map(self, path: tuple[int, ...]) -> Iterator[slice]:
        count = self._number()
        kinds = self._byte() if count else 0
        for _ in range(count):
            yield from self._item(kinds >> 4, path)
            yield from self._item(kinds & 15, path)

    def _item(self, kind: int, path: tuple[int, ...]) -> Iterator[slice]:
        """A value outside of a field, where being true or false takes a byte."""
        return self._value(_BYTE if kind in (_TRUE, _FALSE) else kind, path)

    def _byte(self) -> int:
        self.at += 1
        return self.body[self.at - 1]

    def _number(self) -> int:
        """A number of any length, seven bits a byte, the lowest first."""
        found = shift = 0
        while (byte := self._byte()) & 128:
            found |= (byte & 127) << shift
            shift += 7
        return found | byte << shift


def _signed(number: int) -> int:
    return number >> 1 ^ -(number & 1)
