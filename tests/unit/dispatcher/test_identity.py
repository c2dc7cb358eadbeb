"""A token proves one name."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kernel.entropy import seeded_entropy, system_entropy
from penstock.kernel.errors import InvalidInput
from penstock.protocol.identity import Identified, Identities, secret_of

SECRET = "a secret of enough characters"
NAMES = st.text(
    st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1, max_size=50
)


@given(NAMES, NAMES)
def test_a_token_is_of_its_name_and_of_no_other(name: str, other: str) -> None:
    identities = Identities(SECRET)
    mine = identities.identity(name)
    assert identities.judge(name, mine.token) is Identified.KNOWN
    expected = Identified.KNOWN if other == name else Identified.WRONG
    assert identities.judge(other, mine.token) is expected
    assert Identities(SECRET + "x").judge(name, mine.token) is Identified.WRONG


@pytest.mark.parametrize(
    ("name", "token"),
    [(None, "t"), ("", "t"), ("w", None), ("w", ""), ("w" * 201, "t"), ("a\nb", "t")],
)
def test_what_is_missing_is_not_wrong(name: str | None, token: str | None) -> None:
    assert Identities(SECRET).judge(name, token) is Identified.MISSING


def test_a_strange_token_is_only_wrong() -> None:
    assert Identities(SECRET).judge("w", "\udcff") is Identified.WRONG


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(InvalidInput, match="16 characters"):
        Identities("short")


def test_a_secret_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    file = tmp_path / "worker.secret"
    first = secret_of(file, entropy=seeded_entropy(1))
    assert len(first) == 48
    assert file.stat().st_mode & 0o777 == 0o600
    assert secret_of(file, entropy=seeded_entropy(2)) == first
    assert [each.name for each in tmp_path.iterdir()] == ["worker.secret"]


def test_many_who_make_it_at_once_get_the_same(tmp_path: Path) -> None:
    found: list[str] = []
    ready = threading.Barrier(8)

    def make() -> None:
        ready.wait()
        found.append(secret_of(tmp_path / "worker.secret", entropy=system_entropy()))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(found) == 8
    assert len(set(found)) == 1
