"""The console over HTTP: pages, forms, files, the stream. What is the API's goes to the API.

In this order: the host (403), the session, whether it is over included (the page to sign in), the
path (404), of a form that it is from here and that its sender may steer (403), then the page or the
action within its time. Whatever goes wrong is a page with a sentence.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, Protocol, TypeVar
from urllib.parse import parse_qs, quote, unquote, urlencode

from penstock.console import asking
from penstock.console.alerting import BLOCK as ALERTS_BLOCK
from penstock.console.alerting import AlertCount, NoCount
from penstock.console.answering import (
    JSON,
    Answer,
    Header,
    Send,
    for_script,
    forget_told,
    is_ours,
    redirect,
    send_answer,
    send_events,
    set_cookie,
    tell,
    told,
)
from penstock.console.live import HELLO, Full, Live
from penstock.console.pages.base import Action, Asked, Done, Missing, Page, Site
from penstock.console.rendering import Rendering
from penstock.console.sessions import COOKIE, SESSION_SECONDS, Role, Session, Sessions
from penstock.dispatcher.api.endpoints import pattern_of
from penstock.dispatcher.api.requests import (
    Admission,
    Receive,
    be_known,
    is_asked_as,
    is_of_this_machine,
)
from penstock.dispatcher.wire.problem import Problem
from penstock.kernel.clock import Clock
from penstock.kernel.errors import DatabaseUnavailable, PenstockError

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_log = logging.getLogger(__name__)

_API: Final = ("/v1/", "/internal/", "/metrics", "/healthz", "/readyz", "/openapi.json")
_PAGE_SECONDS_MAX: Final = 15.0
_WRONG_SECONDS: Final = 1.0
"""How long a wrong token takes, so that guessing is slow."""
DATABASE_AWAY: Final = "The database does not answer now."
_A_YEAR: Final = b"public, max-age=31536000, immutable"
_ASK_AGAIN: Final = b"no-cache"


@dataclass(frozen=True, slots=True)
class _Visit:
    """A request, and who makes it."""

    path: str
    query: bytes
    headers: list[Header]
    session: Session
    is_new: bool
    """Whether the session has to be told to the browser."""
    address: str = ""
    """Where the request comes from."""

    @property
    def here(self) -> str:
        """The page that is asked for."""
        path = quote(self.path, safe="/")
        return f"{path}?{self.query.decode('utf-8', 'replace')}" if self.query else path


class Audit(Protocol):
    """Where is told who was refused."""

    def note(self, *, what: str, outcome: str, address: str, reason: str) -> None:
        """Remember it; returns at once."""
        ...


class _Served(Protocol):
    @property
    def audit(self) -> Audit: ...


Served = TypeVar("Served", bound=_Served)
"""What the pages ask: the parts of a dispatcher, or a queue alone."""


class Console(Generic[Served]):
    """The application of the public listener: the console, and the API beside it.

    `hosts` are the names, in lower case, that browsers may ask for; None is any. A page whose own
    name leads here since would be of the same site as this server. `away` is said when what the
    pages ask does not answer in time.
    """

    def __init__(
        self,
        api: App,
        parts: Served,
        site: Site[Served],
        *,
        sessions: Sessions,
        live: Live,
        clock: Clock,
        version: str = "",
        alerts: AlertCount | None = None,
        hosts: Collection[str] | None = None,
        away: str = DATABASE_AWAY,
    ) -> None:
        self._api = api
        self._away = away
        self._parts = parts
        self._site = site
        self._sessions = sessions
        self._live = live
        self._clock = clock
        self._version = version
        self._hosts = hosts
        self._rendering = Rendering()
        limits = asking.FORM_LIMITS
        self._known = Admission(limits, requests_max=limits.requests_max)
        self._anonymous = Admission(limits, requests_max=limits.anonymous_requests_max)
        self._alerts = alerts or NoCount()
        self._pages = [(pattern_of(each.path), each) for each in site.pages]
        self._actions = [(pattern_of(each.path), each) for each in site.actions]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(_API):
            await self._api(scope, receive, send)
            return
        try:
            answer = await self._answer(scope, receive, send)
        except Exception:  # noqa: BLE001 - every error has an answer
            _log.exception("%s %r failed in the console", scope["method"], scope["path"])
            title = "The console has made a mistake; the dispatcher's log says which."
            answer = self._plain(title, status=500)
        if answer is not None:
            await send_answer(send, answer, is_head=scope["method"] == "HEAD")

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> Answer | None:
        headers: list[Header] = list(scope["headers"])
        path, method = scope["path"], scope["method"]
        if path.startswith("/static/"):
            return self._file(path, scope["query_string"], headers)
        if (refused := self._misnamed(headers)) is not None:
            return refused
        if method not in ("GET", "HEAD", "POST"):
            return self._plain("Pages are read with GET.", status=405)
        address = (scope.get("client") or ("",))[0]
        visit = await self._visit(path, scope["query_string"], headers, address=address)
        if isinstance(visit, Answer):
            return visit
        if visit is not None:
            be_known(scope)
        if method == "POST":
            posted = await self._posted(visit, path, headers, receive, address=address)
            is_script = asking.header(headers, b"accept") == JSON
            return for_script(posted) if posted is not None and is_script else posted
        if visit is None:
            return self._sign_in(to=path if path != "/sign-in" else "/")
        if path == "/live":
            if method == "HEAD":
                return self._plain("A stream is read with GET.", status=405)
            return await self._stream(visit, receive, send)
        return await self._page(visit)

    def _misnamed(self, headers: list[Header]) -> Answer | None:
        """Why the name that was asked for is none of ours; None if it is."""
        if self._sessions.is_open and not is_of_this_machine(headers):
            title = "Without a token the console answers to 127.0.0.1 and localhost alone."
            hint = "Set PENSTOCK_API_TOKEN to use another name."
            return self._plain(title, hint=hint, status=403)
        if self._hosts is not None and not is_asked_as(headers, self._hosts):
            title = "The console does not answer to this name."
            hint = "Set PENSTOCK_HOSTS of the dispatcher to the names that browsers use for it."
            return self._plain(title, hint=hint, status=403)
        return None

    async def _visit(
        self, path: str, query: bytes, headers: list[Header], *, address: str
    ) -> _Visit | Answer | None:
        """Who asks; None for somebody who has to sign in, and an answer if that is not known."""
        session = self._sessions.read(asking.cookie(headers, COOKIE))
        if path == "/sign-in" or (session is None and not self._sessions.is_open):
            return None
        if session is None:
            session = self._sessions.begin(Role.OPERATOR)
            return _Visit(path, query, headers, session, is_new=True, address=address)
        visit = _Visit(path, query, headers, session, is_new=False, address=address)
        try:
            async with asyncio.timeout(_PAGE_SECONDS_MAX):
                is_over = session in await self._sessions.over([session])
        except (DatabaseUnavailable, TimeoutError):
            return self._problem(visit, self._away, status=503)
        return None if is_over else visit

    async def _page(self, visit: _Visit) -> Answer:
        page, asked = self._found(visit)
        if page is None:
            return self._problem(visit, "There is no such page.", status=404)
        try:
            async with asyncio.timeout(_PAGE_SECONDS_MAX):
                said = await page.load(self._parts, asked)
                await self._alerts.look()
        except (DatabaseUnavailable, TimeoutError):
            return self._problem(visit, self._away, status=503)
        if isinstance(said, Missing):
            return self._problem(visit, said.what, hint=said.hint, status=404)
        before = told(visit.headers, visit.session, self._sessions)
        whole = {**self._given(visit, page, said), "told": before}
        answer = Answer(self._rendering.page(page.name, whole))
        if before is not None:
            answer.headers.append(forget_told(is_secure=_is_secure(visit.headers)))
        return self._with_session(answer, visit)

    def _found(self, visit: _Visit) -> tuple[Page[Served] | None, Asked]:
        for pattern, page in self._pages:
            if (found := pattern.fullmatch(visit.path)) is not None:
                query = asking.query(visit.query, page.query)
                return page, Asked(found.groupdict(), query, visit.session)
        return None, Asked({}, {}, visit.session)

    def _given(self, visit: _Visit, page: Page[Served], said: Mapping[str, Any]) -> dict[str, Any]:
        """What the template of a page is given."""
        whole = self._whole(visit, page)
        assert whole.keys().isdisjoint(said), "a page says what every page is given"
        return {**whole, **said}

    def _whole(self, visit: _Visit, page: Page[Served] | None) -> dict[str, Any]:
        """What every template is given."""
        return {
            "version": self._version,
            "sections": self._site.sections,
            "section": (page.section or page.name) if page is not None else "",
            "session": visit.session,
            "is_open": self._sessions.is_open,
            "is_read_only": self._sessions.is_read_only,
            "form_token": self._sessions.form_token(visit.session),
            "here": visit.here,
            "is_live": page is not None and bool(page.live),
            "told": None,
            "open_alerts": self._alerts.shown,
        }

    async def _stream(self, visit: _Visit, receive: Receive, send: Send) -> Answer | None:
        to = parse_qs(visit.query.decode("utf-8", "replace")).get("page", [""])[0]
        path, _, query = to.partition("?")
        seen = replace(visit, path=unquote(path), query=query.encode())
        page, asked = self._found(seen)
        if page is None or not page.live:
            return self._plain("There is no such page.", status=404)

        async def blocks() -> Mapping[str, str]:
            said = await page.load(self._parts, asked)
            if isinstance(said, Missing):
                return {"trouble": said.what}
            # Shared by all of a role: a form keeps the token that its page came with.
            whole = {**self._given(seen, page, said), "form_token": ""}
            await self._alerts.look()
            shown = {name: self._rendering.block(page.name, name, whole) for name in page.live}
            return {**shown, ALERTS_BLOCK: self._alerts.shown}

        try:
            # What the page does not understand makes no watch of its own.
            known = urlencode(sorted(asked.query.items()))
            events = self._live.stream(
                f"{visit.session.role} {seen.path}?{known}",
                blocks,
                session=visit.session,
                # Who brings no session would be somebody else each time.
                counted_as=visit.address if visit.is_new else visit.session.number,
            )
        except Full:
            return self._plain("As many look as may; try again.", status=503)
        async with aclosing(events):
            await send_events(events, receive, send, first=HELLO)
        return None

    async def _posted(
        self,
        visit: _Visit | None,
        path: str,
        headers: list[Header],
        receive: Receive,
        *,
        address: str,
    ) -> Answer | None:
        admission = self._known if visit is not None else self._anonymous
        fields = await asking.form(headers, receive, admission)
        if isinstance(fields, Problem):
            return self._plain(fields.title, status=fields.status)
        if fields is None:
            return None
        if not asking.is_of_our_page(headers):
            return self._plain("Forms of other sites are not taken.", status=403)
        if path == "/sign-in":
            return await self._signed_in(fields, headers, address=address)
        if visit is None:
            return self._sign_in(to="/")
        if not self._sessions.is_from_here(visit.session, fields.get("form_token", "")):
            hint = "Load the page again, and send the form once more."
            return self._problem(visit, "This form is too old.", hint=hint, status=403)
        if path == "/sign-out":
            return await self._signed_out(visit)
        return await self._act(visit, fields)

    async def _act(self, visit: _Visit, fields: Mapping[str, str]) -> Answer:
        matched = [
            (found, each)
            for pattern, each in self._actions
            if (found := pattern.fullmatch(visit.path)) is not None
        ]
        if not matched:
            return self._problem(visit, "There is no such action.", status=404)
        found, action = matched[0]
        if not visit.session.may_steer:
            read_only = "This console is read-only."
            what = read_only if self._sessions.is_read_only else "You may look, and not steer."
            return self._problem(visit, what, status=403)
        given = {name: value for name, value in fields.items() if name in action.fields}
        to = fields.get("to", "/")
        done = await self._done(action, Asked(found.groupdict(), given, visit.session), to)
        answer = redirect(done.to if is_ours(done.to) else "/")
        answer.headers.append(
            tell(done, visit.session, self._sessions, is_secure=_is_secure(visit.headers))
        )
        return self._with_session(answer, visit)

    async def _done(self, action: Action[Served], asked: Asked, to: str) -> Done:
        try:
            async with asyncio.timeout(_PAGE_SECONDS_MAX):
                return await action.act(self._parts, asked, to)
        except TimeoutError:
            return Done("It took too long; look whether it was done.", to, is_well=False)
        except PenstockError as error:
            return Done(f"{error.message} {error.hint}".strip(), to, is_well=False)

    async def _signed_in(
        self, fields: Mapping[str, str], headers: list[Header], *, address: str
    ) -> Answer:
        role = self._sessions.role_of(fields.get("token", "").strip())
        to = fields.get("to", "/")
        if role is None:
            self._parts.audit.note(
                what="POST /sign-in", outcome="refused", address=address, reason="wrong api token"
            )
            await self._clock.sleep(_WRONG_SECONDS)
            return self._sign_in(to=to, wrong=True)
        answer = redirect(to if is_ours(to) else "/")
        answer.headers.append(self._session_cookie(self._sessions.begin(role), headers))
        return answer

    async def _signed_out(self, visit: _Visit) -> Answer:
        try:
            async with asyncio.timeout(_PAGE_SECONDS_MAX):
                await self._sessions.end(visit.session)
        except (DatabaseUnavailable, TimeoutError):
            what = f"You are not signed out. {self._away}"
            return self._problem(visit, what, hint="Try again in a moment.", status=503)
        answer = redirect("/")
        gone = set_cookie(COOKIE, "", seconds=0, is_secure=_is_secure(visit.headers))
        answer.headers.append(gone)
        return answer

    def _sign_in(self, *, to: str, wrong: bool = False) -> Answer:
        said = {"to": to if is_ours(to) else "/", "wrong": wrong, "version": self._version}
        return Answer(self._rendering.page("sign_in", said), status=403 if wrong else 401)

    def _problem(self, visit: _Visit, what: str, *, status: int, hint: str = "") -> Answer:
        said = {**self._whole(visit, None), "what": what, "hint": hint, "status": status}
        return self._with_session(Answer(self._rendering.page("problem", said), status), visit)

    def _plain(self, what: str, *, status: int, hint: str = "") -> Answer:
        return Answer(f"{what}\n{hint}".strip(), status, "text/plain; charset=utf-8")

    def _file(self, path: str, query: bytes, headers: list[Header]) -> Answer:
        file = self._rendering.files.get(path.removeprefix("/static/"))
        if file is None:
            return self._plain("There is no such file.", status=404)
        tag = f'"{file.digest[:32]}"'
        # Modules import each other without a digest in their names, and are asked for again.
        is_named = query == f"v={file.digest[:12]}".encode()
        kept = [(b"etag", tag.encode()), (b"cache-control", _A_YEAR if is_named else _ASK_AGAIN)]
        if asking.header(headers, b"if-none-match") == tag:
            return Answer(status=304, kind=file.kind, headers=kept)
        return Answer(file.content, kind=file.kind, headers=kept)

    def _with_session(self, answer: Answer, visit: _Visit) -> Answer:
        if visit.is_new:
            answer.headers.append(self._session_cookie(visit.session, visit.headers))
        return answer

    def _session_cookie(self, session: Session, headers: list[Header]) -> Header:
        value = self._sessions.written(session)
        return set_cookie(COOKIE, value, seconds=SESSION_SECONDS, is_secure=_is_secure(headers))


def _is_secure(headers: list[Header]) -> bool:
    return asking.header(headers, b"x-forwarded-proto") == "https"
