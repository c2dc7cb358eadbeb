"""Into how many files a result is cut, and which files were cut too small. Pure.

Files follow the result and not what was read: Spark cuts by its own tasks first, and splinters are
put together afterwards, from the files (`writing`). With `sort_by` every number here is made of the
data alone: of the bytes that were given, and of those that files have.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from penstock.datasets.manifest import File

UNKNOWN_BYTES: Final = 2**60
"""The size of what nobody has measured."""
_CUTS_OF_UNKNOWN: Final = 32
_SHARES_MAX: Final = 4
"""So many tasks write side by side what would fit into one file."""
_SPLINTER: Final = 8
"""A file is a splinter below this part of the target size."""
_FEWER: Final = 4
"""Splinters are put together if so many times fewer files hold them."""


def files_for(size: int, *, file_bytes: int) -> int:
    """How many files hold so many bytes; of an unknown size, how many cuts are worth a try."""
    if size >= UNKNOWN_BYTES:
        return _CUTS_OF_UNKNOWN
    shares = size * _SHARES_MAX // file_bytes
    return max(1, math.ceil(size / file_bytes), min(_SHARES_MAX, shares))


def splinters(files: Sequence[File], *, file_bytes: int) -> tuple[File, ...]:
    """The files that are better put together; none if that would make few files fewer."""
    small = tuple(each for each in files if each.bytes * _SPLINTER < file_bytes)
    needed = files_for(sum(each.bytes for each in small), file_bytes=file_bytes)
    return small if len(small) >= _FEWER * needed else ()
