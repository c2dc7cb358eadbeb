"""A safety rule has one id and one meaning, stands on one page, and is cited where it is kept."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.architecture.source import ROOT, plant, texts

PAGES = ("queue-protocol.md", "dispatcher-protocol.md")
_ID = re.compile(r"\b(?:QUEUE|LIMIT|SHARD|FENCE|PUBLISH)-\d+\b")
_DEFINED = re.compile(rf"^\| ({_ID.pattern}) \|", re.MULTILINE)
_TEST = re.compile(r"`(test_\w+)`")
_TESTS_DEFINED = re.compile(r"\bdef (test_\w+)")


def rule_problems(root: Path) -> list[str]:
    """What is wrong with the rules of a project, and with who cites them."""
    pages = [(root / "docs" / name).read_text("utf-8") for name in PAGES]
    defined = Counter(rule for page in pages for rule in _DEFINED.findall(page))
    problems = [f"{rule} is defined {times} times" for rule, times in defined.items() if times > 1]
    cited = {
        folder: {
            (found, str(path.relative_to(root)))
            for path, text in texts(root / folder)
            for found in _ID.findall(text)
        }
        for folder in ("src", "tests", "docs")
    }
    problems += sorted(
        f"{where} cites {rule}, which is no rule"
        for places in cited.values()
        for rule, where in places
        if rule not in defined and not where.endswith("test_rules.py")
    )
    kept = {rule for rule, _ in cited["src"]}
    problems += [f"nothing in src cites {rule}" for rule in defined if rule not in kept]
    tests = {name for _, text in texts(root / "tests") for name in _TESTS_DEFINED.findall(text)}
    problems += [
        f"a rule names {name}, which is no test"
        for name in sorted({name for page in pages for name in _TEST.findall(page)} - tests)
    ]
    return problems


def test_each_rule_is_defined_once_and_cited_where_it_is_kept() -> None:
    assert rule_problems(ROOT) == []


_SOUND = {
    "docs/queue-protocol.md": "| QUEUE-1 | one | `test_one` |\n",
    "docs/dispatcher-protocol.md": "| FENCE-1 | As QUEUE-1. | |\n",
    "src/a.py": "# QUEUE-1\n",
    "src/b.sql": "-- FENCE-1\n",
    "tests/test_a.py": "def test_one(): ...\n",
}


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({}, None),
        ({"docs/dispatcher-protocol.md": "| FENCE-1 | |\n| QUEUE-1 | |\n"}, "QUEUE-1 is defined 2"),
        ({"tests/test_b.py": "# QUEUE-10"}, "tests/test_b.py cites QUEUE-10, which is no rule"),
        ({"src/b.sql": ""}, "nothing in src cites FENCE-1"),
        ({"tests/test_a.py": ""}, "a rule names test_one, which is no test"),
    ],
)
def test_a_rule_that_is_wrong_is_found(
    tmp_path: Path, changed: Mapping[str, str], problem: str | None
) -> None:
    found = rule_problems(plant(tmp_path, {**_SOUND, **changed}))
    assert len(found) == (problem is not None)
    assert problem is None or found[0].startswith(problem)
