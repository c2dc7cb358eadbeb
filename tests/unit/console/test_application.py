"""Who gets to see a page, whose forms are taken, and what every answer has."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Collection, Mapping, MutableMapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urlencode

import pytest

from penstock.console.application import Console, _Visit
from penstock.console.http import is_ours, read_message, send_events, set_message
from penstock.console.live import LivePages
from penstock.console.pages.base import (
    ActionResult,
    ConsolePage,
    ConsoleSite,
    FormAction,
    PageNotFound,
    PageRequest,
)
from penstock.console.pages.table import SITE
from penstock.console.sessions import COOKIE, SESSION_SECONDS, ConsoleRole, ConsoleSessions
from penstock.dispatcher.api.context import ApiContext
from penstock.kernel.clock import SystemClock
from penstock.kernel.entropy import seeded_entropy
from penstock.kernel.errors import DatabaseUnavailable, InvalidInput

_HOST = "127.0.0.1:7070"
_SCRIPT = "<script>alert(1)</script>"


async def _page(_: ApiContext, asked: PageRequest) -> Mapping[str, Any] | PageNotFound:
    if asked.path["name"] == "none":
        return PageNotFound(f"There is no {_SCRIPT}.", hint="Look elsewhere.")
    if asked.path["name"] == "away":
        raise DatabaseUnavailable("away")
    if asked.path["name"] == "broken":
        raise ValueError("a mistake")
    return {"what": asked.path["name"], "hint": "", "status": asked.query.get("q", "")}


async def _act(_: ApiContext, asked: PageRequest, to: str) -> ActionResult:
    if asked.query.get("field") == "wrong":
        raise InvalidInput("The field is wrong.", hint="Write another.")
    return ActionResult(f"Done: {sorted(asked.query.items())}", to)


async def _api(scope: MutableMapping[str, Any], _receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 299, "headers": []})
    await send({"type": "http.response.body", "body": scope["path"].encode()})


@dataclass
class _Said:
    status: int
    headers: list[tuple[str, str]]
    body: str

    def header(self, name: str) -> str:
        return next((value for known, value in self.headers if known == name), "")

    @property
    def cookies(self) -> dict[str, str]:
        found = [value.partition(";")[0] for name, value in self.headers if name == "set-cookie"]
        return dict(each.split("=", 1) for each in found)


class _Ended:
    """What is remembered of sessions that were ended."""

    def __init__(self) -> None:
        self.numbers: set[str] = set()
        self.is_away = False

    async def end(self, number: str, *, seconds: float) -> None:
        assert seconds >= SESSION_SECONDS
        await self.among(())
        self.numbers.add(number)

    async def among(self, numbers: Collection[str]) -> Collection[str]:
        if self.is_away:
            raise DatabaseUnavailable("away")
        return self.numbers.intersection(numbers)


class _Browser:
    """Keeps cookies, as a browser does."""

    def __init__(
        self,
        *,
        api_token: str = "",
        viewer_token: str = "",
        hosts: Collection[str] | None = None,
    ) -> None:
        self.ended = _Ended()
        self.sessions = ConsoleSessions(
            "a secret of some length",
            clock=SystemClock(),
            entropy=seeded_entropy(1),
            ended=self.ended,
            api_token=api_token,
            viewer_token=viewer_token,
        )
        site = ConsoleSite(
            pages=(
                ConsolePage("/see/{name:path}", "problem", _page, query=("q",)),
                ConsolePage("/watch/{name}", "problem", _page, live=("content",)),
            ),
            actions=(FormAction("/do/{name}", _act, fields=("field",)),),
            sections={"see": "/see/it"},
        )
        self.live = LivePages(clock=SystemClock(), over=self.sessions.over)
        self.app = Console(
            _api,
            cast("ApiContext", SimpleNamespace(audit=SimpleNamespace(note=self._note))),
            site,
            sessions=self.sessions,
            live=self.live,
            clock=SystemClock(),
            hosts=hosts,
        )
        self.cookies: dict[str, str] = {}
        self.noted: list[str] = []

    def _note(self, *, reason: str = "", **_: object) -> None:
        self.noted.append(reason)

    def ask(
        self,
        path: str,
        *,
        method: str = "GET",
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
    ) -> _Said:
        path, _, query = path.partition("?")
        sent = {"host": _HOST, **(headers or {})}
        if self.cookies:
            sent["cookie"] = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": query.encode(),
            "headers": [(name.encode(), value.encode()) for name, value in sent.items()],
        }
        got: list[MutableMapping[str, Any]] = []

        async def receive() -> MutableMapping[str, Any]:
            return {"type": "http.request", "body": body}

        async def send(message: MutableMapping[str, Any]) -> None:
            got.append(message)

        asyncio.run(self.app(scope, receive, send))
        start, *rest = got
        answer = _Said(
            start["status"],
            [(name.decode(), value.decode()) for name, value in start["headers"]],
            b"".join(each["body"] for each in rest).decode(),
        )
        self.cookies |= answer.cookies
        return answer

    def post(
        self, path: str, fields: Mapping[str, str], headers: Mapping[str, str] | None = None
    ) -> _Said:
        kind = {"content-type": "application/x-www-form-urlencoded"}
        body = urlencode(fields).encode()
        return self.ask(path, method="POST", body=body, headers={**kind, **(headers or {})})

    @property
    def token(self) -> str:
        session = self.sessions.read(self.cookies[COOKIE])
        assert session is not None
        return self.sessions.form_token(session)


def test_every_answer_keeps_a_page_to_itself() -> None:
    browser = _Browser()
    for path in ("/see/it", "/see/none", "/nothing", "/static/console.js", "/static/no.js"):
        answer = browser.ask(path)
        policy = answer.header("content-security-policy")
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.header("x-content-type-options") == "nosniff"
        assert answer.header("x-frame-options") == "DENY"
    for path in ("/v1/tasks", "/metrics", "/healthz", "/openapi.json"):
        assert browser.ask(path).status == 299


def test_pages_are_found_and_what_is_not_there_is_told() -> None:
    browser = _Browser()
    assert browser.ask("/see/it?q=404&other=1").status == 200
    assert browser.ask("/see/a/b").status == 200
    missing = browser.ask("/see/none")
    assert (missing.status, _SCRIPT in missing.body) == (404, False)
    assert "&lt;script&gt;" in missing.body
    assert browser.ask("/see/away").status == 503
    assert browser.ask("/see/broken").status == 500
    assert browser.ask("/nothing").status == 404
    assert browser.ask("/see/it", method="DELETE").status == 405
    assert browser.ask("/see/it", method="HEAD").body == ""


@pytest.mark.parametrize("host", ["evil.example", "evil.example:7070", "", "127.0.0.1.evil", "[x"])
def test_without_a_token_only_this_machine_is_answered_whatever_its_name_leads_to(
    host: str,
) -> None:
    assert _Browser().ask("/see/it", headers={"host": host}).status == 403
    with_token = _Browser(api_token="steer").ask("/see/it", headers={"host": host})
    assert with_token.status == 401


@pytest.mark.parametrize("host", ["evil.example:7070", "", "127.0.0.1.evil", "[x"])
def test_with_a_token_the_names_that_were_set_are_answered_alone(host: str) -> None:
    browser = _Browser(api_token="steer", hosts={"console.example", "127.0.0.1"})
    # A page whose own name leads here since could try tokens as one of this site.
    signing = browser.post("/sign-in", {"token": "steer"}, {"host": host})
    assert (signing.status, signing.cookies) == (403, {})
    assert "PENSTOCK_HOSTS" in signing.body
    for ours in ("Console.Example:8443", "127.0.0.1:7070"):
        assert browser.post("/sign-in", {"token": "steer"}, {"host": ours}).status == 303


@pytest.mark.parametrize("host", ["localhost:1", "127.0.0.1", "[::1]:7070"])
def test_this_machine_has_these_names(host: str) -> None:
    assert _Browser().ask("/see/it", headers={"host": host}).status == 200


def test_a_form_has_to_be_from_a_page_of_this_session() -> None:
    browser, other = _Browser(), _Browser()
    browser.ask("/see/it")
    other.sessions = browser.sessions
    assert browser.post("/do/it", {"field": "1"}).status == 403
    assert browser.post("/do/it", {"field": "1", "form_token": "x"}).status == 403
    foreign = browser.sessions.form_token(browser.sessions.begin(ConsoleRole.OPERATOR))
    assert browser.post("/do/it", {"form_token": foreign}).status == 403
    done = browser.post(
        "/do/it", {"field": "1", "x": "2", "form_token": browser.token, "to": "/see/it"}
    )
    assert (done.status, done.header("location")) == (303, "/see/it")
    shown = browser.ask("/see/it")
    assert "Done: [(&#39;field&#39;, &#39;1&#39;)]" in shown.body
    assert browser.cookies["penstock_told"] == ""


def test_a_script_that_sends_a_form_is_told_where_to_go_and_goes_there_itself() -> None:
    browser = _Browser()
    browser.ask("/see/it")
    fields = {"field": "1", "form_token": browser.token, "to": "/see/it"}
    done = browser.post("/do/it", fields, {"accept": "application/json"})
    assert (done.status, done.header("location")) == (200, "")
    assert done.header("content-type") == "application/json"
    assert json.loads(done.body) == {"to": "/see/it"}
    # What became of it waits for the page that it goes to.
    assert "Done: [(&#39;field&#39;, &#39;1&#39;)]" in browser.ask("/see/it").body
    refused = browser.post("/do/it", {"form_token": "x"}, {"accept": "application/json"})
    assert (refused.status, "This form has expired." in refused.body) == (403, True)
    assert "data-hint" in refused.body


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:9999"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_forms_of_other_sites_are_not_taken(headers: Mapping[str, str]) -> None:
    browser = _Browser()
    browser.ask("/see/it")
    assert browser.post("/do/it", {"form_token": browser.token}, headers).status == 403
    ours = {"origin": f"http://{_HOST}", "sec-fetch-site": "same-origin"}
    assert browser.post("/do/it", {"form_token": browser.token}, ours).status == 303


def test_a_form_of_another_kind_or_size_is_refused() -> None:
    browser = _Browser()
    browser.ask("/see/it")
    assert browser.ask("/do/it", method="POST", body=b"{}").status == 415
    assert browser.post("/do/it", {"field": "x" * 300_000}).status == 413
    many = {f"f{number}": "" for number in range(300)}
    assert browser.post("/do/it", many).status == 422


def test_what_an_action_refuses_is_told_on_the_page() -> None:
    browser = _Browser()
    browser.ask("/see/it")
    answer = browser.post(
        "/do/it", {"field": "wrong", "form_token": browser.token, "to": "/see/it"}
    )
    assert answer.status == 303
    assert "The field is wrong. Write another." in browser.ask("/see/it").body
    assert browser.post("/do-not", {"form_token": browser.token}).status == 404


def test_a_viewer_looks_and_an_operator_steers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.console.application._WRONG_SECONDS", 0.0)
    for token, status in (("steer", 303), ("look", 403)):
        browser = _Browser(api_token="steer", viewer_token="look")
        asked = browser.ask("/see/it?q=1")
        assert asked.status == 401
        assert "it" not in asked.body.partition("<title>")[2][:20]
        wrong = browser.post("/sign-in", {"token": "guess", "to": "/see/it"})
        assert (wrong.status, COOKIE in browser.cookies) == (403, False)
        assert len(browser.noted) == 1
        right = browser.post("/sign-in", {"token": token, "to": "/see/it"})
        assert (right.status, right.header("location")) == (303, "/see/it")
        assert browser.ask("/see/it").status == 200
        assert browser.post("/do/it", {"form_token": browser.token}).status == status
        browser.post("/sign-out", {"form_token": browser.token})
        assert browser.ask("/see/it").status == 401


def test_signing_out_ends_what_was_signed_out() -> None:
    browser = _Browser(api_token="steer")
    browser.post("/sign-in", {"token": "steer"})
    copied, token = browser.cookies[COOKIE], browser.token
    browser.ended.is_away = True
    for answer in (
        browser.post("/sign-out", {"form_token": token}),
        browser.ask("/see/it"),
        browser.post("/do/it", {"form_token": token}),
        browser.ask("/live?page=/watch/it"),
    ):
        assert (answer.status, COOKIE in answer.cookies) == (503, False)
    browser.ended.is_away = False
    gone = browser.post("/sign-out", {"form_token": token})
    assert (gone.status, browser.cookies[COOKIE]) == (303, "")
    browser.cookies[COOKIE] = copied
    assert browser.ask("/see/it").status == 401
    assert browser.ask("/live?page=/watch/it").status == 401
    assert browser.post("/do/it", {"form_token": token}).status == 401
    browser.post("/sign-in", {"token": "steer"})
    assert browser.ask("/see/it").status == 200


def test_a_cookie_is_for_this_site_and_not_for_scripts() -> None:
    browser = _Browser()
    plain = browser.ask("/see/it").header("set-cookie")
    assert "HttpOnly" in plain
    assert "SameSite=Strict" in plain
    assert "Secure" not in plain
    secure = _Browser().ask("/see/it", headers={"x-forwarded-proto": "https"})
    assert "Secure" in secure.header("set-cookie")


@pytest.mark.parametrize(
    "to", ["//evil.example", "/\\evil.example", "https://evil.example", "evil", "/a\r\nb: c", ""]
)
def test_nobody_is_sent_away_from_here(to: str) -> None:
    assert not is_ours(to)
    browser = _Browser(api_token="steer")
    assert browser.post("/sign-in", {"token": "steer", "to": to}).header("location") == "/"
    answer = browser.post("/do/it", {"form_token": browser.token, "to": to})
    assert answer.header("location") == "/"


def test_files_are_kept_for_ever_by_their_digest_and_asked_for_again_without() -> None:
    browser = _Browser()
    page = browser.ask("/see/it").body
    named = page.partition('src="/static/console.js')[2].partition('"')[0]
    kept = browser.ask(f"/static/console.js{named}")
    assert "immutable" in kept.header("cache-control")
    plain = browser.ask("/static/morph.js")
    assert plain.header("cache-control") == "no-cache"
    again = browser.ask("/static/morph.js", headers={"if-none-match": plain.header("etag")})
    assert (again.status, again.body) == (304, "")
    assert browser.ask("/static/../application.py").status == 404


def test_only_pages_that_are_live_have_a_stream() -> None:
    browser = _Browser()
    assert browser.ask("/live?page=/see/it").status == 404
    assert browser.ask("/live?page=/nothing").status == 404
    assert _Browser(api_token="steer").ask("/live?page=/see/it").status == 401


@pytest.mark.parametrize(
    "other", ['prefs={"a": 1}', "a=b c", "flag", "\xe9=1", "penstock_session_x=1", "=", '"']
)
def test_cookies_of_other_programs_of_this_host_hide_nothing(other: str) -> None:
    browser = _Browser(api_token="steer")
    browser.post("/sign-in", {"token": "steer"})
    cookie = f"{other}; {COOKIE}={browser.cookies[COOKIE]}"
    browser.cookies = {}
    assert browser.ask("/see/it", headers={"cookie": cookie}).status == 200


def test_a_page_knows_where_it_is_whatever_its_name_has_in_it() -> None:
    visit = _Visit(
        "/see/a?b %41", b"q=1", [], _Browser().sessions.begin(ConsoleRole.VIEWER), is_new=True
    )
    assert visit.here == "/see/a%3Fb%20%2541?q=1"


def test_what_became_of_an_action_fits_into_a_cookie_and_strange_ones_are_none() -> None:
    sessions = _Browser().sessions
    mine, other = sessions.begin(ConsoleRole.OPERATOR), sessions.begin(ConsoleRole.OPERATOR)
    name, value = set_message(ActionResult("\u6f22" * 5000, "/"), mine, sessions, is_secure=False)
    assert name == b"set-cookie"
    assert len(value) < 4096
    for strange in ("W1tb" * 3000, "x", "e30", "bnVsbA"):
        signed = f"{strange}.{sessions.signed(mine, strange)}"
        for each in (strange, f"{strange}.", signed):
            cookie = f"penstock_told={each}".encode()
            assert read_message([(b"cookie", cookie)], mine, sessions) is None
    cookie = value.partition(b";")[0]
    # What another program of this host, or another session, was told is not ours to show.
    assert read_message([(b"cookie", cookie)], other, sessions) is None
    assert read_message([(b"cookie", cookie.rpartition(b".")[0])], mine, sessions) is None
    said = read_message([(b"cookie", cookie)], mine, sessions)
    assert said is not None
    assert set(said.told) == {"\u6f22"}


def test_the_last_parameter_of_every_page_may_have_slashes() -> None:
    for page in SITE.pages:
        assert not page.path.endswith("}") or page.path.endswith(":path}"), page.path


def test_a_stream_is_not_asked_for_its_head() -> None:
    assert _Browser().ask("/live?page=/see/it", method="HEAD").status == 405


def test_who_does_not_read_a_stream_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.console.http._UNREAD_SECONDS_MAX", 0.05)

    async def events() -> AsyncIterator[bytes]:
        while True:
            yield b"event"

    async def receive() -> MutableMapping[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError("nobody says anything")

    sent = 0

    async def send(_: MutableMapping[str, Any]) -> None:
        nonlocal sent
        sent += 1
        if sent > 3:
            await asyncio.Event().wait()

    async def main() -> None:
        async with asyncio.timeout(20):
            await send_events(events(), receive, send, first=b"hello")

    asyncio.run(main())
    assert sent == 4


@pytest.mark.parametrize("sent_before", [0, 1, 2])
def test_a_stream_that_cannot_be_sent_gives_its_place_back(sent_before: int) -> None:
    browser = _Browser()
    counts: list[int] = []

    async def receive() -> MutableMapping[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError("nobody says anything")

    async def send(_: MutableMapping[str, Any]) -> None:
        counts.append(browser.live.count)
        if len(counts) > sent_before:
            raise ConnectionResetError

    async def main() -> None:
        scope = {
            "type": "http",
            "method": "GET",
            "path": "/live",
            "query_string": b"page=/watch/it",
            "headers": [(b"host", _HOST.encode())],
            "client": ("127.0.0.1", 1),
        }
        async with asyncio.timeout(60):
            await browser.app(scope, receive, send)

    asyncio.run(main())
    assert set(counts) == {1}
    assert browser.live.count == 0
