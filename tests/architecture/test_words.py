"""Names say what a thing is, and every module says what it owns.

Some words fit everything and so say nothing: a file, folder, class or function that is named
with one of them wants a better name, or a better cut.

One name is one thing: a public class has a name that no other public class has, wherever it is
defined. And a module is called by what it is, mostly an agent (`executor`, `sweeper`): a gerund
says what goes on, not who does it, so few stay, those that are the field's own words (`tracing`).

A task that has ended well is SUCCEEDED and one that has not is FAILED, whatever letter or word is
stored and sent: code names a member of an enum, and not that word (decision 0122).
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.architecture.source import SOURCE, TESTS, Module, files, modules, plant

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
GERUNDS_MAX = 12
MIRRORS = {"Queue": "penstock.sync", "Worker": "penstock.sync"}
"""Public classes that are defined twice, and the module whose definition mirrors the other one."""
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


def double_problems(found: Sequence[Module]) -> list[str]:
    """Every public class name that two modules define, or one twice, other than the mirrors.

    Classes that are defined in a class or a function are no public names.
    """
    places: dict[str, list[str]] = defaultdict(list)
    for module in found:
        for node in _classes(module.tree):
            if not node.name.startswith("_") and MIRRORS.get(node.name) != module.name:
                places[node.name].append(f"{module.name}:{node.lineno}")
    return [
        f"class {name} is defined more than once: {', '.join(where)}"
        for name, where in sorted(places.items())
        if len(where) > 1
    ]


def gerund_problems(found: Sequence[Module], *, gerunds_max: int = GERUNDS_MAX) -> list[str]:
    """That too many modules, or packages, are called by what goes on in them."""
    gerunds = sorted(module.name for module in found if module.name.endswith("ing"))
    say = f"{len(gerunds)} modules are gerunds; {gerunds_max} are allowed: {', '.join(gerunds)}"
    return [say] if len(gerunds) > gerunds_max else []


STATUS_WORDS = frozenset(
    {
        *("queued", "delayed", "running", "retrying", "succeeded", "completed"),
        *("failed", "dead", "cancelled", "expired"),
    }
)
_STATUS_NAMES = frozenset({"COMPLETED", "DEAD", "FAIL", "FAILURE", "SUCCESS", "CANCELED"})
"""How members of an enum might be called that SUCCEEDED, FAILED and CANCELLED are for."""


def status_problems(found: Sequence[Module]) -> list[str]:
    """Every place where a status is a word and not a member, or a member has a second name."""
    return [
        f"{module.name}:{line} {told}"
        for module in found
        for node in ast.walk(module.tree)
        for line, told in _status_problems(node)
    ]


def _status_problems(node: ast.AST) -> Iterator[tuple[int, str]]:
    match node:
        case ast.Compare(left=left, comparators=others) if any(map(_is_status, (left, *others))):
            words = [word for each in (left, *others) for word in _status_words(each)]
        case ast.Match(subject=subject, cases=cases) if _is_status(subject):
            words = [word for case in cases for word in _status_words(case.pattern)]
        case ast.keyword(arg="status" | "statuses" | "task_status", value=value):
            words = list(_status_words(value))
        case ast.ClassDef(bases=bases, body=body) if any("Enum" in ast.unparse(b) for b in bases):
            for each in body:
                if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) in _STATUS_NAMES:
                    yield each.lineno, f"{ast.unparse(each)}: name it SUCCEEDED or FAILED"
            return
        case _:
            return
    for word in words:
        yield getattr(node, "lineno", 0), f"says {word!r}: name the member of the enum"


def _is_status(node: ast.expr) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return name in ("status", "task_status", "statuses")


def _status_words(node: ast.AST) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, ast.Constant) and each.value in STATUS_WORDS:
            yield str(each.value)


def _classes(node: ast.AST) -> Iterator[ast.ClassDef]:
    """The classes at the top level of a module, also those under `if` and `try`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield child
        elif isinstance(child, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            yield from _classes(child)


@pytest.mark.parametrize("folder", [SOURCE, TESTS], ids=["src", "tests"])
def test_names_say_something(folder: Path) -> None:
    assert name_problems(folder) == []


def test_modules_say_what_they_own() -> None:
    found = modules(SOURCE)
    assert len(found) > 5
    assert docstring_problems(found) == []


def test_a_public_class_has_a_name_of_its_own() -> None:
    found = modules(SOURCE)
    assert double_problems(found) == []
    # The exceptions are needed.
    for name, mirror in MIRRORS.items():
        (text,) = [module.text for module in found if module.name == mirror]
        assert f"\nclass {name}" in text


def test_a_status_is_a_member_and_has_one_name() -> None:
    found = [each for each in modules(SOURCE) if not each.name.startswith("penstock.testing")]
    assert status_problems(found) == []


@pytest.mark.parametrize(
    "text",
    [
        "def over(task):\n    return task.status == 'dead'\n",
        "def over(task):\n    return task.status in ('dead', 'x')\n",
        "def over(task):\n    match task.status:\n        case 'completed':\n            pass\n",
        "found = tasks(status='failed')\n",
        "class End(StrEnum):\n    DEAD = 'x'\n",
    ],
)
def test_a_status_that_is_a_word_is_found(tmp_path: Path, text: str) -> None:
    plant(tmp_path, {"a.py": text})
    (problem,) = status_problems(modules(tmp_path))
    assert problem.startswith("a:")


def test_a_status_that_is_a_member_is_fine(tmp_path: Path) -> None:
    text = "def over(task):\n    return task.status == End.FAILED and task.phase == 'dead'\n"
    plant(tmp_path, {"a.py": text + "class End(StrEnum):\n    FAILED = 'dead'\n"})
    assert status_problems(modules(tmp_path)) == []


def test_few_modules_are_gerunds() -> None:
    assert gerund_problems(modules(SOURCE)) == []


@pytest.mark.parametrize(
    "texts",
    [
        ("class Reader: ...\n", "class Reader: ...\n"),
        ("class Reader: ...\n", "if x:\n    class Reader: ...\n"),
        ("class Reader: ...\n", "try:\n    y\nexcept E:\n    class Reader: ...\n"),
        ("class Reader: ...\nclass Reader: ...\n", ""),
        ("class Queue: ...\n", "class Queue: ...\n"),
    ],
)
def test_a_name_that_is_given_twice_is_found(tmp_path: Path, texts: tuple[str, str]) -> None:
    plant(tmp_path, {"penstock/a.py": texts[0], "penstock/b.py": texts[1]})
    (problem,) = double_problems(modules(tmp_path))
    assert "is defined more than once: penstock.a:1, penstock." in problem


def test_mirrors_private_and_inner_classes_may_share_a_name(tmp_path: Path) -> None:
    text = "class _Row: ...\nclass A{}:\n    class Inner: ...\ndef f():\n    class Found: ...\n"
    plant(tmp_path, {"penstock/a.py": text.format(1), "penstock/b.py": text.format(2)})
    plant(tmp_path, {"penstock/sync.py": "class Queue: ...\n", "c.py": "class Queue: ...\n"})
    assert double_problems(modules(tmp_path)) == []


def test_a_gerund_too_many_is_found(tmp_path: Path) -> None:
    plant(tmp_path, {"routing/__init__.py": "", "a/tracing.py": "", "a/ingest.py": ""})
    assert gerund_problems(modules(tmp_path), gerunds_max=2) == []
    (problem,) = gerund_problems(modules(tmp_path), gerunds_max=1)
    assert problem == "2 modules are gerunds; 1 are allowed: a.tracing, routing"


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
