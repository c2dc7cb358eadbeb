"""The repository can be handed to a stranger: nothing in it belongs to one machine.

Set-up is pinned and names no registry, continuous integration runs what a developer runs, and
every link in the documentation leads somewhere.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.architecture.source import ROOT, SOURCE, files, plant, texts

# Folders in which people and their build machines keep checkouts and home folders.
_MACHINE_PATH = re.compile(
    r"(?<![\w.}$)-])/(?:home|Users|root|work|workspaces?|builds|var/folders)/[\w.-]+"
    r"|\b[A-Za-z]:\\+Users\\+\w+"
)
_URL = re.compile(r"[a-z][a-z0-9+]*://", re.IGNORECASE)
_HOST = re.compile(r"\b(?:[a-z0-9-]+\.)+(?:com|org|net|io|cloud|internal|lan)\b", re.IGNORECASE)
_SOURCE_OPTION = re.compile(
    r"(?<![\w-])(?:-i|-f|--(?:extra-)?index(?:-url)?|--find-links|--trusted-host"
    r"|(?:extra-|default-)?index(?:-url)?|find-links)(?![\w-])"
)
_PINNED = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]*)(?:\[[\w,-]+\])?==(?P<version>[\w.!+-]+)"
    r"(?:\s*;[^\\]*?)?(?:\s+--hash=sha256:[0-9a-f]{64})+"
)
_FENCE = re.compile(r"^ *(```|~~~).*?^ *\1 *$", re.MULTILINE | re.DOTALL)
_INLINE_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)")
_LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?[^)]*\)|^ *\[[^\]]+\]: *<?([^\s>]+)", re.MULTILINE)


_PATH = re.compile(r"`([a-z_][a-z0-9_./*]*(?:\.py|/[\w*]+\.sql|/))`")
_HEADING = re.compile(r"## (.*)")


def source_path_problems(page: str, source: Path) -> list[str]:
    """Every path of code on a page that leads nowhere, and every name that leads to two places.

    A path is below `source` or the repository. What is short of that is in a folder that is named
    before it, in its paragraph or row, in that of its section, or is the only one of its name.
    """
    problems: list[str] = []
    sections: list[Path] = [source]
    nearest: list[Path] = []
    every = list(source.rglob("*.py"))
    for number, line in enumerate(page.splitlines(), 1):
        if heading := _HEADING.match(line):
            named = [source / word.strip(" `") for word in heading[1].split(",")]
            sections = [*(each for each in named if each.is_dir()), source]
        if not line.strip() or line.startswith("|"):
            nearest = []
        for name in _PATH.findall(line):
            homes = [*nearest, *sections, source.parent, source.parents[1]]
            found = next((each for home in homes for each in sorted(home.glob(name))), None)
            alike = [each for each in every if each.name == name]
            if found is None and len(alike) == 1:
                found = alike[0]
            if found is None:
                told = f"has {len(alike)} meanings: write its folder" if alike else "is not there"
                problems.append(f"line {number}: {name} {told}")
            elif "/" in name:
                nearest = [found if found.is_dir() else found.parent, *nearest]
    return problems


def machine_path_problems(root: Path) -> list[str]:
    """Every path of somebody's machine in any text of the project."""
    return [
        f"{path.relative_to(root)}:{number} names a path of one machine: {found.group()}"
        for path, text in texts(root)
        for number, line in enumerate(text.splitlines(), 1)
        for found in _MACHINE_PATH.finditer(line)
    ]


def registry_problems(text: str) -> list[str]:
    """Every URL, host and choice of a registry in a file that says what to install."""
    return [
        f"line {number} says where packages come from: {found.group()}"
        for number, line in enumerate(text.splitlines(), 1)
        for found in (_URL.search(line) or _HOST.search(line) or _SOURCE_OPTION.search(line),)
        if found
    ]


def pins_of(text: str) -> tuple[dict[str, str], list[str]]:
    """The pinned version of each requirement, and a complaint for each that is not pinned."""
    pins: dict[str, str] = {}
    problems = []
    for line in re.sub(r"\\\n", " ", text).splitlines():
        requirement = re.sub(r"(^|\s)#.*", "", line).strip()
        if not requirement:
            continue
        pinned = _PINNED.fullmatch(requirement)
        if pinned is None:
            problems.append(f"{requirement[:40]} is not pinned to one version with a hash")
        else:
            pins[re.sub(r"[-_.]+", "-", pinned["name"]).lower()] = pinned["version"]
    return pins, problems


def subset_problems(run: Mapping[str, str], dev: Mapping[str, str]) -> list[str]:
    """Every package that is run in another version than the one that is tested."""
    return [
        f"run.txt has {name} {version}, dev.txt has {dev.get(name, 'none')}"
        for name, version in run.items()
        if dev.get(name) != version
    ]


def ci_problems(root: Path) -> list[str]:
    """Whether continuous integration runs the two commands."""
    script = root / ".ci" / "run"
    if not script.is_file():
        return [".ci/run is missing"]
    problems = [] if os.access(script, os.X_OK) else [".ci/run is not executable"]
    goals = {
        goal
        for command in re.findall(r"^[ \t]*make ([^#\n]*)", script.read_text("utf-8"), re.MULTILINE)
        for goal in command.split()
    }
    return [
        *problems,
        *[f".ci/run does not call make {goal}" for goal in ("check", "test") if goal not in goals],
    ]


def makefile_problems(text: str) -> list[str]:
    """The goals that people are told of and that the Makefile does not have."""
    goals = set(re.findall(r"^([a-z]+):(?!=)", text, re.MULTILINE))
    return [
        f"the Makefile has no goal {goal}"
        for goal in ("demo", "test", "check", "bench")
        if goal not in goals
    ]


def documents(root: Path) -> list[Path]:
    """The pages whose links are followed."""
    top = [root / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    return [*top, *[path for path in files(root / "docs") if path.suffix == ".md"]]


def link_problems(root: Path) -> list[str]:
    """Every relative link in a page that leads nowhere, or out of the repository."""
    problems = []
    for page in documents(root):
        if not page.is_file():
            problems.append(f"{page.relative_to(root)} is missing")
            continue
        prose = _INLINE_CODE.sub("", _FENCE.sub("", page.read_text("utf-8")))
        for found in _LINK.finditer(prose):
            link = found[1] or found[2]
            target = link.partition("#")[0]
            if not target or re.match(r"[a-z][a-z0-9+.-]*:", link):
                continue
            path = (page.parent / target).resolve()
            if not path.is_relative_to(root.resolve()) or not path.exists():
                problems.append(f"{page.relative_to(root)} links to {link}, which is not there")
    return problems


def test_no_path_of_one_machine() -> None:
    assert len(list(files(ROOT))) > 20
    assert machine_path_problems(ROOT) == []


@pytest.mark.parametrize("name", ["pyproject.toml", "requirements/run.txt", "requirements/dev.txt"])
def test_no_registry_is_named(name: str) -> None:
    assert registry_problems((ROOT / name).read_text("utf-8")) == []


def test_no_further_requirements_file() -> None:
    assert sorted(path.name for path in files(ROOT / "requirements")) == ["dev.txt", "run.txt"]


def test_every_requirement_is_pinned_and_tested() -> None:
    run, run_problems = pins_of((ROOT / "requirements/run.txt").read_text("utf-8"))
    dev, dev_problems = pins_of((ROOT / "requirements/dev.txt").read_text("utf-8"))
    assert run_problems + dev_problems == []
    assert run
    assert subset_problems(run, dev) == []


def test_continuous_integration_runs_the_two_commands() -> None:
    assert ci_problems(ROOT) == []


def test_the_makefile_has_its_goals() -> None:
    assert makefile_problems((ROOT / "Makefile").read_text("utf-8")) == []


def test_every_link_leads_somewhere() -> None:
    assert link_problems(ROOT) == []


# From here on: planted repositories that break the rules, and some that do not.


@pytest.mark.parametrize("folder", ["home", "Users", "root", "work", "workspace", "builds"])
def test_a_path_of_one_machine_is_found(tmp_path: Path, folder: str) -> None:
    path = f"/{folder}/ann/penstock"
    plant(tmp_path, {"docs/a.md": f"words\nput it into {path}.\n", ".venv/a.cfg": path})
    (problem,) = machine_path_problems(tmp_path)
    assert problem == f"docs/a.md:2 names a path of one machine: {path[:-9]}"

    fine = f"/srv{path} ${{ROOT}}{path} {{root}}{path} file:///srv/data /tmp/x /{folder}"
    plant(tmp_path, {"docs/a.md": fine})
    assert machine_path_problems(tmp_path) == []


def test_a_path_of_one_machine_is_found_after_a_scheme_or_a_quote(tmp_path: Path) -> None:
    home = "/" + "home/ann"
    drive = "C:" + r"\Users\ann"
    plant(tmp_path, {"src/a.py": f"url = 'file://{home}'\nx = '{home}'\ny = r'{drive}'\n"})
    assert len(machine_path_problems(tmp_path)) == 3


@pytest.mark.parametrize(
    "line",
    [
        "--index-url https://registry.example/simple",
        "-i mirror",
        "--extra-index-url mirror",
        "--find-links wheels",
        "a @ git+ssh://server/a",
        "# from pypi.org",
        'index-url = "mirror"',
        "[[tool.uv.index]]",
        'Homepage = "https://example"',
    ],
)
def test_a_registry_is_found(line: str) -> None:
    assert registry_problems(f"click==8.2.0 --hash=sha256:00\n{line}\n") != []


def test_a_plain_project_file_names_no_registry() -> None:
    fine = 'asyncio.sleep = 1\npenstock = "penstock.cli:main"\nselect = ["I"]\na>=1.0.dev1\n'
    assert registry_problems(fine) == []


HASH = "--hash=sha256:" + "0f" * 32


@pytest.mark.parametrize(
    "requirement",
    [
        "click==8.2.0",
        f"click {HASH}",
        f"click>=8.2 {HASH}",
        f"click==8.2.0 {HASH[:-1]}",
        "click==8.2.0 --hash=md5:00",
        f"click==8.* {HASH}",
        "-e .",
        "-r other.txt",
        f"click==8.2.0 {HASH} --pre",
    ],
)
def test_a_loose_requirement_is_found(requirement: str) -> None:
    pins, problems = pins_of(f"six==1.17.0 \\\n    {HASH}\n{requirement}\n")
    assert pins == {"six": "1.17.0"}
    assert len(problems) == 1


def test_pinned_requirements_are_read() -> None:
    lines = [
        "# words",
        "",
        f"Type_Ext[x]==1.0.post1 \\\n    {HASH} \\\n    {HASH}",
        f"colorama==0.4.6 ; sys_platform == 'win32' \\\n    {HASH}  # why",
    ]
    assert pins_of("\n".join(lines)) == ({"type-ext": "1.0.post1", "colorama": "0.4.6"}, [])


def test_a_version_that_is_not_tested_is_found() -> None:
    run = {"a": "1", "b": "2", "c": "3"}
    problems = subset_problems(run, {"a": "1", "b": "3", "z": "9"})
    assert problems == ["run.txt has b 2, dev.txt has 3", "run.txt has c 3, dev.txt has none"]


@pytest.mark.parametrize(
    ("text", "mode", "problems"),
    [
        ("make check\nmake test\n", 0o755, []),
        ("make -s check test  # all\n", 0o755, []),
        ("make check\nmake test\n", 0o644, [".ci/run is not executable"]),
        ("make check\n# make test\n", 0o755, [".ci/run does not call make test"]),
        ("echo make check\nmake test\n", 0o755, [".ci/run does not call make check"]),
        ("make test # check\n", 0o755, [".ci/run does not call make check"]),
    ],
)
def test_a_wrong_ci_script_is_found(
    tmp_path: Path, text: str, mode: int, problems: list[str]
) -> None:
    assert ci_problems(tmp_path) == [".ci/run is missing"]
    plant(tmp_path, {".ci/run": text})
    (tmp_path / ".ci" / "run").chmod(mode)
    assert ci_problems(tmp_path) == problems


def test_a_missing_goal_is_found() -> None:
    text = "demo: x\n\trun\n.PHONY: test\ntest := 1\ncheck:\nbench: ## words\n"
    assert makefile_problems(text) == ["the Makefile has no goal test"]


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    live = (
        "[a](docs/a.md) ![b](<docs/a.md#part> 'title') [c](#here) [d](https://example/x) [e][f]\n"
        "`[code](no.md)` ``[code](`no.md)``\n```\n[code](no.md)\n```\n[f]: docs\n"
    )
    pages = {"README.md": live, "CONTRIBUTING.md": "", "CHANGELOG.md": "", "docs/a.md": ""}
    plant(tmp_path, pages)
    assert link_problems(tmp_path) == []

    dead = "[a](a.md) [b](b.md) `x` [c](../no.md#part)\n\n[d]: no/d.md\n"
    plant(tmp_path, {"docs/deep/a.md": dead, "README.md": "[out](../../etc)"})
    assert link_problems(tmp_path) == [
        "README.md links to ../../etc, which is not there",
        "docs/deep/a.md links to b.md, which is not there",
        "docs/deep/a.md links to ../no.md#part, which is not there",
        "docs/deep/a.md links to no/d.md, which is not there",
    ]

    (tmp_path / "CHANGELOG.md").unlink()
    assert "CHANGELOG.md is missing" in link_problems(tmp_path)


def test_the_paths_of_the_architecture_page_lead_somewhere() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    assert source_path_problems(page, SOURCE / "penstock") == []


@pytest.mark.parametrize(
    ("page", "problem"),
    [
        ("see `queue/gone.py`", "queue/gone.py is not there"),
        ("see `pack.py`", ""),
        ("see `child.py`", "child.py has 2 meanings: write its folder"),
        ("see `query/child.py`, then `engine.py`", ""),
        ("## queue\nsee `child.py`", ""),
        ("see `queue/`, `sql/*.sql`", "sql/*.sql is not there"),
    ],
)
def test_a_path_that_leads_nowhere_is_found(tmp_path: Path, page: str, problem: str) -> None:
    source = tmp_path / "src" / "penstock"
    plant(source, dict.fromkeys(("queue/pack.py", "queue/child.py"), ""))
    plant(source, dict.fromkeys(("query/child.py", "query/engine.py", "cli/engine.py"), ""))
    found = source_path_problems(page, source)
    assert [each.partition(": ")[2] for each in found] == ([problem] if problem else [])
