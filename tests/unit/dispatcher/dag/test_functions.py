"""Functions that a DAG names, looked for in files beside it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.cli.dag.files import check
from penstock.dispatcher.dag.files import CODE_BYTES_MAX, missing_functions
from penstock.dispatcher.dag.parser import parse

DAG = """\
jobs:
  feed: {activation: source, source: {kind: manual}, outputs: [raw]}
  clean:
    runtime: process
    operator: OPERATOR
    inputs: [raw]
    outputs: [tidy]
"""
SHOP = """\
def clean(task): ...
def count(task): ...
"""


def dag(operator: str) -> str:
    return DAG.replace("OPERATOR", f'"{operator}"')


def told(folder: Path, operator: str = "shop:claen", **files: str) -> list[str]:
    """What is wrong with the functions of a DAG beside these files; notes begin so."""
    for name, text in files.items():
        file = folder / f"{name.replace('_in_', '/')}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    found = missing_functions(dag(operator), parse(dag(operator), "a.yaml"), (folder,))
    assert all((each.line, each.field) == (5, "jobs.clean.operator") for each in found.functions)
    return [each.message for each in found.functions] + [
        f"note: {each.message}" for each in found.modules
    ]


def test_a_function_that_is_not_there(tmp_path: Path) -> None:
    assert told(tmp_path, shop=SHOP) == ["shop.py has no claen. Did you mean clean?"]
    assert told(tmp_path, "shop:zzz") == ["shop.py has no zzz. It has clean and count."]
    assert told(tmp_path, "shop:clean") == []
    assert told(tmp_path, shop="") == ["shop.py has no claen."]


@pytest.mark.parametrize(
    "text",
    [
        "async def claen(task): ...",
        "@retried(3)\ndef claen(task): ...",
        "claen = partial(clean, fast=True)",
        "claen: Function = clean",
        "a, (claen, *b) = found()",
        "if (claen := found()): ...",
        "from other import claen",
        "from other import clean as claen",
        "import claen.fast",
        "from other import *",
        "try:\n    from fast import claen\nexcept ImportError:\n    claen = None",
        "if True:\n    def claen(task): ...",
        "for claen in functions: ...",
        "with opened() as claen: ...",
        "match found():\n    case {'f': claen}: ...",
        "def make():\n    global claen\n    claen = 1",
        "def __getattr__(name): ...",
        "from other import __getattr__",
        "globals()['claen'] = 1",
        "exec('def claen(): ...')",
        "import sys\nsetattr(sys.modules[__name__], 'claen', 1)",
    ],
)
def test_what_may_be_there_is_believed(tmp_path: Path, text: str) -> None:
    assert told(tmp_path, shop=SHOP + text) == []


@pytest.mark.parametrize(
    "text",
    [
        "def outer():\n    def claen(task): ...",
        "class Shop:\n    def claen(self): ...",
        "claen.other = 1",
        "print(claen)",
        "def outer(claen): ...",
    ],
)
def test_what_is_bound_elsewhere_is_not_there(tmp_path: Path, text: str) -> None:
    assert told(tmp_path, shop=SHOP + text) == ["shop.py has no claen. Did you mean clean?"]


def test_methods(tmp_path: Path) -> None:
    plain = "class Shop:\n    def clean(self): ...\n"
    assert told(tmp_path, "shop:Shop.clean", shop=plain) == []
    assert told(tmp_path, "shop:Shop.claen") == ["shop.py has no claen. Did you mean clean?"]
    for text in (
        "class Shop(Base):\n    def clean(self): ...",
        "@dataclass\nclass Shop:\n    def clean(self): ...",
        "class Shop(metaclass=Meta): ...",
        "Shop = found()",
        plain + plain,
    ):
        assert told(tmp_path, "shop:Shop.claen", shop=text) == []


def test_packages(tmp_path: Path) -> None:
    told(tmp_path, shop_in___init__="from shop.jobs import clean", shop_in_jobs=SHOP)
    assert told(tmp_path, "shop:clean") == []
    assert told(tmp_path, "shop:claen") == ["shop/__init__.py has no claen. Did you mean clean?"]
    assert told(tmp_path, "shop.jobs:claen") == ["jobs.py has no claen. Did you mean clean?"]
    # A module of a package is a name of it.
    assert told(tmp_path, "shop:jobs") == []
    none = "note: The module shop.none is not beside the file; workers must have it."
    assert told(tmp_path, "shop.none:clean") == [none]


def test_what_cannot_be_looked_into_is_believed(tmp_path: Path) -> None:
    (tmp_path / "space").mkdir()
    (tmp_path / f"built{sys.implementation.cache_tag and '.abi3'}.so").touch()
    (tmp_path / "built.pyc").touch()
    assert told(tmp_path, "space:clean") == told(tmp_path, "built:clean") == []
    assert told(tmp_path, shop="#" * CODE_BYTES_MAX + "\n") == []
    assert told(tmp_path, shop="a = " + "(" * 3_000) == [
        (
            "note: shop.py is no Python that this version can read: line 1: too many nested"
            " parentheses."
        )
    ]
    # What is installed here may be of another version there.
    assert told(tmp_path, "json:nothing") == told(tmp_path, "json.nowhere:nothing") == []


def test_nothing_is_imported(tmp_path: Path) -> None:
    text = "raise SystemExit('imported')\ndef clean(task): ...\n"
    assert told(tmp_path, "shop.jobs:clean", shop_in___init__=text, shop_in_jobs=text) == []
    assert not {"shop", "shop.jobs"} & sys.modules.keys()


def test_transforms_of_spark(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    text = DAG.replace("runtime: process", "runtime: spark").replace(
        "OPERATOR", 'spark.python\n    config: {transform: "shop:claen"}'
    )
    (found,) = missing_functions(text, parse(text, "a.yaml"), (tmp_path,)).functions
    assert (found.line, found.field) == (6, "jobs.clean.config.transform")
    # Others are no function of a module.
    for other in ("runtime: lambda", "runtime: mine"):
        text = dag("shop:claen").replace("runtime: process", other)
        assert missing_functions(text, parse(text, "a.yaml"), (tmp_path,)).functions == []


def test_the_verb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dags").mkdir()
    (tmp_path / "shop.py").write_text(SHOP)
    for name, operator in (
        ("a", "shop:claen"),
        ("b", "penstock_nowhere:clean"),
        ("c", "shop:clean"),
    ):
        (tmp_path / "dags" / f"{name}.yaml").write_text(dag(operator))
    found = CliRunner().invoke(check, ["dags/a.yaml"])
    assert found.exit_code == 2
    message = "shop.py has no claen. Did you mean clean?"
    assert found.stdout == f"dags/a.yaml:5: jobs.clean.operator: {message}\n"
    found = CliRunner().invoke(check, ["dags/b.yaml", "dags/c.yaml"])
    assert found.exit_code == 0
    assert found.stderr == (
        "note: dags/b.yaml:5: jobs.clean.operator: The module penstock_nowhere is not beside the"
        " file; workers must have it.\n"
    )
    assert found.stdout.startswith("No problems in 2 files")
