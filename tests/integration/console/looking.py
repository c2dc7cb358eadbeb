"""Somebody with a browser, before a console over a real dispatcher's parts and a real Postgres.

A story is given a `Visitor`. What the dispatcher does in the background is done by the story, by
way of `visitor.stage`, which has both sides of the API: it applies DAGs, triggers, routes, claims
and completes as workers do. Time stands still but for `visitor.world.later`.
"""

from __future__ import annotations

import asyncio
import contextlib
import html
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from penstock.console.application import Console, OpenAlertCount
from penstock.console.live import LivePages
from penstock.console.pages.table import SITE
from penstock.console.sessions import COOKIE, ConsoleSessions, EndedSessions
from penstock.dispatcher.api.context import ApiContext
from penstock.dispatcher.api.routes import public_app
from penstock.kernel.clock import SystemClock
from penstock.kernel.entropy import seeded_entropy
from tests.integration.dispatcher.api.stage import SECRET, Stage, staged
from tests.integration.dispatcher.world import World, Worlds

_TAG = re.compile(r"<[^>]*>")
_SCRIPT = re.compile(r"<(script|style)\b.*?</\1>", re.DOTALL)


@dataclass
class Visitor:
    """Who looks, and what is behind the pages."""

    stage: Stage
    browser: httpx.AsyncClient
    sessions: ConsoleSessions
    live: LivePages

    @property
    def world(self) -> World:
        return self.stage.world

    @property
    def parts(self) -> ApiContext:
        return self.stage.parts

    async def get(self, path: str) -> tuple[int, str]:
        """The status of a page, and its HTML."""
        answer = await self.browser.get(path)
        return answer.status_code, answer.text

    async def post(self, path: str, fields: Mapping[str, str] | None = None) -> tuple[int, str]:
        """Send a form as a page has it, and go where the answer leads: the page that is shown."""
        if COOKIE not in self.browser.cookies:
            await self.browser.get("/")
        session = self.sessions.read(self.browser.cookies.get(COOKIE) or "")
        assert session is not None, "Nobody is signed in."
        said = {"form_token": self.sessions.form_token(session), "to": "/", **(fields or {})}
        answer = await self.browser.post(path, data=said)
        if answer.status_code == 303:
            answer = await self.browser.get(answer.headers["location"])
        return answer.status_code, answer.text

    async def sign_in(self, token: str) -> None:
        """Show a token, of a console that wants one."""
        answer = await self.browser.post("/sign-in", data={"token": token, "to": "/"})
        assert answer.status_code == 303, answer.text


def words(page: str) -> str:
    """What a page says, without its tags, with single spaces."""
    return " ".join(html.unescape(_TAG.sub(" ", _SCRIPT.sub(" ", page))).split())


@contextlib.asynccontextmanager
async def visiting(
    world: World, *, api_token: str = "", viewer_token: str = "", **fields: Any
) -> AsyncIterator[Visitor]:
    """A console over a world. `fields` are of the dispatcher's parts."""
    clock = SystemClock()
    sessions = ConsoleSessions(
        SECRET,
        clock=clock,
        entropy=seeded_entropy(2),
        ended=EndedSessions(world.database),
        api_token=api_token,
        viewer_token=viewer_token,
    )
    async with staged(world, **fields) as stage, LivePages(clock=clock, over=sessions.over) as live:
        console = Console(
            public_app(stage.parts),
            stage.parts,
            SITE,
            sessions=sessions,
            live=live,
            clock=clock,
            alerts=OpenAlertCount(stage.parts.database, clock=clock),
        )
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(console), base_url="http://127.0.0.1"
        ) as browser:
            yield Visitor(stage, browser, sessions, live)


Story = Callable[[Visitor], Coroutine[Any, Any, None]]
Look = Callable[..., None]


def look(worlds: Worlds, story: Story, **fields: Any) -> None:
    """Run a story with a visitor of its own, in an empty world."""

    async def main() -> None:
        async with worlds.world() as world, visiting(world, **fields) as visitor:
            await story(visitor)

    asyncio.run(main())
