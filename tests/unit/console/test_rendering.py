"""Words, figures and times in templates, and that nothing in them is HTML."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from penstock.console.renderer import (
    Renderer,
    ago,
    counted,
    cursor,
    data,
    length,
    line,
    number,
    plural,
    prose,
    share,
    size,
    span,
    word,
)

_SCRIPT = "<script>alert(1)</script>"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (None, "\N{EN DASH}"),
        (0, "0 ms"),
        (-1, "0 ms"),
        (0.2341, "234 ms"),
        (9.96, "10.0 s"),
        (59, "59 s"),
        (60, "1 min"),
        (61.9, "1 min 1 s"),
        (3600, "1 h"),
        (3_660, "1 h 1 min"),
        (90_000, "1 d 1 h"),
    ],
)
def test_lengths(seconds: float | None, shown: str) -> None:
    assert length(seconds) == shown


def test_sizes_counts_and_shares() -> None:
    assert [size(each) for each in (0, 1023, 1024, 1536 * 1024, 200 * 2**30)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 MiB",
        "200 GiB",
    ]
    assert number(12_345) == "12,345"
    assert number(10_000, most=10_000) == "10,000+"
    assert number(1.5) == "1.5"
    assert share(1, 3) == "33 %"
    assert share(1, 0) == "\N{EN DASH}"


def test_one_is_not_several() -> None:
    assert [counted(each, "file") for each in (0, 1, 2)] == ["0 files", "1 file", "2 files"]
    assert counted(1000, "partition", most=1000) == "1,000+ partitions"
    assert (plural(1, "is", "are"), plural(2, "is", "are")) == ("is", "are")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Run `penstock worker`.", "Run <code>penstock worker</code>."),
        ("`a` and `<b>`", "<code>a</code> and <code>&lt;b&gt;</code>"),
        ("a ` alone <b>", "a ` alone &lt;b&gt;"),
        ("`a` b ` c", "<code>a</code> b ` c"),
        (None, ""),
    ],
)
def test_what_stands_between_backticks_is_code(text: str | None, shown: str) -> None:
    assert str(prose(text)) == shown


def test_ranges_that_can_be_times_are_shown_as_times() -> None:
    shown = str(span(1357344000, 1357430400))
    assert "2013-01-05 00:00 \N{EN DASH}</span> <span>2013-01-06 00:00 UTC" in shown
    assert 'title="1357344000 to 1357430400,' in shown
    assert "2013-01-05 00:00:01" in str(span(1357344001, 1357430400))
    # Whatever else counts something is shown as it is.
    for start, end in ((0, 10), (-5, 1357430400), (1357344000, 9_999_999_999), (5, 2**62)):
        assert f"{start} \N{EN DASH} {end}" in str(span(start, end))
    assert "\N{EN DASH}" in str(span(None, None))


def test_cursors_that_can_be_times_are_shown_as_times() -> None:
    assert "2013-01-05 00:00 UTC" in str(cursor(1357344000123 // 1000 * 1000))
    assert 'title="1357344000000,' in str(cursor(1357344000000))
    assert ">1357344000<" in str(cursor(1357344000))
    assert ">-1<" in str(cursor(-1))


def test_short_keys_and_names_are_not_broken() -> None:
    assert str(word("2013-01-05")) == '<span class="word">2013-01-05</span>'
    assert str(word("<b>")) == '<span class="word">&lt;b&gt;</span>'
    for text in ("x" * 60, "two words"):
        assert str(word(text)) == text
    assert str(word("x" * 300, 80)).endswith("x…")


def test_a_time_is_an_age_with_the_time_at_hand() -> None:
    shown = str(ago(datetime(2026, 11, 16, 4, 5, 6, tzinfo=UTC)))
    assert 'title="2026-11-16 04:05:06 UTC"' in shown
    assert "data-ago" in shown
    assert "never" in str(ago(None))
    assert "&lt;b&gt;" in str(ago(None, none="<b>"))


def test_a_line_is_one_line() -> None:
    assert line("a\nb\x1b[31m") == "a b [31m"
    assert line("x" * 300).endswith("…")
    assert line(None) == ""


def test_what_a_script_is_given_cannot_end_its_element() -> None:
    shown = str(data({"said": f"{_SCRIPT}<!--&"}))
    assert "<" not in shown
    assert ">" not in shown
    assert json.loads(shown) == {"said": f"{_SCRIPT}<!--&"}


def test_templates_escape_whatever_they_are_given() -> None:
    said = {"to": _SCRIPT, "wrong": False, "version": _SCRIPT}
    page = Renderer().page("sign_in", said)
    assert _SCRIPT not in page
    assert "&lt;script&gt;" in page


def test_files_are_named_by_what_they_hold() -> None:
    rendering = Renderer()
    file = rendering.files["console.js"]
    assert rendering.address("console.js") == f"/static/console.js?v={file.digest[:12]}"
    assert file.kind.startswith("text/javascript")
