"""Reading fields from a tree of nodes, and writing down whatever is wrong with them.

Nothing here raises: a field that cannot be read is noted in `Findings` with its line, and its
default is returned, so that one reading finds every problem of a file. `Findings` also remembers
where each field stands, so that rules over the finished model, which knows no lines, can be told
with a line.

Called by `jobs`, which says which fields there are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeVar

import yaml

from penstock.dispatcher.dag.errors import Problem
from penstock.dispatcher.dag.model import Json
from penstock.dispatcher.dag.nodes import scalar_value, text_problem
from penstock.kernel.words import listed, nearest, shown

SUGGESTIONS_MAX: Final = 50
"""How many problems come with a guess of what was meant: guessing among many names takes time."""

Value = TypeVar("Value")
Choice = TypeVar("Choice", bound=StrEnum)


class Findings:
    """The problems of one file, and the places of its fields."""

    def __init__(self, *, is_stored: bool = False) -> None:
        self.is_stored = is_stored
        """Whether it is a version that was in force: what was right then is right now."""
        self.problems: list[Problem] = []
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
        self.problems.append(Problem(*place, path, message))
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
    findings: Findings

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
    def findings(self) -> Findings:
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
