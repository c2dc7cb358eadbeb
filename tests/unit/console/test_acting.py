"""Forms as calls of the API, and its answers as sentences."""

from __future__ import annotations

import pytest

from penstock.console.pages.base import (
    action_result,
    parse_form,
    parse_id,
    parse_json_object,
    split_lines,
)
from penstock.dispatcher.api.endpoints import HttpReply
from penstock.kernel.errors import InvalidInput
from penstock.protocol.base import TasksParams, TaskStatus
from penstock.protocol.problem import Problem
from penstock.protocol.steering import BackfillAsk, OutboxRetryAnswer
from penstock.protocol.work import ResultsAnswer, TaskResult


def test_fields_become_what_the_api_is_asked() -> None:
    fields = {"job": " totals ", "start": "-5", "end": "5", "step": "1", "request_id": "  "}
    ask = parse_form(BackfillAsk, fields)
    assert ask == BackfillAsk(job="totals", start=-5, end=5, step=1)
    params = parse_form(TasksParams, {"status": "dead", "job": ""})
    assert (params.status, params.job) == (TaskStatus.FAILED, None)


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
        parse_form(BackfillAsk, fields, names=names)
    assert wrong.value.message == sentence


def test_a_word_that_is_not_one_of_some_names_them() -> None:
    with pytest.raises(InvalidInput, match="has to be one of queued, running, retrying"):
        parse_form(TasksParams, {"status": "lost"}, names={"status": "The status"})


def test_texts_that_are_lists_objects_and_numbers() -> None:
    assert split_lines(" a \n\n b\r\nc") == ["a", "b", "c"]
    assert parse_json_object("  ", name="It") is None
    assert parse_json_object('{"a": null}', name="It") == {"a": None}
    for text, words in (("{", "It is not JSON on line 1"), ("[1]", "It must be a JSON object")):
        with pytest.raises(InvalidInput, match=words):
            parse_json_object(text, name="It")
    with pytest.raises(InvalidInput, match="It is not JSON"):
        parse_json_object("[" * 100_000, name="It")
    assert [parse_id(each) for each in ("7", "0", "x", "-1", "²", "9" * 19, "1" * 30)] == [
        *(7, 0, 0, 0, 0, 0, 0)
    ]


def test_answers_as_sentences() -> None:
    assert action_result(OutboxRetryAnswer(retried=2), "/", told="Done.").told == "Done."
    told = action_result(
        OutboxRetryAnswer(retried=2), "/x", told=lambda each: f"{each.retried} again."
    )
    assert (told.told, told.to, told.is_well) == ("2 again.", "/x", True)
    problem = Problem(type="over", title="It is over.", status=409, detail="Make another.")
    for answer in (problem, HttpReply(problem, 409)):
        said = action_result(answer, "/", told="Done.")
        assert (said.told, said.is_well) == ("It is over. Make another.", False)


def test_answers_about_several_tasks() -> None:
    well = TaskResult(task_id=1, status=200)
    refused = TaskResult(task_id=2, status=409, why="over", detail="Task 2 is completed.")
    said = action_result(HttpReply(ResultsAnswer(results=[well, refused]), 207), "/", told="Done.")
    assert (said.told, said.is_well) == ("1 of 2 were refused. Task 2 is completed.", False)
    assert action_result(ResultsAnswer(results=[well]), "/", told="Done.").is_well
    problem = Problem(type="over", title="Every one was refused.", status=409, detail="`results`")
    problem.results = [refused, refused]
    assert (
        action_result(problem, "/", told="x").told == "Every one was refused. Task 2 is completed."
    )
