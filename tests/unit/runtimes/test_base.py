"""Where attempts write, and the old names of the module."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from penstock.kernel.errors import InvalidInput
from penstock.runtimes import base
from penstock.runtimes.base import AttemptPaths
from penstock.testing import runtime_contract


@pytest.mark.parametrize("root", ["s3://bucket/prefix", "s3://bucket/prefix/"])
def test_places_are_below_the_root(root: str) -> None:
    places = AttemptPaths(root)
    payload = {"partition_key": "2013/01", "start": 1}
    output = places.output("daily sales", generation="g", payload=payload, attempt_id="1-2-x")
    assert output == "s3://bucket/prefix/datasets/daily~20sales/g/2013~2F01/1-2-x"
    assert places.scratch("1-2-x") == "s3://bucket/prefix/scratch/1-2-x"


@pytest.mark.parametrize("payload", [{}, {"partition_key": None}, {"partition_key": ""}])
def test_without_a_partition_it_is_the_whole(payload: dict[str, object]) -> None:
    output = AttemptPaths("file:///x").output("a", generation="g", payload=payload, attempt_id="n")
    assert output == "file:///x/datasets/a/g/~all/n"


def test_logs_are_files_of_this_machine() -> None:
    assert AttemptPaths("file:///x").log(task_id=1, attempt=2) == ""
    assert AttemptPaths("file:///x", Path("/logs")).log(task_id=1, attempt=2) == "/logs/1-2.log"


@pytest.mark.parametrize("root", ["", "memory://", "file://host", "s3://", "s3://b?region=x", "/x"])
def test_a_root_that_is_no_place_is_refused(root: str) -> None:
    with pytest.raises(InvalidInput):
        AttemptPaths(root)


RENAMED = {
    base: (
        "Fault=RuntimeFault Finished=WorkResult Given=WorkInput Made=ProducedOutput News=WorkEvent"
        " Place=WorkOutput Voice=WorkReporter Work=AttemptWork"
    ),
    runtime_contract: (
        "Bench=RuntimeBench Deed=WorkKind Ear=RecordingReporter Trial=RuntimeTrial Watch=PipeWatch"
    ),
}


@pytest.mark.parametrize("module", RENAMED)
def test_old_names_are_there_with_a_warning(module: ModuleType) -> None:
    for old, new in (pair.split("=") for pair in RENAMED[module].split()):
        with pytest.warns(DeprecationWarning, match=f"{module.__name__}.{old} is called {new} now"):
            assert getattr(module, old) is getattr(module, new)
    with pytest.raises(AttributeError, match="no attribute 'Never'"):
        module.Never  # noqa: B018 - it is looked for
