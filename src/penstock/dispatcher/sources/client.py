"""What sources need of a dispatcher: the list of sources, a place for events, admission.

The worker's client has both. Each call raises `DispatcherUnavailable` if no dispatcher answers,
and `DispatcherRefused` if one refuses; events may be sent again, for their ids make them one.

`SourceProcess` asks for the sources once when it starts, until a dispatcher has answered: an
unavailable one is waited for, a refusal ends the process. Later refusals do not, since one
dispatcher of a fleet may be changing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final, Protocol

from penstock.kernel.errors import DispatcherUnavailable
from penstock.kernel.service import Service, Services
from penstock.protocol.events import (
    EventResult,
    EventsAnswer,
    EventsAsk,
    RefusalsAnswer,
    RefusalsAsk,
    SourcesAnswer,
)

REFUSED: Final = "refused"
"""The outcome of an event that was not kept."""


class SourceClient(Protocol):
    """A dispatcher, as a source sees it."""

    async def sources(self) -> SourcesAnswer:
        """The sources of the DAG in force."""
        ...

    async def events(self, ask: EventsAsk, /) -> EventsAnswer:
        """Send events."""
        ...


class WebhookClient(SourceClient, Protocol):
    """A dispatcher, as the process of webhooks sees it."""

    async def webhook_refusals(self, ask: RefusalsAsk, /) -> RefusalsAnswer:
        """Have it noted that requests were refused."""
        ...


def why_refused(results: list[EventResult]) -> str:
    """Why events were not kept; empty if all were."""
    return " ".join(sorted({each.why or "" for each in results if each.outcome == REFUSED}))


def why_paused(results: list[EventResult]) -> str:
    """Why the source should send nothing more for now; empty if it may."""
    return " ".join(sorted({each.paused for each in results if each.paused}))


_log = logging.getLogger(__name__)

_ANSWER_SECONDS: Final = 5.0
_PAUSE_SECONDS_MIN: Final = 0.5
_PAUSE_SECONDS_MAX: Final = 10.0


class SourceProcess(Services):
    """The services of a source, which can say whether it is let in.

    `check` is given the sources that there are then, and raises if they cannot be served.
    """

    def __init__(
        self,
        client: SourceClient,
        services: Iterable[Service],
        *,
        check: Callable[[SourcesAnswer], None] = lambda _: None,
    ) -> None:
        super().__init__(services)
        self._client = client
        self._check = check

    async def until_let_in(self, stopped: asyncio.Event) -> None:
        """Return when a dispatcher has let us in, or we are to stop; raises if one says no."""
        pause_seconds = _PAUSE_SECONDS_MIN
        is_logged = False
        while not stopped.is_set():
            try:
                async with asyncio.timeout(_ANSWER_SECONDS):
                    answer = await self._client.sources()
            except (DispatcherUnavailable, TimeoutError) as error:
                if not is_logged:
                    _log.warning("waiting for a dispatcher: %s", str(error) or "no answer")
                is_logged = True
            else:
                self._check(answer)
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_seconds):
                    await stopped.wait()
            pause_seconds = min(_PAUSE_SECONDS_MAX, 2 * pause_seconds)
