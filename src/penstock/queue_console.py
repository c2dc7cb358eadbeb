"""The console of a queue alone, from what its command is given: a store, a listener, the pages.

It binds loopback, or wants a token (`PENSTOCK_API_TOKEN`); `console_for` says what is refused.
Called by the command line.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib.metadata import version
from urllib.parse import urlsplit, urlunsplit

from penstock.console.alone import SITE, STORE_AWAY, QueueAlone, SignedOut, no_api
from penstock.console.application import Console
from penstock.console.live import Live
from penstock.console.sessions import Sessions
from penstock.dispatcher.queues.looks import Queues
from penstock.dispatcher.serving import Listener, Serving
from penstock.kernel.clock import SystemClock
from penstock.kernel.entropy import new_id, system_entropy
from penstock.kernel.errors import QueueNotFound
from penstock.kernel.service import Service
from penstock.settings import Settings
from penstock.store.opening import open_store


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueConsoleSettings:
    """What a console for queues is given."""

    store: str
    queue: str
    host: str
    port: int
    is_read_only: bool
    api_token: str
    viewer_token: str
    hosts: Collection[str] | None
    """The names that browsers may ask for; None is any."""


def console_for(
    settings: Settings, *, store: str, queue: str, is_read_only: bool
) -> QueueConsoleSettings:
    """The settings of a console for the queues of a store; `settings` are checked already."""
    return QueueConsoleSettings(
        store=store,
        queue=queue,
        host=settings.host,
        port=settings.port,
        is_read_only=is_read_only,
        api_token=settings.api_token,
        viewer_token=settings.viewer_token,
        hosts=settings.console_hosts,
    )


class QueueConsole(Service):
    """The pages of the queues of one store, on one listener."""

    def __init__(self, settings: QueueConsoleSettings) -> None:
        self._settings = settings
        self._stack = AsyncExitStack()
        self._serving: Serving | None = None

    @property
    def url(self) -> str:
        """Where browsers find it."""
        assert self._serving is not None, "it is started"
        return self._serving.url("console")

    async def start(self) -> None:
        settings, clock, entropy = self._settings, SystemClock(), system_entropy()
        store = await open_store(settings.store)
        self._stack.push_async_callback(store.close)
        queues = Queues(store, entropy=entropy)
        await self._look(queues)
        sessions = Sessions(
            new_id(entropy, characters=40),
            clock=clock,
            entropy=entropy,
            ended=SignedOut(clock),
            api_token=settings.api_token,
            viewer_token=settings.viewer_token,
            is_read_only=settings.is_read_only,
        )
        live = Live(clock=clock, over=sessions.over)
        console = Console(
            no_api,
            QueueAlone(
                queues=queues,
                store=store,
                root=shown(settings.store),
                first_queue=settings.queue,
            ),
            SITE,
            sessions=sessions,
            live=live,
            clock=clock,
            version=version("penstock"),
            hosts=settings.hosts,
            away=STORE_AWAY,
        )
        self._serving = Serving([Listener("console", console, settings.host, settings.port)])
        await self._stack.enter_async_context(self._serving)
        await self._stack.enter_async_context(live)

    async def stop(self) -> None:
        await self._stack.aclose()

    async def _look(self, queues: Queues) -> None:
        """Fail now, rather than on every page, if the store cannot be reached.

        A queue that is not there yet is no failure: the page says so, and how to make one.
        """
        try:
            await queues.opened(self._settings.queue)
        except QueueNotFound:
            return


def shown(url: str) -> str:
    """A URL without a user, a password or parameters."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
