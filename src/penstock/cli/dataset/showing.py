"""How figures of datasets look: counts with commas, sizes in the unit that fits."""

from __future__ import annotations

from penstock.cli.task import figures


def number(count: int | None) -> str:
    """A count; nothing where it is not known."""
    return "" if count is None else f"{count:,}"


def size(size_bytes: int | None) -> str:
    """A number of bytes; nothing where it is not known."""
    return "" if size_bytes is None else figures.size(size_bytes)
