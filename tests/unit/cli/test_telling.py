"""How what a dispatcher says is made to fit: ages, lines, tables, progress."""

from __future__ import annotations

import os
import pty
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as some

from penstock.cli.backfill.showing import Progress, percent
from penstock.cli.telling import ago, cut, fitted, line
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
    before = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    after = [max(map(len, cells)) for cells in zip(*shown, strict=True)]
    between = 2 * (len(before) - 1)
    assert sum(after) + between <= columns or max(after) <= 12
    assert all(now == then or now >= 12 for now, then in zip(after, before, strict=True))
    if sum(before) + between <= columns:
        assert shown == rows
    for row, original in zip(shown, rows, strict=True):
        for cell, whole in zip(row, original, strict=True):
            assert cell == whole or (cell.endswith("…") and whole.startswith(cell[:-1]))


def test_the_longest_column_is_cut_first() -> None:
    assert cut([("id", "x" * 50), ("17", "short")], columns=24) == [
        ("id", "x" * 19 + "…"),
        ("17", "short"),
    ]


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


def test_elsewhere_nothing_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    fitted(("id", "reason"), [("17", "y" * 100)])
    assert "y" * 100 in capsys.readouterr().out


def test_on_a_terminal_progress_is_one_line() -> None:
    def show() -> None:
        progress = Progress()
        progress(backfill(planned=10, open=5))
        progress(backfill(planned=1000, state="done"))
        progress.end()

    assert _on_a_terminal(name="stderr", show=show) == (
        "\r\x1b[Kbackfill 7 of totals: 0%, 5 of 1,000 en"
        "\r\x1b[Kbackfill 7 of totals: 100%, 1,000 of 1,\r\n"
    )


@pytest.mark.parametrize(
    ("planned", "partitions", "said"),
    [(0, 0, ""), (0, 10, "0%"), (999, 1000, "99%"), (1000, 1000, "100%")],
)
def test_what_is_not_over_is_not_at_a_hundred(planned: int, partitions: int, said: str) -> None:
    assert percent(backfill(planned=planned, partitions=partitions)) == said
