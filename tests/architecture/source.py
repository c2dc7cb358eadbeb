"""The project's files as the architecture tests see them.

Every rule is a function over a tree or a text that returns its complaints, one sentence each.
So the same function judges the project and, in the next test, a small planted tree that breaks
the rule. `plant` writes such a tree.
"""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"
TESTS = ROOT / "tests"

_UNREAD = ("__pycache__", "build", "dist", "htmlcov", "node_modules", "venv")


@dataclass(frozen=True, slots=True)
class Module:
    """A Python file and the name by which it is imported."""

    name: str
    path: Path
    text: str
    tree: ast.Module

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"


def files(folder: Path) -> Iterator[Path]:
    """Every file that belongs to the project: no caches, no builds, no hidden folder but .ci."""
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            hidden = path.name.startswith(".") and path.name not in (".ci", ".github")
            if not hidden and path.name not in _UNREAD and path.suffix != ".egg-info":
                yield from files(path)
        elif path.name != ".git":  # a file, in a worktree of Git
            yield path


def texts(folder: Path) -> Iterator[tuple[Path, str]]:
    """Every file that is text, with its text."""
    for path in files(folder):
        try:
            yield path, path.read_text("utf-8")
        except UnicodeDecodeError:
            continue


def modules(folder: Path) -> tuple[Module, ...]:
    """Every Python file below a folder from which imports start."""
    return _ours() if folder == SOURCE else _parsed(folder)


@cache
def _ours() -> tuple[Module, ...]:
    # Most rules look at all of it. No garbage is looked for in it.
    found = _parsed(SOURCE)
    gc.freeze()
    return found


def _parsed(folder: Path) -> tuple[Module, ...]:
    gc.disable()
    found = []
    for path in files(folder):
        if path.suffix != ".py":
            continue
        parts = path.relative_to(folder).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text("utf-8")
        found.append(Module(name, path, text, ast.parse(text, filename=str(path))))
    gc.enable()
    return tuple(found)


def plant(folder: Path, sources: Mapping[str, str]) -> Path:
    """Write the files of a small tree and return its folder."""
    for name, text in sources.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    return folder
