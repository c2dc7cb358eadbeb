"""Versions of the DAG: what going back would do is shown first, and done when it is still true."""

from __future__ import annotations

from penstock.protocol.dags import DagAnswer
from tests.integration.console.looking import Look, Visitor, words
from tests.integration.dispatcher.api.stage import ok, read
from tests.integration.dispatcher.test_deployment import chain

PATH = "/operations/versions"
MORE = """
  extra:
    runtime: process
    operator: a:extra
    inputs: [feed.raw]
    outputs: [more]
"""


async def _present(visitor: Visitor) -> int:
    return read(await visitor.stage.public.get("/v1/dag"), DagAnswer).version.id


def test_the_version_before_is_put_in_force_again(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        await visitor.stage.apply()
        first = await _present(visitor)
        _, page = await visitor.get(f"{PATH}?version=before")
        assert "No other version was in force before this one." in words(page)
        ok(await visitor.stage.apply(chain(clean="2") + MORE))
        await visitor.stage.trigger("p")
        second = await _present(visitor)
        assert "data-sure" not in (await visitor.get(PATH))[1]
        _, page = await visitor.get(f"{PATH}?version=before")
        said = words(page)
        assert f"Roll back to version {first} Preview, nothing was changed yet." in said
        assert "Removed jobs; their data stays extra" in said
        assert "Reverted jobs clean" in said
        assert "Obsolete work of extra 1 waiting: will be cancelled" in said
        assert "data-sure" in page.partition(f"Put version {first} in force")[0]
        assert await _present(visitor) == second
        fields = {"version": str(first), "present": str(second)}
        _, page = await visitor.post(f"{PATH}/roll-back", fields)
        assert f"Version {first} of the DAG is in force. Obsolete tasks cancelled" in words(page)
        assert await _present(visitor) == first
        # The same form again does nothing: it does not go there and back.
        _, page = await visitor.post(f"{PATH}/roll-back", fields)
        assert f"Version {first} is in force already." in words(page)
        assert await _present(visitor) == first

    console(story)


def test_what_somebody_else_has_changed_meanwhile_is_looked_at_again(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        await visitor.stage.apply()
        first = await _present(visitor)
        await visitor.stage.apply(chain(clean="2"))
        second = await _present(visitor)
        await visitor.stage.apply(chain(clean="3"))
        third = await _present(visitor)
        stale = {"version": str(first), "present": str(second)}
        _, page = await visitor.post(f"{PATH}/roll-back", stale)
        assert f"Version {third} is in force by now." in words(page)
        assert f"Roll back to version {first} Preview, nothing was changed yet." in words(page)
        assert await _present(visitor) == third
        for wrong, told in (
            ({"version": ""}, "Choose a version."),
            ({"version": "<script>"}, "The version"),
            ({"version": "99", "present": str(third)}, "There is no version 99"),
        ):
            _, page = await visitor.post(f"{PATH}/roll-back", wrong)
            assert told in words(page)
            assert "<script>" not in page.replace('<script src="', "").replace("<script type", "")
        for wanted, told in (
            ("x", "Not a version number."),
            ("99", "There is no version 99 of the DAG."),
            (str(third), f"Version {third} is in force already."),
        ):
            status, page = await visitor.get(f"{PATH}?version={wanted}")
            assert (status, told in words(page)) == (200, True), wanted
        assert await _present(visitor) == third

    console(story)


def test_a_viewer_sees_what_it_would_do_and_cannot_do_it(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        await visitor.sign_in("a token to look")
        visitor.stage.public.headers["authorization"] = "Bearer a token to steer"
        await visitor.stage.apply()
        await visitor.stage.apply(chain(clean="2"))
        _, page = await visitor.get(f"{PATH}?version=before")
        assert "disabled" in page.partition("in force</button>")[0].rpartition("<button")[2]
        status, _ = await visitor.post(f"{PATH}/roll-back", {"version": "1", "present": "2"})
        assert status == 403

    console(story, api_token="a token to steer", viewer_token="a token to look")
