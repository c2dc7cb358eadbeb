"""The console over HTTP: pages, forms, static files and the event stream; the API's paths go to
the API.

The checks, in order: the host (403); the session, and whether it is over (the sign-in page);
the path (404); for a form, that it is from our page and that its sender is an operator (403).
Then the page or the action runs within its time limit. Every failure is a page with a sentence.

The header of every page has the number of open alerts: one short query for all viewers, at most
every five seconds, by an index of open alerts alone. While the database is away the last count
stays.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, Protocol, TypeVar
from urllib.parse import parse_qs, quote, unquote, urlencode

from penstock.console import http
from penstock.console.http import (
    JSON,
    Header,
    HttpResponse,
    Send,
    clear_message,
    for_script,
    is_ours,
    read_message,
    redirect,
    send_answer,
    send_events,
    set_cookie,
    set_message,
)
from penstock.console.live import HELLO, LivePages, TooManyWatchers
from penstock.console.pages.base import (
    ActionResult,
    ConsolePage,
    ConsoleSite,
    FormAction,
    PageNotFound,
    PageRequest,
)
from penstock.console.renderer import Renderer, number
from penstock.console.sessions import (
    COOKIE,
    SESSION_SECONDS,
    ConsoleRole,
    ConsoleSession,
    ConsoleSessions,
)
from penstock.dispatcher.api.endpoints import pattern_of
from penstock.dispatcher.api.requests import (
    Receive,
    RequestAdmission,
    be_known,
    is_asked_as,
    is_of_this_machine,
)
from penstock.dispatcher.database.pool import Database
from penstock.dispatcher.views.status import AlertViews
from penstock.kernel.clock import Clock
from penstock.kernel.errors import DatabaseUnavailable, PenstockError
from penstock.protocol.problem import Problem

ALERTS_BLOCK: Final = "open-alerts"
"""What the element in the header is called in the stream of a page."""
_LOOK_SECONDS: Final = 5.0
_MANY: Final = 1000


class AlertCount(Protocol):
    """What the header of a page says of alerts."""

    @property
    def shown(self) -> str:
        """The count as a text; none are nothing."""
        ...

    async def look(self) -> None:
        """Bring it up to date, if it is not."""
        ...


class NoAlertCount:
    """Of a console that shows none."""

    shown = ""

    async def look(self) -> None:
        """There is nothing to ask."""


class OpenAlertCount:
    """The count, as it was last seen."""

    def __init__(self, database: Database, *, clock: Clock) -> None:
        self._views = AlertViews(database)
        self._clock = clock
        self._asked_at = -math.inf
        self._count = 0

    @property
    def shown(self) -> str:
        """The count as a text; none are nothing."""
        return number(self._count, most=_MANY) if self._count else ""

    async def look(self) -> None:
        """Ask, unless somebody has a moment ago."""
        now = self._clock.monotonic()
        if now - self._asked_at < _LOOK_SECONDS:
            return
        # First, so that those who come meanwhile do not ask as well.
        self._asked_at = now
        try:
            self._count = await self._views.open_count()
        except DatabaseUnavailable:
            return


Scope = MutableMapping[str, Any]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_log = logging.getLogger(__name__)

_API: Final = (
    "/v1/",
    "/iceberg/",
    "/internal/",
    "/metrics",
    "/healthz",
    "/readyz",
    "/openapi.json",
)
_PAGE_SECONDS_MAX: Final = 15.0
_QUERY: Final = "/query/run"
_OF_QUERY: Final = (b"host", b"content-type", b"content-length", b"transfer-encoding")
_WRONG_SECONDS: Final = 1.0
"""How long a wrong token takes, so that guessing is slow."""
DATABASE_AWAY: Final = "The database does not answer."
_A_YEAR: Final = b"public, max-age=31536000, immutable"
_ASK_AGAIN: Final = b"no-cache"


@dataclass(frozen=True, slots=True)
class _Visit:
    """A request, and who makes it."""

    path: str
    query: bytes
    headers: list[Header]
    session: ConsoleSession
    is_new: bool
    """Whether the session has to be told to the browser."""
    address: str = ""
    """Where the request comes from."""

    @property
    def here(self) -> str:
        """The page that is asked for."""
        path = quote(self.path, safe="/")
        return f"{path}?{self.query.decode('utf-8', 'replace')}" if self.query else path


class SignInAudit(Protocol):
    """Where is told who was refused."""

    def note(self, *, what: str, outcome: str, address: str, reason: str) -> None:
        """Remember it; returns at once."""
        ...


class _Served(Protocol):
    @property
    def audit(self) -> SignInAudit: ...


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
        site: ConsoleSite[Served],
        *,
        sessions: ConsoleSessions,
        live: LivePages,
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
        self._rendering = Renderer()
        limits = http.FORM_LIMITS
        self._known = RequestAdmission(limits, requests_max=limits.requests_max)
        self._anonymous = RequestAdmission(limits, requests_max=limits.anonymous_requests_max)
        self._alerts = alerts or NoAlertCount()
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
            title = "Internal error of the console; see the dispatcher's log."
            answer = self._plain(title, status=500)
        if answer is not None:
            await send_answer(send, answer, is_head=scope["method"] == "HEAD")

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> HttpResponse | None:
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
        if isinstance(visit, HttpResponse):
            return visit
        if visit is not None:
            be_known(scope)
        if method == "POST":
            return await self._sent(visit, scope, receive, send, address=address)
        if visit is None:
            return self._sign_in(to=path if path != "/sign-in" else "/")
        if path == "/live":
            if method == "HEAD":
                return self._plain("A stream is read with GET.", status=405)
            return await self._stream(visit, receive, send)
        return await self._page(visit)

    def _misnamed(self, headers: list[Header]) -> HttpResponse | None:
        """Why the name that was asked for is none of ours; None if it is."""
        if self._sessions.is_open and not is_of_this_machine(headers):
            title = "Without a token the console serves only 127.0.0.1 and localhost."
            hint = "Set PENSTOCK_API_TOKEN to use another name."
            return self._plain(title, hint=hint, status=403)
        if self._hosts is not None and not is_asked_as(headers, self._hosts):
            title = "The console does not serve this host name."
            hint = "Set PENSTOCK_HOSTS of the dispatcher to the names that browsers use for it."
            return self._plain(title, hint=hint, status=403)
        return None

    async def _visit(
        self, path: str, query: bytes, headers: list[Header], *, address: str
    ) -> _Visit | HttpResponse | None:
        """Who asks; None for somebody who has to sign in, and an answer if that is not known."""
        session = self._sessions.read(http.cookie_of(headers, COOKIE))
        if path == "/sign-in" or (session is None and not self._sessions.is_open):
            return None
        if session is None:
            session = self._sessions.begin(ConsoleRole.OPERATOR)
            return _Visit(path, query, headers, session, is_new=True, address=address)
        visit = _Visit(path, query, headers, session, is_new=False, address=address)
        try:
            async with asyncio.timeout(_PAGE_SECONDS_MAX):
                is_over = session in await self._sessions.over([session])
        except (DatabaseUnavailable, TimeoutError):
            return self._problem(visit, self._away, status=503)
        return None if is_over else visit

    async def _page(self, visit: _Visit) -> HttpResponse:
        page, asked = self._found(visit)
        if page is None:
            return self._problem(visit, "There is no such page.", status=404)
        try:
            async with asyncio.timeout(_PAGE_SECONDS_MAX):
                said = await page.load(self._parts, asked)
                await self._alerts.look()
        except (DatabaseUnavailable, TimeoutError):
            return self._problem(visit, self._away, status=503)
        if isinstance(said, PageNotFound):
            return self._problem(visit, said.what, hint=said.hint, status=404)
        before = read_message(visit.headers, visit.session, self._sessions)
        whole = {**self._given(visit, page, said), "told": before}
        answer = HttpResponse(self._rendering.page(page.name, whole))
        if before is not None:
            answer.headers.append(clear_message(is_secure=_is_secure(visit.headers)))
        return self._with_session(answer, visit)

    def _found(self, visit: _Visit) -> tuple[ConsolePage[Served] | None, PageRequest]:
        for pattern, page in self._pages:
            if (found := pattern.fullmatch(visit.path)) is not None:
                query = http.query(visit.query, page.query)
                return page, PageRequest(found.groupdict(), query, visit.session)
        return None, PageRequest({}, {}, visit.session)

    def _given(
        self, visit: _Visit, page: ConsolePage[Served], said: Mapping[str, Any]
    ) -> dict[str, Any]:
        """What the template of a page is given."""
        whole = self._whole(visit, page)
        assert whole.keys().isdisjoint(said), "a page says what every page is given"
        return {**whole, **said}

    def _whole(self, visit: _Visit, page: ConsolePage[Served] | None) -> dict[str, Any]:
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

    async def _stream(self, visit: _Visit, receive: Receive, send: Send) -> HttpResponse | None:
        to = parse_qs(visit.query.decode("utf-8", "replace")).get("page", [""])[0]
        path, _, query = to.partition("?")
        seen = replace(visit, path=unquote(path), query=query.encode())
        page, asked = self._found(seen)
        if page is None or not page.live:
            return self._plain("There is no such page.", status=404)

        async def blocks() -> Mapping[str, str]:
            said = await page.load(self._parts, asked)
            if isinstance(said, PageNotFound):
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
        except TooManyWatchers:
            return self._plain("Too many viewers; try again.", status=503)
        async with aclosing(events):
            await send_events(events, receive, send, first=HELLO)
        return None

    async def _sent(
        self, visit: _Visit | None, scope: Scope, receive: Receive, send: Send, *, address: str
    ) -> HttpResponse | None:
        headers: list[Header] = list(scope["headers"])
        if scope["path"] == _QUERY and self._site.query:
            return await self._query(visit, scope, receive, send)
        posted = await self._posted(visit, scope["path"], headers, receive, address=address)
        is_script = http.header(headers, b"accept") == JSON
        return for_script(posted) if posted is not None and is_script else posted

    async def _query(
        self, visit: _Visit | None, scope: Scope, receive: Receive, send: Send
    ) -> HttpResponse | None:
        """Hand a query to the API, with the rights of the session: its answer may go on for long.

        A script of ours brings the token of forms in a header, which no other site can add.
        """
        headers: list[Header] = list(scope["headers"])
        if visit is None:
            return self._plain("Sign in again: the session has ended.", status=401)
        token = http.header(headers, b"x-form-token")
        if not http.is_of_our_page(headers) or not self._sessions.is_from_here(
            visit.session, token
        ):
            return self._plain("Reload the page and run the query again.", status=403)
        kept = [each for each in headers if each[0] in _OF_QUERY]
        shown = self._sessions.token_of(visit.session)
        if shown:
            kept.append((b"authorization", f"Bearer {shown}".encode()))
        handed = {**scope, "path": self._site.query, "query_string": b"", "headers": kept}
        await self._api(handed, receive, send)
        return None

    async def _posted(
        self,
        visit: _Visit | None,
        path: str,
        headers: list[Header],
        receive: Receive,
        *,
        address: str,
    ) -> HttpResponse | None:
        admission = self._known if visit is not None else self._anonymous
        fields = await http.form(headers, receive, admission)
        if isinstance(fields, Problem):
            return self._plain(fields.title, status=fields.status)
        if fields is None:
            return None
        if not http.is_of_our_page(headers):
            return self._plain("Cross-site form submission refused.", status=403)
        if path == "/sign-in":
            return await self._signed_in(fields, headers, address=address)
        if visit is None:
            return self._sign_in(to="/")
        if not self._sessions.is_from_here(visit.session, fields.get("form_token", "")):
            hint = "Reload the page and submit the form again."
            return self._problem(visit, "This form has expired.", hint=hint, status=403)
        if path == "/sign-out":
            return await self._signed_out(visit)
        return await self._act(visit, fields)

    async def _act(self, visit: _Visit, fields: Mapping[str, str]) -> HttpResponse:
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
            what = read_only if self._sessions.is_read_only else "This session is read-only."
            return self._problem(visit, what, status=403)
        given = {name: value for name, value in fields.items() if name in action.fields}
        to = fields.get("to", "/")
        done = await self._done(action, PageRequest(found.groupdict(), given, visit.session), to)
        answer = redirect(done.to if is_ours(done.to) else "/")
        answer.headers.append(
            set_message(done, visit.session, self._sessions, is_secure=_is_secure(visit.headers))
        )
        return self._with_session(answer, visit)

    async def _done(self, action: FormAction[Served], asked: PageRequest, to: str) -> ActionResult:
        try:
            async with asyncio.timeout(_PAGE_SECONDS_MAX):
                return await action.act(self._parts, asked, to)
        except TimeoutError:
            return ActionResult("The request timed out; check its effect.", to, is_well=False)
        except PenstockError as error:
            return ActionResult(f"{error.message} {error.hint}".strip(), to, is_well=False)

    async def _signed_in(
        self, fields: Mapping[str, str], headers: list[Header], *, address: str
    ) -> HttpResponse:
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

    async def _signed_out(self, visit: _Visit) -> HttpResponse:
        try:
            async with asyncio.timeout(_PAGE_SECONDS_MAX):
                await self._sessions.end(visit.session)
        except (DatabaseUnavailable, TimeoutError):
            what = f"Sign-out failed. {self._away}"
            return self._problem(visit, what, hint="Try again in a moment.", status=503)
        answer = redirect("/")
        gone = set_cookie(COOKIE, "", seconds=0, is_secure=_is_secure(visit.headers))
        answer.headers.append(gone)
        return answer

    def _sign_in(self, *, to: str, wrong: bool = False) -> HttpResponse:
        said = {"to": to if is_ours(to) else "/", "wrong": wrong, "version": self._version}
        return HttpResponse(self._rendering.page("sign_in", said), status=403 if wrong else 401)

    def _problem(self, visit: _Visit, what: str, *, status: int, hint: str = "") -> HttpResponse:
        said = {**self._whole(visit, None), "what": what, "hint": hint, "status": status}
        return self._with_session(
            HttpResponse(self._rendering.page("problem", said), status), visit
        )

    def _plain(self, what: str, *, status: int, hint: str = "") -> HttpResponse:
        return HttpResponse(f"{what}\n{hint}".strip(), status, "text/plain; charset=utf-8")

    def _file(self, path: str, query: bytes, headers: list[Header]) -> HttpResponse:
        file = self._rendering.files.get(path.removeprefix("/static/"))
        if file is None:
            return self._plain("There is no such file.", status=404)
        tag = f'"{file.digest[:32]}"'
        # Modules import each other without a digest in their names, and are asked for again.
        is_named = query == f"v={file.digest[:12]}".encode()
        kept = [(b"etag", tag.encode()), (b"cache-control", _A_YEAR if is_named else _ASK_AGAIN)]
        if http.header(headers, b"if-none-match") == tag:
            return HttpResponse(status=304, kind=file.kind, headers=kept)
        return HttpResponse(file.content, kind=file.kind, headers=kept)

    def _with_session(self, answer: HttpResponse, visit: _Visit) -> HttpResponse:
        if visit.is_new:
            answer.headers.append(self._session_cookie(visit.session, visit.headers))
        return answer

    def _session_cookie(self, session: ConsoleSession, headers: list[Header]) -> Header:
        value = self._sessions.written(session)
        return set_cookie(COOKIE, value, seconds=SESSION_SECONDS, is_secure=_is_secure(headers))


def _is_secure(headers: list[Header]) -> bool:
    return http.header(headers, b"x-forwarded-proto") == "https"
