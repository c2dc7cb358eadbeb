"""A console for queues alone: the pages of queues over a store, without a dispatcher or a database.

The pages, the sessions and the stream are those of the console (`penstock.console`); here is what
they are given instead of a dispatcher. Called by the wiring, `penstock.queue_console`.

Who has signed out is remembered in this process, and its secret is random: a restart ends all
sessions. A sign-in that was refused is logged. Nothing else is kept, and a crash loses a view.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.console.answering import Answer, Send, send_answer
from penstock.console.pages import queue, queue_rules, queue_tasks
from penstock.console.pages.base import Site
from penstock.dispatcher.queues.looks import Queues
from penstock.kernel.clock import Clock
from penstock.store.base import ObjectStore

_log = logging.getLogger(__name__)

STORE_AWAY: Final = "The store does not answer now."
_ENDED_MAX: Final = 10_000


class SignIns:
    """The audit of a console without a database: the log."""

    def note(self, *, what: str, outcome: str, address: str, reason: str) -> None:
        """Log it."""
        _log.warning("%s from %s: %s, %s", what, address or "somewhere", outcome, reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueAlone:
    """What the pages of queues ask where there is no dispatcher."""

    queues: Queues
    store: ObjectStore
    root: str
    """The URL of the store, without what is secret in it."""
    first_queue: str
    has_pipeline: bool = False
    audit: SignIns = field(default_factory=SignIns)


SITE: Final[Site[QueueAlone]] = Site(
    pages=(queue.HOME, queue.PAGE, *queue_tasks.PAGES, *queue_rules.PAGES),
    actions=(*queue.ACTIONS, *queue_tasks.ACTIONS, *queue_rules.ACTIONS),
)


class SignedOut:
    """The sessions that people have signed out of, in this process."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until: dict[str, float] = {}

    async def end(self, number: str, *, seconds: float) -> None:
        """Remember it, for so many seconds at least."""
        now = self._clock.monotonic()
        self._until = {each: until for each, until in self._until.items() if until > now}
        while len(self._until) >= _ENDED_MAX:
            del self._until[next(iter(self._until))]
        self._until[number] = now + seconds

    async def among(self, numbers: Collection[str]) -> Collection[str]:
        """Which of these it has."""
        return [each for each in numbers if each in self._until]


async def no_api(scope: Any, _receive: Any, send: Send) -> None:
    """What is answered where a dispatcher has its API: `/healthz`, and nothing else."""
    if scope["type"] != "http":
        return
    is_probe = scope["path"] == "/healthz" and scope["method"] in ("GET", "HEAD")
    answer = Answer("ok\n") if is_probe else Answer("A queue alone has no API.\n", 404)
    answer.kind = "text/plain; charset=utf-8"
    await send_answer(send, answer, is_head=scope["method"] == "HEAD")
