"""Buffered datasets in a DAG: who owns them, who publishes into them, and what an edit rebuilds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.dispatcher.backpressure import PauseScope, QueueMeasure, decide
from penstock.dispatcher.dag.canonical import canonical, diff, lineage_hashes
from penstock.dispatcher.dag.model import Dag, Graph
from penstock.dispatcher.dag.parser import BATCHES_WAITING_MAX, parse
from penstock.protocol.problem import DagError

DAG = """
jobs:
  feed: {activation: source, source: {kind: manual}, outputs: [raw]}
  note: {runtime: process, operator: "a:note", inputs: [raw], buffers: [alerts]}
  write:
    runtime: sink
    operator: sink.write
    update: append
    config: {max_age: 5s, expect: {id: {required: true}}}
    outputs: [{name: alerts, buffered: true, columns: {id: string}}, rejected]
  read: {runtime: process, operator: "a:read", inputs: [alerts], outputs: [seen]}
"""


def parsed(text: str = DAG) -> Dag:
    return parse(text, "the DAG")


def test_a_dag_with_a_sink_comes_back_from_its_canonical_form() -> None:
    dag = parsed()
    assert parse(canonical(dag).decode(), "stored") == dag
    write = dag.job("write")
    assert write.is_sink
    assert write.max_queue_depth == BATCHES_WAITING_MAX
    assert dag.job("note").buffers == ("alerts",)
    assert not dag.job("note").is_sink


def test_writers_are_not_upstream_and_their_edits_rebuild_nothing() -> None:
    dag = parsed()
    assert Graph(dag).upstream("write") == frozenset()
    edited = parsed(DAG.replace("a:note", "a:other"))
    change = diff(dag, edited)
    assert change.new_generations() == {"note"}
    # To publish there or not is no part of what a job writes.
    without = parsed(DAG.replace(", buffers: [alerts]", ""))
    assert diff(dag, without).new_generations() == frozenset()
    assert diff(dag, without).changed["note"].fields == ("buffers",)


def test_how_a_sink_judges_counts_from_now_on() -> None:
    dag = parsed()
    edited = parsed(DAG.replace("expect: {id: {required: true}}", "max_rows: 5"))
    assert lineage_hashes(dag) == lineage_hashes(edited)
    merging = parsed(DAG.replace("update: append", "update: merge\n    unique_key: [id]"))
    assert diff(dag, merging).new_generations() == {"write", "read"}


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("buffered: true, ", "", "a sink writes nothing else"),
        ("runtime: sink\n    operator: sink.write", "runtime: process\n    operator: a:b", "sink"),
        (", rejected]", "]", "A sink has two outputs"),
        (", rejected]", ", {name: rejected, buffered: true}]", "A sink has two outputs"),
        (", columns: {id: string}", "", "needs `columns`"),
        ("rejected]", "{name: rejected, columns: {a: int}}]", "columns of rejected rows are fixed"),
        ("rejected]", "{name: rejected, maintain: {compact: true}}]", "rewrites none"),
        ("update: append", "update: replace", "A sink adds rows"),
        ("update: append", "update: append\n    inputs: [raw]", "take `inputs` out"),
        ("expect: {id:", "expect: {no:", "There is no column 'no'"),
        ("buffers: [alerts]", "buffers: [raw]", "The dataset raw is not buffered"),
        ("buffers: [alerts]", "buffers: [rejected]", "not buffered"),
        ("buffers: [alerts]", "buffers: [nothing]", "There is no dataset 'nothing'"),
        ("buffers: [alerts]", "buffers: [alerts, write.alerts]", "named twice"),
        ("outputs: [seen]", "outputs: [seen], buffers: [alerts]", "run again, without end"),
        ("kind: manual}", "kind: manual}, buffers: [alerts]", "take `buffers` out"),
    ],
)
def test_what_is_wrong_with_a_sink_or_a_writer_is_said(old: str, new: str, said: str) -> None:
    assert old in DAG
    with pytest.raises(DagError) as error:
        parsed(DAG.replace(old, new))
    assert any(said in each.message for each in error.value.problems), error.value


@pytest.mark.parametrize("by", ["unique_key: [id, who]", "unique_key: [id], version_by: who"])
def test_rows_are_merged_by_plain_columns(by: str) -> None:
    merging = DAG.replace("update: append", "update: merge\n    " + by.replace("], ", "]\n    "))
    with pytest.raises(DagError, match="'who' is nested"):
        parsed(merging.replace("columns: {id: string}", 'columns: {id: string, who: "array<int>"}'))


def test_who_reads_without_being_triggered_may_publish() -> None:
    read = "inputs: [raw, {from: alerts, trigger: false}], outputs: [seen], buffers: [alerts]"
    dag = parsed(DAG.replace("inputs: [alerts], outputs: [seen]", read))
    assert dag.job("read").buffers == ("alerts",)


def test_a_sink_that_falls_behind_presses_its_writers() -> None:
    dag = parsed()
    measures = {"write": QueueMeasure(depth=2 * BATCHES_WAITING_MAX)}
    found = decide(dag, measures, {})
    assert {each.job for each in found.pauses} == {"feed", "note"}
    assert {each.scope for each in found.pauses} == {PauseScope.ALL}
    # A DAG without writers has nobody to pause.
    alone = replace(dag, jobs=tuple(replace(job, buffers=()) for job in dag.jobs))
    assert decide(alone, measures, {}).pauses == frozenset()
