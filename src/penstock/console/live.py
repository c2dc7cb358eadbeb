"""Live pages: server-sent events with what has changed, for all viewers of a page.

A *watch* is a page with its parameters and a role, viewed by one or more people. While there is
a viewer, the page is loaded about once a second and its live blocks are rendered; a block that
differs from the last one is sent to all of them. Somebody who joins has a newer page than what
was last sent, and gets all of the next rendering and nothing older. So a page costs the same
however many view it, and nothing while nobody does. Before each load the sessions that are over
(`sessions`) are looked up; their streams end without seeing it.

Bounds: a watcher has a slot from when its stream is made until that is closed, whether or not
it was ever read. There are `WATCHERS_MAX` slots, `WATCHERS_EACH_MAX` of them for one
`counted_as`.

Each watcher buffers one block of each name: a slow one gets the latest, and never delays
others. While nothing changes a heartbeat is sent, as an event of its own (scripts do not see
comments), so that both ends notice a dead connection. When a page cannot be loaded, watchers
get `trouble` and it is tried again: the last content stays. Streams end after a while, and
browsers reconnect.

A crash ends the streams. Nothing else is kept.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from typing import Final, Self

from penstock.console.sessions import ConsoleSession
from penstock.kernel.clock import Clock
from penstock.kernel.service import Service

_log = logging.getLogger(__name__)

HELLO: Final = b"retry: 1000\n: hello\n\n"
"""What a stream begins with: how soon a browser comes back, in milliseconds."""
LOOK_SECONDS: Final = 1.0
WATCHERS_MAX: Final = 200
WATCHERS_EACH_MAX: Final = 20
"""More than the windows that a browser keeps connected to one site."""
QUIET_SECONDS: Final = 10.0
"""How often a heartbeat is sent. Browsers think a stream dead after more than this (`live.js`)."""
BEAT: Final = "heartbeat"
"""The name of the heartbeat; no block of a page has it."""
_STREAM_SECONDS_MAX: Final = 3600.0
_LOAD_SECONDS_MAX: Final = 10.0

Blocks = Callable[[], Awaitable[Mapping[str, str]]]
"""Loads a page and renders its live blocks."""
SessionsOver = Callable[[Collection[ConsoleSession]], Awaitable[Collection[ConsoleSession]]]
"""Which of these sessions are over."""


class TooManyWatchers(Exception):
    """As many look as may."""


class _Watcher:
    """Somebody who looks: the blocks that were not sent to them yet."""

    def __init__(self, session: ConsoleSession, counted_as: str) -> None:
        self.session = session
        self.counted_as = counted_as
        self.unsent: dict[str, str] = {}
        self.news = asyncio.Event()
        self.is_new = True
        """Whether no page was loaded since it came."""
        self.is_let_go = False

    def tell(self, name: str, said: str) -> None:
        self.unsent[name] = said
        self.news.set()


class _Watch:
    """A page that is looked at."""

    def __init__(self, blocks: Blocks) -> None:
        self.blocks = blocks
        self.seen: dict[str, str] = {}
        self.watchers: set[_Watcher] = set()
        self.looking: asyncio.Task[None] | None = None

    def tell(self, found: Mapping[str, str], new: Collection[_Watcher]) -> None:
        """Tell what has changed; those who are new, everything."""
        for name, said in found.items():
            has_changed = self.seen.get(name) != said
            self.seen[name] = said
            for each in self.watchers:
                if has_changed or each in new:
                    each.tell(name, said)

    def let_go(self, over: Collection[ConsoleSession]) -> None:
        """Send nothing more to those whose session is over."""
        for each in [each for each in self.watchers if each.session in over]:
            self.watchers.discard(each)
            each.is_let_go = True
            each.news.set()


class EventStream:
    """The events of one watcher, as they go over the wire. Has to be closed, read or not."""

    def __init__(
        self, watch: _Watch, watcher: _Watcher, events: AsyncGenerator[bytes, None]
    ) -> None:
        self._watch = watch
        self._watcher = watcher
        self._events = events

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        return await anext(self._events)

    async def aclose(self) -> None:
        """Give the place back."""
        self._watch.watchers.discard(self._watcher)
        await self._events.aclose()


class LivePages(Service):
    """All that is looked at."""

    def __init__(
        self, *, clock: Clock, over: SessionsOver, look_seconds: float = LOOK_SECONDS
    ) -> None:
        self._clock = clock
        self._over = over
        self._look_seconds = look_seconds
        self._watches: dict[str, _Watch] = {}
        self._is_stopped = False

    async def start(self) -> None:
        self._is_stopped = False

    async def stop(self) -> None:
        """End all streams."""
        self._is_stopped = True
        for watch in self._watches.values():
            for each in watch.watchers:
                each.news.set()

    @property
    def count(self) -> int:
        """How many look."""
        return sum(len(each.watchers) for each in self._watches.values())

    def stream(
        self, key: str, blocks: Blocks, *, session: ConsoleSession, counted_as: str
    ) -> EventStream:
        """What somebody is sent who looks at a page, which `key` names. Raises `Full`."""
        everybody = [each for watch in self._watches.values() for each in watch.watchers]
        theirs = sum(each.counted_as == counted_as for each in everybody)
        if len(everybody) >= WATCHERS_MAX or theirs >= WATCHERS_EACH_MAX or self._is_stopped:
            raise TooManyWatchers
        watch = self._watches.setdefault(key, _Watch(blocks))
        watcher = _Watcher(session, counted_as)
        watch.watchers.add(watcher)
        if watch.looking is None:
            watch.looking = asyncio.get_running_loop().create_task(self._look(key, watch))
        return EventStream(watch, watcher, self._events(watcher))

    async def _events(self, watcher: _Watcher) -> AsyncGenerator[bytes, None]:
        ends_at = self._clock.monotonic() + _STREAM_SECONDS_MAX
        while not (self._is_stopped or watcher.is_let_go or self._clock.monotonic() >= ends_at):
            watcher.news.clear()
            unsent, watcher.unsent = watcher.unsent, {}
            for name, said in unsent.items():
                yield event(name, said)
            with suppress(TimeoutError):
                async with asyncio.timeout(QUIET_SECONDS):
                    await watcher.news.wait()
                    continue
            yield event(BEAT, "")

    async def _look(self, key: str, watch: _Watch) -> None:
        """Load the page again and again, while somebody looks."""
        try:
            while watch.watchers and not self._is_stopped:
                new = [each for each in watch.watchers if each.is_new]
                try:
                    async with asyncio.timeout(_LOAD_SECONDS_MAX):
                        watch.let_go(await self._over({each.session for each in watch.watchers}))
                        if not watch.watchers:
                            continue
                        found = await watch.blocks()
                except Exception as error:  # noqa: BLE001 - whatever it is, the page is tried again
                    if not watch.seen.get("trouble"):
                        _log.warning("failed to load a page: %s", error)
                    watch.tell({"trouble": "The dispatcher failed to load this page."}, new)
                else:
                    watch.tell({"trouble": "", **found}, new)
                    for each in new:
                        each.is_new = False
                await self._clock.sleep(self._look_seconds)
        finally:
            watch.looking = None
            if self._watches.get(key) is watch:
                del self._watches[key]


def event(name: str, said: str) -> bytes:
    """One event: its data is a text in JSON, which has no ends of lines."""
    return f"event: {name}\ndata: {json.dumps(said)}\n\n".encode()
