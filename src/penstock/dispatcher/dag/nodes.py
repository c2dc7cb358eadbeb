"""From text to a tree of YAML nodes that know their lines, within bounds.

PyYAML makes the tree and nothing more: no tag of a file is obeyed, and no value is constructed by
it. What a scalar means is decided here, by JSON's rules and not by YAML 1.1's: `no`, `1:30` and
`010` are refused rather than taken for false, 90 and 8. Bounds hold while the tree is made, and
they count an alias as often as it is used, so a file of few lines cannot become a tree of
millions of nodes.

Called by `parsing`; a text that is no YAML, or too much of it, is an `UnreadableYaml`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import yaml

from penstock.dispatcher.dag.model import Json

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
