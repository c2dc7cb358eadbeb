"""What a handler says of how far it is: heard from any thread, written with the next heartbeat.

A `Voice` belongs to one attempt. The handler speaks into it, and only the last word counts.
Whoever writes the ledger asks what is `unsent`, writes it, and says that it is `sent`. Nothing is
written for a word alone before `PROGRESS_SECONDS` have passed since the pack's last write, so a
handler may report as often as it likes: it costs one put in `PROGRESS_SECONDS` at most, for all the
tasks of a pack together, and nothing in handlers that are done sooner. A word that is said last is
written with the ending. A crash loses what was not written yet, and nothing else.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Final

from penstock.kernel.errors import InvalidInput
from penstock.queue.ledger import Progress

PROGRESS_SECONDS: Final = 5.0
"""How long after its last write a pack is written because of a report alone."""
MESSAGE_CHARACTERS_MAX: Final = 200


@dataclass(frozen=True, slots=True)
class Said:
    """One report."""

    done: float
    total: float
    message: str

    def at(self, at_ms: int) -> Progress:
        """As the ledger has it."""
        return Progress(at_ms, self.done, self.total, self.message)


def _nobody() -> None:
    pass


class Voice:
    """What one attempt has said last. `heard` is called, in any thread, when there is news."""

    _lock: ClassVar = threading.Lock()
    """Of all: it is held for two assignments, and most attempts say nothing."""

    def __init__(self, heard: Callable[[], None] = _nobody) -> None:
        self._heard = heard
        self._unsent: Said | None = None

    def say(self, done: float, total: float, message: str) -> None:
        """Take a report. Raises `InvalidInput` for one that nobody could read."""
        said = _checked(done, total, message)
        with self._lock:
            is_first = self._unsent is None
            self._unsent = said
        if is_first:
            self._heard()

    @property
    def unsent(self) -> Said | None:
        """What was said and is not written."""
        return self._unsent

    def sent(self, said: Said) -> None:
        """This is written; what was said after it is not."""
        with self._lock:
            if self._unsent is said:
                self._unsent = None


def _checked(done: object, total: object, message: object) -> Said:
    for name, value in (("done", done), ("total", total)):
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise InvalidInput(f"A report needs a number for {name!r}, not {value!r}.")
    assert isinstance(done, int | float)
    assert isinstance(total, int | float)
    if done < 0 or total <= 0:
        raise InvalidInput(
            f"A report of {done!r} of {total!r} says nothing.",
            hint="'done' is at least 0 and 'total' above it: task.report(3, total=10).",
        )
    # Text that cannot be encoded would cost the whole pack its write.
    text = str(message).encode("utf-8", "replace").decode()[:MESSAGE_CHARACTERS_MAX]
    return Said(float(done), float(total), text)
