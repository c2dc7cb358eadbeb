"""Where a handler is found by another process: its module, and its name in there.

A function that runs in a process of its own is not sent there: the other process imports the module
and takes what has its name. So it must be a function of a module, and the module must have a file.
A script that was started itself is loaded from its file, under the name `MAIN`, so what it does
below `if __name__ == "__main__"` is done once only.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import msgspec

from penstock.kernel.errors import InvalidInput

MAIN: Final = "__penstock_main__"
"""What the script that a worker was started by is called in the processes of its handlers."""


class Address(msgspec.Struct, frozen=True):
    """A function of a module, or of a script at a path."""

    module: str
    name: str
    path: str = ""

    def find(self) -> Any:
        """The function. Raises whatever the import of its module does."""
        found: Any = _script(self.path) if self.path else importlib.import_module(self.module)
        for part in self.name.split("."):
            found = getattr(found, part)
        return found


def check_addressable(function: object, *, type: str) -> None:
    """Raises `InvalidInput` for what is surely not a function of a module."""
    name = getattr(function, "__qualname__", "")
    if not isinstance(name, str) or not name or "<" in name:
        said = f"{name or function!r} cannot be imported by its name"
        raise _not_isolated(type, said)


def address_of(function: Callable[..., Any], *, type: str) -> Address:
    """Where a function is. Raises `InvalidInput` if another process would not find it."""
    check_addressable(function, type=type)
    name, module = function.__qualname__, function.__module__
    found: Any = sys.modules.get(module)
    if found is None:
        raise _not_isolated(type, f"its module {module!r} cannot be imported")
    address = Address(public_module(module), name)
    if address.module == MAIN:
        path = getattr(found, "__file__", None)
        if not path or not Path(path).is_file():
            raise _not_isolated(type, "it was typed in and is in no file")
        address = Address(MAIN, name, str(Path(path).resolve()))
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not function:
        raise _not_isolated(type, f"{module}.{name} is something else, decorated once more perhaps")
    return address


def public_module(module: str) -> str:
    """The name by which another process knows a module of this one."""
    if module != "__main__":
        return module
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return MAIN if spec is None else str(spec.name)


@functools.cache
def _script(path: str) -> ModuleType:
    loader = importlib.machinery.SourceFileLoader(MAIN, path)
    spec = importlib.util.spec_from_loader(MAIN, loader)
    assert spec is not None, "a loader of our own has one"
    module = importlib.util.module_from_spec(spec)
    sys.modules[MAIN] = module
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[MAIN]
        raise
    return module


def _not_isolated(type: str, why: str) -> InvalidInput:
    return InvalidInput(
        f"The handler of {type!r} cannot run in a process of its own: {why}.",
        hint="Use a function at the top of a module, not a lambda or a function in a function.",
    )
