"""From an assignment to work, and from what was made to an end."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from penstock.datasets.manifest import LISTED_MAX
from penstock.datasets.schema import Column
from penstock.kernel.errors import InvalidInput, WorkFailed
from penstock.kernel.frames import FrameDecoder
from penstock.protocol.work import (
    Assignment,
    ColumnAsk,
    EndAsk,
    FactsAsk,
    InputAnswer,
    InputColumnAnswer,
    PartAnswer,
)
from penstock.runtimes.base import (
    Facts,
    Part,
    ProducedOutput,
    WorkInput,
    WorkOutput,
    WorkResult,
    manifest_inputs,
    manifest_totals,
)
from penstock.runtimes.frames import FRAME_BYTES_MAX, encode_frame
from penstock.runtimes.spark.frames import GiveWork, to_host
from penstock.worker.assignment_codec import failed, is_always_on, succeeded, work_of
from penstock.worker.settings import PipelineWorkerSettings
from tests.unit.worker.scripted import DATASET, GENERATION

LOGS = Path("/logs")


def assignment(definition: dict[str, Any] | None = None, **payload: Any) -> Assignment:
    return Assignment(
        task_id=7,
        attempt=2,
        lease_token="token",
        lease_expires_at=datetime(2025, 1, 1, tzinfo=UTC),
        heartbeat_seconds=30,
        timeout_seconds=60,
        job="clean",
        operator="a:clean",
        runtime="process",
        generation=GENERATION,
        definition=definition or {},
        payload=payload,
        inputs={"raw": InputAnswer(dataset="r", uuid=DATASET, generation="g", location="s3://x")},
        root="s3://bucket/data",
        folder="ID",
        token="head.body.signature",
    )


def test_an_assignment_as_work() -> None:
    definition = {
        "config": {"a": 1},
        "resources": {"cpu": 2},
        "outputs": [
            {"name": "tidy"},
            {"name": "bad", "dataset": "rejected"},
            {"name": "days", "partition_by": "day"},
        ],
        "datasets": {"tidy": DATASET, "rejected": GENERATION, "days": DATASET, "r": "unused"},
    }
    columns = {
        "rejected": [
            InputColumnAnswer(name="n", type="int"),
            InputColumnAnswer(name="m", type="date", is_nullable=False),
        ]
    }
    told = structs.replace(assignment(definition, partition_key="2025"), columns=columns)
    work = work_of(told, logs=LOGS, grace_seconds=3)
    assert (work.task_id, work.attempt, work.job, work.operator) == (7, 2, "clean", "a:clean")
    assert (work.config, work.resources) == ({"a": 1}, {"cpu": 2})
    assert (work.grace_seconds, work.timeout_seconds) == (3, 60)
    assert work.inputs == {"raw": WorkInput(dataset="r", generation="g", location="s3://x")}
    base = "s3://bucket/data/datasets"
    assert work.outputs == {
        "tidy": WorkOutput(
            dataset="tidy", uuid=DATASET, location=f"{base}/tidy/{GENERATION}/2025/ID"
        ),
        "bad": WorkOutput(
            dataset="rejected",
            uuid=GENERATION,
            location=f"{base}/rejected/{GENERATION}/2025/ID",
            columns=(Column("n", "int"), Column("m", "date", is_nullable=False)),
        ),
        "days": WorkOutput(
            dataset="days",
            uuid=DATASET,
            location=f"{base}/days/{GENERATION}/~many/ID",
            partition_by="day",
        ),
    }
    assert work.log == "/logs/7-2.log"
    assert work.scratch == "s3://bucket/data/scratch/ID"
    assert (work.batch, work.batch_size) == ("", 1)


def test_an_assignment_of_a_batch() -> None:
    given_out = structs.replace(assignment(), batch="7-2")
    work = work_of(given_out, logs=LOGS, grace_seconds=3, batch_size=5)
    assert (work.batch, work.batch_size) == ("7-2", 5)


def with_parts(count: int) -> Assignment:
    parts = [
        PartAnswer(
            location=f"s3://{number}",
            partition_key="p",
            start=1,
            end=2,
            revision=3,
            append_key=str(number),
            manifest="a" * 64,
            rows=4,
            bytes=5,
        )
        for number in range(count)
    ]
    raw = InputAnswer(dataset="r", uuid=DATASET, generation="g", parts=parts)
    return structs.replace(assignment(), inputs={"raw": raw})


def test_all_parts_of_an_input_are_given() -> None:
    work = work_of(with_parts(2), logs=LOGS, grace_seconds=3)
    first, second = work.inputs["raw"].parts
    assert first == Part(
        location="s3://0",
        partition_key="p",
        start=1,
        end=2,
        revision=3,
        append_key="0",
        manifest="a" * 64,
        rows=4,
        bytes=5,
    )
    assert second.location == "s3://1"


def test_a_task_may_read_very_many_parts_and_they_reach_its_runtime() -> None:
    work = work_of(with_parts(100_000), logs=LOGS, grace_seconds=3)
    unframing = FrameDecoder(bytes_max=2**32)
    unframing.feed(encode_frame(GiveWork(run=1, work=work)))
    body = unframing.body()
    assert body is not None
    assert len(body) > FRAME_BYTES_MAX
    given = to_host.decode(body)
    assert isinstance(given, GiveWork)
    assert given.work.inputs["raw"].parts == work.inputs["raw"].parts
    assert len(manifest_inputs(work.inputs)) == LISTED_MAX
    totals = manifest_totals(work.inputs)
    assert totals is not msgspec.UNSET
    (total,) = totals
    assert (total.dataset, total.parts) == (work.inputs["raw"].dataset, 100_000)


def test_of_an_input_without_changes_the_columns_are_given_and_what_was_missed() -> None:
    columns = [InputColumnAnswer("n", "bigint", is_nullable=False)]
    raw = InputAnswer(dataset="r", uuid=DATASET, generation="g", columns=columns, missed=2)
    work = work_of(structs.replace(assignment(), inputs={"raw": raw}), logs=LOGS, grace_seconds=3)
    given = work.inputs["raw"]
    assert (given.parts, given.columns, given.missed) == ((), (Column("n", "bigint", False),), 2)
    assert given.is_there
    assert not work_of(assignment(), logs=LOGS, grace_seconds=3).inputs["raw"].is_there


def test_what_a_manifest_says_is_told() -> None:
    definition = {"outputs": [{"name": "tidy"}], "datasets": {"tidy": DATASET}}
    work = work_of(assignment(definition), logs=LOGS, grace_seconds=3)
    facts = Facts(
        manifest="b" * 64, files=1, rows=2, bytes=3, columns=(Column("day", "date", False),)
    )
    made = ProducedOutput(output="tidy", location="x", facts=facts)
    end = succeeded(work, WorkResult(made=(made,), metrics={"rows": 2}), lease_token="token")
    (output,) = end.outputs
    assert output.facts == FactsAsk(
        manifest="b" * 64,
        files=1,
        rows=2,
        bytes=3,
        columns=[ColumnAsk(name="day", type="date", is_nullable=False)],
    )
    assert end.metrics == {"rows": 2}


def test_a_manifest_that_cannot_be_is_a_failure() -> None:
    definition = {"outputs": [{"name": "tidy"}], "datasets": {"tidy": DATASET}}
    work = work_of(assignment(definition), logs=LOGS, grace_seconds=3)
    facts = Facts(manifest="no digest", files=1, rows=2, bytes=3)
    made = ProducedOutput(output="tidy", location="x", facts=facts)
    with pytest.raises(WorkFailed, match="cannot be published"):
        succeeded(work, WorkResult(made=(made,)), lease_token="token")


@pytest.mark.parametrize(
    ("metrics", "told"),
    [
        ({}, None),
        ({"phases": {"read_seconds": 0.5}}, {"phases": {"read_seconds": 0.5}}),
        ({"text": "x" * 8_000}, {"omitted": "They have 8,011 bytes; 8,000 are allowed."}),
    ],
)
def test_figures_are_told_within_bounds(metrics: dict[str, Any], told: object) -> None:
    work = work_of(assignment(), logs=LOGS, grace_seconds=3)
    end = succeeded(work, WorkResult(made=(), metrics=metrics), lease_token="token")
    assert end.metrics == told


def test_figures_that_are_no_json_cost_nothing_else() -> None:
    work = work_of(assignment(), logs=LOGS, grace_seconds=3)
    end = succeeded(work, WorkResult(made=(), metrics={"x": object()}), lease_token="token")
    assert end.failure is None
    assert str((end.metrics or {})["omitted"]).startswith("They are no JSON")


def test_a_job_without_anything() -> None:
    work = work_of(assignment(), logs=LOGS, grace_seconds=3)
    assert (work.outputs, work.config, work.resources) == ({}, {}, {})


@pytest.mark.parametrize("outputs", [["x"], [{}], [{"name": 1}], [{"name": "not in datasets"}]])
def test_outputs_of_a_later_release(outputs: list[Any]) -> None:
    with pytest.raises(WorkFailed, match="cannot be read by this worker"):
        work_of(
            assignment({"outputs": outputs, "datasets": {}}),
            logs=LOGS,
            grace_seconds=3,
        )


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ({"kind": "always_on", "drain_timeout": "2m"}, (True, 120)),
        ({"kind": "always_on"}, (True, 3)),
        ({"kind": "always_on", "drain_timeout": "soon"}, (True, 3)),
        ({"kind": "manual"}, (False, 3)),
        ("always_on", (False, 3)),
    ],
)
def test_how_long_a_source_may_take_to_stop(source: object, expected: tuple[bool, float]) -> None:
    given_out = assignment({"source": source})
    work = work_of(given_out, logs=LOGS, grace_seconds=3)
    assert (is_always_on(given_out), work.grace_seconds) == expected
    assert (work.timeout_seconds is None) == expected[0]


def whatever() -> st.SearchStrategy[ProducedOutput]:
    texts = st.text(st.characters(exclude_categories=()), max_size=30)
    numbers = st.none() | st.integers(-(2**70), 2**70)
    return st.builds(
        ProducedOutput,
        output=st.sampled_from(["tidy", "other"]),
        location=texts,
        partition_key=st.none() | texts,
        start=numbers,
        end=numbers,
        cursor=numbers,
        append_key=st.none() | texts,
    )


@given(st.lists(whatever(), max_size=3))
def test_no_task_can_spoil_a_call(made: list[ProducedOutput]) -> None:
    definition = {"outputs": [{"name": "tidy"}], "datasets": {"tidy": DATASET}}
    work = work_of(assignment(definition), logs=LOGS, grace_seconds=3)
    try:
        end = succeeded(work, WorkResult(made=tuple(made)), lease_token="token")
    except WorkFailed:
        return
    # What the dispatcher reads is what was meant, and is within its bounds.
    assert msgspec.json.decode(msgspec.json.encode(end), type=EndAsk) == end
    assert [each.location for each in end.outputs] == [each.location for each in made]


def test_more_outputs_than_a_task_may_have() -> None:
    definition = {"outputs": [{"name": "tidy"}], "datasets": {"tidy": DATASET}}
    work = work_of(assignment(definition), logs=LOGS, grace_seconds=3)
    finished = WorkResult(made=(ProducedOutput(output="tidy", location="x"),) * 10_001)
    with pytest.raises(WorkFailed, match=r"10,001 outputs; at most 10,000 are allowed\."):
        succeeded(work, finished, lease_token="token")


@given(st.text(st.characters(exclude_categories=()), max_size=50))
def test_every_reason_can_be_told(reason: str) -> None:
    end = failed(assignment(), reason, log="x" * 1001)
    assert msgspec.json.decode(msgspec.json.encode(end), type=EndAsk) == end
    assert end.log is None
    long = failed(assignment(), "x" * 200_000).failure
    assert long is not None
    assert len(long.reason) == 10_000


@pytest.mark.parametrize(
    "wrong",
    [
        {"concurrency": 0},
        {"concurrency": 1001},
        {"stop_seconds": -1},
        {"hello_seconds": 0},
        {"look_seconds": 1e9},
        {"gather_seconds": float("nan")},
    ],
)
def test_settings_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        PipelineWorkerSettings(**wrong)
