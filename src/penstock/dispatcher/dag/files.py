"""Texts of a DAG that stand in files of their own: `sql_file`, beside the DAG.

Whoever has a DAG as a file reads the files that it names, relative to its folder, and gives
their texts to `parser.parse`; the dispatcher gets them with the DAG. Then `sql` has the text,
and `sql_file` stays beside it as the name by which errors call it: so an edit of the file is an
edit of the job, and what is stored says all. A DAG that has both already is one that was
written out.

Pure: `references` says which files a text names, `inlined` puts the texts in. Reading is done by
`client.dag_files`.

Checks that users' functions which a DAG names exist, without importing anything of theirs.

Whoever checks a DAG has the code beside it, or in the current folder, as workers that are
started there have it. Then a function that is not there is known before a task dies of it: the
file is parsed, and its names are what it binds at its top level. Python can bind names in other
ways too, so a file that does anything of the kind is believed. Of a module that is not found it
is said that workers need it; one that is installed here is left alone, for theirs may be
another.

Of jobs of the runtime `process`, and of the transforms of `spark.python`. Called by `penstock
dag check`.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import all_suffixes
from pathlib import Path, PurePosixPath
from typing import Final

import yaml

from penstock.dispatcher.dag.model import SQL_OPERATOR, Dag, Job, Json
from penstock.dispatcher.dag.yaml_reader import UnreadableYaml, compose, text_problem
from penstock.kernel.text import listed, nearest, shown
from penstock.protocol.problem import DagDiagnostic
from penstock.runtimes.user_code import FunctionReference, reference

FILE_BYTES_MAX: Final = 200_000
"""How large a file may be that a DAG names."""
FILES_MAX: Final = 1000
NAME_CHARACTERS_MAX: Final = 500

OUTSIDE: Final = "lies outside of the folder of the DAG; move it there and name it from there"


@dataclass(frozen=True, slots=True)
class Unread:
    """A file that could not be read; a whole sentence why."""

    why: str


Files = Mapping[str, str | Unread]
"""What became of the files that a DAG names, by the names that it gives them."""


def references(text: str) -> tuple[str, ...]:
    """The files that the text of a DAG names, each once; none if it is no YAML."""
    try:
        tree = compose(text)
    except UnreadableYaml:
        return ()
    names: dict[str, None] = {}
    for job in _values(field_node(tree, "jobs")):
        operator = field_node(job, "operator")
        named = field_node(field_node(job, "config"), "sql_file")
        if not isinstance(operator, yaml.ScalarNode) or operator.value != SQL_OPERATOR:
            continue
        if isinstance(named, yaml.ScalarNode) and not name_problem(str(named.value)):
            names[str(named.value)] = None
    return tuple(names)[:FILES_MAX]


def name_problem(name: str) -> str:
    """Why nothing can be read by this name, to go on after it; empty if it may."""
    if not name or len(name) > NAME_CHARACTERS_MAX or not name.isprintable() or "\\" in name:
        return "is not the name of a file; write one as in sql/daily.sql"
    path = PurePosixPath(name)
    if path.is_absolute():
        return OUTSIDE
    depth = 0
    for part in path.parts:
        depth += -1 if part == ".." else 1
        if depth < 0:
            return OUTSIDE
    return "" if depth > 0 else "is a folder; name a file in it"


def inlined(config: Mapping[str, Json], files: Files | None) -> tuple[Mapping[str, Json], str]:
    """The config of a job with the text of its file, and what is wrong with the file, if it is."""
    if "sql_file" not in config:
        return config, ""
    name, sql = config["sql_file"], config.get("sql")
    if not isinstance(name, str):
        return config, "It is the name of a file; write one as in sql/daily.sql."
    if problem := name_problem(name):
        return config, f"{shown(name)} {problem}."
    found = files.get(name) if files is not None else None
    if sql is not None:
        is_other = isinstance(found, str) and found != sql
        return config, "Its text is not that of `sql`; take one of the two out." if is_other else ""
    match found:
        case None:
            return config, (
                f"The text of {shown(name)} did not come with the DAG; apply the DAG as a file, or"
                " send the text in `files`, or write it as `sql`."
            )
        case Unread(why):
            return config, why
    if problem := text_problem(found):
        return config, f"{shown(name)} {problem}."
    if len(found.encode()) > FILE_BYTES_MAX:
        return config, too_large(name)
    if not found.strip():
        return config, f"{shown(name)} is empty; write a query into it."
    return {**config, "sql": found}, ""


def too_large(name: str) -> str:
    """What is said of a file that is."""
    return f"{shown(name)} is larger than {FILE_BYTES_MAX:,} bytes; make several jobs of it."


def field_node(node: yaml.Node | None, name: str) -> yaml.Node | None:
    """The value of a field; None if there is none."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value == name:
                assert isinstance(value, yaml.Node)
                return value
    return None


def texts(dag: Dag) -> dict[str, str]:
    """The files that a DAG was read with: enough to read its text again."""
    found: dict[str, str] = {}
    for job in dag.jobs:
        name, sql = job.config.get("sql_file"), job.config.get("sql")
        if job.operator == SQL_OPERATOR and isinstance(name, str) and isinstance(sql, str):
            found.setdefault(name, sql)
    return found


def _values(node: yaml.Node | None) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        for _, value in node.value:
            yield value


CODE_BYTES_MAX: Final = 1_000_000
_PROCESS: Final = "process"
_TRANSFORM: Final = "spark.python"
_BINDS_BY_NAME: Final = frozenset({"globals", "locals", "vars", "exec", "eval", "setattr"})
_DYNAMIC: Final = frozenset({"__getattr__", "__dict__", "modules"})


@dataclass(slots=True)
class MissingFunction:
    """What was looked for in vain."""

    functions: list[DagDiagnostic] = field(default_factory=list)
    """Of files that are there, and do not have them."""
    modules: list[DagDiagnostic] = field(default_factory=list)
    """Of modules that were not found, or not understood: each once."""


@dataclass(frozen=True, slots=True)
class _Names:
    """What a body of code binds; `is_all` if it may be more than that."""

    found: frozenset[str]
    is_all: bool
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)


def missing_functions(text: str, dag: Dag, folders: Sequence[Path]) -> MissingFunction:
    """The functions and modules of a DAG that are not found in these folders."""
    missing = MissingFunction()
    seen: set[str] = set()
    jobs = field_node(compose(text), "jobs")
    for job in dag.jobs:
        if (found := _named(job)) is None:
            continue
        path, wanted = found
        node = jobs
        for name in (job.name, *path):
            node = field_node(node, name)
        told = _judged(wanted, folders)
        if told is None:
            continue
        is_function, message = told
        problem = _problem(node, f"jobs.{job.name}.{'.'.join(path)}", message)
        if is_function:
            missing.functions.append(problem)
        elif wanted.module not in seen:
            seen.add(wanted.module)
            missing.modules.append(problem)
    return MissingFunction(sorted(missing.functions), sorted(missing.modules))


def _named(job: Job) -> tuple[tuple[str, ...], FunctionReference] | None:
    """The field of a job that names a function, and the function; None if it names none."""
    path: tuple[str, ...] = ("operator",)
    said: object = job.operator if job.runtime == _PROCESS else None
    if job.operator == _TRANSFORM:
        path, said = ("config", "transform"), job.config.get("transform")
    found = reference(said) if isinstance(said, str) else None
    return None if found is None else (path, found)


def _problem(node: yaml.Node | None, where: str, message: str) -> DagDiagnostic:
    if node is None:
        return DagDiagnostic(1, 1, where, message)
    return DagDiagnostic(node.start_mark.line + 1, node.start_mark.column + 1, where, message)


def _judged(wanted: FunctionReference, folders: Sequence[Path]) -> tuple[bool, str] | None:
    """What is wrong with a reference, and whether that is its function; None if nothing is."""
    for folder in folders:
        if (file := _file(wanted.module, folder)) is not None:
            break
    else:
        if _is_installed(wanted.module):
            return None
        return False, f"The module {wanted.module} is not beside the file; workers must have it."
    if file.suffix != ".py":
        return None
    try:
        if file.stat().st_size > CODE_BYTES_MAX:
            return None
        tree = ast.parse(file.read_bytes())
    except SyntaxError as error:
        why = f"line {error.lineno}: {error.msg}"
        return False, f"{_shown(file)} is no Python that this version can read: {why}."
    except (OSError, ValueError, RecursionError, MemoryError):
        return None
    lacking = _lacking(wanted, tree.body, tree)
    if lacking is None or _file(f"{wanted.module}.{lacking[0]}", folder) is not None:
        return None
    name, names = lacking
    near = nearest(name, names)
    meant = f" Did you mean {near}?" if near else ""
    if not meant and (public := sorted(each for each in names if not each.startswith("_"))):
        meant = f" It has {listed(public)}."
    return True, f"{_shown(file)} has no {name}.{meant}"


def _lacking(
    wanted: FunctionReference, body: Sequence[ast.stmt], tree: ast.AST
) -> tuple[str, frozenset[str]] | None:
    """The part of a function's name that is bound nowhere, and what is; None if all is well."""
    for name in wanted.function.split("."):
        names = _bound(body, tree)
        if name not in names.found:
            return None if names.is_all else (name, names.found)
        plain = names.classes.get(name)
        if plain is None:
            return None
        body, tree = plain.body, plain
    return None


def _bound(body: Sequence[ast.stmt], tree: ast.AST) -> _Names:
    """What a module or a class binds at its own level."""
    found: set[str] = set()
    classes: dict[str, list[ast.ClassDef]] = {}
    for node in _own(body):
        match node:
            case ast.ClassDef(name=name):
                found.add(name)
                classes.setdefault(name, []).append(node)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.Import() | ast.ImportFrom():
                found |= {(one.asname or one.name).partition(".")[0] for one in node.names}
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                found.add(name)
            case ast.MatchMapping(rest=str(name)) | ast.ExceptHandler(name=str(name)):
                found.add(name)
    every = list(ast.walk(tree))
    # What a function makes global is bound when it is called, which may be at once.
    found |= {name for each in every if isinstance(each, ast.Global) for name in each.names}
    # What a class has of others, or is made of, cannot be seen; nor which of two it is.
    plain = {name: those[0] for name, those in classes.items() if _is_plain(those)}
    return _Names(frozenset(found), any(_is_dynamic(each) for each in every), plain)


def _is_plain(those: Sequence[ast.ClassDef]) -> bool:
    one = those[0]
    return len(those) == 1 and not (one.bases or one.keywords or one.decorator_list)


def _own(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """The nodes of a body, but not those of the functions and classes in it."""
    left = list(body)
    while left:
        node = left.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            left.extend(ast.iter_child_nodes(node))


def _is_dynamic(node: ast.AST) -> bool:
    """Whether a piece of code may bind names that cannot be seen."""
    match node:
        case ast.ImportFrom(names=[ast.alias(name="*")]):
            return True
        case ast.Name(id=name):
            return name in _BINDS_BY_NAME
        case ast.Attribute(attr=name) | ast.FunctionDef(name=name):
            return name in _DYNAMIC
        case ast.alias(name=name):
            return name in _DYNAMIC
    return False


def _file(module: str, folder: Path) -> Path | None:
    """The file that a module is, in a folder; another than Python's source is not looked into."""
    base = folder.joinpath(*module.split("."))
    try:
        for source in (base / "__init__.py", base.with_name(f"{base.name}.py")):
            if source.is_file():
                return source
        for suffix in all_suffixes():
            if (other := base.with_name(f"{base.name}{suffix}")).is_file():
                return other
        # A package without a file of its own.
        return base if base.is_dir() else None
    except OSError:
        return None


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module.partition(".")[0]) is not None
    except (ImportError, ValueError, AttributeError):
        return True


def _shown(file: Path) -> str:
    return f"{file.parent.name}/{file.name}" if file.name == "__init__.py" else file.name
