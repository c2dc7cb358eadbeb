"""Which ranges a range is cut into, and which windows it is part of. Pure.

A range goes from its start up to, but without, its end. Pieces and windows lie on a grid that does
not depend on the range that asks, so that every range which reaches a window names it alike.
"""

from __future__ import annotations

import re
from typing import Final

PIECES_MAX: Final = 10_000
"""How many ranges one task may make; more than that is a mistake in the sizes."""

Range = tuple[int, int]

_NAMED: Final = re.compile(r"(-?[0-9]{1,19})-(-?[0-9]{1,19})", re.ASCII)


def pieces(start: int, end: int, *, size: int) -> tuple[Range, ...] | None:
    """The range, cut at the multiples of `size`; None if that makes too many pieces."""
    first, last = start // size, -(-end // size)
    if last - first > PIECES_MAX:
        return None
    return tuple(
        (max(start, place * size), min(end, (place + 1) * size)) for place in range(first, last)
    )


def windows(start: int, end: int, *, size: int, step: int) -> tuple[Range, ...] | None:
    """The windows of `size` that begin every `step` and overlap the range; None if too many."""
    first, last = (start - size) // step + 1, -(-end // step)
    if last - first > PIECES_MAX:
        return None
    return tuple((place * step, place * step + size) for place in range(first, last))


def key(piece: Range) -> str:
    """The name of the partition that is this range."""
    return f"{piece[0]}-{piece[1]}"


def named(partition_key: str) -> Range | None:
    """The range that is called so by `key`; None if none is."""
    if (found := _NAMED.fullmatch(partition_key)) is None:
        return None
    piece = int(found[1]), int(found[2])
    in_bits = -(2**63) <= piece[0] < piece[1] < 2**63
    return piece if in_bits and key(piece) == partition_key else None
