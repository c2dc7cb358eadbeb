"""Who may look, who may steer, and that a form is from here. A dispatcher that wants tokens."""

from __future__ import annotations

import html
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from playwright.sync_api import expect

from tests.browser.installation import API_TOKEN, VIEWER_TOKEN, Installation
from tests.browser.looks import faults
from tests.browser.window import Window

_SEND = """
    async ([path, fields]) => {
      const answer = await fetch(path, {method: "POST", body: new URLSearchParams(fields)});
      return [answer.status, await answer.text()];
    }
"""
_COOKIE = "penstock_session"
_TOKEN = "document.body.dataset.formToken"


def _sign_in(window: Window, token: str) -> None:
    window.open("/tasks", status=401)
    window.page.get_by_label("Token").fill(token)
    window.page.get_by_role("button", name="Sign in").click()


def _is_paused(installation: Installation, job: str) -> bool:
    pauses = installation.client.get("/v1/pressure").json()["pauses"]
    return any(each["job"] == job for each in pauses)


def test_the_page_to_sign_in_has_no_serious_fault(axe: str, stranger: Window) -> None:
    stranger.open("/", status=401)
    assert faults(stranger, axe) == []


def test_a_wrong_token_lets_nobody_in(stranger: Window) -> None:
    _sign_in(stranger, "a guess")
    expect(stranger.page.locator("main, .sign-in")).to_contain_text("Wrong token")
    stranger.open("/tasks", status=401)
    assert _COOKIE not in {each["name"] for each in stranger.page.context.cookies()}


def test_an_operator_signs_in_and_out(stranger: Window) -> None:
    page = stranger.page
    _sign_in(stranger, API_TOKEN)
    # To the page that was asked for.
    expect(page.locator("h1")).to_have_text("Tasks")
    stranger.until_live()
    (cookie,) = [each for each in page.context.cookies() if each["name"] == _COOKIE]
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
    assert page.evaluate("document.cookie") == ""
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_label("Token")).to_be_visible()
    stranger.open("/tasks", status=401)


def test_who_signs_out_is_shown_nothing_more_in_other_windows(stranger: Window) -> None:
    page = stranger.page
    _sign_in(stranger, VIEWER_TOKEN)
    stranger.until_live()
    other = page.context.new_page()
    other.goto(f"{stranger.url}/operations", wait_until="load")
    (copied,) = [each["value"] for each in page.context.cookies() if each["name"] == _COOKIE]
    other.get_by_role("button", name="Sign out").click()
    # The page that was left open is let go, and shows the page to sign in.
    expect(page.get_by_label("Token")).to_be_visible()
    other.close()
    page.context.add_cookies([{"name": _COOKIE, "value": copied, "url": stranger.url}])
    stranger.open("/tasks", status=401)


def test_a_viewer_may_look_and_not_steer(stranger: Window, installation: Installation) -> None:
    page = stranger.page
    _sign_in(stranger, VIEWER_TOKEN)
    stranger.open("/operations")
    stranger.until_live()
    for button in page.locator("main form[method=post] button").all():
        expect(button).to_be_disabled()
    assert page.locator("main form[method=post] button").count() > 0
    fields = {"job": "held", "form_token": page.evaluate(_TOKEN)}
    status, said = page.evaluate(_SEND, ["/operations/pause", fields])
    assert (status, "This session is read-only." in said) == (403, True)
    assert not _is_paused(installation, "held")


def test_a_form_without_its_token_is_refused(stranger: Window, installation: Installation) -> None:
    page = stranger.page
    _sign_in(stranger, API_TOKEN)
    expect(page.locator("h1")).to_have_text("Tasks")
    for token in ({}, {"form_token": ""}, {"form_token": "x" * 43}):
        status, said = page.evaluate(_SEND, ["/operations/pause", {"job": "held", **token}])
        assert (status, "This form has expired." in said) == (403, True)
    assert not _is_paused(installation, "held")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
@pytest.mark.parametrize("is_guarded", [True, False])
def test_a_form_of_another_site_is_refused(
    host: str, *, is_guarded: bool, stranger: Window, seen: Window, installation: Installation
) -> None:
    """Another port is the same site and sends the cookies; another name does not."""
    window = stranger if is_guarded else seen
    if is_guarded:
        _sign_in(window, API_TOKEN)
        expect(window.page.locator("h1")).to_have_text("Tasks")
    else:
        window.open("/tasks")
    # Even with a token that it has stolen.
    token = window.page.evaluate(_TOKEN)
    with _other_site(f"{window.url}/operations/pause", token) as port:
        window.page.goto(f"http://{host}:{port}/")
        with window.page.expect_response(lambda said: said.url.endswith("/pause")) as waited:
            window.page.get_by_role("button").click()
        assert waited.value.status == 403
        assert waited.value.text() == "Cross-site form submission refused."
    assert not _is_paused(installation, "held")
    # What the browser says of the refusal is no mistake of a page.
    window.wrong.clear()
    window.open("/tasks")


@contextmanager
def _other_site(to: str, token: str) -> Iterator[int]:
    body = (
        f"<!doctype html><form method=post action='{html.escape(to)}'><input name=job value=held>"
        f"<input name=form_token value='{html.escape(token)}'><button>A kitten</button></form>"
    )

    class Answering(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/" else 204)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(body.encode() if self.path == "/" else b"")

        def log_message(self, *said: object) -> None:
            """It is quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
