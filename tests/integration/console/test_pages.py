"""What all pages have in common, over HTTP."""

from __future__ import annotations

from tests.integration.console.looking import Look, Visitor, words


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
        assert (status, "The token of the API" in page) == (401, True)
        await visitor.sign_in("a token to look")
        status, page = await visitor.get("/")
        assert status == 200
        status, page = await visitor.post("/tasks/1/replay")
        assert status in (403, 404)

    console(story, api_token="a token to steer", viewer_token="a token to look")
