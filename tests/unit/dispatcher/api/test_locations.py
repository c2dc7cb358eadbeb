"""Where an attempt may say that it has written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.dispatcher.api.worker_endpoints import canonical, misplaced
from penstock.kernel.errors import InvalidInput
from penstock.protocol.work import OutputAsk
from penstock.tokens.claims import Grants, WriteGrant
from penstock.tokens.scopes import scope_of_location

A, B = ("0" * 8 + f"-0000-0000-0000-{letter * 12}" for letter in "ab")
OWN = "s3://lake/root/datasets/tidy/g/2013-01-05/7-2-abc"
FILES = "file:///data/my%20lake/datasets/tidy/g/~all/7-2-abc"
GRANTS = Grants(
    write=(
        WriteGrant(dataset=A, version="g", prefix=f"{OWN}/"),
        WriteGrant(dataset=B, version="g", prefix=f"{FILES}/"),
    ),
    scratch="s3://lake/root/scratch/7-2-abc/",
)


def why(location: str, dataset: str = A, *, grants: Grants = GRANTS) -> str:
    found = misplaced([OutputAsk(dataset=dataset, location=location)], grants)
    return "" if found is None else found[1]


@pytest.mark.parametrize(
    ("location", "dataset"),
    [
        (OWN, A),
        (f"{OWN}/", A),
        (f"{OWN}/part-0.parquet", A),
        (f"{OWN}/deep/er", A),
        (FILES, B),
        (FILES.replace("~", "%7E"), B),
        (FILES.replace("%20", " "), B),
    ],
)
def test_its_own_folder_and_below(location: str, dataset: str) -> None:
    assert why(location, dataset) == ""


@pytest.mark.parametrize(
    "location",
    [
        "s3://lake/root/datasets/tidy/g/2013-01-05",
        "s3://lake/root/datasets/tidy/g/2013-01-05/7-2-ab",
        f"{OWN}d",
        OWN.replace("7-2", "7-1"),
        OWN.replace("7-2", "8-2"),
        OWN.replace("lake", "pond"),
        OWN.replace("s3:", "S3:"),
        OWN.replace("s3:", "s3a:"),
        OWN.replace("s3:", "file:"),
        f"{OWN}/../7-1-abc",
        f"{OWN}/%2e%2e/7-1-abc",
        f"{OWN}/..%2f7-1-abc",
        f"{OWN}/x/../../7-1-abc",
        f"{OWN}//x",
        f"{OWN}/*",
        f"{OWN}?versionId=x",
        f"{OWN}/x#y",
        f"{OWN}\\x",
        f"{OWN}/x\x00",
        f"{OWN}/\N{FULLWIDTH FULL STOP}\N{FULLWIDTH FULL STOP}/x",
        f" {OWN}",
        "s3://lake/root/scratch/7-2-abc",
        FILES,
        "/data/x",
        "x",
        "s3://",
    ],
)
def test_everything_else_is_outside(location: str) -> None:
    assert "does not lie in the folder of this attempt" in why(location)


@pytest.mark.parametrize(
    "location",
    [
        FILES.replace("my%20lake", "my%20lake/.."),
        FILES.replace("7-2", "7-1"),
        f"{FILES}/%2e%2e/x",
        f"{FILES}/%2F",
        f"file://host{FILES.removeprefix('file://')}",
        FILES.replace("file://", "s3:/"),
        OWN,
    ],
)
def test_the_same_for_files(location: str) -> None:
    assert why(location, B)


def test_one_that_lies_elsewhere_is_found_among_others() -> None:
    good = OutputAsk(dataset=A, location=f"{OWN}/x")
    bad = OutputAsk(dataset=B, location=f"{FILES}x")
    assert misplaced([], GRANTS) is None
    assert misplaced([good, good], GRANTS) is None
    found = misplaced([good, bad, good], GRANTS)
    assert found is not None
    assert found[0] is bad


def test_what_is_not_granted_is_not_allowed() -> None:
    other = B.replace("b", "c")
    assert why(OWN, other) == f"Dataset {other} is not an output of this task."
    assert why(OWN, grants=Grants()) == f"Dataset {A} is not an output of this task."
    # A grant that is no folder allows nothing.
    for prefix in ("", "s3://lake", "s3://lake/", OWN, f"{OWN}/../"):
        odd = Grants(write=(WriteGrant(dataset=A, version="g", prefix=prefix),))
        assert why(OWN, grants=odd)


@given(st.text("aZ0~=-_./%? ü\\\x00", max_size=8), st.sampled_from([OWN, FILES]))
def test_what_is_plain_is_what_it_would_be_if_it_were_taken_apart(rest: str, own: str) -> None:
    location = f"{own}/{rest}"
    dataset = A if own == OWN else B
    try:
        slowly = str(scope_of_location(location)).removesuffix("/")
    except InvalidInput:
        assert why(location, dataset)
        return
    assert not why(location, dataset)
    assert canonical(location, GRANTS) == slowly
