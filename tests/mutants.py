"""`make mutants`: break the core in small ways, one at a time, and see which the tests notice.

A mutant is one edit of one file of the core: a comparison turned, a condition negated, a number one
higher, a call or a `raise` left out, in SQL a lock or a condition left out. Of each file the same
ones are taken every time (the first by the hash of what they edit), so that two runs can be
compared: write one with `--to before.json`, change the tests, and ask with `--against before.json`
which mutants were killed then and live now. `--tests` takes the tests of another checkout.

Each mutant lives in a copy of `src` that stands first in the path, and is put before the tests that
the table below names for its file, until one fails. Hanging is failing. The tests have to pass on
the copy without an edit first; else nothing is said of that file.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[1]
SECONDS_MORE: Final = 30
"""That a mutant may take longer than twice what the tests take without it."""

_DISPATCHER: Final = "tests/integration/dispatcher"
_ENDINGS: Final = tuple(
    f"{_DISPATCHER}/test_{each}.py"
    for each in ("endings", "lifecycle", "publication", "publication_races", "races")
)
_ROUTING: Final = tuple(
    f"{_DISPATCHER}/test_{each}.py" for each in ("routing", "ranges", "coalesce", "order")
)
_TOKENS: Final = ("tests/unit/tokens", f"{_DISPATCHER}/test_once_broken_tokens.py")
_QUEUE: Final = tuple(
    f"tests/unit/queue/test_{each}.py"
    for each in ("transitions", "claims", "exclusive", "expiry", "heartbeats", "cancelling")
)
_SIMULATION: Final = ("tests/simulation/test_queue.py",)
GUARDS: Final[Mapping[str, tuple[str, ...]]] = {
    "queue/transitions.py": (*_QUEUE, *_SIMULATION),
    "queue/pack_session.py": (*_QUEUE, "tests/simulation/test_claims.py", *_SIMULATION),
    "queue/attempt_outcomes.py": (*_QUEUE, "tests/unit/queue/test_retry.py", *_SIMULATION),
    "queue/shards/leases.py": (
        "tests/unit/queue/test_leases.py",
        "tests/simulation/test_leases.py",
        *_SIMULATION,
    ),
    "queue/inbox.py": (
        "tests/unit/queue/direct",
        "tests/unit/queue/test_direct.py",
        *_SIMULATION,
    ),
    "dispatcher/tasks/lifecycle.py": _ENDINGS,
    "dispatcher/sql/tasks.sql": _ENDINGS,
    "dispatcher/router.py": _ROUTING,
    "dispatcher/sql/routing.sql": _ROUTING,
    "dispatcher/tasks/completion.py": _ENDINGS,
    "dispatcher/sql/tasks_ending.sql": _ENDINGS,
    "dispatcher/sql/partitions.sql": _ENDINGS,
    "dispatcher/backpressure.py": (
        "tests/unit/dispatcher/pressure",
        f"{_DISPATCHER}/test_pressure.py",
    ),
    "dispatcher/capabilities/credentials.py": ("tests/unit/dispatcher/capabilities",),
    "tokens/scopes.py": _TOKENS,
    "tokens/claims.py": _TOKENS,
    "tokens/verifier.py": _TOKENS,
    "console/sessions.py": (
        "tests/unit/console/test_sessions.py",
        "tests/unit/console/test_application.py",
    ),
    "datasets/snapshot.py": ("tests/unit/datasets", "tests/simulation/test_datasets.py"),
}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One edit: the text from `start` to `end` of a file becomes `instead`."""

    file: str
    start: int
    end: int
    instead: str
    was: str
    number: int
    line: int

    @property
    def name(self) -> str:
        """The same in every run, wherever the text stands; equal edits are told apart by order."""
        number = f" ({self.number})" if self.number > 1 else ""
        return f"{self.file}: {' '.join(self.was.split())} -> {self.instead}{number}"

    def of(self, source: bytes) -> bytes:
        return source[: self.start] + self.instead.encode() + source[self.end :]


def mutants(file: str, source: bytes, count: int) -> Sequence[Mutant]:
    """The ones of a file that are taken."""
    of = _of_sql if file.endswith(".sql") else _of_python
    made = {
        (start, end, instead)
        for start, end, instead in of(source)
        if source[start:end].decode() != instead
    }
    equal: Counter[tuple[str, str]] = Counter()
    found = []
    for start, end, instead in sorted(made):
        was = source[start:end].decode()
        equal[was, instead] += 1
        line = source.count(b"\n", 0, start) + 1
        found.append(Mutant(file, start, end, instead, was, equal[was, instead], line))
    found.sort(key=lambda each: hashlib.sha256(each.name.encode()).digest())
    return found[:count]


_SQL: Final = (
    (rb"\bFOR (NO KEY )?UPDATE\b( OF \w+)?( SKIP LOCKED)?", ""),
    (rb"\bSKIP LOCKED\b", ""),
    (rb"\bON CONFLICT[^;]*?DO NOTHING\b", ""),
    (rb"\bAND\b", "OR"),
    (rb"\bIS NOT NULL\b", "IS NULL"),
    (rb"\bIS NULL\b", "IS NOT NULL"),
    (rb"\bNOT EXISTS\b", "EXISTS"),
    (rb"(?<=\s)=(?=\s)", "<>"),
    (rb"(?<=\s)<(?=\s)", "<="),
    (rb"(?<=\s)>(?=\s)", ">="),
    (rb"(?<=\s)<=(?=\s)", "<"),
    (rb"(?<=\s)>=(?=\s)", ">"),
    (rb"\+ 1\b", "+ 2"),
    (rb"\bgreatest\b", "least"),
)


def _of_sql(source: bytes) -> Iterator[tuple[int, int, str]]:
    # Comments keep their length, so that the places are those of the file.
    bare = re.sub(rb"--[^\n]*", lambda found: b" " * len(found[0]), source)
    for pattern, instead in _SQL:
        for found in re.finditer(pattern, bare):
            yield found.start(), found.end(), instead


_TURNED: Final[Mapping[type[ast.cmpop], str]] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}


def _of_python(source: bytes) -> Iterator[tuple[int, int, str]]:
    lines = [0]
    for each in source.splitlines(keepends=True):
        lines.append(lines[-1] + len(each))

    def place(node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return (
            lines[node.lineno - 1] + node.col_offset,
            lines[node.end_lineno - 1] + node.end_col_offset,
        )

    def text(node: ast.expr | ast.stmt) -> str:
        start, end = place(node)
        return source[start:end].decode()

    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.expr | ast.stmt):
            edited, instead = _edit(node, text)
            if edited is not None:
                yield *place(edited), instead


def _edit(
    node: ast.expr | ast.stmt, text: Callable[[ast.expr | ast.stmt], str]
) -> tuple[ast.expr | ast.stmt | None, str]:
    """What is edited of a node, and what stands there instead."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return node, f"({text(left)}) {_TURNED[type(op)]} ({text(right)})"
        case ast.BoolOp(op=op, values=values):
            other = " or " if isinstance(op, ast.And) else " and "
            return node, other.join(f"({text(each)})" for each in values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return node, text(operand)
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            return None if text(test) == "TYPE_CHECKING" else test, f"not ({text(test)})"
        case ast.Constant(value=bool() | int() as value):
            return node, str(not value if isinstance(value, bool) else value + 1)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as op, right=right):
            return node, f"{text(left)} {'-' if isinstance(op, ast.Add) else '+'} {text(right)}"
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.Raise(exc=ast.expr()):
            return None if text(node).startswith("_log") else node, "pass"
    return None, ""


def _tests(folder: str, source: str, paths: Sequence[str], log: str) -> None:
    """In a process of its own: the tests, on a copy of the sources."""
    os.setsid()
    os.chdir(folder)
    with Path(log).open("wb") as written:
        os.dup2(written.fileno(), 1)
        os.dup2(written.fileno(), 2)
    os.environ["PYTHONPATH"] = source
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.dont_write_bytecode = True
    sys.path[:] = [source, *(each for each in sys.path if Path(each) != ROOT)]
    sys.modules.pop("tests", None)  # of this checkout
    options = ("-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--timeout", "300")
    code = pytest.main([*options, *(each for each in paths if Path(each).exists())])
    sys.stdout.flush()
    os._exit(int(code))


class Copies:
    """Copies of `src`, one for each mutant that lives at a time."""

    def __init__(self, folder: Path, count: int, tests: Path) -> None:
        self._tests = tests
        self._free: SimpleQueue[Path] = SimpleQueue()
        self._forks = multiprocessing.get_context("forkserver")
        self._forks.set_forkserver_preload(["pytest", "msgspec", "psycopg", "httpx"])
        for number in range(count):
            copy = folder / str(number)
            shutil.copytree(
                ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__")
            )
            self._free.put(copy)

    def judge(
        self, guards: Sequence[str], mutant: Mutant | None, seconds: float
    ) -> tuple[bool, float]:
        """Whether the tests noticed, and how long they took."""
        copy = self._free.get()
        file = copy / "src/penstock" / mutant.file if mutant else copy / "none"
        source = file.read_bytes() if mutant else b""
        began = time.monotonic()
        try:
            if mutant:
                file.write_bytes(mutant.of(source))
            arguments = (str(self._tests), str(copy / "src"), guards, str(copy / "log"))
            child = self._forks.Process(target=_tests, args=arguments)
            child.start()
            child.join(seconds)
            if child.pid is not None and child.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.join()
            if mutant is None and child.exitcode:
                print((copy / "log").read_text()[-3_000:])
            return child.exitcode != 0, time.monotonic() - began
        finally:
            if mutant:
                file.write_bytes(source)
            self._free.put(copy)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("files", nargs="*", help="of the core; all if none are given")
    parser.add_argument("--count", type=int, default=20, help="mutants of each file")
    parser.add_argument("--jobs", type=int, default=2, help="that live at a time")
    parser.add_argument("--tests", type=Path, default=ROOT, help="the checkout with the tests")
    parser.add_argument("--to", type=Path, help="write what happened to each mutant")
    parser.add_argument("--against", type=Path, help="what happened to each before")
    options = parser.parse_args()
    guards_here = {each for file in options.files or GUARDS for each in GUARDS[file]}
    if missing := [each for each in sorted(guards_here) if not (ROOT / each).exists()]:
        parser.error(f"GUARDS names tests that do not exist: {', '.join(missing)}")
    killed: dict[str, bool] = {}
    red: list[str] = []
    with (
        tempfile.TemporaryDirectory(prefix="penstock-mutants-") as folder,
        ThreadPoolExecutor(options.jobs) as pool,
    ):
        copies = Copies(Path(folder), options.jobs, options.tests.resolve())
        for file in options.files or GUARDS:
            guards = GUARDS[file]
            is_red, seconds = copies.judge(guards, None, 1_200)
            if is_red:
                print(f"{file}: its tests fail without a mutant; see above")
                red.append(file)
                continue
            some = mutants(file, (ROOT / "src/penstock" / file).read_bytes(), options.count)
            judged = pool.map(
                lambda each, guards=guards, seconds=seconds: copies.judge(
                    guards, each, 2 * seconds + SECONDS_MORE
                ),
                some,
            )
            for mutant, (is_killed, _) in zip(some, judged, strict=True):
                killed[mutant.name] = is_killed
                if not is_killed:
                    print(f"  lives: {mutant.name}, line {mutant.line}", flush=True)
            count = sum(killed[each.name] for each in some)
            print(f"{file}: {count} of {len(some)} killed ({seconds:.0f} s of tests)", flush=True)
            if options.to:
                options.to.write_text(json.dumps(killed, indent=1) + "\n")
    print(f"{sum(killed.values())} of {len(killed)} mutants were killed.")
    before = json.loads(options.against.read_text()) if options.against else {}
    lost = [name for name, was in before.items() if was and killed.get(name) is False]
    for name in lost:
        print(f"killed before, lives now: {name}")
    gone = sum(name not in killed for name in before)
    if gone:
        print(f"{gone} of {len(before)} were not tried: their code has changed")
    return 1 if lost or red else 0


if __name__ == "__main__":
    sys.exit(main())
