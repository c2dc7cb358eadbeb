"""How a worker behaves: how much at a time, how often it asks, how long it waits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from penstock.kernel.errors import InvalidInput

CONCURRENCY_MAX: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """The defaults are what production uses."""

    concurrency: int = 8
    """How many tasks run at a time."""
    queues: tuple[str, ...] = ()
    """The queues whose tasks it takes; empty for those of all."""
    stop_seconds: float = 30.0
    """How long tasks may go on when the worker is stopped; what is left is given back."""
    grace_seconds: float = 10.0
    """How long work that is interrupted has to end by itself."""
    flush_seconds: float = 15.0
    """How long a worker that stops tries to tell how its tasks have ended."""
    hello_seconds: float = 5.0
    look_seconds: float = 30.0
    """After how long an operator is asked for work although no wake-up came."""
    answer_seconds: float = 10.0
    """How long a wake-up waits for a claim here before it goes elsewhere."""
    full_seconds: float = 1.0
    """After how long without room a worker stops listening, so that others hear instead."""
    gather_seconds: float = 0.01
    """How long a busy worker waits for more to ask for, or to tell, in one call."""

    def __post_init__(self) -> None:
        if not 1 <= self.concurrency <= CONCURRENCY_MAX:
            raise InvalidInput(
                f"A worker runs 1 to {CONCURRENCY_MAX} tasks at a time, not {self.concurrency}."
            )
        for name in ("stop_seconds", "grace_seconds", "flush_seconds", "gather_seconds"):
            if not 0 <= getattr(self, name) <= 86_400:
                raise InvalidInput(f"{name} is from 0 to a day, not {getattr(self, name)}.")
        for name in ("hello_seconds", "look_seconds", "answer_seconds", "full_seconds"):
            if not 0 < getattr(self, name) <= 86_400:
                raise InvalidInput(f"{name} is above 0 and up to a day, not {getattr(self, name)}.")
