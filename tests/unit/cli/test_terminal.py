"""No text of a task, a worker, a user or a bucket is obeyed by the terminal that shows it."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import click
import msgspec
import pytest
from msgspec import inspect

from penstock import Client
from penstock.cli import cli, dispatcher_call, main, run
from penstock.cli.output import Guarded, ProgressBar, harmless
from penstock.dispatcher.api.routes import PUBLIC
from penstock.kernel.errors import TaskFailed
from penstock.protocol.steering import AttemptAnswer, TaskAnswer
from penstock.queue.execution.retry import Retry
from penstock.sync import Queue, Worker
from tests.unit.cli.terminal import Hurried, Screen, Typed, typed
from tests.unit.cli.test_dispatcher_verbs import ARGUMENTS, DATE, VERBS
from tests.unit.dispatcher.client.scripted import NOW, Reply, Scripted, problem, summary
from tests.unit.test_sync import SETTINGS

NASTY = "\x1b]0;owned\x07\x1b[2J\x9b31m\x08\x7f\r\u202efdp\u2066\u2028end"
"""It names the window, clears the screen, and turns the order of characters round."""
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_COLOURS = re.compile(r"\x1b\[(0|1|31|32|33|36)m")
_BAR = re.compile(r"\r\x1b\[K")


def _check(ran: Typed) -> None:
    for text in (_COLOURS.sub("", ran.out), _BAR.sub("", _COLOURS.sub("", ran.errors))):
        found = _OBEYED.search(text)
        assert found is None, repr(text[max(0, found.start() - 60) : found.end() + 20])


def _said(type_: inspect.Type) -> Any:
    """A value of a type, as JSON has it, with the nasty text wherever a text may be."""
    match type_:
        case inspect.StrType():
            return NASTY if type_.pattern is None else "00000000-0000-0000-0000-000000000000"
        case inspect.LiteralType() | inspect.EnumType():
            values = type_.values if isinstance(type_, inspect.LiteralType) else [*type_.cls]
            return values[0]
        case inspect.ListType():
            return [_said(type_.item_type)]
        case inspect.DictType():
            return {_said(type_.key_type): _said(type_.value_type)}
        case inspect.StructType():
            # There is never another page.
            return {
                each.encode_name: None if each.name == "after" else _said(each.type)
                for each in type_.fields
            }
        case inspect.UnionType():
            kinds = [each for each in type_.types if not isinstance(each, inspect.NoneType)]
            return _said(kinds[0])
        case inspect.DateTimeType():
            return NOW.isoformat()
        case inspect.BoolType():
            return True
        case inspect.IntType() | inspect.FloatType():
            return 1
    return {NASTY: NASTY}


def _hostile() -> Scripted:
    """A dispatcher in whose answers every text is nasty."""
    dispatcher = Scripted()
    for each in PUBLIC:
        if each.answer is None or not isinstance(each.answer, type):
            continue
        path = each.path
        for name, value in (("id", "42"), ("version", "3")):
            path = path.replace(f"{{{name}:int}}", value).replace(f"{{{name}}}", value)
        for name in ("clean", "sales", "ingest", "totals", "m:f", "7", "42", "3"):
            filled = re.sub(r"\{[^}]*\}", name, path)
            said = _said(inspect.type_info(each.answer))
            dispatcher.on(f"{each.method} {filled}", Reply(json.dumps(said).encode(), 200, DATE))
    return dispatcher


@pytest.mark.parametrize("verb", [each for each in VERBS if each not in ("dag apply", "task logs")])
@pytest.mark.parametrize("is_terminal", [True, False])
def test_no_verb_shows_what_would_be_obeyed(verb: str, *, is_terminal: bool) -> None:
    words = [*verb.split(), *ARGUMENTS.get(verb, "").split()]
    ran = typed(*words, dispatcher=_hostile(), is_terminal=is_terminal, clock=Hurried())
    _check(ran)
    assert "Internal error" not in ran.errors, ran.errors
    ran = typed(*words, "--json", dispatcher=_hostile(), is_terminal=is_terminal, clock=Hurried())
    _check(ran)


@pytest.mark.parametrize("verb", [each for each in VERBS if each != "dag apply"])
def test_no_refusal_shows_what_would_be_obeyed(verb: str) -> None:
    dispatcher = Scripted(steps=_Everywhere(problem(409, title=NASTY, detail=NASTY)))
    words = [*verb.split(), *ARGUMENTS.get(verb, "").split()]
    ran = typed(*words, dispatcher=dispatcher, clock=Hurried())
    _check(ran)
    assert "\\u001b]0;owned" in ran.errors


class _Everywhere(dict[str, Any]):
    """The same step, whatever is asked."""

    def __init__(self, step: Reply) -> None:
        super().__init__()
        self._step = step

    def get(self, _key: str, _default: Any = None) -> Any:
        return [self._step]


def test_logs_of_tasks_are_shown_without_what_would_be_obeyed_or_as_they_are(
    tmp_path: Path,
) -> None:
    log = tmp_path / "42-1.log"
    log.write_bytes(f"\x1b[8mhidden\x1b[0m\r\n10%\r20%\n{NASTY}\n".encode() + b"\xff")
    attempt = AttemptAnswer(
        number=1,
        worker=NASTY,
        started_at=NOW,
        ended_at=NOW,
        outcome="failed",
        reason=NASTY,
        progress=None,
        log=str(log),
    )
    answer = TaskAnswer(task=summary(), payload={}, attempts=[attempt], published=[])
    dispatcher = Scripted().on("GET /v1/tasks/42", Reply(msgspec.json.encode(answer), 200, DATE))
    for is_terminal in (True, False):
        ran = typed(
            "task", "logs", "42", dispatcher=dispatcher, is_terminal=is_terminal, clock=Hurried()
        )
        _check(ran)
        assert _COLOURS.search(ran.out) is None
        assert ran.out.startswith("hidden\n10%\n20%\n\\u001b]0;owned\\u0007")
    screen = io.TextIOWrapper(io.BytesIO(), "utf-8")
    with (
        redirect_stdout(screen),
        mock.patch.object(dispatcher_call, "connected", _connected(dispatcher)),
    ):
        assert run(["task", "logs", "42", "--raw"]) == 0
    assert screen.buffer.getvalue() == log.read_bytes()


def _connected(dispatcher: Scripted) -> Any:
    return lambda url, token: Client(url, token, transport=dispatcher.transport, clock=Hurried())


def test_a_task_of_a_queue_is_shown_harmlessly(tmp_path: Path) -> None:
    store = tmp_path.as_uri()

    with Queue(store, name="q") as queue:
        worker = Worker(queue, mode="shared", settings=SETTINGS)

        @worker.handler("t", retry=Retry(attempts=1))
        def fail(_: Any) -> None:
            raise ValueError(NASTY)

        with worker:
            task = queue.submit("t", {NASTY: NASTY})
            with pytest.raises(TaskFailed):
                task.result(timeout=60)
    for words in (("get", task.id), ("list",), ("history", task.id), ("stats",)):
        ran = typed("queue", *words, "--store", store, "--queue", "q", clock=Hurried())
        _check(ran)
        told = typed("queue", *words, "--store", store, "--queue", "q", "--json", clock=Hurried())
        _check(told)
    shown = typed("queue", "get", task.id, "--store", store, "--queue", "q", clock=Hurried())
    assert "\\u001b]0;owned" in shown.out
    assert _COLOURS.sub("", shown.out) != shown.out, "its own colours stay"


def test_whatever_a_verb_prints_is_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    def spill(**_: Any) -> None:
        click.echo(NASTY)
        # As click prints what the shell is to complete.
        click.echo(NASTY.encode())
        click.secho(NASTY, fg="red", err=True)
        sys.stdout.write(NASTY)
        sys.stderr.writelines([NASTY])
        logging.StreamHandler(sys.stderr).emit(logging.LogRecord("x", 40, "x", 1, NASTY, (), None))
        raise RuntimeError(NASTY)

    monkeypatch.setattr(cli, "main", spill)
    ran = typed("status", clock=Hurried())
    _check(ran)
    assert ran.out.count("\\u001b]0;owned") == 3
    assert "\x1b[31m" in ran.errors
    with pytest.raises(AttributeError):
        _ = Guarded(io.TextIOWrapper(io.BytesIO())).buffer


def test_a_traceback_is_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise TaskFailed("\x1b]0;title\x07")

    monkeypatch.setattr(cli, "main", fail)
    monkeypatch.setattr(sys, "argv", ["penstock", "--debug", "status"])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    with pytest.raises(TaskFailed) as caught:
        main()
    with redirect_stderr(io.StringIO()) as shown:
        sys.excepthook(caught.type, caught.value, caught.tb)
    assert "\\u001b]0;title" in shown.getvalue()
    assert "\x1b" not in shown.getvalue()


def test_what_is_shown_is_the_same_text_to_a_reader_of_json() -> None:
    every = "".join(map(chr, [*range(0x20, 0x300), *range(0x2000, 0x2100), 0xD800, 0x1F600]))
    out = Screen()
    with redirect_stdout(Guarded(out)):
        click.echo(json.dumps([every], ensure_ascii=False))
    assert json.loads(out.getvalue()) == [every]
    assert harmless("a\tb\nü€😀") == "a\tb\nü€😀"


def test_a_bar_draws_over_itself_and_lets_its_text_do_nothing() -> None:
    out = Screen()
    with redirect_stderr(Guarded(out)), ProgressBar() as bar:
        bar.show(f"{NASTY} is computed", done=1, of=2)
    _check(Typed(0, "", out.getvalue()))
    assert out.getvalue().startswith("\r\x1b[K")
