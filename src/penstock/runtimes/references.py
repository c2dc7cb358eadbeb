"""Names of users' code, as a DAG writes them: `module:function`, or `module.function` at Lambda."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Final

FUNCTION_FORM: Final = "module:function"
OPERATORS_GROUP: Final = "penstock.operators"


@dataclass(frozen=True, slots=True)
class Reference:
    """A function of a module; `function` may have dots, as a method of a class has."""

    module: str
    function: str

    def __str__(self) -> str:
        return f"{self.module}:{self.function}"


def reference(text: str) -> Reference | None:
    """What `module:function` names; None if it is not of that form."""
    module, colon, function = text.partition(":")
    return Reference(module, function) if colon and _dotted(module) and _dotted(function) else None


def handler_reference(text: str) -> Reference | None:
    """What a handler's name says: `module.function`, as Lambda has it, or `module:function`."""
    if ":" in text:
        return reference(text)
    module, dot, function = text.rpartition(".")
    return Reference(module, function) if dot and _dotted(module) and _dotted(function) else None


def installed_operators() -> Mapping[str, Reference]:
    """The functions that installed packages offer by name. Nothing is imported."""
    return {
        each.name: Reference(each.module, each.attr)
        for each in entry_points(group=OPERATORS_GROUP)
        if each.attr
    }


def _dotted(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))
