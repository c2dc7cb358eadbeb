"""What a handler with Lambda's signature is given, in a child process and at AWS alike."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from penstock.kernel.clock import Clock, SystemClock
from penstock.runtimes.base import Work

_SECONDS_MAX: Final = 900.0
"""What a function gets at AWS at most."""


def event_of(work: Work) -> dict[str, Any]:
    """The event of a task: why there is one, what it reads, and where it may write."""
    plain: dict[str, Any] = msgspec.to_builtins(work)
    names = ("task_id", "attempt", "job", "operator", "generation", "config", "payload")
    return {name: plain[name] for name in (*names, "inputs", "outputs")}


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalContext:
    """The part of Lambda's context that means something on any machine."""

    function_name: str
    aws_request_id: str
    timeout_seconds: float
    began_at: float
    function_version: str = "$LATEST"
    clock: Clock = field(default_factory=SystemClock, repr=False)

    def get_remaining_time_in_millis(self) -> int:
        """How long the handler may still run."""
        left = self.began_at + self.timeout_seconds - self.clock.monotonic()
        return max(0, int(left * 1000))


def context_of(work: Work, *, clock: Clock) -> LocalContext:
    """The context of a task that begins now."""
    return LocalContext(
        function_name=work.operator,
        aws_request_id=f"{work.task_id}-{work.attempt}",
        timeout_seconds=work.timeout_seconds or _SECONDS_MAX,
        began_at=clock.monotonic(),
        clock=clock,
    )
