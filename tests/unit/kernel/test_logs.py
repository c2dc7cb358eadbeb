"""Lines for people, and lines for programs."""

from __future__ import annotations

import contextlib
import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path

from penstock.kernel.logs import LogFormat, last_complaint, last_words, log_to_stderr


@contextlib.contextmanager
def listening() -> Iterator[io.StringIO]:
    """What goes to standard error, with a root logger that has no handlers yet."""
    root, ours = logging.getLogger(), logging.getLogger("penstock")
    before, level = root.handlers[:], ours.level
    root.handlers = []
    try:
        with contextlib.redirect_stderr(io.StringIO()) as told:
            yield told
    finally:
        root.handlers = before
        ours.setLevel(level)


def test_json_lines_have_the_fields_that_were_given() -> None:
    with listening() as told:
        log_to_stderr(LogFormat.JSON)
        logging.getLogger("penstock.relay").info("sent %d", 3, extra={"task_id": 7})
    (line,) = told.getvalue().splitlines()
    said = json.loads(line)
    assert said["message"] == "sent 3"
    assert said["level"] == "info"
    assert said["logger"] == "penstock.relay"
    assert said["task_id"] == 7
    assert said["at"].endswith("Z")


def test_a_traceback_is_one_line_of_json() -> None:
    with listening() as told:
        log_to_stderr(LogFormat.JSON)
        try:
            int("bad\nline")
        except ValueError:
            logging.getLogger("penstock").exception("failed")
    (line,) = told.getvalue().splitlines()
    assert "ValueError" in json.loads(line)["traceback"]


def test_text_is_for_people_and_others_are_quiet() -> None:
    with listening() as told:
        log_to_stderr()
        logging.getLogger("penstock").info("ours")
        logging.getLogger("elsewhere").info("theirs")
    assert told.getvalue().endswith("Z INFO penstock: ours\n")


def test_a_second_call_and_a_handler_of_somebody_else_change_nothing() -> None:
    with listening():
        log_to_stderr()
        log_to_stderr(LogFormat.JSON)
        assert len(logging.getLogger().handlers) == 1


def test_the_last_words_of_a_process(tmp_path: Path) -> None:
    log = tmp_path / "it.log"
    where = f"Its log is {log}."
    assert last_words(log) == ("nothing.", where)
    log.write_text("")
    assert last_words(log) == ("nothing.", where)
    log.write_text("one\n\ntwo \n\n")
    assert last_words(log) == ("two", where)
    log.write_text("penstock: Earlier.\npenstock: No.\n  Do this.\n{}\n")
    assert last_words(log) == ("No.", "Do this.")
    log.write_text("penstock: No.\n{}\n")
    assert last_words(log) == ("No.", where)
    log.write_bytes(b"x" * 20_000 + b"\n\xff\n")
    assert last_words(log) == ("\ufffd", where)


def test_only_a_complaint_at_the_end_is_why_a_process_has_ended(tmp_path: Path) -> None:
    log = tmp_path / "it.log"
    assert last_complaint(log) == ""
    log.write_text("{}\npenstock: No.\n  Do this.\n")
    assert last_complaint(log) == "No."
    # It went on since, and was killed.
    log.write_text("penstock: No.\n  Do this.\n{}\n")
    assert last_complaint(log) == ""
