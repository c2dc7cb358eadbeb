"""Somebody's words in a message: quoted, listed, and which name was probably meant. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Final

TEXT_SHOWN_MAX: Final = 60
_WORD_CHARACTERS_MAX: Final = 200


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
    if len(word) > _WORD_CHARACTERS_MAX:
        return ""
    found = difflib.get_close_matches(word.lower(), list(names), n=1, cutoff=0.6)
    return found[0] if found else ""
