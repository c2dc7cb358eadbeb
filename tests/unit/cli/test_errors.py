"""What goes wrong: one sentence, the next step, an exit code, and the traceback for who asks."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import click
import pytest

from penstock.cli import cli, main, run, start_page
from penstock.cli.verbs import Verbs
from penstock.kernel.errors import InvalidInput, PenstockError


@contextmanager
def failing(error: BaseException) -> Iterator[None]:
    """A verb `fail` that fails so."""

    @click.command()
    @click.argument("words", nargs=-1)
    def fail(words: tuple[str, ...]) -> None:
        if words != ("--debug",):
            raise error

    with mock.patch.dict(cli.commands, {"fail": fail}):
        yield


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (PenstockError("No.", hint="Yes."), 1, "penstock: No.\n  Yes.\n"),
        (InvalidInput("No.", hint="Yes."), 2, "penstock: No.\n  Yes.\n"),
        (ExceptionGroup("x", [InvalidInput("No.")]), 2, "penstock: No.\n"),
        (OSError(28, "No space left", "a/b"), 1, "penstock: The system refused a/b: No space"),
        (
            KeyError("x\ny"),
            1,
            "penstock: Internal error: KeyError: 'x\\ny'.\n  Run again with --debug",
        ),
        (RuntimeError(), 1, "penstock: Internal error: RuntimeError.\n"),
        (KeyboardInterrupt(), 130, "\npenstock: Interrupted.\n"),
        (click.UsageError("No."), 2, "penstock: No.\n"),
    ],
)
def test_an_error_is_one_sentence_and_a_next_step(
    error: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with failing(error):
        assert run(["fail"]) == code
    shown = capsys.readouterr()
    assert shown.err.startswith(said)
    assert "Traceback" not in shown.err
    assert shown.out == ""


class Unraisable:
    """Something that fails when it is thrown away, as half a coroutine does."""

    def __del__(self) -> None:
        raise ValueError("This is buried.")


@pytest.mark.parametrize(("kind", "is_shown"), [(KeyboardInterrupt, False), (KeyError, True)])
def test_what_an_interrupt_leaves_half_done_is_not_complained_of(
    kind: type[BaseException], is_shown: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    @click.command()
    def fail() -> None:
        half = Unraisable()  # It goes with the frames of the error.
        raise kind(half.__class__)

    with (
        mock.patch.dict(cli.commands, {"fail": fail}),
        mock.patch.object(sys, "unraisablehook"),
        mock.patch.object(sys, "argv", ["penstock", "fail"]),
        mock.patch("penstock.cli._interrupted", threading.Event()),
        pytest.raises(SystemExit),
    ):
        main()
    assert ("This is buried." in capsys.readouterr().err) is is_shown


@pytest.mark.parametrize("words", [["--debug", "fail"], ["fail", "--debug"]], ids=" ".join)
@pytest.mark.parametrize("error", [InvalidInput("No."), KeyError("x"), OSError(1, "x")])
def test_debug_before_or_after_the_verb_shows_the_traceback(
    words: list[str], error: Exception
) -> None:
    with failing(error), pytest.raises(type(error)):
        run(words)


def test_after_two_dashes_debug_is_a_word_like_others() -> None:
    with failing(InvalidInput("No.")):
        assert run(["fail", "--", "--debug"]) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("docter", "No such command 'docter'. Did you mean 'doctor'?\n  'penstock --help' shows"),
        ("task lst", "No such command 'lst'. Did you mean 'list'?\n  'penstock task --help'"),
        ("dag chek", "No such command 'chek'. Did you mean 'check'?\n  'penstock dag --help'"),
        ("xyzzy", "No such command 'xyzzy'.\n  'penstock --help' shows what it takes.\n"),
        ("completion", "Missing argument 'bash|zsh|fish'. Choose from: bash, zsh, fish\n"),
        ("task show x", "Invalid value for 'ID': 'x' is not a valid integer.\n"),
    ],
)
def test_wrong_words_are_one_sentence_and_where_to_look(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words.split()) == 2
    assert capsys.readouterr().err.startswith(f"penstock: {said}")


def test_what_is_added_to_a_group_is_a_verb_of_it() -> None:
    assert isinstance(cli, Verbs)
    with failing(InvalidInput("No.")):
        context = click.Context(cli)
        assert cli.list_commands(context)[-1] == "fail"
        assert cli.get_command(context, "fail") is not None
        assert [each.value for each in cli.shell_complete(context, "fa")] == ["fail"]


def test_no_verb_is_imported_for_the_completion_of_its_name() -> None:
    with mock.patch("penstock.cli.verbs.import_module", side_effect=AssertionError):
        found = cli.shell_complete(click.Context(cli), "st")
        with mock.patch.object(start_page, "glance", return_value=None):
            assert run(["--help"]) == 0
    assert [(each.value, each.help) for each in found] == [
        ("status", "Show jobs, queues, workers and backfills.")
    ]
