"""Where attempts write."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.kernel.errors import InvalidInput
from penstock.runtimes.places import Places


@pytest.mark.parametrize("root", ["s3://bucket/prefix", "s3://bucket/prefix/"])
def test_places_are_below_the_root(root: str) -> None:
    places = Places(root)
    payload = {"partition_key": "2013/01", "start": 1}
    output = places.output("daily sales", generation="g", payload=payload, attempt_id="1-2-x")
    assert output == "s3://bucket/prefix/datasets/daily~20sales/g/2013~2F01/1-2-x"
    assert places.scratch("1-2-x") == "s3://bucket/prefix/scratch/1-2-x"


@pytest.mark.parametrize("payload", [{}, {"partition_key": None}, {"partition_key": ""}])
def test_without_a_partition_it_is_the_whole(payload: dict[str, object]) -> None:
    output = Places("file:///x").output("a", generation="g", payload=payload, attempt_id="n")
    assert output == "file:///x/datasets/a/g/~all/n"


def test_logs_are_files_of_this_machine() -> None:
    assert Places("file:///x").log(task_id=1, attempt=2) == ""
    assert Places("file:///x", Path("/logs")).log(task_id=1, attempt=2) == "/logs/1-2.log"


@pytest.mark.parametrize("root", ["", "memory://", "file://host", "s3://", "s3://b?region=x", "/x"])
def test_a_root_that_is_no_place_is_refused(root: str) -> None:
    with pytest.raises(InvalidInput):
        Places(root)
