"""DAGs are judged by the runtimes that they name, with the defaults that their jobs would get."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from penstock.dispatcher.dag.errors import DagError
from penstock.dispatcher.dag.model import Dag
from penstock.dispatcher.dag.parsing import parse
from penstock.dispatcher.registry import BuiltInRuntimes, RegisteredRuntimes
from penstock.runtimes.base import Delivery
from penstock.runtimes.registry import Registry

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
    return RegisteredRuntimes(Registry(settings, installed=[]))


def _parse(text: str, runtimes: RegisteredRuntimes) -> Dag:
    return parse(text, "dag.yaml", runtimes=runtimes)


def test_a_right_dag_has_no_faults() -> None:
    runtimes = _runtimes()
    dag = _parse(DAG + "    resources: {memory: 1GiB, queue: mine}\n", runtimes)
    placement = runtimes.placement(dag.job("work"))
    assert placement is not None
    assert (placement.queue, placement.resources) == ("mine", {"memory": "1GiB"})
    assert runtimes.placement(dag.job("tick")) is None


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("runtime: process", "runtime: spork", "There is no runtime 'spork'"),
        ("operator: mine:work", "operator: mine", "Write your function as module:function"),
        ("inputs: [ticks]", "inputs: [ticks]\n    resources: {gpu: 1}", "has no resource 'gpu'"),
        ("inputs: [ticks]", "inputs: [ticks]\n    resources: {image: 1}", "are wrong"),
    ],
)
def test_a_wrong_dag_is_refused(old: str, new: str, sentence: str) -> None:
    with pytest.raises(DagError) as caught:
        _parse(DAG.replace(old, new), _runtimes())
    (problem,) = caught.value.problems
    assert sentence in problem.message


@pytest.mark.parametrize("slip", ["proces", "sparc", "lamda"])
def test_a_slip_of_the_pen_is_told_also_where_not_all_runtimes_are_known(slip: str) -> None:
    text = DAG.replace("runtime: process", f"runtime: {slip}")
    with pytest.raises(DagError, match="Did you mean"):
        _parse(text, BuiltInRuntimes())
    _parse(text, BuiltInRuntimes([slip]))


@pytest.mark.parametrize("name", ["process-big", "spark3", "express", "gpu"])
def test_other_runtimes_may_be_there(name: str) -> None:
    _parse(DAG.replace("runtime: process", f"runtime: {name}"), BuiltInRuntimes())


def test_defaults_are_judged_with_the_job() -> None:
    with pytest.raises(DagError):
        _parse(DAG, _runtimes(process={"resources": {"memory": "much"}}))
    own = DAG + "    resources: {memory: 1GiB}\n"
    _parse(own, _runtimes(process={"resources": {"memory": "much"}}))


def test_how_tasks_are_delivered() -> None:
    assert _runtimes().delivery("lambda") is Delivery.WAKE
    assert _runtimes(**{"lambda": {"is_invoked": True}}).delivery("lambda") is Delivery.INVOKE
    assert _runtimes().operators("process") is None


def test_without_settings_only_what_comes_with_penstock_is_judged() -> None:
    runtimes = BuiltInRuntimes()
    _parse(DAG, runtimes)
    _parse(DAG.replace("runtime: process", "runtime: process-big"), runtimes)
    for old, new in (
        ("mine:work", "mine"),
        ("inputs: [ticks]", "inputs: [ticks]\n    resources: {gpu: 1}"),
    ):
        with pytest.raises(DagError):
            _parse(DAG.replace(old, new), runtimes)
