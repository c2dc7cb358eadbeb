"""Imports go downward only.

The layers and their order are read from the table in docs/architecture.md, which is the one
place that states them; whoever adds a package adds a row. Every import counts, wherever it
stands: inside a function, under `TYPE_CHECKING`, or by name through `import_module`.

`penstock/__init__.py` re-exports the public names. It stands just below the highest layer, so
that it may import all but the command line, and only the command line may import it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.architecture.source import ROOT, SOURCE, Module, modules, plant

ARCHITECTURE = ROOT / "docs" / "architecture.md"
PACKAGE = "penstock"
COLUMNS = ["Layer", "Folder", "Responsibility", "May import", "State"]
SPARK_HOME = f"{PACKAGE}.runtimes.spark"
SPARK_INTERNALS = f"{SPARK_HOME}.internals"

_NAME = re.compile(r"`([\w./]+)`")
_INTERNAL = re.compile(
    r"pyspark\.(?:java_gateway|sql\.pandas|sql\.connect)"
    r"|\.(?:sessionState|statusStore|sharedState|cacheManager|externalCatalog)\("
    r"|\.(?:globalTempViewManager|getPersistentRDDs)\("
    r"|\.(?:queryExecution|optimizedPlan|subqueriesAll|collectLeaves|rootPaths|toJSON)\("
    r"|[gs]etattr\([^'\"]*['\"]_(?!_|penstock_)\w+"
)


@dataclass(frozen=True, slots=True)
class Layer:
    """A row of the table; `homes` are the packages and modules that make up the layer."""

    name: str
    homes: tuple[str, ...]
    may_import: str
    state: str


@dataclass(frozen=True, slots=True)
class Import:
    """That one module imports another; `target` is a full dotted name."""

    target: str
    line: int


def layers_of(page: str) -> tuple[Layer, ...]:
    """The rows of the layer table, lowest first; empty if the page has no such table."""
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in page.splitlines()]
    if COLUMNS not in rows:
        return ()
    layers = []
    for row in rows[rows.index(COLUMNS) + 2 :]:
        if len(row) != len(COLUMNS):
            break
        name, folder, _, may_import, state = row
        homes = tuple(home.removesuffix("/").removesuffix(".py") for home in _NAME.findall(folder))
        layers.append(Layer("".join(_NAME.findall(name)), homes, may_import, state))
    return tuple(layers)


def table_problems(layers: Sequence[Layer], source: Path) -> list[str]:
    """What the table says against itself, or against the folders that are there."""
    problems = [] if layers else [f"docs/architecture.md has no table headed {COLUMNS}"]
    for place, layer in enumerate(layers):
        lower = [f"`{other.name}`" for other in layers[:place]]
        expected = " to ".join(dict.fromkeys([lower[0], lower[-1]])) if lower else "nothing"
        if layer.may_import != expected:
            problems.append(
                f"layer {layer.name} may import {expected}; the table says {layer.may_import!r}"
            )
        if layer.name not in layer.homes:
            problems.append(f"layer {layer.name} does not name its folder or module")
        state = "here" if any(_is_there(source, home) for home in layer.homes) else "later"
        if layer.state != state:
            problems.append(f"layer {layer.name} is {state}; the table says {layer.state!r}")
    return problems


def layer_problems(found: Sequence[Module], layers: Sequence[Layer]) -> list[str]:
    """Every import that goes upward, and every module that no layer has."""
    ranks = _ranks(layers)
    known = {module.name for module in found}
    problems = []
    for module in found:
        home = _home(module.name)
        if home not in ranks:
            problems.append(
                f"{module.name} belongs to no layer: add {home!r} to the layer table"
                " of docs/architecture.md, at the height from which it imports downward only"
            )
            continue
        for item in imports_of(module, known):
            if item.target.split(".")[0] != PACKAGE:
                continue
            target = _home(item.target)
            if target not in ranks:
                problems.append(
                    f"{module.name}:{item.line} imports {item.target}, which no layer has:"
                    f" add {target!r} to the layer table of docs/architecture.md"
                )
            elif ranks[target] > ranks[home]:
                problems.append(
                    f"{module.name}:{item.line} imports {item.target}, which is above it"
                )
    return problems


def cycle_problems(found: Sequence[Module]) -> list[str]:
    """A cycle of modules that import each other, if there is one."""
    known = {module.name for module in found}
    graph = {
        module.name: {item.target for item in imports_of(module, known)} & known for module in found
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [f"modules import each other: {' <- '.join(error.args[1])}"]
    return []


def spark_problems(found: Sequence[Module]) -> list[str]:
    """Every import of pyspark outside the one package that may have it."""
    return [
        f"{module.name}:{item.line} imports pyspark; only {SPARK_HOME} may"
        for module in found
        if not f"{module.name}.".startswith(f"{SPARK_HOME}.")
        for item in imports_of(module, frozenset())
        if item.target.split(".")[0] == "pyspark"
    ]


def internals_problems(found: Sequence[Module]) -> list[str]:
    """Every use of what PySpark does not promise outside the one module that may have it."""
    return [
        f"{module.name}:{number} uses {use[0]!r} of PySpark; only {SPARK_INTERNALS} may"
        for module in found
        if f"{module.name}.".startswith(f"{SPARK_HOME}.") and module.name != SPARK_INTERNALS
        for number, line in enumerate(module.text.splitlines(), start=1)
        if (use := _INTERNAL.search(line))
    ] + [
        f"{module.name}:{line} uses {use!r} of another's; only {SPARK_INTERNALS} may"
        for module in found
        if f"{module.name}.".startswith(f"{SPARK_HOME}.") and module.name != SPARK_INTERNALS
        for line, use in _privates(module.tree, is_own=False)
    ]


def _privates(node: ast.AST, *, is_own: bool) -> Iterator[tuple[int, str]]:
    """Every private attribute of what is not `self` in a method of a class: it may be PySpark's.

    `is_own` says whether `self` is of a class that is defined here.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Attribute) and _is_private(child.attr):
            of = child.value.id if isinstance(child.value, ast.Name) else ""
            if not (is_own and of in ("self", "cls")):
                yield child.lineno, child.attr
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            takes_self = any(each.arg in ("self", "cls") for each in child.args.args)
            is_method = isinstance(node, ast.ClassDef)
            yield from _privates(child, is_own=is_method or (is_own and not takes_self))
        else:
            yield from _privates(child, is_own=is_own)


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith(("__", "_penstock_"))


def imports_of(module: Module, known: set[str] | frozenset[str]) -> Iterator[Import]:
    """Every import in a module. `known` tells a module from a name inside its package."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = _base_of(module, node)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield Import(inner if inner in known else base, node.lineno)
        elif isinstance(node, ast.Call) and _is_import_by_name(node):
            match node.args:
                case [ast.Constant(value=str(target)), *_]:
                    yield Import(target, node.lineno)


def _is_there(source: Path, home: str) -> bool:
    package = source / PACKAGE / home
    return package.with_suffix(".py").is_file() or any(package.glob("*.py"))


def _base_of(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    above = module.name.split(".")
    kept = above[: len(above) - node.level + (1 if module.is_package else 0)]
    return ".".join([*kept, *([node.module] if node.module else [])])


def _is_import_by_name(node: ast.Call) -> bool:
    called = node.func
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    return name in ("import_module", "__import__")


def _home(name: str) -> str:
    """The part of a dotted name that the table lists; empty for the package itself."""
    return name.split(".")[1] if "." in name else ""


def _ranks(layers: Sequence[Layer]) -> Mapping[str, float]:
    ranks: dict[str, float] = {"": len(layers) - 1.5}
    for place, layer in enumerate(layers):
        ranks.update(dict.fromkeys(layer.homes, place))
    return ranks


def found_problems(source: Path, layers: Sequence[Layer]) -> list[str]:
    """All that this file has to say about a tree."""
    found = modules(source)
    spark = [*spark_problems(found), *internals_problems(found)]
    return [*layer_problems(found, layers), *cycle_problems(found), *spark]


def test_the_table_is_complete_and_true() -> None:
    assert table_problems(layers_of(ARCHITECTURE.read_text("utf-8")), SOURCE) == []


def test_imports_go_downward() -> None:
    found = modules(SOURCE)
    assert len(found) > 5
    assert found_problems(SOURCE, layers_of(ARCHITECTURE.read_text("utf-8"))) == []


# From here on: planted trees that break the rules, and some that do not.

LOW_TO_HIGH = ("kernel", "store", "runtimes", "app", "cli")
LAYERS = tuple(Layer(name, (name,), "", "here") for name in LOW_TO_HIGH)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("kernel/clock.py", "from penstock.store.base import ObjectStore\n"),
        ("kernel/clock.py", "from penstock.store import base\n"),
        ("kernel/clock.py", "from penstock import store\n"),
        ("kernel/clock.py", "import penstock.store.base as base\n"),
        ("kernel/clock.py", "import os, penstock.store\n"),
        ("kernel/clock.py", "def late():\n    from penstock.store import base\n"),
        ("kernel/clock.py", "if TYPE_CHECKING:\n    from penstock.store import base\n"),
        ("kernel/clock.py", "try:\n    import penstock.store\nexcept ImportError:\n    pass\n"),
        ("kernel/clock.py", "from ..store import base\n"),
        ("kernel/__init__.py", "from ..store import base\n"),
        ("kernel/clock.py", "importlib.import_module('penstock.store.base')\n"),
        ("store/base.py", "from penstock.app import build\n"),
        ("app.py", "import penstock.cli\n"),
        ("app.py", "from penstock import ObjectStore\n"),
        ("__init__.py", "from penstock.cli import main\n"),
    ],
)
def test_an_import_upward_is_found(tmp_path: Path, path: str, text: str) -> None:
    tree = {"store/__init__.py": "", "store/base.py": "", "__init__.py": "", path: text}
    plant(tmp_path / PACKAGE, tree)
    assert "which is above it" in " ".join(layer_problems(modules(tmp_path), LAYERS))


def test_an_import_downward_is_fine(tmp_path: Path) -> None:
    plant(
        tmp_path / PACKAGE,
        {
            "__init__.py": "from penstock.store.base import ObjectStore\n",
            "kernel/clock.py": "import asyncio\nimport store\n",
            "store/__init__.py": "from penstock.store.base import ObjectStore\n",
            "store/base.py": "from penstock.kernel import clock\nfrom .time import Interval\n",
            "store/time.py": "from penstock.kernel.clock import Clock\n",
            "cli/__init__.py": "from penstock import ObjectStore, store\nimport penstock.app\n",
        },
    )
    assert found_problems(tmp_path, LAYERS) == []


@pytest.mark.parametrize("path", ["extras/__init__.py", "extras.py", "extras/deep/er.py"])
def test_a_package_without_a_layer_is_told_where_to_go(tmp_path: Path, path: str) -> None:
    plant(tmp_path / PACKAGE, {path: ""})
    (problem,) = layer_problems(modules(tmp_path), LAYERS)
    assert "add 'extras' to the layer table of docs/architecture.md" in problem


def test_an_import_of_no_layer_is_found(tmp_path: Path) -> None:
    plant(tmp_path / PACKAGE, {"cli/x.py": "import penstock.extras.y\n"})
    (problem,) = layer_problems(modules(tmp_path), LAYERS)
    assert "penstock.cli.x:1 imports penstock.extras.y, which no layer has" in problem


@pytest.mark.parametrize(
    "tree",
    [
        {"store/a.py": "import penstock.store.b", "store/b.py": "import penstock.store.a"},
        {"store/a.py": "from penstock.store import b", "store/b.py": "from .a import x"},
        {"store/a.py": "def f():\n  import penstock.store.b", "store/b.py": "from . import a"},
        {"store/__init__.py": "from .a import x", "store/a.py": "from penstock.store import y"},
        {"store/a.py": "from penstock.store.a import x"},
        {
            "store/a.py": "if TYPE_CHECKING:\n  from penstock.store import b",
            "store/b.py": "from penstock.store.c import x",
            "store/c.py": "from penstock.store.a import x",
        },
    ],
)
def test_a_cycle_is_found(tmp_path: Path, tree: dict[str, str]) -> None:
    plant(tmp_path / PACKAGE, tree)
    found = modules(tmp_path)
    assert layer_problems(found, LAYERS) == []
    (problem,) = cycle_problems(found)
    assert "modules import each other: penstock.store" in problem


@pytest.mark.parametrize(
    "text",
    ["import pyspark", "from pyspark.sql import functions", "def f():\n    import pyspark.sql"],
)
def test_pyspark_stays_in_its_place(tmp_path: Path, text: str) -> None:
    tree = {"runtimes/spark/session.py": text, "runtimes/spark/__init__.py": text}
    plant(tmp_path / PACKAGE, tree)
    assert spark_problems(modules(tmp_path)) == []

    plant(tmp_path / PACKAGE, {"runtimes/sparkling.py": text, "app.py": text})
    first, second = spark_problems(modules(tmp_path))
    assert first.startswith("penstock.app:")
    assert second.startswith("penstock.runtimes.sparkling:")


@pytest.mark.parametrize(
    "text",
    [
        "session._jsparkSession",
        "getattr(frame, '_jdf')",
        "from pyspark.sql.pandas.types import x",
        "state.sessionState()",
        "state.sharedState()",
        "context.getPersistentRDDs()",
        "json.loads(plan.toJSON())",
        "getattr(error, '_stackTrace', None)",
        "session.builder._options",
        "refusing(lambda self: self._sparkSession)",
        "class A:\n def f(self):\n  def g(self): return self._sparkSession\n  return g",
    ],
)
def test_what_pyspark_does_not_promise_stays_in_its_module(tmp_path: Path, text: str) -> None:
    plant(tmp_path / PACKAGE, {"runtimes/spark/internals.py": text})
    assert internals_problems(modules(tmp_path)) == []

    plant(tmp_path / PACKAGE, {"runtimes/spark/access/remote.py": text})
    (problem,) = internals_problems(modules(tmp_path))
    assert problem.startswith("penstock.runtimes.spark.access.remote:")
    own = "class A:\n def f(self):\n  return [self._x for _ in map(lambda y: self._y, self._z)]\n"
    plant(tmp_path / PACKAGE, {"runtimes/spark/access/remote.py": own})
    assert internals_problems(modules(tmp_path)) == []


TABLE = """
Words before.

| Layer | Folder | Responsibility | May import | State |
|---|---|---|---|---|
| `kernel` | `kernel/` | the floor | nothing | here |
| `store` | `store/` | objects | `kernel` | later |
| `cli` | `cli/`, `__main__.py` | verbs | `kernel` to `store` | here |

Words after | with a bar.
"""


def test_the_table_is_read(tmp_path: Path) -> None:
    plant(tmp_path / PACKAGE, {"kernel/clock.py": "", "__main__.py": ""})
    (tmp_path / PACKAGE / "store").mkdir()
    layers = layers_of(TABLE)
    assert [layer.homes for layer in layers] == [("kernel",), ("store",), ("cli", "__main__")]
    assert table_problems(layers, tmp_path) == []


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("| Layer |", "| Part |", "has no table"),
        ("| `kernel` | later |", "| `cli` | later |", "store may import `kernel`; the table says"),
        ("| `kernel` | later |", "| `kernel` | here |", "store is later; the table says 'here'"),
        ("| nothing | here |", "| nothing | later |", "kernel is here; the table says 'later'"),
        ("`store/`", "`shop/`", "store does not name its folder"),
    ],
)
def test_a_wrong_table_is_found(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    plant(tmp_path / PACKAGE, {"kernel/clock.py": "", "cli/__init__.py": ""})
    assert TABLE.count(old) == 1
    problems = table_problems(layers_of(TABLE.replace(old, new)), tmp_path)
    assert complaint in " ".join(problems)
