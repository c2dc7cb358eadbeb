"""A default stands in one place: what a setting is handed to has no number of its own.

Otherwise the obvious edit, of the number beside the code that uses it, does nothing: the wiring
hands over the setting, which has another.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from tests.architecture.source import SOURCE, Module, modules, plant

APART: Mapping[str, str] = {
    "LongPollListener.wait_seconds": "its default is the most that the protocol allows",
    "aws_client.read_seconds_max": "for the clients of all services; that of SQS waits longer",
}
_NOTHING = (None, False, "", (), 0, 1)

Defaults = dict[str, ast.expr]


def default_problems(found: Sequence[Module], apart: Mapping[str, str]) -> list[str]:
    """Every default of a parameter or field that is handed a setting which has its own."""
    defaults: dict[str, Defaults] = {}
    for module in found:
        for name, each in _defaults(module.tree):
            defaults.setdefault(name, {}).update(each)
    borrowed = {name for module in found for name in _borrowed(module.tree)}
    problems = []
    for module in found:
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func).rpartition(".")[2]
            for keyword in node.keywords:
                default = defaults.get(called, {}).get(keyword.arg or "")
                target = f"{called}.{keyword.arg}"
                if default is None or target in apart or not _is_given(keyword.value, borrowed):
                    continue
                problems.append(
                    f"{module.name}:{node.lineno} hands a setting to {target}, which has the"
                    f" default {ast.unparse(default)}: take it away, or let the setting be it"
                )
    return problems


def _defaults(tree: ast.Module) -> Iterator[tuple[str, Defaults]]:
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef():
                for each in node.body:
                    if isinstance(each, ast.FunctionDef) and each.name == "__init__":
                        yield node.name, _of_parameters(each.args)
                    elif isinstance(each, ast.AnnAssign) and each.value and _is_own(each.value):
                        yield node.name, {ast.unparse(each.target): each.value}
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.name, _of_parameters(node.args)


def _of_parameters(found: ast.arguments) -> Defaults:
    placed = reversed([*found.posonlyargs, *found.args])
    pairs: list[tuple[ast.arg, ast.expr | None]] = [
        *zip(placed, reversed(found.defaults), strict=False),
        *zip(found.kwonlyargs, found.kw_defaults, strict=True),
    ]
    return {each.arg: default for each, default in pairs if default and _is_own(default)}


def _is_own(default: ast.expr) -> bool:
    """Whether a default is a value of its own, and not nothing, or that of another class."""
    try:
        return ast.literal_eval(default) not in _NOTHING
    except ValueError:
        return isinstance(default, ast.Name | ast.BinOp)


def _borrowed(tree: ast.Module) -> Iterator[str]:
    """Fields whose default is that of another class."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Attribute):
            yield ast.unparse(node.target)


def _is_given(value: ast.expr, borrowed: Collection[str]) -> bool:
    """Whether a value is a setting with a number of its own, in this unit or another."""
    match value:
        case ast.Attribute(value=owner, attr=name) if name not in borrowed:
            return ast.unparse(owner).rpartition(".")[2].lstrip("_") == "settings"
        case ast.BinOp(left=left):
            return _is_given(left, borrowed)
    return False


def test_a_default_stands_in_one_place() -> None:
    assert default_problems(modules(SOURCE), APART) == []


def test_a_second_default_is_found(tmp_path: Path) -> None:
    plant(
        tmp_path,
        {
            "a.py": "class A:\n    seconds: float = 3.0\n    count: int = 0\n",
            "b.py": "MANY = 9\nclass B:\n    def __init__(self, x, many=MANY): ...\n",
            "c.py": "A(seconds=settings.hours * 60, count=self._settings.count)\n"
            "b.B(1, many=self.settings.many)\nA(seconds=2)\nB(many=other.many)\n",
        },
    )
    one, two = default_problems(modules(tmp_path), {})
    assert "c:1 hands a setting to A.seconds, which has the default 3.0" in one
    assert "c:2 hands a setting to B.many, which has the default MANY" in two
    assert default_problems(modules(tmp_path), {"A.seconds": "x", "B.many": "x"}) == []
