"""Whether a source is let in: asked once when it starts, of whichever dispatcher answers.

A source that may not ask or send would go on for ever and do nothing. So it asks which sources
there are until a dispatcher has answered: one that is away is waited for, since dispatchers come
and go, and one that says no is why the process ends. Afterwards it goes on whatever is answered, as
workers do: a refusal then is that of one dispatcher of a fleet that is being changed.

Made by the wiring, asked by the command line. Nothing is kept; it costs one request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final

from penstock.dispatcher.sources.client import SourceClient
from penstock.dispatcher.wire.events import SourcesAnswer
from penstock.kernel.errors import DispatcherUnavailable
from penstock.kernel.service import Service, Services

_log = logging.getLogger(__name__)

_ANSWER_SECONDS: Final = 5.0
_PAUSE_SECONDS_MIN: Final = 0.5
_PAUSE_SECONDS_MAX: Final = 10.0


class Source(Services):
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
        is_told = False
        while not stopped.is_set():
            try:
                async with asyncio.timeout(_ANSWER_SECONDS):
                    answer = await self._client.sources()
            except (DispatcherUnavailable, TimeoutError) as error:
                if not is_told:
                    _log.warning("waiting for a dispatcher: %s", str(error) or "none answers")
                is_told = True
            else:
                self._check(answer)
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_seconds):
                    await stopped.wait()
            pause_seconds = min(_PAUSE_SECONDS_MAX, 2 * pause_seconds)
