"""Where pages of partitions are: every key has one, and comes back from it."""

from __future__ import annotations

from urllib.parse import parse_qs, unquote, urlsplit

from hypothesis import example, given
from hypothesis import strategies as st

from penstock.console.pages.dataset import generation_of, partition_path

GENERATION = "01234567-89ab-cdef-0123-456789abcdef"


@given(st.text(max_size=20))
@example("")
@example("..")
@example("a/b?c=d&e#f%2F<>\"'")
def test_a_key_is_found_by_its_path(key: str) -> None:
    parts = urlsplit(partition_path("tidy", key, generation=GENERATION))
    query = parse_qs(parts.query)
    if parts.path == "/datasets/tidy/partition":
        assert query.get("key", [""]) == [key]
    else:
        last = parts.path.removeprefix("/datasets/tidy/partitions/")
        assert "/" not in last
        assert last not in ("", ".", "..")
        assert unquote(last) == key
    assert query["generation"] == [GENERATION]


def test_only_what_looks_like_a_generation_is_one() -> None:
    assert generation_of(GENERATION) == GENERATION
    for other in ("", "x", GENERATION.upper(), f"{GENERATION}\n", f"{GENERATION}'"):
        assert generation_of(other) is None
