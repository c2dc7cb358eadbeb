"""What a page is: a path, a function that loads its data from the dispatcher, and a template.

A page has a template of its name. The blocks of the template that are named in `live` are
rendered again about once a second while somebody views the page, and what has changed is sent;
each stands in an element with the attribute `data-live` and the name of the block. So `load` is
called often, and must be cheap: a few short queries, each with a bound. It changes nothing.

An action is what a form does. It gets the fields of the form, calls the same handler as the API
does, and returns its result as a sentence; the browser is redirected to a page that shows it.

Forms as API calls: parses fields into a request of the API, and turns its answer into a
sentence.

An action parses the fields with `parse_form`, calls the handler of the API with `call_api`, and
returns that result. A field that is wrong raises `InvalidInput` with one sentence, in the words
of the form, which the console shows; nothing was done then. A refusal of the dispatcher is its
own sentence, with the next step. So an action needs no branches for failures:

    async def _pause(parts: Parts, asked: PageRequest, to: str) -> ActionResult:
        ask = parse_form(PauseAsk, asked.query, names={"reason": "The reason"})
        params = NameParams(name=asked.path["name"])
        return await call_api(parts, pause_job, to, ask=ask, params=params, told="It is paused.")

Nothing is kept here. A form that is sent twice calls the API twice, which is idempotent.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Final, Generic, TypeVar

import msgspec

from penstock.console.renderer import number
from penstock.console.sessions import ConsoleSession
from penstock.dispatcher.api.context import ApiContext
from penstock.dispatcher.api.endpoints import ApiCall, Handler, HttpReply
from penstock.dispatcher.api.problems import not_as_declared, problem_of
from penstock.kernel.errors import InvalidInput, PenstockError
from penstock.protocol.base import Answer, Ask
from penstock.protocol.problem import Problem
from penstock.protocol.work import ResultsAnswer

Given_contra = TypeVar("Given_contra", contravariant=True)
"""What a page asks: the parts of a dispatcher, or as much of them as it needs."""


@dataclass(frozen=True, slots=True)
class PageRequest:
    """A request for a page, or a form."""

    path: Mapping[str, str]
    """The parameters of the path, unescaped."""
    query: Mapping[str, str]
    """What stands in the query, or in the fields of a form."""
    session: ConsoleSession


@dataclass(frozen=True, slots=True)
class PageNotFound:
    """There is no such thing: a sentence about what is not there, and what to do."""

    what: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class ActionResult:
    """What became of an action: a sentence, and where to look at it."""

    told: str
    to: str
    is_well: bool = True


_RESERVED: Final = frozenset({"open", "error", "message", "trouble", "heartbeat"})

Loaded = Mapping[str, Any] | PageNotFound
"""What the template of a page is given."""


@dataclass(frozen=True, slots=True)
class ConsolePage(Generic[Given_contra]):
    """One page. A path has parameters as `{name}`; `{name:path}` is one that may have slashes.

    Where a parameter is the last, it is of that kind: what has slashes in it is then told to be no
    job, or no task, rather than no page.
    """

    path: str
    name: str
    """Its template is `{name}.html`; the navigation marks it by this, or by `section`."""
    load: Callable[[Given_contra, PageRequest], Awaitable[Loaded]]
    _: KW_ONLY
    live: tuple[str, ...] = ()
    """The blocks of the template that are kept up to date."""
    section: str = ""
    query: tuple[str, ...] = ()
    """The parameters that it understands; others are left out."""

    def __post_init__(self) -> None:
        # An event of such a name is the browser's own, or the stream's.
        assert not _RESERVED.intersection(self.live), "a live block needs another name"


@dataclass(frozen=True, slots=True)
class FormAction(Generic[Given_contra]):
    """What the forms of a path do; for operators only."""

    path: str
    act: Callable[[Given_contra, PageRequest, str], Awaitable[ActionResult]]
    """The last is the page that the form says to go to afterwards."""
    fields: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ConsoleSite(Generic[Given_contra]):
    """All pages and actions."""

    pages: tuple[ConsolePage[Given_contra], ...]
    actions: tuple[FormAction[Given_contra], ...] = ()
    sections: Mapping[str, str] = field(default_factory=dict)
    """The navigation: names, and the paths of their pages."""
    query: str = ""
    """The path of the API that queries from the console are handed to; empty if there is none."""


AnAsk = TypeVar("AnAsk", bound=Ask)
SuccessMessage = str | Callable[[Any], str]
"""What is said of a success: a sentence, or what makes one of the answer."""

CONSOLE: Final = "the console"
"""Where the calls of forms come from, as the audit has it."""
_ID_MAX: Final = 2**63 - 1


def parse_form(
    kind: type[AnAsk],
    fields: Mapping[str, object],
    *,
    names: Mapping[str, str] | None = None,
) -> AnAsk:
    """The fields of a form as a call of the API has them, checked as the API checks them.

    Texts become numbers where a number is wanted, and what is left empty is left out. `names` says
    what the form calls its fields, for the sentence about a wrong one.
    """
    said = {name: _stripped(value) for name, value in fields.items()}
    given = {name: value for name, value in said.items() if value not in ("", None)}
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        problem = not_as_declared(error, kind=kind, place="The form")
        words = problem.title.removeprefix(f"`{problem.field}` ")
        # Of a list, the element is not what the form calls a field.
        shown = (names or {}).get(problem.field.partition("[")[0], problem.field)
        raise InvalidInput(f"{shown[:1].upper()}{shown[1:]} {words}") from None


def split_lines(text: str) -> list[str]:
    """The lines of a field that takes several values, without those that are empty."""
    return [each.strip() for each in text.splitlines() if each.strip()]


def parse_json_object(text: str, *, name: str) -> dict[str, Any] | None:
    """The JSON object that somebody has typed; None if nothing was."""
    if not text.strip():
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        place = f" on line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise InvalidInput(
            f"{name} is not JSON{place}.", hint='Write an object, such as {"rows": 12}.'
        ) from None
    if not isinstance(found, dict):
        raise InvalidInput(
            f"{name} must be a JSON object.", hint='Write an object, such as {"rows": 12}.'
        )
    return found


def parse_id(text: str) -> int:
    """A number of a task, a backfill or the like; 0, which none has, for what is no number."""
    if not text.isascii() or not text.isdecimal() or len(text) > 19:
        return 0
    return int(text) if int(text) <= _ID_MAX else 0


async def call_api(
    parts: ApiContext,
    handler: Handler,
    to: str,
    *,
    told: SuccessMessage,
    ask: Ask | None = None,
    params: Ask | None = None,
) -> ActionResult:
    """Call a handler of the API, and say what became of it. `to` is the page that says so."""
    try:
        answer = await handler(parts, ApiCall(ask=ask, params=params, address=CONSOLE))
    except (PenstockError, TimeoutError) as error:
        problem = problem_of(error)
        if problem is None:
            raise
        answer = problem
    return action_result(answer, to, told=told)


def action_result(answer: Answer | HttpReply, to: str, *, told: SuccessMessage) -> ActionResult:
    """What an answer of the API is for somebody who sent a form."""
    body = answer.body if isinstance(answer, HttpReply) else answer
    if isinstance(body, Problem):
        return ActionResult(problem_sentence(body), to, is_well=False)
    if isinstance(body, ResultsAnswer):
        refused = [each for each in body.results if each.status >= 400]
        if refused:
            count = f"{number(len(refused))} of {number(len(body.results))}"
            return ActionResult(f"{count} were refused. {refused[0].detail}", to, is_well=False)
    return ActionResult(told if isinstance(told, str) else told(body), to)


def problem_sentence(problem: Problem) -> str:
    """What is wrong, and what to do."""
    # Of several tasks the first says why, rather than that the answer says so.
    if len(problem.results) > 1:
        return f"{problem.title} {problem.results[0].detail}"
    return f"{problem.title} {problem.detail}".strip()


def _stripped(value: object) -> object:
    return value.strip() if isinstance(value, str) else value
