"""The settings of a pipeline worker: concurrency, intervals between claims, shutdown times.

Those that an installation may set, `penstock.settings` takes from here, with defaults and bounds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.kernel.settings_schema import check, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineWorkerSettings:
    """The defaults are what production uses, with workers that wait at a dispatcher."""

    concurrency: int = setting(4, least=1, most=1000)
    """How many tasks a worker runs concurrently."""
    queues: tuple[str, ...] = setting(())
    """The queues whose tasks a worker claims, as in gpu,default; empty for all. A runtime under a
    name of its own has a queue of that name; all others have the queue default."""
    stop_seconds: float = setting(30.0, least=0, most=86_400)
    """How long a worker that is stopping lets its tasks run."""
    grace_seconds: float = setting(10.0, least=0, most=86_400)
    """How long work that is interrupted has to end by itself."""
    flush_seconds: float = setting(15.0, least=0, most=86_400)
    """How long a worker that stops tries to tell how its tasks have ended."""
    hello_seconds: float = setting(30.0, least=0.001, most=86_400)
    """How often a dispatcher is told that the worker is there, while no request of it waits."""
    look_seconds: float = setting(300.0, least=0.001, most=86_400)
    """After how long an operator is asked for work although no wake-up came. Dispatchers look for
    those whose workers wait there."""
    answer_seconds: float = setting(10.0, least=0.001, most=86_400)
    """How long a wake-up waits for a claim here before it goes elsewhere."""
    full_seconds: float = setting(1.0, least=0.001, most=86_400)
    """After how long without room a worker stops listening, so that others hear instead."""
    gather_seconds: float = setting(0.01, least=0, most=86_400)
    """How long a busy worker waits for more to ask for, or to tell, in one call."""
    ahead_seconds: float = setting(0.5, least=0, most=86_400)
    """Short tasks are claimed ahead of free slots: as many as begin within this. 0 claims none."""

    def __post_init__(self) -> None:
        check(self)

    def by_queue(self) -> PipelineWorkerSettings:
        """The same for a worker that is woken by a bucket or by SQS: it has to ask by itself what
        to serve, and for work that no wake-up was about."""
        return replace(self, hello_seconds=5.0, look_seconds=30.0)
