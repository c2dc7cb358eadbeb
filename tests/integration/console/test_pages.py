"""What all pages have in common, over HTTP."""

from __future__ import annotations

import asyncio

from penstock.console.sessions import COOKIE, SESSION_SECONDS, EndedSessions
from penstock.kernel.clock import SystemClock
from tests.integration.console.looking import Look, Visitor, visiting, words


def test_an_installation_without_a_dag_says_what_to_do(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        status, page = await visitor.get("/")
        assert status == 200
        assert "penstock dag apply" in words(page)

    console(story)


def test_an_unknown_page_is_a_page_with_a_sentence(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        status, page = await visitor.get("/no-such-page")
        assert status == 404
        assert "There is no such page." in words(page)

    console(story)


def test_who_has_no_token_is_asked_for_one(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        status, page = await visitor.get("/")
        assert (status, "API token" in page) == (401, True)
        await visitor.sign_in("a token to steer")
        assert ">viewer<" not in (await visitor.get("/"))[1]
        await visitor.sign_in("a token to look")
        status, page = await visitor.get("/")
        assert status == 200
        assert ">viewer<" in page
        status, page = await visitor.post("/tasks/1/replay")
        assert status in (403, 404)

    console(story, api_token="a token to steer", viewer_token="a token to look")


def test_who_signs_out_is_signed_out_everywhere_and_what_was_open_ends(console: Look) -> None:
    tokens = {"api_token": "a token to steer", "viewer_token": "a token to look"}

    async def story(visitor: Visitor) -> None:
        await visitor.sign_in("a token to look")
        kept = visitor.browser.cookies[COOKIE]
        await visitor.sign_in("a token to look")
        copied = visitor.browser.cookies[COOKIE]
        async with visiting(visitor.world, **tokens) as other, asyncio.timeout(120):
            assert (await visitor.browser.post("/sign-out", data={"to": "/"})).status_code == 403
            async with asyncio.TaskGroup() as group:
                other.browser.cookies = {COOKIE: copied}
                stream = group.create_task(other.browser.get("/live?page=/tasks"))
                while not other.live.count:
                    await SystemClock().sleep(0.01)
                assert (await other.get("/tasks"))[0] == 200
                status, _ = await visitor.post("/sign-out")
                assert status == 401
                # It ends by itself: until then nothing else would end it.
                assert (await stream).status_code == 200
            for path in ("/tasks", "/live?page=/tasks"):
                assert (await other.get(path))[0] == 401
            visitor.browser.cookies = {COOKIE: copied}
            assert (await visitor.get("/"))[0] == 401
            other.browser.cookies = {COOKIE: kept}
            assert (await other.get("/tasks"))[0] == 200

    console(story, **tokens)


def test_what_was_ended_is_remembered_until_no_cookie_is_that_old(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        ended = EndedSessions(visitor.world.database)
        for _ in range(2):
            await ended.end("first", seconds=SESSION_SECONDS)
        visitor.world.later(SESSION_SECONDS - 1)
        await ended.end("second", seconds=SESSION_SECONDS)
        assert await ended.among(["first", "second", "third"]) == {"first", "second"}
        visitor.world.later(2)
        await ended.end("third", seconds=SESSION_SECONDS)
        assert await ended.among(["first", "second", "third"]) == {"second", "third"}
        assert await ended.among([]) == frozenset()

    console(story)
