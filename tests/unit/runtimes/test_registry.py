"""Which runtimes there are: built in, from settings, and from installed packages."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from penstock.kernel.errors import InvalidInput
from penstock.runtimes.process import ProcessRuntime
from penstock.runtimes.registry import GROUP, Placement, RuntimeRegistry


class Mine(ProcessRuntime):
    """A runtime of somebody else."""

    name = "mine"

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self.said = settings


def not_a_runtime(settings: Mapping[str, Any]) -> object:
    return settings


def _point(name: str, what: str) -> EntryPoint:
    return EntryPoint(name, f"{__name__}:{what}", GROUP)


def test_five_are_always_there() -> None:
    registry = RuntimeRegistry(installed=[])
    assert registry.names() == ("lambda", "process", "sink", "spark", "thread")
    assert registry.runtime("process") is registry.runtime("process")


def test_packages_bring_others() -> None:
    registry = RuntimeRegistry({"mine": {"colour": "red"}}, installed=[_point("mine", "Mine")])
    assert registry.names() == ("lambda", "mine", "process", "sink", "spark", "thread")
    made = registry.runtime("mine")
    assert isinstance(made, Mine)
    assert made.said == {"colour": "red"}


def test_a_runtime_may_be_used_under_another_name() -> None:
    registry = RuntimeRegistry({"big": {"uses": "process", "tasks_max": 1}}, installed=[])
    assert registry.runtime("big").name == "big"
    assert registry.runtime("process").name == "process"
    assert (registry.uses("big"), registry.placement("big", {}).queue) == ("process", "big")
    assert registry.placement("process", {}).queue == "default"


def test_a_job_overrides_what_a_runtime_has() -> None:
    settings = {
        "image": "worker:7",
        "command": ["penstock", "worker"],
        "queue": "small",
        "resources": {"memory": "2GiB", "cpu": 1},
    }
    registry = RuntimeRegistry({"process": settings}, installed=[])
    registry.runtime("process")
    assert registry.placement("process", {}) == Placement(
        image="worker:7",
        command=("penstock", "worker"),
        queue="small",
        resources={"memory": "2GiB", "cpu": 1},
    )
    placed = registry.placement("process", {"queue": "large", "memory": "8GiB"})
    assert (placed.image, placed.queue) == ("worker:7", "large")
    assert placed.resources == {"memory": "8GiB", "cpu": 1}


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"dispatcher": {}}, "part of the platform"),
        (
            {"flink": {}},
            "would use 'flink', which is not there; there are lambda, process, sink, spark",
        ),
        ({"mine": {"uses": "lambda"}}, "lambda has no other names"),
        ({"process": {"image": 3}}, r"The settings of the runtime process are wrong: .*image"),
        ({"process": {"queue": "A b"}}, "'A b' is no name of a queue"),
        ({"lambda": {"image": "x"}}, "has 'image', and functions have no workers of their own"),
    ],
)
def test_wrong_settings_are_one_sentence(
    settings: Mapping[str, Mapping[str, Any]], sentence: str
) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        RuntimeRegistry(settings, installed=[])


@pytest.mark.parametrize("name", ["process", "dispatcher"])
def test_packages_replace_nothing(name: str) -> None:
    with pytest.raises(InvalidInput, match="which is there already"):
        RuntimeRegistry(installed=[_point(name, "Mine")])


@pytest.mark.parametrize(
    ("what", "sentence"), [("absent", "cannot be made"), ("not_a_runtime", "does not make")]
)
def test_a_broken_package_breaks_when_it_is_used(what: str, sentence: str) -> None:
    registry = RuntimeRegistry(installed=[_point("mine", what)])
    assert "mine" in registry.names()
    with pytest.raises(InvalidInput, match=sentence):
        registry.runtime("mine")


def test_an_unknown_runtime_is_told_with_those_there_are() -> None:
    with pytest.raises(InvalidInput, match="There is no runtime 'x'; there are lambda, process"):
        RuntimeRegistry(installed=[]).runtime("x")
