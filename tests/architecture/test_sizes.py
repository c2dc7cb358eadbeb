"""Files and functions stay readable: what outgrows its limit is usually two ideas.

Too many files are unreadable too: what only one sibling imports usually belongs in it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.architecture.source import SOURCE, Module, modules, plant, texts

FILE_LINES_MAX = 800
FUNCTION_LINES_MAX = 50
FILES_MAX = 450


def file_problems(source: Path) -> list[str]:
    """Every file that has too many lines; documentation inside it counts."""
    return [
        f"{path.relative_to(source)} has {lines} lines; {FILE_LINES_MAX} are allowed"
        for path, text in texts(source)
        if (lines := len(text.splitlines())) > FILE_LINES_MAX
    ]


def function_problems(found: Sequence[Module]) -> list[str]:
    """Every function that has too many lines; documentation inside it does not count."""
    return [
        f"{module.name}:{node.lineno} {node.name} has {lines} lines;"
        f" {FUNCTION_LINES_MAX} are allowed"
        for module in found
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (lines := _lines(node) - sum(map(_lines, _docstrings(node)))) > FUNCTION_LINES_MAX
    ]


def count_problems(source: Path, *, files_max: int = FILES_MAX) -> list[str]:
    """That a tree has too many Python files, empty ones among them."""
    count = len(modules(source))
    say = f"{count} Python files; {files_max} are allowed: merge what only one sibling imports"
    return [say] if count > files_max else []


def _docstrings(function: ast.AST) -> Iterator[ast.stmt]:
    """The docstrings of a function and of what is defined in it."""
    for node in ast.walk(function):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                if ast.get_docstring(node) is not None:
                    yield node.body[0]


def _lines(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def test_files_are_short() -> None:
    assert file_problems(SOURCE) == []


def test_functions_are_short() -> None:
    found = modules(SOURCE)
    assert len(found) > 5
    assert function_problems(found) == []


def test_there_are_few_files() -> None:
    assert count_problems(SOURCE) == []


def test_a_file_too_many_is_found(tmp_path: Path) -> None:
    plant(tmp_path, {"a/__init__.py": "", "a/b.py": "x = 1\n", "a/query.sql": "", "a/c.txt": ""})
    assert count_problems(tmp_path, files_max=2) == []
    (problem,) = count_problems(tmp_path, files_max=1)
    assert problem.startswith("2 Python files; 1 are allowed")


@pytest.mark.parametrize("name", ["long.py", "deep/er/long.sql"])
def test_a_long_file_is_found(tmp_path: Path, name: str) -> None:
    plant(tmp_path, {name: "# line\n" * FILE_LINES_MAX, "binary.bin": ""})
    (tmp_path / "binary.bin").write_bytes(b"\xff\n" * 500)
    assert file_problems(tmp_path) == []

    plant(tmp_path, {name: "# line\n" * (FILE_LINES_MAX + 1)})
    assert file_problems(tmp_path) == [f"{name} has 801 lines; 800 are allowed"]


def _function(head: str, *, lines: int, docstring_lines: int = 0, indent: str = "    ") -> str:
    documentation = ['"""Words.', *["More."] * (docstring_lines - 2), '"""']
    body = [*(documentation if docstring_lines else []), *["pass"] * (lines - 1)]
    return "\n".join([head, *[indent + line for line in body], ""])


@pytest.mark.parametrize("head", ["def long():", "async def long():"])
def test_a_long_function_is_found(tmp_path: Path, head: str) -> None:
    plant(tmp_path, {"a.py": _function(head, lines=50, docstring_lines=20)})
    assert function_problems(modules(tmp_path)) == []

    plant(tmp_path, {"a.py": "\n" + _function(head, lines=51)})
    assert function_problems(modules(tmp_path)) == ["a:2 long has 51 lines; 50 are allowed"]

    plant(tmp_path, {"a.py": _function(head, lines=51, docstring_lines=20)})
    assert function_problems(modules(tmp_path)) == ["a:1 long has 51 lines; 50 are allowed"]


def test_methods_and_inner_functions_count(tmp_path: Path) -> None:
    method = _function("    def long(self):", lines=51, indent=" " * 8)
    inner = _function("    def long():", lines=50, docstring_lines=9, indent=" " * 8)
    plant(tmp_path, {"a.py": f"class A:\n{method}", "b.py": f"def outer():\n{inner}"})
    assert function_problems(modules(tmp_path)) == [
        "a:2 long has 51 lines; 50 are allowed",
        "b:1 outer has 51 lines; 50 are allowed",
    ]
