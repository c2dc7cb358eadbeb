"""The console of a queue alone, from what its command is given: a store, a listener, the pages.

It binds loopback, or wants a token (`PENSTOCK_API_TOKEN`); `console_for` says what is refused.
Called by the command line.

Pages, sessions and the event stream are those of the console (`penstock.console`); what the
dispatcher gives them elsewhere is replaced here. Sign-outs are kept in this process and its
secret is random: a restart ends all sessions. A refused sign-in is logged. Nothing else is
kept, and a crash loses a view.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

from penstock.console.application import Console
from penstock.console.http import HttpResponse, Send, send_answer
from penstock.console.live import LivePages
from penstock.console.pages import queue, queue_tasks
from penstock.console.pages.base import ConsoleSite
from penstock.console.sessions import ConsoleSessions
from penstock.dispatcher.api.server import HttpListener, HttpServer
from penstock.dispatcher.bucket_queues import QueueInspector
from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.entropy import new_id, system_entropy
from penstock.kernel.errors import QueueNotFound
from penstock.kernel.service import Service
from penstock.settings import Settings
from penstock.store.base import ObjectStore
from penstock.store.opening import open_store

_log = logging.getLogger(__name__)

STORE_AWAY: Final = "The store does not answer."
_ENDED_MAX: Final = 10_000


class SignInLog:
    """The audit of a console without a database: the log."""

    def note(self, *, what: str, outcome: str, address: str, reason: str) -> None:
        """Log it."""
        _log.warning("%s from %s: %s, %s", what, address or "somewhere", outcome, reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueOnlyParts:
    """What the pages of queues ask where there is no dispatcher."""

    queues: QueueInspector
    store: ObjectStore
    root: str
    """The URL of the store, without what is secret in it."""
    first_queue: str
    has_pipeline: bool = False
    audit: SignInLog = field(default_factory=SignInLog)


SITE: Final[ConsoleSite[QueueOnlyParts]] = ConsoleSite(
    pages=(queue.HOME, queue.PAGE, *queue_tasks.PAGES, *queue.RULE_PAGES),
    actions=(*queue.ACTIONS, *queue_tasks.ACTIONS, *queue.RULE_ACTIONS),
)


class InMemorySignOuts:
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
    answer = HttpResponse("ok\n") if is_probe else HttpResponse("A queue alone has no API.\n", 404)
    answer.kind = "text/plain; charset=utf-8"
    await send_answer(send, answer, is_head=scope["method"] == "HEAD")


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
        self._serving: HttpServer | None = None

    @property
    def url(self) -> str:
        """Where browsers find it."""
        assert self._serving is not None, "it is started"
        return self._serving.url("console")

    async def start(self) -> None:
        settings, clock, entropy = self._settings, SystemClock(), system_entropy()
        store = await open_store(settings.store)
        self._stack.push_async_callback(store.close)
        queues = QueueInspector(store, entropy=entropy)
        await self._look(queues)
        sessions = ConsoleSessions(
            new_id(entropy, characters=40),
            clock=clock,
            entropy=entropy,
            ended=InMemorySignOuts(clock),
            api_token=settings.api_token,
            viewer_token=settings.viewer_token,
            is_read_only=settings.is_read_only,
        )
        live = LivePages(clock=clock, over=sessions.over)
        console = Console(
            no_api,
            QueueOnlyParts(
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
        self._serving = HttpServer([HttpListener("console", console, settings.host, settings.port)])
        await self._stack.enter_async_context(self._serving)
        await self._stack.enter_async_context(live)

    async def stop(self) -> None:
        await self._stack.aclose()

    async def _look(self, queues: QueueInspector) -> None:
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
