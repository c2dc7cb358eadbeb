"""Names say what a thing is, and every module says what it owns.

Some words fit everything and so say nothing: a file, folder, class or function that is named
with one of them wants a better name, or a better cut.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.architecture.source import SOURCE, TESTS, Module, files, modules, plant

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_EMPTY_WORD = re.compile(r"(\w*util|\w*helper|\w*manager)s?|common|misc", re.IGNORECASE)


def name_problems(folder: Path) -> list[str]:
    """Every name below a folder that has one of the words in it."""
    paths = {part: path for path in files(folder) for part in path.relative_to(folder).parts}
    named = [(name, str(path.relative_to(folder))) for name, path in paths.items()]
    named += [
        (node.name, f"{module.name}:{node.lineno}")
        for module in modules(folder)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    ]
    return [
        f"{place} is named {name}: {word.lower()!r} says nothing"
        for name, place in named
        for word in _WORD.findall(name)
        if _EMPTY_WORD.fullmatch(word)
    ]


def docstring_problems(found: Sequence[Module]) -> list[str]:
    """Every module that has something in it but no docstring."""
    return [
        f"{module.name} has no docstring: say what it owns, its invariants and who calls it"
        for module in found
        if module.text.strip() and not (ast.get_docstring(module.tree) or "").strip()
    ]


@pytest.mark.parametrize("folder", [SOURCE, TESTS], ids=["src", "tests"])
def test_names_say_something(folder: Path) -> None:
    assert name_problems(folder) == []


def test_modules_say_what_they_own() -> None:
    found = modules(SOURCE)
    assert len(found) > 5
    assert docstring_problems(found) == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("utils.py", ""),
        ("store_utils.py", ""),
        ("storeutils.py", ""),
        ("util/a.py", ""),
        ("deep/helpers/a.txt", ""),
        ("common.sql", ""),
        ("misc/a.py", ""),
        ("a.py", "class StoreManager: ..."),
        ("a.py", "class HTTPHelper: ..."),
        ("a.py", "class Managers: ..."),
        ("a.py", "def _put_helper(): ..."),
        ("a.py", "async def common_keys(): ..."),
        ("a.py", "class A:\n    def manager(self): ..."),
        ("a.py", "def outer():\n    def misc_2(): ..."),
    ],
)
def test_an_empty_word_is_found(tmp_path: Path, path: str, text: str) -> None:
    plant(tmp_path, {path: text})
    (problem,) = name_problems(tmp_path)
    assert problem.endswith("says nothing")


def test_other_names_are_fine(tmp_path: Path) -> None:
    text = "@contextmanager\ndef uncommon(helpers): ...\nclass Miscount: ...\nutils = 1\n"
    plant(tmp_path, {"a.py": text, "commons/managed.py": ""})
    assert name_problems(tmp_path) == []


@pytest.mark.parametrize("text", ["x = 1\n", "# words\n", "x = 1\n'''late'''\n", "''''''\n"])
def test_a_missing_docstring_is_found(tmp_path: Path, text: str) -> None:
    plant(tmp_path, {"a.py": text, "empty.py": "\n", "b.py": '"""Owns nothing."""\n'})
    (problem,) = docstring_problems(modules(tmp_path))
    assert problem.startswith("a has no docstring")
