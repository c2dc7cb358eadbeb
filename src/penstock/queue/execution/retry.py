"""What follows when an attempt fails: the stored failure, and whether and when to retry. Pure.

A `Retry` is what a handler is registered with. Whether an error is retried is decided by its
class and by nothing else: no text of an error is ever read. So a `TimeoutError`, whether the
handler raised it or the worker enforced it, is retried by `on=(TimeoutError,)`, by
`on=(OSError,)`, for it is one, and by `on=(Exception,)`. `KeyboardInterrupt`, `SystemExit` and
`CancelledError` are not `Exception`s, so the default does not retry them. `DoNotRetry`, and the
classes in `never`, are not retried whatever `on` says. `Reschedule` is no failure at all.

Called by `penstock.queue.execution.attempt` when an attempt has failed, and by users, who make
`Retry`s.
"""

from __future__ import annotations

import math
import traceback
from dataclasses import dataclass
from typing import Final, TypeGuard

from penstock.kernel.entropy import Entropy
from penstock.kernel.errors import DoNotRetry, InvalidInput, Reschedule
from penstock.queue.attempt_outcomes import (
    MESSAGE_CHARACTERS_MAX,
    TRACE_CHARACTERS_MAX,
    Failed,
    Rescheduled,
    Retried,
)
from penstock.queue.ledger import LedgerFailure

SECONDS_MAX: Final = 366 * 86_400.0
"""A year: the longest pause, and the longest timeout."""


@dataclass(frozen=True, slots=True)
class Retry:
    """How often a task may be attempted, after which errors again, and with which pauses.

    The pause after the first attempt is `first_seconds`, and each further one is `backoff` times
    as long. Each is made longer or shorter by up to `jitter` of itself, so that tasks that failed
    together do not come back together. None is longer than `max_seconds`.

        Retry(attempts=5, backoff=2.0, on=(IOError,))
    """

    attempts: int = 3
    """How many attempts a task has in all; those that were given back do not count."""
    backoff: float = 2.0
    on: type[BaseException] | tuple[type[BaseException], ...] = (Exception,)
    """The classes of errors that are retried, as in an `except`; `()` retries none."""
    first_seconds: float = 1.0
    max_seconds: float = 3600.0
    jitter: float = 0.25
    never: type[BaseException] | tuple[type[BaseException], ...] = ()
    """The classes of errors that are not retried, although `on` says so; `DoNotRetry` never is."""

    def __post_init__(self) -> None:
        if not is_whole(self.attempts) or self.attempts < 1:
            raise InvalidInput(f"Retry needs attempts of at least 1, not {self.attempts!r}.")
        _check("a backoff, the factor between two pauses,", self.backoff, least=1, most=1_000_000)
        _check("first_seconds", self.first_seconds, least=0, most=SECONDS_MAX)
        _check("max_seconds", self.max_seconds, least=self.first_seconds, most=SECONDS_MAX)
        _check("a jitter", self.jitter, least=0, most=1)
        for each in (*classes(self.on), *classes(self.never)):
            if not _is_exception_class(each):
                raise InvalidInput(
                    f"Retry cannot decide by {each!r}: it is not a class of exceptions.",
                    hint="Give a class or a tuple of classes, for instance on=(OSError,).",
                )

    def retries(self, error: BaseException) -> bool:
        """Whether an attempt that ended with this error may be followed by another.

        A group of errors, as a `TaskGroup` raises, is retried too if each error in it is.
        """
        if self.excludes(error):
            return False
        if isinstance(error, self.on):
            return True
        return isinstance(error, BaseExceptionGroup) and all(map(self.retries, error.exceptions))

    def excludes(self, error: BaseException) -> bool:
        """Whether this error, or one in a group of errors, is never retried."""
        if isinstance(error, BaseExceptionGroup) and any(map(self.excludes, error.exceptions)):
            return True
        return isinstance(error, (DoNotRetry, *classes(self.never)))

    def pause_seconds(self, attempt_number: int, entropy: Entropy) -> float:
        """How long to wait after the attempt of this number, counted from 1."""
        try:
            pause = self.first_seconds * float(self.backoff) ** (attempt_number - 1)
        except OverflowError:
            pause = self.max_seconds if self.first_seconds else 0.0
        pause = min(pause, self.max_seconds)
        longest = min(pause * (1 + self.jitter), self.max_seconds)
        # Rounding may bring `uniform` past its end.
        return min(entropy.uniform(pause * (1 - self.jitter), longest), longest)


@dataclass(frozen=True, slots=True)
class Raised:
    """An attempt ended with an error, which itself is not kept: it would hold its frames."""

    failure: LedgerFailure
    is_retried: bool


@dataclass(frozen=True, slots=True)
class Postponed:
    """An attempt ended with `Reschedule`: it has not failed."""

    seconds: float
    reason: str = ""


def postponed(found: Postponed, *, now_ms: int) -> Rescheduled:
    """How the attempt ends."""
    return Rescheduled(now_ms + math.ceil(found.seconds * 1000), found.reason)


def ended_by(error: BaseException, retry: Retry, *, ours: str) -> Raised | Postponed:
    """What an attempt came to that raised this."""
    if isinstance(error, Reschedule):
        return Postponed(error.seconds, _encodable(error.reason))
    return raised(error, retry, ours=ours)


def raised(error: BaseException, retry: Retry, *, ours: str) -> Raised:
    """What an error says, where it came from, and whether its class is retried.

    The frames of the file `ours`, which called the handler, are left out of the trace.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == ours:
        trace = trace.tb_next
    # It also copes with errors whose own text cannot be made.
    told = traceback.TracebackException(type(error), error, trace)
    # The end of a trace says more than its beginning.
    lines = "".join(told.format())[-TRACE_CHARACTERS_MAX:]
    message = str(told)[:MESSAGE_CHARACTERS_MAX]
    failure = LedgerFailure(
        _encodable(type(error).__name__), _encodable(message), _encodable(lines)
    )
    return Raised(failure, retry.retries(error))


def timed_out(retry: Retry, *, seconds: float | None, trace: str) -> Raised:
    """The end of an attempt whose timeout was enforced; `trace` is where the handler was."""
    message = f"The handler did not end within {seconds} s."
    failure = LedgerFailure("TimeoutError", message, _encodable(trace))
    return Raised(failure, retry.retries(TimeoutError()))


def failed(
    found: Raised, retry: Retry, *, counted: int, now_ms: int, entropy: Entropy
) -> Failed | Retried:
    """How the attempt of this counted number ends: for good, or with another to follow."""
    if not found.is_retried or counted >= retry.attempts:
        return Failed(found.failure)
    pause_ms = math.ceil(retry.pause_seconds(counted, entropy) * 1000)
    return Retried(found.failure, now_ms + pause_ms)


def classes(
    given: type[BaseException] | tuple[type[BaseException], ...],
) -> tuple[type[BaseException], ...]:
    """Classes, as they are given to an `except`."""
    return given if isinstance(given, tuple) else (given,)


def _encodable(text: str) -> str:
    """As it can be stored: half a surrogate pair, as in a file name that is no UTF-8, cannot."""
    return text.encode("utf-8", "replace").decode()


def _check(what: str, value: object, *, least: float, most: float) -> None:
    if not (is_number(value) and least <= value <= most):
        raise InvalidInput(f"Retry needs {what} from {least:g} to {most:g}, not {value!r}.")


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a number; a boolean is none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_whole(value: object) -> bool:
    """Whether it is a whole number; a boolean is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def _is_exception_class(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException)
