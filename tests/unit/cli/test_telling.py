"""How what a dispatcher says is made to fit: ages, lines, tables, progress."""

from __future__ import annotations

import os
import pty
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from unittest import mock

import click
import pytest
from hypothesis import given
from hypothesis import strategies as some

from penstock.cli.backfill import BackfillProgress, percent
from penstock.cli.dispatcher_call import ago, cut, fitted, gist, line, lines
from penstock.cli.options import absolute_option
from penstock.cli.output import bar
from tests.unit.dispatcher.client.scripted import NOW, backfill


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0, "0 s ago"),
        (59, "59 s ago"),
        (300, "5 min ago"),
        (3 * 86_400, "72 h ago"),
        (-1.5, "0 s ago"),
        (-90, "in 1 min"),
    ],
)
def test_an_age_is_one_figure(seconds: float, said: str) -> None:
    assert ago(NOW - timedelta(seconds=seconds), now=NOW.timestamp()) == said


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        (None, ""),
        ("", ""),
        ("The function was stopped.", "The function was stopped."),
        # As runtimes tell of an error: itself, and then where it was.
        ('ValueError: boom\n  File "shop.py", line 3, in clean\n    raise', "ValueError: boom"),
        # As Python does.
        (
            (
                'Traceback (most recent call last):\n  File "shop.py", line 3, in clean\n    x\n\n'
                "ValueError: boom\n"
            ),
            "ValueError: boom",
        ),
        (
            'File "shop.py", line 3\n    def\n       ^\nSyntaxError: no\n  File "a"',
            "SyntaxError: no",
        ),
        ('Traceback (most recent call last):\n  File "a"', "Traceback (most recent call last):"),
        ("\n\n  \x1b[31mboom\n", "[31mboom"),
    ],
)
def test_the_gist_of_a_reason_is_the_error(reason: str | None, said: str) -> None:
    assert gist(reason) == said


def test_words_keep_their_lines_and_indentation() -> None:
    said = 'ValueError: boom\r\n  File "a\x1b[2J"\n\traise\n\n' + "x" * 20
    assert lines(said, characters_max=12).split("\n") == [
        "ValueError:…",
        '  File "a [2J"',
        "    raise",
        "",
        "xxxxxxxxxxx…",
    ]
    assert lines(None) == ""


def test_a_time_that_there_is_not_has_no_age() -> None:
    assert ago(None, now=0) == ""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, ""),
        ("two\nlines", "two lines"),
        ("\x1b[2Jgone", "[2Jgone"),
        ("a\u202eb", "a b"),
        ("x" * 300, "x" * 199 + "…"),
    ],
)
def test_words_of_others_are_one_line_that_does_nothing(text: str | None, said: str) -> None:
    assert line(text) == said


Cells = some.text(alphabet="abc ", max_size=60)
Tables = some.integers(1, 6).flatmap(
    lambda width: some.lists(some.tuples(*[Cells] * width), min_size=1, max_size=5)
)


@given(rows=Tables, columns=some.integers(1, 200))
def test_a_table_is_cut_to_the_terminal_and_no_further_than_can_be_read(
    rows: list[tuple[str, ...]], columns: int
) -> None:
    shown = cut(rows, columns=columns)
    before, after = _widths(rows), _widths(shown)
    cells, left = _widths(rows[1:] or rows), _widths(shown[1:] or shown)
    between = 2 * (len(before) - 1)
    # It fits, or everything that is long is as short as it may be.
    assert sum(after) + between <= columns or all(
        now <= 6 for now, then in zip(left, cells, strict=True) if then > 12
    )
    # What is short stays whole; of what is long something stays.
    assert all(
        now == then if then <= 12 else now >= 6 for now, then in zip(left, cells, strict=True)
    )
    if sum(before) + between <= columns:
        assert shown == rows
    for row, original in zip(shown, rows, strict=True):
        for cell, whole in zip(row, original, strict=True):
            assert cell == whole or (cell.endswith("…") and whole.startswith(cell[:-1]))


def _widths(rows: list[tuple[str, ...]]) -> list[int]:
    return [max(map(len, cells)) for cells in zip(*rows, strict=True)]


def test_heads_give_way_before_what_is_below_them() -> None:
    rows = [("attempt", "id"), ("1", "x" * 12)]
    assert cut(rows, columns=18) == [("att…", "id"), ("1", "x" * 12)]


def test_the_longest_column_is_cut_first() -> None:
    assert cut([("id", "x" * 50), ("17", "short")], columns=24) == [
        ("id", "x" * 19 + "…"),
        ("17", "short"),
    ]


def test_numbers_and_what_is_copied_are_never_cut() -> None:
    rows = [("n", "long", "id"), ("1,000,000,000,000", "x" * 50, "y" * 50)]
    assert cut(rows, columns=40, whole=(0, 2))[1] == (
        "1,000,000,000,000",
        "x" * 5 + "…",
        "y" * 50,
    )


def _on_a_terminal(*, name: str, show: Callable[[], None]) -> str:
    """What is shown where a stream is a terminal of forty columns."""
    ours, theirs = pty.openpty()
    with (
        os.fdopen(theirs, "w") as terminal,
        mock.patch(f"sys.{name}", terminal),
        mock.patch.dict(os.environ, {"COLUMNS": "40"}),
    ):
        show()
    shown = b""
    # Linux ends a terminal whose last writer has left with an error.
    with suppress(OSError):
        while chunk := os.read(ours, 4096):
            shown += chunk
    os.close(ours)
    return shown.decode()


def test_on_a_terminal_a_table_fits() -> None:
    shown = _on_a_terminal(
        name="stdout", show=lambda: fitted(("id", "reason"), [("17", "y" * 100)])
    )
    assert shown.splitlines()[1] == f"17  {'y' * 35}…"


def test_on_a_terminal_columns_without_anything_make_room() -> None:
    heads, row = ("id", "worker", "reason"), ("17", "", "y" * 34)
    shown = _on_a_terminal(name="stdout", show=lambda: fitted(heads, [row], numbers=(0,)))
    assert shown.splitlines()[1] == f"17  {'y' * 34}"
    short = _on_a_terminal(name="stdout", show=lambda: fitted(heads, [("17", "", "y")]))
    assert "worker" in short


def test_elsewhere_nothing_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    fitted(("id", "reason"), [("17", "y" * 100)])
    assert "y" * 100 in capsys.readouterr().out


def test_on_a_terminal_progress_is_one_line() -> None:
    def show() -> None:
        progress = BackfillProgress()
        progress(backfill(planned=10, open=5))
        progress(backfill(planned=1000, state="done"))
        progress.end()

    assert _on_a_terminal(name="stderr", show=show) == (
        f"\r\x1b[K{'·' * 24} backfill 7 of "
        f"\r\x1b[K{'█' * 24} backfill 7 of "
        # Gone when it is over.
        "\r\x1b[K"
    )


def test_elsewhere_there_is_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    progress = BackfillProgress()
    progress(backfill(planned=10, open=5))
    progress.end()
    assert capsys.readouterr() == ("", "")


@given(done=some.integers(-5, 2000), of=some.integers(1, 1000))
def test_a_bar_is_full_when_all_is_done_and_not_before(done: int, of: int) -> None:
    shown = bar(done, of)
    assert len(shown) == 24
    assert shown == "█" * shown.count("█") + "·" * shown.count("·")
    assert ("·" not in shown) == (done >= of)


def test_with_absolute_times_are_told_and_not_ages() -> None:
    command = absolute_option(click.Command("x", params=[]))
    with command.make_context("x", ["--absolute"]) as context, context.scope():
        assert ago(NOW, now=0) == "2030-01-01T00:00:00Z"
    with command.make_context("x", []) as context, context.scope():
        assert ago(NOW, now=NOW.timestamp()) == "0 s ago"


@pytest.mark.parametrize(
    ("planned", "partitions", "said"),
    [(0, 0, ""), (0, 10, "0%"), (999, 1000, "99%"), (1000, 1000, "100%")],
)
def test_what_is_not_over_is_not_at_a_hundred(planned: int, partitions: int, said: str) -> None:
    assert percent(backfill(planned=planned, partitions=partitions)) == said
