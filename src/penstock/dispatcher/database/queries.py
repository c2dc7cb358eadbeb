"""The SQL of the dispatcher, by name.

Every statement stands in a file of `penstock/dispatcher/sql`, below a line `-- name: the_name`, and
has its parameters as `%(parameter)s`. Files whose name begins with a number are migrations and hold
no named statements. Read once, at the first use; a name that is not there is a mistake of ours.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from importlib import resources
from typing import Final

_NAME: Final = re.compile(r"^-- name: (\w+)$", re.MULTILINE)
_MIGRATION: Final = re.compile(r"\d+_\w+\.sql")


def query(name: str) -> bytes:
    """The statement of this name, as psycopg takes it."""
    return _queries()[name]


def named(text: str, *, where: str) -> Mapping[str, bytes]:
    """The statements of one file."""
    pieces = _NAME.split(text)
    names, bodies = pieces[1::2], pieces[2::2]
    found = {name: body.strip().encode() for name, body in zip(names, bodies, strict=True)}
    if len(found) < len(names):
        raise ValueError(f"{where} has two statements of one name.")
    return found


def migration_texts() -> Mapping[str, str]:
    """The migrations that come with this release, by the names of their files."""
    return {
        each.name: each.read_text("utf-8")
        for each in _folder().iterdir()
        if _MIGRATION.fullmatch(each.name)
    }


@functools.cache
def _queries() -> Mapping[str, bytes]:
    found: dict[str, bytes] = {}
    for each in _folder().iterdir():
        if each.name.endswith(".sql") and not _MIGRATION.fullmatch(each.name):
            statements = named(each.read_text("utf-8"), where=each.name)
            if twice := found.keys() & statements.keys():
                raise ValueError(f"{each.name} names {sorted(twice)}, which are there already.")
            found |= statements
    return found


def _folder() -> resources.abc.Traversable:
    return resources.files("penstock.dispatcher") / "sql"
