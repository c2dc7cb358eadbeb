"""Texts that stand in files of their own: `sql_file`."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.dispatcher.client.dag_files import dag_source, named_files
from penstock.dispatcher.dag.canonical import (
    JobChange,
    canonical,
    content_hash,
    definition_hash,
    diff,
    render,
)
from penstock.dispatcher.dag.files import FILE_BYTES_MAX, Files, Unread, references, texts
from penstock.dispatcher.dag.model import Dag
from penstock.dispatcher.dag.parser import parse
from penstock.kernel.errors import InvalidInput
from penstock.protocol.problem import DagError
from tests.queries import OTHER_TOKENS, SAME_TOKENS

HEAD = """\
jobs:
  s: {activation: source, source: {kind: manual}, outputs: [raw]}
"""
JOB = """\
  a:
    runtime: spark
    operator: spark.sql
    config:
      sql_file: %s
    inputs: [raw]
    outputs: [a]
"""
TEXT = HEAD + JOB % "sql/a.sql"
SQL = "SELECT *\nFROM raw -- é\n"


def problem(text: str, files: Files | None = None) -> str:
    with pytest.raises(DagError) as caught:
        parse(text, "file.yaml", files=files)
    (found,) = caught.value.problems
    assert found.field == "jobs.a.config.sql_file"
    return f"{found.line}: {found.message}"


def read(text: str = TEXT, sql: str = SQL) -> Dag:
    return parse(text, "file.yaml", files={"sql/a.sql": sql})


def test_the_text_is_part_of_the_job() -> None:
    dag = read()
    assert dag.job("a").config == {"sql": SQL, "sql_file": "sql/a.sql"}
    # What is written out says all, and is read without files.
    for written in (canonical(dag).decode(), render(dag)):
        assert parse(written, "again") == dag
        assert parse(written, "again", files={"sql/a.sql": SQL}) == dag
    assert texts(dag) == {"sql/a.sql": SQL}


def test_an_edit_of_the_file_is_an_edit_of_the_job() -> None:
    edited = read(sql=SQL.replace("*", "k"))
    assert content_hash(edited) != content_hash(read())
    assert diff(read(), edited).changed == {"a": JobChange(("config",), keeps_generation=False)}


@pytest.mark.parametrize(("sql", "other"), SAME_TOKENS)
def test_comments_and_layout_define_nothing(sql: str, other: str) -> None:
    for old, new in [(sql, other), (other, sql)]:
        before, after = read(sql=old), read(sql=new)
        assert content_hash(before) != content_hash(after)
        assert diff(before, after).changed == {"a": JobChange(("config",), keeps_generation=True)}


@pytest.mark.parametrize(("sql", "other"), OTHER_TOKENS)
def test_whatever_else_is_edited_is_another_definition(sql: str, other: str) -> None:
    for old, new in [(sql, other), (other, sql)]:
        found = diff(read(sql=old), read(sql=new))
        assert found.changed == {"a": JobChange(("config",), keeps_generation=False)}


def test_the_name_of_the_file_rebuilds_nothing() -> None:
    renamed = parse(HEAD + JOB % "b.sql", "file.yaml", files={"b.sql": SQL})
    assert diff(read(), renamed).changed == {"a": JobChange(("config",), keeps_generation=True)}
    bare = parse(TEXT.replace("sql_file: sql/a.sql", 'sql: "SELECT 1"'), "bare.yaml")
    assert definition_hash(bare.job("a")) == definition_hash(read(sql="SELECT 1").job("a"))


@pytest.mark.parametrize("files", [None, {}, {"a.sql": SQL}])
def test_a_text_that_did_not_come(files: Files | None) -> None:
    assert problem(TEXT, files) == (
        "7: The text of 'sql/a.sql' did not come with the DAG; apply the DAG as a file, or send the"
        " text in `files`, or write it as `sql`."
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/etc/a.sql", "'/etc/a.sql' lies outside of the folder of the DAG; move it there"),
        ("../a.sql", "'../a.sql' lies outside of the folder of the DAG"),
        ("sql/../../a.sql", "lies outside of the folder"),
        ("sql/..", "'sql/..' is a folder; name a file in it."),
        (r"sql\a.sql", "is not the name of a file; write one as in sql/daily.sql."),
        ('""', "'' is not the name of a file"),
        ("5", "It is the name of a file; write one as in sql/daily.sql."),
        ("[a.sql]", "It is the name of a file"),
        ("x" * 501, "is not the name of a file"),
    ],
)
def test_a_name_that_cannot_be(name: str, message: str) -> None:
    said = problem(HEAD + JOB % name, {})
    assert said.startswith("7: ")
    assert message in said
    assert references(HEAD + JOB % name) in ((), (name,))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'sql/a.sql' is empty; write a query into it."),
        (" \n", "'sql/a.sql' is empty"),
        ("a\0b", "'sql/a.sql' has the character '\\x00', which cannot be stored; take it out."),
        ("x" * (FILE_BYTES_MAX + 1), "'sql/a.sql' is larger than 200,000 bytes; make several"),
    ],
)
def test_a_text_that_cannot_be(text: str, message: str) -> None:
    assert message in problem(TEXT, {"sql/a.sql": text})


def test_what_could_not_be_read_is_told_where_it_is_named() -> None:
    assert problem(TEXT, {"sql/a.sql": Unread("There is no such file.")}) == (
        "7: There is no such file."
    )


def test_a_text_and_a_file() -> None:
    both = TEXT.replace("sql_file:", "sql: SELECT 1\n      sql_file:")
    for files in (None, {}, {"sql/a.sql": Unread("no")}, {"sql/a.sql": "SELECT 1"}):
        assert parse(both, "both.yaml", files=files).job("a").config["sql"] == "SELECT 1"
    assert problem(both, {"sql/a.sql": "SELECT 2"}) == (
        "8: Its text is not that of `sql`; take one of the two out."
    )


def test_other_operators_may_have_a_field_of_that_name() -> None:
    text = TEXT.replace("runtime: spark", "runtime: process").replace("spark.sql", "my:code")
    assert references(text) == ()
    assert parse(text, "file.yaml").job("a").config == {"sql_file": "sql/a.sql"}
    assert texts(parse(text, "file.yaml")) == {}


def test_which_files_a_text_names() -> None:
    second = JOB.replace("  a:", "  b:").replace("[a]", "[b]")
    text = TEXT + second % "b.sql" + second.replace("  b:", "  c:") % "b.sql"
    assert references(text) == ("sql/a.sql", "b.sql")
    for nothing in ("", "{", "jobs: 1", "jobs: {a: 1}", "jobs: {a: {operator: spark.sql}}"):
        assert references(nothing) == ()


def written(folder: Path, sql: bytes = SQL.encode()) -> Path:
    (folder / "dag" / "sql").mkdir(parents=True)
    (folder / "dag" / "sql" / "a.sql").write_bytes(sql)
    file = folder / "dag" / "file.yaml"
    file.write_text(TEXT, "utf-8")
    return file


def test_files_are_read_from_the_folder_of_the_dag(tmp_path: Path) -> None:
    source = dag_source(written(tmp_path), None)
    assert (source.text, source.files) == (TEXT, {"sql/a.sql": SQL})
    # A text has no folder.
    assert dag_source(TEXT, None).files == {}


def _unread(file: Path) -> str:
    (found,) = named_files(TEXT, file.parent).values()
    assert isinstance(found, Unread)
    with pytest.raises(InvalidInput) as caught:
        dag_source(file, "file.yaml")
    assert caught.value.message == (
        f"file.yaml has a problem:\n  file.yaml:7: jobs.a.config.sql_file: {found.why}"
    )
    return found.why


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    file = written(tmp_path, b"\n\xff")
    place = file.parent / "sql" / "a.sql"
    assert _unread(file) == "'sql/a.sql' is not UTF-8, as line 2 shows; save it as UTF-8."
    place.write_bytes(b"x" * (FILE_BYTES_MAX + 1))
    assert _unread(file) == "'sql/a.sql' is larger than 200,000 bytes; make several jobs of it."
    place.unlink()
    assert _unread(file) == "There is no file 'sql/a.sql' in the folder of the DAG."
    place.mkdir()
    assert _unread(file) == "'sql/a.sql' is a folder; name a file in it."
    place.rmdir()
    (tmp_path / "outside.sql").write_text(SQL, "utf-8")
    place.symlink_to(tmp_path / "outside.sql")
    assert _unread(file).startswith("'sql/a.sql' lies outside of the folder of the DAG; move it")
    place.unlink()
    place.symlink_to(place)
    assert _unread(file).startswith("'sql/a.sql' ") or "no file" in _unread(file)
    place.unlink()
    place.symlink_to(file.parent / "b.sql")
    (file.parent / "b.sql").write_text(SQL, "utf-8")
    assert dag_source(file, None).files == {"sql/a.sql": SQL}


def test_there_is_a_limit_to_all_of_them(tmp_path: Path) -> None:
    text = HEAD
    for number in range(6):
        (tmp_path / f"{number}.sql").write_bytes(b"x" * FILE_BYTES_MAX)
        job = (JOB % f"{number}.sql").replace("  a:", f"  j{number}:")
        text += job.replace("[a]", f"[o{number}]")
    found = named_files(text, tmp_path)
    assert [isinstance(each, str) for each in found.values()] == [True] * 5 + [False]
    assert found["5.sql"] == Unread(
        "The files of the DAG have more than 1,000,000 bytes; make several DAGs."
    )
