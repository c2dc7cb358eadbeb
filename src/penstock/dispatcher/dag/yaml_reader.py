"""The YAML reader: text to a bounded tree of nodes with lines, and nodes to field values.

PyYAML makes the tree and nothing more: no tag of a file is obeyed, and no value is constructed
by it. What a scalar means is decided here, by JSON's rules and not by YAML 1.1's: `no`, `1:30`
and `010` are refused rather than taken for false, 90 and 8. Bounds hold while the tree is made,
and they count an alias as often as it is used, so a file of few lines cannot become a tree of
millions of nodes.

A text that is no YAML, or too much of it, is an `UnreadableYaml`. Reading fields never raises:
what cannot be read is noted in `FieldProblems` with its line, and its default is returned, so
that one reading finds every problem. `FieldProblems` also remembers where each field stands,
for rules over the finished model. Called by `parser` and `edges`, which say which fields there
are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeVar

import yaml

from penstock.dispatcher.dag.model import Json
from penstock.kernel.text import listed, nearest, shown
from penstock.protocol.problem import DagDiagnostic

BYTES_MAX: Final = 1_000_000
DEPTH_MAX: Final = 32
NODES_MAX: Final = 50_000
INTEGER_MIN: Final = -(2**63)
INTEGER_MAX: Final = 2**63 - 1

_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9]*|[1-9][0-9]{0,2}(?:_[0-9]{3})+)")
_FLOAT = re.compile(r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)(?:[eE][-+]?[0-9]+)?")
_NULLS: Final = ("", "~", "null", "Null", "NULL")
_TRUES: Final = ("true", "True", "TRUE")
_FALSES: Final = ("false", "False", "FALSE")
_TAG: Final = "tag:yaml.org,2002:"
_MEANT_BY_OTHERS: Final = tuple(f"{_TAG}{kind}" for kind in ("bool", "int", "float", "null"))

# What PyYAML raises for text that is no YAML: besides its own errors those of `chr` and `int`,
# which it calls with whatever stands in the text.
_NOT_YAML = (yaml.YAMLError, ValueError, OverflowError, LookupError, RecursionError)


class UnreadableYaml(Exception):
    """A text that cannot be made into a tree; `line` and `column` are counted from 1."""

    def __init__(self, message: str, *, line: int = 1, column: int = 1) -> None:
        super().__init__(message)
        self.message = message
        self.line = line
        self.column = column


def compose(text: str) -> yaml.Node | None:
    """The tree of the only document in a text; None if the text has none."""
    # A surrogate has no UTF-8 form; the parser refuses it with its place.
    if len(text.encode("utf-8", "surrogatepass")) > BYTES_MAX:
        raise UnreadableYaml(f"It is larger than {BYTES_MAX:,} bytes; make several DAGs of it.")
    composer: _Composer | None = None
    try:
        composer = _Composer(text)
        return composer.get_single_node()
    except UnreadableYaml:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        words = ", ".join(filter(None, [error.context, error.problem]))
        # Cron expressions and paths begin with what YAML keeps for itself.
        is_sign = "alias" in words or "cannot start any token" in words
        hint = "; put a text that begins so in quotes" if is_sign else ""
        raise _unreadable(words + hint, mark) from error
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        raise UnreadableYaml(
            f"It has the character U+{_code(error):04X}, which is not allowed; take it out.",
            line=before.count("\n") + 1,
            column=len(before) - before.rfind("\n"),
        ) from error
    except _NOT_YAML as error:
        mark = composer.get_mark() if composer is not None else None
        raise _unreadable("it has a number or an escape that is out of range", mark) from error


def _code(error: yaml.reader.ReaderError) -> int:
    # The stubs say text; it is a number where the input is text.
    return error.character if isinstance(error.character, int) else ord(error.character)


def _unreadable(words: str, mark: yaml.Mark | None) -> UnreadableYaml:
    place = (mark.line + 1, mark.column + 1) if mark else (1, 1)
    return UnreadableYaml(f"It is not valid YAML: {words}.", line=place[0], column=place[1])


@dataclass(frozen=True, slots=True)
class _Size:
    nodes: int
    characters: int
    height: int = 1


class _Composer(yaml.SafeLoader):
    """PyYAML's composer, which stops when a tree becomes too deep or too large."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._nodes = 0
        self._characters = 0
        self._known: dict[int, _Size] = {}
        """The size of each node that is complete, aliases counted."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event: yaml.Event = self.peek_event()  # type: ignore[no-untyped-call]  # of its stubs
        mark = event.start_mark
        assert isinstance(mark, yaml.Mark)
        is_alias = isinstance(event, yaml.AliasEvent)
        if (
            isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent)
            and event.tag is not None
        ):
            raise _stop("It has a tag, as in !!str; leave it out, for tags have no meaning.", mark)
        before = _Size(self._nodes, self._characters)
        size = _Size(1, len(event.value) if isinstance(event, yaml.ScalarEvent) else 0)
        self._add(size, mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        if is_alias:
            known = self._known.get(id(node))
            if known is None:
                raise _stop("It has an alias inside of what it names; write it out.", mark)
            self._nodes -= 1
            self._add(known, mark)
        else:
            height = 1 + max(
                (self._known[id(child)].height for child in _children(node)), default=0
            )
            added = (self._nodes - before.nodes, self._characters - before.characters)
            self._known[id(node)] = _Size(*added, height)
        return node

    def _add(self, size: _Size, mark: yaml.Mark) -> None:
        self._nodes += size.nodes
        self._characters += size.characters
        if self._depth + size.height > DEPTH_MAX:
            raise _stop(f"It is nested more than {DEPTH_MAX} deep; flatten it.", mark)
        if self._nodes > NODES_MAX:
            raise _stop(f"It has more than {NODES_MAX:,} nodes; make several DAGs of it.", mark)
        if self._characters > BYTES_MAX:
            raise _stop(f"It has more than {BYTES_MAX:,} characters with its aliases.", mark)


def _children(node: yaml.Node | None) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.SequenceNode):
        yield from node.value
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield key
            yield value


def _stop(message: str, mark: yaml.Mark) -> UnreadableYaml:
    return UnreadableYaml(message, line=mark.line + 1, column=mark.column + 1)


def scalar_value(node: yaml.ScalarNode) -> Json:
    """What a scalar means where any JSON value is allowed; a `ValueError` if that is unclear."""
    text = str(node.value)
    if node.style is not None:
        return text
    if text in _NULLS:
        return None
    if text in _TRUES or text in _FALSES:
        return text in _TRUES
    if _INTEGER.fullmatch(text):
        return _integer(text)
    if _FLOAT.fullmatch(text):
        return _float(text)
    if node.tag in _MEANT_BY_OTHERS:
        raise ValueError(
            "means different things to different readers; write true, false or a decimal number,"
            " or put it in quotes"
        )
    return text


def text_problem(text: str) -> str:
    """Why a text cannot be kept, for there are characters that no database takes."""
    for character in text:
        if character == "\0" or "\ud800" <= character <= "\udfff":
            return f"has the character {character!r}, which cannot be stored; take it out"
    return ""


def _integer(text: str) -> int:
    if len(text) > 30 or not INTEGER_MIN <= int(text) <= INTEGER_MAX:
        raise ValueError("is a number of more than 64 bits; put it in quotes")
    return int(text)


def _float(text: str) -> float:
    if re.fullmatch(r"[-+]?0[0-9]+", text):
        raise ValueError("begins with a zero; leave it out, or put the number in quotes")
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("is too large for a number; put it in quotes")
    return value


SUGGESTIONS_MAX: Final = 50
"""How many problems come with a guess of what was meant: guessing among many names takes time."""

Value = TypeVar("Value")
Choice = TypeVar("Choice", bound=StrEnum)


class FieldProblems:
    """The problems of one file, and the places of its fields."""

    def __init__(self, *, is_stored: bool = False) -> None:
        self.is_stored = is_stored
        """Whether it is a version that was in force: what was right then is right now."""
        self.problems: list[DagDiagnostic] = []
        self._places: dict[str, tuple[int, int]] = {}
        self._broken: set[str] = set()
        self._suggestions_left = SUGGESTIONS_MAX

    def place(self, path: str, node: yaml.Node) -> None:
        """Remember where a field stands."""
        self._places[path] = (node.start_mark.line + 1, node.start_mark.column + 1)

    def line(self, path: str) -> int:
        """The line of a field, or of the nearest field around it."""
        return self._place_of(path)[0]

    def add(self, path: str, message: str, *, node: yaml.Node | None = None) -> None:
        """Note a problem, at a node or at the place of the field."""
        place = self._place_of(path)
        if node is not None:
            place = (node.start_mark.line + 1, node.start_mark.column + 1)
        self.problems.append(DagDiagnostic(*place, path, message))
        self.distrust(path)

    def is_broken(self, path: str) -> bool:
        """Whether a field, or something inside of it, has a problem or cannot be trusted."""
        return path in self._broken

    def distrust(self, path: str) -> None:
        """Draw no conclusion from what this field says, or from its absence."""
        while path:
            self._broken.add(path)
            path = _around(path)

    def guess(self, word: str, names: Iterable[str]) -> str:
        """The name that was probably meant; empty if none is like the word."""
        if self._suggestions_left <= 0:
            return ""
        self._suggestions_left -= 1
        return nearest(word, names)

    def meant(self, word: str, names: Iterable[str]) -> str:
        """A question that ends a message about an unknown name; empty if nothing is like it."""
        name = self.guess(word, names)
        return f" Did you mean {name}?" if name else ""

    def _place_of(self, path: str) -> tuple[int, int]:
        while path and path not in self._places:
            path = _around(path)
        return self._places.get(path, (1, 1))


def _around(path: str) -> str:
    """The path of what a field stands in."""
    return path[: max(path.rfind("."), path.rfind("["), 0)]


@dataclass(frozen=True, slots=True)
class Field:
    """A value in a file: its node, its path, and where its problems are noted."""

    node: yaml.Node
    path: str
    findings: FieldProblems

    def wrong(self, message: str) -> None:
        """Note a problem of this field."""
        self.findings.add(self.path, message, node=self.node)

    def text(self) -> str | None:
        """The words that stand here, whatever YAML would take them for; None if there are none."""
        if not isinstance(self.node, yaml.ScalarNode) or (
            self.node.style is None and self.node.value in ("", "~", "null")
        ):
            self.wrong(f"It is {kind_of(self.node)}; write a text.")
            return None
        text = str(self.node.value)
        problem = text_problem(text)
        if problem:
            self.wrong(f"It {problem}.")
            return None
        return text

    def read(self, parse: Callable[[str], Value]) -> Value | None:
        """The words as a value; `parse` raises a `ValueError` that continues "… is wrong"."""
        text = self.text()
        if text is None:
            return None
        try:
            return parse(text)
        except ValueError as error:
            self.wrong(_ended(f"{shown(text)} {error}"))
            return None

    def choice(self, kind: type[Choice]) -> Choice | None:
        """One of a few words."""
        text = self.text()
        names = [each.value for each in kind]
        if text is None:
            return None
        if text not in names:
            ask = self.findings.meant(text, names)
            self.wrong(f"{shown(text)} is not known; write {' or '.join(names)}.{ask}")
            return None
        return kind(text)

    def flag(self) -> bool | None:
        """true or false."""
        text = self.text()
        if text is None or (text in ("true", "false") and self.is_plain):
            return None if text is None else text == "true"
        self.wrong(f"{shown(text)} is neither true nor false; write one of them.")
        return None

    @property
    def is_scalar(self) -> bool:
        """Whether it is neither a list nor a mapping."""
        return isinstance(self.node, yaml.ScalarNode)

    @property
    def is_mapping(self) -> bool:
        """Whether it has fields, or could."""
        return isinstance(self.node, yaml.MappingNode)

    @property
    def is_plain(self) -> bool:
        """Whether it stands without quotes."""
        return isinstance(self.node, yaml.ScalarNode) and self.node.style is None

    def items(self, *, most: int) -> Iterator[Field]:
        """The items of a list; a text or a mapping by itself counts as a list of one."""
        if not isinstance(self.node, yaml.SequenceNode):
            yield self
            return
        if len(self.node.value) > most:
            self.wrong(f"It has {len(self.node.value)} items; at most {most} are allowed.")
            return
        for number, node in enumerate(self.node.value):
            item = Field(node, f"{self.path}[{number}]", self.findings)
            self.findings.place(item.path, node)
            yield item

    def section(self, known: Collection[str]) -> Section:
        """A mapping of known fields."""
        return Section(self, known)

    def json(self) -> Json:
        """Whatever JSON can say."""
        if isinstance(self.node, yaml.MappingNode):
            return self.mapping()
        if isinstance(self.node, yaml.SequenceNode):
            items = enumerate(self.node.value)
            return [Field(n, f"{self.path}[{i}]", self.findings).json() for i, n in items]
        assert isinstance(self.node, yaml.ScalarNode)
        try:
            value = scalar_value(self.node)
        except ValueError as error:
            self.wrong(_ended(f"{shown(str(self.node.value))} {error}"))
            return None
        problem = text_problem(value) if isinstance(value, str) else ""
        if problem:
            self.wrong(f"It {problem}.")
        return value

    def mapping(self) -> dict[str, Json]:
        """A mapping with keys of any name."""
        return {name: value.json() for name, value in self.entries()}

    def entries(self) -> Iterator[tuple[str, Field]]:
        """The fields of a mapping, each name once; what is no mapping has none."""
        if not isinstance(self.node, yaml.MappingNode):
            self.wrong(f"It is {kind_of(self.node)}; write fields, each as `name: value`.")
            return
        lines: dict[str, int] = {}
        for key, node in self.node.value:
            name = self._key(key)
            if name is None:
                continue
            value = Field(node, f"{self.path}.{name}" if self.path else name, self.findings)
            if name in lines:
                message = f"It is given twice, first in line {lines[name]}; take one out."
                self.findings.add(value.path, message, node=key)
                continue
            lines[name] = key.start_mark.line + 1
            self.findings.place(value.path, key)
            yield name, value

    def _key(self, key: yaml.Node) -> str | None:
        if not isinstance(key, yaml.ScalarNode):
            self.findings.add(self.path, f"A name is {kind_of(key)}; write a text.", node=key)
            return None
        name = str(key.value)
        if name == "<<" and key.style is None:
            message = "Fields cannot be merged with <<; write them out."
            self.findings.add(self.path, message, node=key)
            return None
        if not name or len(name) > KEY_CHARACTERS_MAX or not name.isprintable():
            message = (
                f"{shown(name)} cannot be a name; write 1 to {KEY_CHARACTERS_MAX}"
                " printable characters."
            )
            self.findings.add(self.path, message, node=key)
            return None
        return name


KEY_CHARACTERS_MAX: Final = 128


class Section:
    """A mapping whose fields are known: what is not is a problem."""

    def __init__(self, field: Field, known: Collection[str]) -> None:
        self._field = field
        self._fields: dict[str, Field] = {}
        for name, value in field.entries():
            if name in known:
                self._fields[name] = value
            else:
                guess = field.findings.guess(name, known)
                told = f"Did you mean {guess}?" if guess else f"There are {listed(known, most=30)}."
                field.findings.add(value.path, f"There is no such field. {told}")
                # What was misspelled is not missing.
                field.findings.distrust(self._path(guess))

    @property
    def path(self) -> str:
        """The path of the section itself."""
        return self._field.path

    @property
    def findings(self) -> FieldProblems:
        """Where its problems are noted."""
        return self._field.findings

    def get(self, name: str) -> Field | None:
        """A field, if it is given."""
        return self._fields.get(name)

    def need(self, name: str, why: str) -> Field | None:
        """A field that has to be given; `why` says what to write."""
        field = self._fields.get(name)
        findings, path = self._field.findings, self._path(name)
        if field is None and self._field.is_mapping and not findings.is_broken(path):
            findings.add(path, f"It is missing; {why}.")
        return field

    def read(self, name: str, parse: Callable[[str], Value], default: Value) -> Value:
        """A value that is parsed from words."""
        field = self._fields.get(name)
        value = field.read(parse) if field else None
        return default if value is None else value

    def choice(self, name: str, default: Choice) -> Choice:
        """One of a few words."""
        field = self._fields.get(name)
        return (field.choice(type(default)) if field else None) or default

    def mapping(self, name: str) -> dict[str, Json]:
        """A mapping with keys of any name; empty if it is not given."""
        field = self._fields.get(name)
        return field.mapping() if field else {}

    def note(self, name: str, message: str) -> None:
        """Note a problem of a field, or of the section if the field is not given."""
        self._field.findings.add(self._path(name), message)

    def _path(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name


def kind_of(node: yaml.Node) -> str:
    """What stands there instead of what should."""
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    return "empty" if node.value in ("", "~", "null") else "a text"


def _ended(sentence: str) -> str:
    """The sentence with its end, unless it is a question that has one."""
    return sentence if sentence.endswith("?") else f"{sentence}."
