"""What a policy of IAM allows: an evaluator of its own, for tests that judge what we write.

Read from AWS's documentation and sharing nothing with what makes policies. It knows what is used
here and is an error for anything else, so that nothing is allowed by not being understood.

- A request is denied if a statement that denies it applies, else allowed if one that allows does.
- `*` is any number of characters, `?` is one: in actions, whose case does not matter, in resources,
  and in the operators that end in `Like`. `${name}` is a value of the request's context, as it is;
  `${*}`, `${?}` and `${$}` are those characters. A variable without a value makes nothing match.
- All operators of a condition have to hold, and all keys of an operator; of a key's values one.
  A key that the request does not have makes an operator false, and its negation true.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

VERSION: Final = "2012-10-17"
_STATEMENT: Final = frozenset(
    {
        *("Sid", "Effect", "Principal", "Action", "NotAction", "Resource", "NotResource"),
        "Condition",
    }
)
_PIECE: Final = re.compile(r"\$\{([^}]*)\}|([*?])|([^*?$]+|\$)")

Context = Mapping[str, str]


class Policy:
    """A policy, read once and asked often."""

    def __init__(self, text: str) -> None:
        document = json.loads(text)
        assert set(document) == {"Version", "Statement"}, sorted(document)
        assert document["Version"] == VERSION
        assert document["Statement"], "a policy has a statement"
        self._statements = [_Statement(each) for each in _several(document["Statement"])]
        self._about: dict[str, list[_Statement]] = {}

    def allows(
        self, action: str, resource: str = "*", context: Context | None = None, *, by: str = ""
    ) -> bool:
        """Whether a request is allowed by this policy alone."""
        return self.verdict(action, resource, context, by=by) == "Allow"

    def denies(
        self, action: str, resource: str = "*", context: Context | None = None, *, by: str = ""
    ) -> bool:
        """Whether a request is denied outright, whatever other policies say."""
        return self.verdict(action, resource, context, by=by) == "Deny"

    def verdict(
        self, action: str, resource: str, context: Context | None = None, *, by: str = ""
    ) -> str:
        """`Deny`, `Allow`, or empty if nothing applies."""
        said = context or {}
        found = ""
        about = self._about.get(action)
        if about is None:
            about = [each for each in self._statements if each.is_about(action)]
            self._about[action] = about
        for each in about:
            if each.applies(resource, said, by=by):
                if each.effect == "Deny":
                    return "Deny"
                found = "Allow"
        return found


class _Statement:
    def __init__(self, said: Mapping[str, Any]) -> None:
        assert set(said) <= _STATEMENT, sorted(set(said) - _STATEMENT)
        assert said["Effect"] in {"Allow", "Deny"}
        assert ("Action" in said) != ("NotAction" in said)
        assert not ("Resource" in said and "NotResource" in said)
        self.effect: str = said["Effect"]
        self._is_not_action = "NotAction" in said
        actions = _several(said.get("Action", said.get("NotAction")))
        assert not any("$" in each for each in actions), "there are no variables in actions"
        self._actions = _Patterns(each.lower() for each in actions)
        self._is_not_resource = "NotResource" in said
        resources = _several(said.get("Resource", said.get("NotResource", "*")))
        self._resources = _Patterns(resources)
        self._conditions = [
            (operator, key, _Patterns(_several(values)))
            for operator, keys in said.get("Condition", {}).items()
            for key, values in keys.items()
        ]
        assert all(operator in _OPERATORS for operator, _, _ in self._conditions)
        self._principals = _principals(said.get("Principal"))

    def is_about(self, action: str) -> bool:
        return self._actions.match(action.lower(), {}) is not self._is_not_action

    def applies(self, resource: str, context: Context, *, by: str) -> bool:
        if self._resources.match(resource, context) is self._is_not_resource:
            return False
        if self._principals is not None and not {"*", by} & self._principals:
            return False
        for operator, key, values in self._conditions:
            if not _OPERATORS[operator](context.get(key), values, context):
                return False
        return True


def _principals(said: Any) -> set[str] | None:
    """Who is meant; None in the policies of a principal, which name none."""
    if said is None or said == "*":
        return None if said is None else {"*"}
    assert set(said) <= {"AWS", "Service"}, said
    return {each for values in said.values() for each in _several(values)}


def _several(said: Any) -> list[Any]:
    return said if isinstance(said, list) else [said]


class _Patterns:
    """Whether a text is what one of some patterns says. It is asked millions of times."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self.texts = tuple(patterns)
        # What is plain up to a star at its end, which is most of it, is looked for at once.
        exact: list[str] = []
        beginnings: list[str] = []
        self._others: list[str] = []
        for each in self.texts:
            if "?" in each or "$" in each or "*" in each[:-1]:
                self._others.append(each)
            elif each.endswith("*"):
                beginnings.append(each[:-1])
            else:
                exact.append(each)
        self._exact, self._beginnings = frozenset(exact), tuple(beginnings)

    def match(self, text: str, context: Context) -> bool:
        if text in self._exact or text.startswith(self._beginnings):
            return True
        return any(_matches(each, text, context) for each in self._others)


def _matches(pattern: str, text: str, context: Context) -> bool:
    if "$" in pattern or "?" in pattern:
        return _matches_slowly(pattern, text, context)
    first, *middle, last = pattern.split("*")
    return _in_order(text, first, middle, last)


def _in_order(text: str, first: str, middle: Iterable[str], last: str) -> bool:
    if not text.startswith(first):
        return False
    place = len(first)
    for each in middle:
        found = text.find(each, place)
        if found < 0:
            return False
        place = found + len(each)
    return len(text) - len(last) >= place and text.endswith(last)


def _matches_slowly(pattern: str, text: str, context: Context) -> bool:
    expression = ""
    place = 0
    while place < len(pattern):
        found = _PIECE.match(pattern, place)
        assert found is not None, pattern
        place = found.end()
        variable, wild, plain = found.groups()
        if wild:
            expression += ".*" if wild == "*" else "."
        elif plain:
            expression += re.escape(plain)
        elif variable in {"*", "?", "$"}:
            expression += re.escape(variable)
        elif variable in context:
            expression += re.escape(context[variable])
        else:
            return False
    return re.fullmatch(expression, text, re.DOTALL) is not None


def _like(value: str | None, wanted: _Patterns, context: Context) -> bool:
    return value is not None and wanted.match(value, context)


def _equals(value: str | None, wanted: _Patterns, _: Context) -> bool:
    assert not any("$" in text for text in wanted.texts)
    return value in wanted.texts


def _not(operator: Callable[..., bool]) -> Callable[..., bool]:
    return lambda *said: not operator(*said)


_OPERATORS: Final[Mapping[str, Callable[[str | None, _Patterns, Context], bool]]] = {
    "StringLike": _like,
    "StringNotLike": _not(_like),
    "ArnLike": _like,
    "ArnNotLike": _not(_like),
    "StringEquals": _equals,
    "StringNotEquals": _not(_equals),
    "ArnEquals": _like,
    "Bool": _equals,
}
