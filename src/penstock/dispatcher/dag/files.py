"""Texts of a DAG that stand in files of their own: `sql_file`, beside the DAG.

Whoever has a DAG as a file reads the files that it names, relative to its folder, and gives their
texts to `parsing.parse`; the dispatcher gets them with the DAG. Then `sql` has the text, and
`sql_file` stays beside it as the name by which errors call it: so an edit of the file is an edit
of the job, and what is stored says all. A DAG that has both already is one that was written out.

Pure: `references` says which files a text names, `inlined` puts the texts in. Reading is done by
`penstock.dispatcher.client.named`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

import yaml

from penstock.dispatcher.dag.model import SQL_OPERATOR, Dag, Json
from penstock.dispatcher.dag.nodes import UnreadableYaml, compose, text_problem
from penstock.kernel.words import shown

FILE_BYTES_MAX: Final = 200_000
"""How large a file may be that a DAG names."""
FILES_MAX: Final = 1000
NAME_CHARACTERS_MAX: Final = 500

OUTSIDE: Final = "lies outside of the folder of the DAG; move it there and name it from there"


@dataclass(frozen=True, slots=True)
class Unread:
    """A file that could not be read; a whole sentence why."""

    why: str


Files = Mapping[str, str | Unread]
"""What became of the files that a DAG names, by the names that it gives them."""


def references(text: str) -> tuple[str, ...]:
    """The files that the text of a DAG names, each once; none if it is no YAML."""
    try:
        tree = compose(text)
    except UnreadableYaml:
        return ()
    names: dict[str, None] = {}
    for job in _values(field_node(tree, "jobs")):
        operator = field_node(job, "operator")
        named = field_node(field_node(job, "config"), "sql_file")
        if not isinstance(operator, yaml.ScalarNode) or operator.value != SQL_OPERATOR:
            continue
        if isinstance(named, yaml.ScalarNode) and not name_problem(str(named.value)):
            names[str(named.value)] = None
    return tuple(names)[:FILES_MAX]


def name_problem(name: str) -> str:
    """Why nothing can be read by this name, to go on after it; empty if it may."""
    if not name or len(name) > NAME_CHARACTERS_MAX or not name.isprintable() or "\\" in name:
        return "is not the name of a file; write one as in sql/daily.sql"
    path = PurePosixPath(name)
    if path.is_absolute():
        return OUTSIDE
    depth = 0
    for part in path.parts:
        depth += -1 if part == ".." else 1
        if depth < 0:
            return OUTSIDE
    return "" if depth > 0 else "is a folder; name a file in it"


def inlined(config: Mapping[str, Json], files: Files | None) -> tuple[Mapping[str, Json], str]:
    """The config of a job with the text of its file, and what is wrong with the file, if it is."""
    if "sql_file" not in config:
        return config, ""
    name, sql = config["sql_file"], config.get("sql")
    if not isinstance(name, str):
        return config, "It is the name of a file; write one as in sql/daily.sql."
    if problem := name_problem(name):
        return config, f"{shown(name)} {problem}."
    found = files.get(name) if files is not None else None
    if sql is not None:
        is_other = isinstance(found, str) and found != sql
        return config, "Its text is not that of `sql`; take one of the two out." if is_other else ""
    match found:
        case None:
            return config, (
                f"The text of {shown(name)} did not come with the DAG; apply the DAG as a file, or"
                " send the text in `files`, or write it as `sql`."
            )
        case Unread(why):
            return config, why
    if problem := text_problem(found):
        return config, f"{shown(name)} {problem}."
    if len(found.encode()) > FILE_BYTES_MAX:
        return config, too_large(name)
    if not found.strip():
        return config, f"{shown(name)} is empty; write a query into it."
    return {**config, "sql": found}, ""


def too_large(name: str) -> str:
    """What is said of a file that is."""
    return f"{shown(name)} is larger than {FILE_BYTES_MAX:,} bytes; make several jobs of it."


def field_node(node: yaml.Node | None, name: str) -> yaml.Node | None:
    """The value of a field; None if there is none."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value == name:
                assert isinstance(value, yaml.Node)
                return value
    return None


def texts(dag: Dag) -> dict[str, str]:
    """The files that a DAG was read with: enough to read its text again."""
    found: dict[str, str] = {}
    for job in dag.jobs:
        name, sql = job.config.get("sql_file"), job.config.get("sql")
        if job.operator == SQL_OPERATOR and isinstance(name, str) and isinstance(sql, str):
            found.setdefault(name, sql)
    return found


def _values(node: yaml.Node | None) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        for _, value in node.value:
            yield value
