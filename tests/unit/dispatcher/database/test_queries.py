"""SQL by name: read from files, each name once."""

from __future__ import annotations

import re

import pytest

from penstock.dispatcher.database.pool import migration_texts, named, query


def test_a_file_is_cut_at_its_names() -> None:
    text = "-- Words.\n\n-- name: one\n-- Why.\nSELECT 1\n\n-- name: two\nSELECT 2\n"
    assert named(text, where="x.sql") == {"one": b"-- Why.\nSELECT 1", "two": b"SELECT 2"}


def test_two_statements_of_one_name_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"x\.sql has two statements of one name"):
        named("-- name: one\nSELECT 1\n-- name: one\nSELECT 2\n", where="x.sql")


def test_the_statements_are_found() -> None:
    assert b"INSERT INTO attempt" in query("begin_attempts")
    with pytest.raises(KeyError):
        query("no_such_statement")


def test_migrations_are_no_statements() -> None:
    texts = migration_texts()
    assert "0001_ground.sql" in texts
    assert all(re.fullmatch(r"\d{4}_\w+\.sql", name) for name in texts)
    assert not any("-- name:" in text for text in texts.values())
