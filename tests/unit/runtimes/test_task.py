"""What a user's function is given, and what is made of what it returns."""

from __future__ import annotations

import json
from pathlib import Path
from types import MappingProxyType

import pytest

from penstock.datasets.layout import path_of
from penstock.kernel.errors import InvalidInput
from penstock.protocol.events import BATCH_BYTES_MAX
from penstock.runtimes import task_requests
from penstock.runtimes.base import AttemptWork, Part, ProducedOutput, WorkInput
from penstock.runtimes.task import FunctionTask, RecordingChannel, StopFlag
from tests.unit.runtimes.benches import place, work


def _task(folder: Path, **more: object) -> FunctionTask:
    return FunctionTask(work("mine:run", folder, **more), line=RecordingChannel())


def test_it_tells_what_the_task_is_about(tmp_path: Path) -> None:
    task = _task(tmp_path, config={"colour": "red"})
    assert (task.id, task.attempt, task.job) == (7, 2, "job")
    assert (task.partition_key, task.start, task.end, task.cursor) == ("p", 1, 5, None)
    assert task.config == {"colour": "red"}
    assert task.output.path == tmp_path / "out"


def test_what_came_with_the_event_is_there_to_be_read(tmp_path: Path) -> None:
    assert _task(tmp_path).payload == {}
    task = _task(tmp_path, payload={"partition_key": "p", "payload": {"id": 1, "start": 9}})
    assert task.payload == {"id": 1, "start": 9}
    # What comes with an event says nothing of the task itself.
    assert (task.partition_key, task.start) == ("p", None)
    with pytest.raises(TypeError):
        task.payload["id"] = 2  # type: ignore[index] # that it cannot be done is the point


def test_none_is_every_output_at_its_place_for_the_tasks_partition(tmp_path: Path) -> None:
    outputs = {name: place(name, tmp_path) for name in ("a", "b")}
    made = _task(tmp_path, outputs=outputs).made(None)
    assert made == tuple(
        ProducedOutput(output=name, location=each.location, partition_key="p", start=1, end=5)
        for name, each in outputs.items()
    )


def test_a_task_without_a_partition_makes_its_cursor(tmp_path: Path) -> None:
    (made,) = _task(tmp_path, payload={"cursor": 9, "start": 1}).made(None)
    assert (made.partition_key, made.start, made.cursor) == (None, None, 9)


def test_a_dict_is_just_these(tmp_path: Path) -> None:
    outputs = {name: place(name, tmp_path) for name in ("a", "b")}
    (made,) = _task(tmp_path, outputs=outputs).made({"b": "s3://else/where"})
    assert (made.output, made.location, made.partition_key) == ("b", "s3://else/where", "p")


def test_publish_says_more_and_then_nothing_is_taken_for_granted(tmp_path: Path) -> None:
    task = _task(tmp_path)
    task.publish(append_key="k")
    task.publish("out", partition_key="q", start=5, end=6)
    first, second = task.made(None)
    assert (first.partition_key, first.append_key) == ("p", "k")
    assert (second.partition_key, second.start, second.end) == ("q", 5, 6)
    assert first.location == second.location == (tmp_path / "out").as_uri()


@pytest.mark.parametrize("returned", [7, "text", ["out"], {"out": 7}, {"other": "x"}])
def test_anything_else_is_refused(tmp_path: Path, returned: object) -> None:
    with pytest.raises((TypeError, ValueError), match=r"returned|no output 'other'"):
        _task(tmp_path).made(returned)


def test_which_output_is_meant_must_be_said_where_there_are_several(tmp_path: Path) -> None:
    outputs = {name: place(name, tmp_path) for name in ("a", "b")}
    with pytest.raises(ValueError, match="the outputs a, b; say which"):
        _task(tmp_path, outputs=outputs).publish()


def test_events_are_known_by_their_cursor_and_else_all_new(tmp_path: Path) -> None:
    line = RecordingChannel()
    task = FunctionTask(work("mine:run", tmp_path), line=line)
    task.emit(cursor=4)
    task.emit(partition_key="p")
    task.emit(partition_key="p")
    task.emit(event_id="mine", partition_key="p")
    ids = [each.event_id for each in line.news]
    assert ids[0] == "cursor:4"
    assert len(set(ids)) == 4
    assert ids[3] == "mine"


def test_what_came_with_the_event_can_be_passed_on(tmp_path: Path) -> None:
    line = RecordingChannel()
    task = FunctionTask(work("mine:run", tmp_path, payload={"payload": {"id": 1}}), line=line)
    task.emit(cursor=1, payload=task.payload)
    task.emit(cursor=2)
    assert [each.payload for each in line.news] == [{"id": 1}, None]


def test_an_input_that_is_not_there_says_so(tmp_path: Path) -> None:
    given = WorkInput(
        dataset="raw", generation="g", location=(tmp_path / "a b").as_uri(), revision=3
    )
    task = _task(tmp_path, inputs={"raw": given, "late": WorkInput(dataset="late", generation="g")})
    assert task.inputs["raw"].is_there
    assert task.inputs["raw"].path == tmp_path / "a b"
    assert not task.inputs["late"].is_there
    with pytest.raises(FileNotFoundError, match="Nothing is published of the input late"):
        _ = task.inputs["late"].path


def test_an_input_of_several_parts_is_read_by_its_paths(tmp_path: Path) -> None:
    parts = tuple(Part(location=(tmp_path / name).as_uri()) for name in "ab")
    given = WorkInput(dataset="raw", generation="g", parts=parts)
    raw = _task(tmp_path, inputs={"raw": given}).inputs["raw"]
    assert raw.is_there
    assert raw.parts == parts
    assert raw.paths == (tmp_path / "a", tmp_path / "b")
    with pytest.raises(ValueError, match="The input raw has 2 parts for this task; read all"):
        _ = raw.path


def test_a_location_elsewhere_is_no_path() -> None:
    with pytest.raises(InvalidInput, match="is not a file of this machine"):
        path_of("s3://bucket/key")


def test_looking_at_stopping_is_noticed(tmp_path: Path) -> None:
    stopping = StopFlag()
    task = FunctionTask(work("mine:run", tmp_path), stopping=stopping)
    seen = [stopping.is_watched, task.stopping, stopping.is_watched]
    stopping.set()
    assert [*seen, task.stopping, task.wait(60)] == [False, False, True, True, True]


def test_an_input_or_output_that_there_is_not_tells_which_there_are(tmp_path: Path) -> None:
    task = _task(tmp_path, outputs={name: place(name, tmp_path) for name in ("a", "b")})
    with pytest.raises(KeyError, match=r"The job has no output 'nope'; it has a, b\."):
        task.outputs["nope"]
    with pytest.raises(KeyError, match=r"The job has no input 'nope'; it has raw\."):
        task.inputs["nope"]
    assert task.outputs.get("nope") is None
    assert "nope" not in task.outputs


def test_rows_become_as_many_batches_as_they_need() -> None:
    rows = [{"id": number, "text": "x" * 1000} for number in range(600)]
    pieces = list(task_requests._pieces(rows))
    assert len(pieces) == 3
    assert [json.loads(bytes(row)) for piece in pieces for row in piece] == rows
    sizes = [sum(len(bytes(row)) + 1 for row in piece) for piece in pieces]
    assert max(sizes) <= BATCH_BYTES_MAX + 1
    # The same rows make the same batches, so that a retry sends none of them twice.
    assert [len(piece) for piece in task_requests._pieces(rows)] == [len(each) for each in pieces]
    assert list(task_requests._pieces([])) == []
    (piece,) = task_requests._pieces([MappingProxyType({"id": 1})])
    assert bytes(piece[0]) == b'{"id":1}'
    with pytest.raises(InvalidInput, match="A row has 262,144 bytes at most"):
        list(task_requests._pieces([{"text": "x" * BATCH_BYTES_MAX}]))


def test_a_task_without_a_token_publishes_no_batches() -> None:
    task = FunctionTask(AttemptWork(task_id=1, attempt=1, job="j", operator="o", generation="g"))
    with pytest.raises(InvalidInput, match="no token"):
        task.buffer("alerts", [{"id": 1}], id="one")
