"""Forms as calls of the API, and its answers as sentences."""

from __future__ import annotations

import pytest

from penstock.console.pages.acting import asked_as, done, lines_of, number_of, object_of
from penstock.dispatcher.api.endpoints import Reply
from penstock.dispatcher.wire.asking import TasksParams, TaskStatus
from penstock.dispatcher.wire.problem import Problem
from penstock.dispatcher.wire.steering import BackfillAsk, OutboxRetryAnswer
from penstock.dispatcher.wire.work import ResultsAnswer, TaskResult
from penstock.kernel.errors import InvalidInput


def test_fields_become_what_the_api_is_asked() -> None:
    fields = {"job": " totals ", "start": "-5", "end": "5", "step": "1", "request_id": "  "}
    ask = asked_as(BackfillAsk, fields)
    assert ask == BackfillAsk(job="totals", start=-5, end=5, step=1)
    params = asked_as(TasksParams, {"status": "dead", "job": ""})
    assert (params.status, params.job) == (TaskStatus.DEAD, None)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({}, "The job is missing."),
        (
            {"job": "a", "start": "x"},
            "The start has to be a whole number or null, not a text.",
        ),
        ({"job": "a", "step": "0"}, "Step has to be 1 or more."),
        ({"job": "a", "keys": ["k" * 501]}, "A key has to have 500 characters at most."),
        ({"job": "a", "what": "x"}, "What is not a field that there is."),
    ],
)
def test_a_wrong_field_is_one_sentence(fields: dict[str, object], sentence: str) -> None:
    names = {"job": "the job", "start": "the start", "keys": "a key"}
    with pytest.raises(InvalidInput) as wrong:
        asked_as(BackfillAsk, fields, names=names)
    assert wrong.value.message == sentence


def test_a_word_that_is_not_one_of_some_names_them() -> None:
    with pytest.raises(InvalidInput, match="has to be one of queued, running, retrying"):
        asked_as(TasksParams, {"status": "lost"}, names={"status": "The status"})


def test_texts_that_are_lists_objects_and_numbers() -> None:
    assert lines_of(" a \n\n b\r\nc") == ["a", "b", "c"]
    assert object_of("  ", name="It") is None
    assert object_of('{"a": null}', name="It") == {"a": None}
    for text, words in (("{", "It is not JSON on line 1"), ("[1]", "It has to be a JSON object")):
        with pytest.raises(InvalidInput, match=words):
            object_of(text, name="It")
    with pytest.raises(InvalidInput, match="It is not JSON"):
        object_of("[" * 100_000, name="It")
    assert [number_of(each) for each in ("7", "0", "x", "-1", "²", "9" * 19, "1" * 30)] == [
        *(7, 0, 0, 0, 0, 0, 0)
    ]


def test_answers_as_sentences() -> None:
    assert done(OutboxRetryAnswer(retried=2), "/", told="Done.").told == "Done."
    told = done(OutboxRetryAnswer(retried=2), "/x", told=lambda each: f"{each.retried} again.")
    assert (told.told, told.to, told.is_well) == ("2 again.", "/x", True)
    problem = Problem(type="over", title="It is over.", status=409, detail="Make another.")
    for answer in (problem, Reply(problem, 409)):
        said = done(answer, "/", told="Done.")
        assert (said.told, said.is_well) == ("It is over. Make another.", False)


def test_answers_about_several_tasks() -> None:
    well = TaskResult(task_id=1, status=200)
    refused = TaskResult(task_id=2, status=409, why="over", detail="Task 2 is completed.")
    said = done(Reply(ResultsAnswer(results=[well, refused]), 207), "/", told="Done.")
    assert (said.told, said.is_well) == ("1 of 2 were refused. Task 2 is completed.", False)
    assert done(ResultsAnswer(results=[well]), "/", told="Done.").is_well
    problem = Problem(type="over", title="Every one was refused.", status=409, detail="`results`")
    problem.results = [refused, refused]
    assert done(problem, "/", told="x").told == "Every one was refused. Task 2 is completed."
