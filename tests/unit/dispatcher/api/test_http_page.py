"""docs/http.md says what the listeners serve."""

from __future__ import annotations

from penstock.dispatcher.api.endpoints import PARAMETER
from penstock.dispatcher.api.routes import INTERNAL, PROBES, PUBLIC
from penstock.protocol.base import TASK_HEADER, WORKER_HEADER
from tests.unit.dispatcher.api.http_page import PAGE, made, page


def test_the_page_is_the_one_that_is_made() -> None:
    again = "make it anew with: python -m tests.unit.dispatcher.api.http_page"
    text = PAGE.read_text("utf-8")
    assert text == page(), again
    by_hand = text.removesuffix(made())
    assert f"`{WORKER_HEADER}: NAME`" in by_hand
    assert f"`{TASK_HEADER}`" in by_hand


def test_every_call_is_on_the_page_of_its_listener() -> None:
    public, internal = made().split("## The internal listener")
    for endpoints, text in ((PUBLIC, public), (INTERNAL, internal)):
        for each in (*endpoints, *PROBES):
            path = PARAMETER.sub(r"{\1}", each.path)
            assert f"| `{each.method} {path}` | {each.summary} |" in text


def test_no_internal_call_is_public() -> None:
    public = made().split("## The internal listener")[0].split("## The public listener")[1]
    assert "/internal/" not in public
    assert "/v1/task/" not in public


def test_every_body_that_is_asked_for_is_told() -> None:
    bodies = made().split("## Bodies")[1]
    for each in (*PUBLIC, *INTERNAL):
        if each.ask is not None:
            assert f"| `{each.ask.__name__}` | `" in bodies
