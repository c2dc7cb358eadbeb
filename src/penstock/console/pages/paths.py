"""Where the pages of datasets and partitions are."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import quote, urlencode

_GENERATION: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def generation_of(text: str) -> str | None:
    """A generation as it stands in a query; None if that is none."""
    return text if _GENERATION.fullmatch(text) else None


def dataset_path(name: str, *, generation: str | None = None) -> str:
    """The page of a dataset."""
    return f"/datasets/{quote(name, safe='')}{_query(generation=generation)}"


def partitions_path(name: str, *, generation: str | None = None, after: str | None = None) -> str:
    """The table of the partitions of a dataset."""
    query = _query(generation=generation, after=after)
    return f"/datasets/{quote(name, safe='')}/partitions{query}"


def partition_path(name: str, key: str, *, generation: str | None = None) -> str:
    """The page of a partition; the empty key is the dataset without partitions."""
    base = f"/datasets/{quote(name, safe='')}"
    # What browsers take for a way to another folder, and nothing at all, cannot stand in a path.
    if key in ("", ".", ".."):
        return f"{base}/partition{_query(key=key or None, generation=generation)}"
    return f"{base}/partitions/{quote(key, safe='')}{_query(generation=generation)}"


def contents_path(name: str, key: str, *, generation: str | None = None) -> str:
    """What is in the files of a partition."""
    query = _query(key=key or None, generation=generation)
    return f"/datasets/{quote(name, safe='')}/contents{query}"


def _query(**given: str | None) -> str:
    said = {name: value for name, value in given.items() if value is not None}
    return f"?{urlencode(said)}" if said else ""
