"""What a user's function raises to say what follows: never again, or later.

They are no errors of Penstock's, and so stand outside of its tree.
"""

from __future__ import annotations

from typing import Final

from penstock.kernel.errors import InvalidInput

RESCHEDULE_SECONDS_MAX: Final = 366 * 86_400.0


class DoNotRetry(Exception):
    """Raised by a user's function: another attempt would fail just so."""


class Reschedule(Exception):
    """Raised by a handler of a queue: not now, but again after `seconds`.

    The attempt has not failed and does not count. What must not go on for ever has an expiry.

        if not is_uploaded(task.input):
            raise Reschedule(60, reason="not uploaded yet")
    """

    def __init__(self, seconds: float, *, reason: str = "") -> None:
        if isinstance(seconds, bool) or not 0 <= seconds <= RESCHEDULE_SECONDS_MAX:
            raise InvalidInput(
                f"A task cannot be rescheduled by {seconds!r} s.",
                hint=f"Give a number of seconds from 0 to {RESCHEDULE_SECONDS_MAX:,.0f}, a year.",
            )
        super().__init__(reason or f"again in {seconds:g} s")
        self.seconds = float(seconds)
        self.reason = reason
