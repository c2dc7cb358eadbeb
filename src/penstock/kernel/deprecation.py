"""Names that public modules had before: they still work, with a `DeprecationWarning`.

A module says `__getattr__ = renamed(globals(), {"Old": "New"})`, hidden from type checkers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping


def renamed(module: Mapping[str, object], names: Mapping[str, str]) -> Callable[[str], object]:
    """The `__getattr__` of a module whose names were others."""
    where = module["__name__"]

    def of_old_name(name: str) -> object:
        if name not in names:
            raise AttributeError(f"module {where!r} has no attribute {name!r}")
        message = f"{where}.{name} is called {names[name]} now."
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return module[names[name]]

    return of_old_name
