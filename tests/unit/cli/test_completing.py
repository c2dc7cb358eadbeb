"""What the shell completes: verbs and options always, names if a dispatcher answers."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from click.shell_completion import ShellComplete

from penstock.cli import cli, completion, run
from penstock.cli.start_page import Glance

ANSWERS: dict[str, dict[str, Any]] = {
    "/v1/status": {"jobs": [{"name": "clean", "operator": "m:clean"}, {"name": "totals"}]},
    "/v1/datasets": {"datasets": [{"name": "sales", "job": "clean"}]},
    "/v1/operators": {"operators": [{"name": "m:clean"}]},
    "/v1/backfills": {"backfills": [{"id": 7, "state": "running", "job": "totals"}]},
    "/v1/dag/versions": {"versions": [{"id": 2}, {"id": 1}]},
    "/v1/tasks": {"tasks": [{"id": 42, "status": "dead", "job": "clean", "partition_key": "p"}]},
}


class Dispatcher:
    """Answers, and remembers what it was asked."""

    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.asked: list[tuple[str, str, str | None, dict[str, str]]] = []

    def __call__(
        self,
        url: str,
        path: str,
        *,
        token: str | None,
        seconds: float,
        asked: dict[str, str] | None = None,
    ) -> Glance:
        assert seconds <= 0.5
        self.asked.append((url, path, token, asked or {}))
        return Glance(self.status, ANSWERS[path])


def completed(line: str, dispatcher: Any) -> list[tuple[str, str | None]]:
    *words, typed = line.split(" ")
    with mock.patch.object(completion, "glance", dispatcher):
        made = ShellComplete(cli, {}, "penstock", "_PENSTOCK_COMPLETE")
        return [(each.value, each.help) for each in made.get_completions(words, typed)]


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("trigger ", ["clean", "totals"]),
        ("trigger --dataset ", ["sales"]),
        ("pause c", ["clean"]),
        ("resume t", ["totals"]),
        ("backfill start ", ["clean", "totals"]),
        ("backfill show ", ["7"]),
        ("backfill cancel ", ["7"]),
        ("task list --job to", ["totals"]),
        ("task show ", ["42"]),
        ("task logs 4", ["42"]),
        ("task cancel ", ["42"]),
        ("task replay 5", []),
        ("dataset show ", ["sales"]),
        ("dataset preview s", ["sales"]),
        ("dataset sweep ", ["sales"]),
        ("dataset maintain ", ["sales"]),
        ("dataset refresh ", ["sales"]),
        ("dataset cut-over ", ["sales"]),
        ("operator limit ", ["m:clean"]),
        ("dag rollback ", ["2", "1"]),
    ],
)
def test_names_are_those_that_there_are(line: str, names: list[str]) -> None:
    assert [value for value, _ in completed(line, Dispatcher())] == names
    # In silence, whatever is wrong.
    assert completed(line, Dispatcher(status=401)) == []
    assert completed(line, lambda *_, **__: None) == []
    assert completed(line, lambda *_, **__: Glance(200, {})) == []


def test_a_task_comes_with_what_is_worth_knowing() -> None:
    dispatcher = Dispatcher()
    assert completed("task replay ", dispatcher) == [("42", "dead clean p")]
    assert dispatcher.asked[0][3]["status"] == "dead"


def test_the_dispatcher_is_the_one_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatcher = Dispatcher()
    completed("pause --url http://a --token b ", dispatcher)
    monkeypatch.setenv("PENSTOCK_URL", "http://c")
    completed("pause ", dispatcher)
    assert [each[:3:2] for each in dispatcher.asked] == [("http://a", "b"), ("http://c", None)]


def test_names_that_a_shell_would_obey_are_left_out() -> None:
    rows = [{"name": "a\nb"}, {"name": "\x1b[2J"}, {"name": "good", "operator": "\x1b[2J"}, 7]
    found = completed("pause ", lambda *_, **__: Glance(200, {"jobs": rows}))
    assert found == [("good", None)]


def test_verbs_and_options_complete_without_asking() -> None:
    assert [value for value, _ in completed("queue li", None)] == ["list", "limits"]
    assert [value for value, _ in completed("task list --st", None)] == ["--status"]
    assert [value for value, _ in completed("logs w", None)] == ["worker", "webhook"]


@pytest.mark.parametrize(
    ("shell", "first", "install"),
    [
        ("bash", "# For good: ", "bash-completion/completions/penstock"),
        ("zsh", "#compdef penstock", "fpath"),
        ("fish", "# For good: ", "completions/penstock.fish"),
    ],
)
def test_the_program_of_each_shell_says_how_to_install_it(
    shell: str, first: str, install: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["completion", shell]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(first)
    assert install in "".join(lines[:2])
    assert f"_PENSTOCK_COMPLETE={shell}_complete" in "\n".join(lines)
