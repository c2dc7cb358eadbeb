"""DAGs are judged by the runtimes that they name, with the defaults that their jobs would get."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from penstock.dispatcher.dag.model import Dag
from penstock.dispatcher.dag.parser import parse
from penstock.dispatcher.runtime_registry import RegisteredRuntimes
from penstock.protocol.problem import DagError
from penstock.runtimes.registry import RuntimeRegistry

DAG = """
jobs:
  tick:
    activation: source
    source: {kind: manual}
    outputs: [ticks]
  work:
    runtime: process
    operator: mine:work
    inputs: [ticks]
"""


def _runtimes(**settings: Mapping[str, Any]) -> RegisteredRuntimes:
    return RegisteredRuntimes(RuntimeRegistry(settings, installed=[]))


def _parse(text: str, runtimes: RegisteredRuntimes) -> Dag:
    return parse(text, "dag.yaml", runtimes=runtimes)


def test_a_right_dag_has_no_faults() -> None:
    runtimes = _runtimes()
    dag = _parse(DAG + "    resources: {memory: 1GiB, queue: mine}\n", runtimes)
    assert runtimes.queued(dag) == dag
    plain = _parse(DAG, _runtimes(process={"queue": "small"}))
    queued = _runtimes(process={"queue": "small"}).queued(plain)
    assert queued.job("work").resources == {"queue": "small"}
    assert _runtimes().queued(plain) == plain
    said = _parse(DAG + "    resources: {queue: default}\n", runtimes)
    assert runtimes.queued(said).job("work").resources == {}


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("runtime: process", "runtime: spork", "There is no runtime 'spork'"),
        ("operator: mine:work", "operator: mine", "Write your function as module:function"),
        ("inputs: [ticks]", "inputs: [ticks]\n    resources: {gpu: 1}", "has no resource 'gpu'"),
        (
            "inputs: [ticks]",
            "inputs: [ticks]\n    outputs: [{name: out, partition_by: day}]",
            "The runtime process does not divide",
        ),
        (
            "runtime: process\n    operator: mine:work",
            (
                "runtime: spark\n    operator: spark.sql\n    outputs: [{name: o, partition_by: d}]"
                "\n    config: {sql: SELECT 1, partition_wise: true}"
            ),
            "partition_wise makes the partition of each task",
        ),
        (
            "inputs: [ticks]",
            "inputs: [ticks]\n    resources: {image: i}",
            "has no resource 'image'",
        ),
        (
            "inputs: [ticks]",
            "inputs: [ticks]\n    update: merge\n    unique_key: [id]",
            "The runtime process writes files of its own making, whose rows cannot be merged",
        ),
        (
            "inputs: [ticks]",
            "inputs: [ticks]\n    outputs: [{name: out, maintain: {compact: true}}]",
            "The runtime process writes files of its own making, which nobody else can rewrite",
        ),
    ],
)
def test_a_wrong_dag_is_refused(old: str, new: str, sentence: str) -> None:
    with pytest.raises(DagError) as caught:
        _parse(DAG.replace(old, new), _runtimes())
    (problem,) = caught.value.problems
    assert sentence in problem.message


@pytest.mark.parametrize("name", ["proces", "process-big", "spark3", "gpu"])
def test_a_runtime_that_is_not_registered_is_refused_whatever_it_is_called(name: str) -> None:
    text = DAG.replace("runtime: process", f"runtime: {name}")
    with pytest.raises(DagError, match=f"There is no runtime '{name}'"):
        _parse(text, _runtimes())
    _parse(text, _runtimes(**{name: {"uses": "process"}}))


def test_defaults_are_judged_with_the_job() -> None:
    with pytest.raises(DagError):
        _parse(DAG, _runtimes(process={"resources": {"memory": "much"}}))
    own = DAG + "    resources: {memory: 1GiB}\n"
    _parse(own, _runtimes(process={"resources": {"memory": "much"}}))
