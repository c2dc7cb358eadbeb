"""From an assignment to work, and from what was made to an end."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.dispatcher.wire.work import Assignment, EndAsk, InputAnswer
from penstock.kernel.errors import InvalidInput, WorkFailed
from penstock.runtimes.base import Given, Made, Place
from penstock.runtimes.places import Places
from penstock.worker.orders import failed, is_always_on, succeeded, work_of
from penstock.worker.settings import WorkerSettings
from tests.unit.worker.scripted import DATASET, GENERATION

PLACES = Places("s3://bucket/data/", Path("/logs"))


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
    )


def test_an_assignment_as_work() -> None:
    definition = {
        "config": {"a": 1},
        "resources": {"cpu": 2},
        "outputs": [{"name": "tidy"}, {"name": "bad", "dataset": "rejected"}],
        "datasets": {"tidy": DATASET, "rejected": GENERATION, "r": "unused"},
    }
    work = work_of(
        assignment(definition, partition_key="2025"), PLACES, attempt_id="ID", grace_seconds=3
    )
    assert (work.task_id, work.attempt, work.job, work.operator) == (7, 2, "clean", "a:clean")
    assert (work.config, work.resources) == ({"a": 1}, {"cpu": 2})
    assert (work.grace_seconds, work.timeout_seconds) == (3, 60)
    assert work.inputs == {"raw": Given(dataset="r", generation="g", location="s3://x")}
    base = "s3://bucket/data/datasets"
    assert work.outputs == {
        "tidy": Place(dataset="tidy", uuid=DATASET, location=f"{base}/tidy/{GENERATION}/2025/ID"),
        "bad": Place(
            dataset="rejected", uuid=GENERATION, location=f"{base}/rejected/{GENERATION}/2025/ID"
        ),
    }
    assert work.log == "/logs/7-2.log"


def test_a_job_without_anything() -> None:
    work = work_of(assignment(), PLACES, attempt_id="ID", grace_seconds=3)
    assert (work.outputs, work.config, work.resources) == ({}, {}, {})


@pytest.mark.parametrize("outputs", [["x"], [{}], [{"name": 1}], [{"name": "not in datasets"}]])
def test_outputs_of_a_later_release(outputs: list[Any]) -> None:
    with pytest.raises(WorkFailed, match="cannot be understood by this worker"):
        work_of(
            assignment({"outputs": outputs, "datasets": {}}),
            PLACES,
            attempt_id="ID",
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
    work = work_of(given_out, PLACES, attempt_id="ID", grace_seconds=3)
    assert (is_always_on(given_out), work.grace_seconds) == expected
    assert (work.timeout_seconds is None) == expected[0]


def whatever() -> st.SearchStrategy[Made]:
    texts = st.text(st.characters(exclude_categories=()), max_size=30)
    numbers = st.none() | st.integers(-(2**70), 2**70)
    return st.builds(
        Made,
        output=st.sampled_from(["tidy", "other"]),
        location=texts,
        partition_key=st.none() | texts,
        start=numbers,
        end=numbers,
        cursor=numbers,
        append_key=st.none() | texts,
    )


@given(st.lists(whatever(), max_size=3))
def test_no_task_can_spoil_a_call(made: list[Made]) -> None:
    definition = {"outputs": [{"name": "tidy"}], "datasets": {"tidy": DATASET}}
    work = work_of(assignment(definition), PLACES, attempt_id="ID", grace_seconds=3)
    try:
        end = succeeded(work, made, lease_token="token")
    except WorkFailed:
        return
    # What the dispatcher reads is what was meant, and is within its bounds.
    assert msgspec.json.decode(msgspec.json.encode(end), type=EndAsk) == end
    assert [each.location for each in end.outputs] == [each.location for each in made]


def test_more_outputs_than_a_task_may_have() -> None:
    definition = {"outputs": [{"name": "tidy"}], "datasets": {"tidy": DATASET}}
    work = work_of(assignment(definition), PLACES, attempt_id="ID", grace_seconds=3)
    with pytest.raises(WorkFailed, match=r"10,001 outputs; a task may have 10,000\."):
        succeeded(work, [Made(output="tidy", location="x")] * 10_001, lease_token="token")


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
        WorkerSettings(**wrong)
