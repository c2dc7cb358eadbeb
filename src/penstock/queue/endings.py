"""How an attempt can end, and what of it may be written down.

A ledger holds the endings of many tasks in one object. So each ending is made `sound` by itself
before it goes in: a result that nobody could read again, or text that cannot be encoded, would
otherwise cost all of its neighbours theirs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

import msgspec

from penstock.queue.ledger import NULL, Failure

DEPTH_MAX: Final = 100
MESSAGE_CHARACTERS_MAX: Final = 2_000
TRACE_CHARACTERS_MAX: Final = 8_000

_STRING: Final = re.compile(rb'"(?:[^"\\]|\\.)*"')


@dataclass(frozen=True, slots=True)
class Succeeded:
    """The attempt ended well; `result` is JSON."""

    result: msgspec.Raw = field(default_factory=lambda: NULL)


@dataclass(frozen=True, slots=True)
class Failed:
    """The attempt failed for good."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class Retried:
    """The attempt failed and another may follow, not before `due_ms`."""

    failure: Failure
    due_ms: int


@dataclass(frozen=True, slots=True)
class GivenBack:
    """The attempt was stopped before its time, through no fault of the task."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """The attempt heeded a request to cancel."""


Ending = Succeeded | Failed | Retried | GivenBack | Stopped


def sound(ending: Ending) -> Ending:
    """The ending, such that it can be written and read again: one bad one must not cost a pack."""
    match ending:
        case Succeeded(result):
            problem = _json_problem(bytes(result))
            if problem:
                return Failed(Failure("BadResult", f"The result cannot be stored: {problem}."))
            return ending
        case Failed(failure):
            return Failed(_plain(failure))
        case Retried(failure, due_ms):
            return Retried(_plain(failure), int(due_ms))
    return ending


def _json_problem(body: bytes) -> str:
    if body.count(b"[") + body.count(b"{") > DEPTH_MAX and _depth(body) > DEPTH_MAX:
        return f"it is nested more than {DEPTH_MAX} levels deep"
    try:
        msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return f"it is not JSON ({error})"
    return ""


def _depth(body: bytes) -> int:
    """How deep the brackets outside of strings are nested."""
    depth = deepest = 0
    for part in _STRING.sub(b"", body):
        if part in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        elif part in b"]}":
            depth -= 1
    return deepest


def _plain(failure: Failure) -> Failure:
    """Text that can be written, and not too much of it."""

    def cut(text: str, most: int) -> str:
        return text.encode("utf-8", "replace").decode()[:most]

    return Failure(
        cut(failure.error, 200),
        cut(failure.message, MESSAGE_CHARACTERS_MAX),
        cut(failure.trace, TRACE_CHARACTERS_MAX),
    )
