"""How an attempt can end, and what of it may be stored. Pure.

A ledger holds the outcomes of many tasks in one object. So each outcome is made `sound` by
itself before it is written: a result that no reader could parse, or text that cannot be
encoded, would otherwise cost all of its neighbours theirs. The class names are emitted in spans
(`penstock.queue.tracing`) and must not change.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

import msgspec

from penstock.queue.ledger import NULL, LedgerFailure

DEPTH_MAX: Final = 100
RESULT_BYTES_MAX: Final = 64 * 1024 * 1024
IN_LEDGER_BYTES_MAX: Final = 256 * 1024
"""What a ledger takes in of one result; a worker stores what is larger elsewhere first."""
RESULTS_BYTES_MAX: Final = 4 * 1024 * 1024
"""What all results of a pack may have together: each task has its share."""
MESSAGE_CHARACTERS_MAX: Final = 2_000
TRACE_CHARACTERS_MAX: Final = 8_000
REASON_CHARACTERS_MAX: Final = 200
"""Of what a line of the log says besides: there are many lines."""

_STRING: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_BRACKETS: Final = bytes.maketrans(b"{}", b"[]")
_OTHERS: Final = bytes(set(range(256)) - set(b"[]{}"))


@dataclass(frozen=True, slots=True)
class Succeeded:
    """The attempt ended well; `result` is JSON."""

    result: msgspec.Raw = field(default_factory=lambda: NULL)
    is_ref: bool = False
    """Whether the result is a `PayloadReference` to a payload."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The attempt failed for good."""

    failure: LedgerFailure


@dataclass(frozen=True, slots=True)
class Retried:
    """The attempt failed and another may follow, not before `due_ms`."""

    failure: LedgerFailure
    due_ms: int


@dataclass(frozen=True, slots=True)
class Rescheduled:
    """The handler asked to be called again, not before `due_ms`: the attempt does not count."""

    due_ms: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class GivenBack:
    """The attempt was stopped before its time, through no fault of the task."""


@dataclass(frozen=True, slots=True)
class AttemptCancelled:
    """The attempt heeded a request to cancel."""

    reason: str = field(default="", repr=False)
    """Why, if that is not in the ledger already."""


@dataclass(frozen=True, slots=True)
class Expired:
    """The task's time was over before the attempt had begun: it does not count."""


AttemptOutcome = Succeeded | Failed | Retried | Rescheduled | GivenBack | AttemptCancelled | Expired


def sound(ending: AttemptOutcome, *, count: int = 1) -> AttemptOutcome:
    """The ending, such that it can be written and read again: one bad one must not cost a pack.

    A ledger is written whole, again and again. So what one of `count` tasks may say is bounded by
    its share of what a ledger may hold.
    """
    match ending:
        case Succeeded(result):
            problem = _json_problem(bytes(result)) or _size_problem(bytes(result), count)
            if problem:
                return Failed(
                    LedgerFailure("BadResult", f"The result cannot be stored: {problem}.")
                )
            return ending
        case Failed(failure):
            return Failed(_plain(failure, count))
        case Retried(failure, due_ms):
            return Retried(_plain(failure, count), int(due_ms))
        case Rescheduled(due_ms, reason):
            return Rescheduled(int(due_ms), _cut(reason, REASON_CHARACTERS_MAX))
        case AttemptCancelled(reason) if reason:
            return AttemptCancelled(_cut(reason, REASON_CHARACTERS_MAX))
    return ending


def share_of(count: int) -> int:
    """How many bytes of each result the ledger of so many tasks takes in."""
    return min(IN_LEDGER_BYTES_MAX, RESULTS_BYTES_MAX // count)


def _size_problem(body: bytes, count: int) -> str:
    most = share_of(count)
    if len(body) <= most:
        return ""
    return (
        f"it has {len(body):,} bytes, and in a pack of {count:,} tasks at most {most:,} are kept;"
        " store it in the bucket and return its key"
    )


def _json_problem(body: bytes) -> str:
    if is_too_deep(body):
        return f"it is nested more than {DEPTH_MAX} levels deep"
    try:
        msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return f"it is not JSON ({error})"
    return ""


def is_too_deep(body: bytes) -> bool:
    """Whether JSON is nested so deep that not every reader could read it."""
    if body.count(b"[") + body.count(b"{") <= DEPTH_MAX:
        return False
    brackets = _STRING.sub(b"", body).translate(_BRACKETS, _OTHERS)
    # Each round takes the innermost level away. Megabytes are too many for a loop over bytes.
    for _ in range(DEPTH_MAX):
        brackets = brackets.replace(b"[]", b"")
        if not brackets:
            return False
    return True


def _plain(failure: LedgerFailure, count: int) -> LedgerFailure:
    """Text that can be written, and not too much of it."""
    share = RESULTS_BYTES_MAX // 4 // count

    return LedgerFailure(
        _cut(failure.error, 200),
        _cut(failure.message, min(MESSAGE_CHARACTERS_MAX, share)),
        _cut(failure.trace, min(TRACE_CHARACTERS_MAX, share)),
    )


def _cut(text: str, most: int) -> str:
    return text.encode("utf-8", "replace").decode()[:most]
