"""How things in a DAG may be called, and which name somebody probably meant.

Names of jobs, outputs, datasets and runtimes become parts of keys, table rows and URLs, so they are
plain. An operator may also name a Python callable, as in `my.module:function`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Final

NAME_CHARACTERS_MAX: Final = 64
OPERATOR_CHARACTERS_MAX: Final = 200
TEXT_SHOWN_MAX: Final = 60

_NAME = re.compile(rf"[a-z0-9_-]{{1,{NAME_CHARACTERS_MAX}}}")
_OPERATOR = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9_.:-]{{0,{OPERATOR_CHARACTERS_MAX - 1}}}")


def is_name(text: str) -> bool:
    """Whether a job, an output, a dataset or a runtime may be called so."""
    return _NAME.fullmatch(text) is not None


def is_operator(text: str) -> bool:
    """Whether an operator may be called so."""
    return _OPERATOR.fullmatch(text) is not None


def shown(text: str) -> str:
    """Somebody's words in quotes, on one line, and not too long for a message."""
    return repr(text if len(text) <= TEXT_SHOWN_MAX else f"{text[:TEXT_SHOWN_MAX]}…")


def listed(names: Iterable[str], *, most: int = 12) -> str:
    """Some names for a message, in their order."""
    found = list(names)
    rest = [] if len(found) <= most else [f"{len(found) - most} more"]
    parts = [*found[:most], *rest]
    return " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else "".join(parts)


def nearest(word: str, names: Iterable[str]) -> str:
    """The name that is most like a word; empty if none is."""
    if len(word) > OPERATOR_CHARACTERS_MAX:
        return ""
    found = difflib.get_close_matches(word.lower(), list(names), n=1, cutoff=0.6)
    return found[0] if found else ""
