"""What forms do: their fields as what the API is asked, and its answer as a sentence.

An action reads the fields with `asked_as`, calls the handler of the API with `act`, and returns
what that says. A field that cannot be right is an `InvalidInput` with one sentence, in the words of
the form, which the console shows; nothing was done then. A refusal of the dispatcher is its own
sentence, and what to do. So an action has no branches for what may go wrong:

    async def _pause(parts: Parts, asked: Asked, to: str) -> Done:
        ask = asked_as(PauseAsk, asked.query, names={"reason": "The reason"})
        params = NameParams(name=asked.path["name"])
        return await act(parts, pause_job, to, ask=ask, params=params, told="It is paused.")

Nothing is kept here. Whatever is sent twice is sent twice to the API, which may be repeated.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import msgspec

from penstock.console.pages.base import Done
from penstock.console.rendering import number
from penstock.dispatcher.api.endpoints import Call, Handler, Reply
from penstock.dispatcher.api.parts import Parts
from penstock.dispatcher.api.problems import not_as_declared, problem_of
from penstock.dispatcher.wire.base import Answer, Ask
from penstock.dispatcher.wire.problem import Problem
from penstock.dispatcher.wire.work import ResultsAnswer
from penstock.kernel.errors import InvalidInput, PenstockError

AnAsk = TypeVar("AnAsk", bound=Ask)
Told = str | Callable[[Any], str]
"""What is said of a success: a sentence, or what makes one of the answer."""

CONSOLE: Final = "the console"
"""Where the calls of forms come from, as the audit has it."""
_ID_MAX: Final = 2**63 - 1


def asked_as(
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


def lines_of(text: str) -> list[str]:
    """The lines of a field that takes several values, without those that are empty."""
    return [each.strip() for each in text.splitlines() if each.strip()]


def object_of(text: str, *, name: str) -> dict[str, Any] | None:
    """The JSON object that somebody has typed; None if nothing was."""
    if not text.strip():
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        place = f" on line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise InvalidInput(
            f"{name} is not JSON{place}.", hint='It is an object, such as {"rows": 12}.'
        ) from None
    if not isinstance(found, dict):
        raise InvalidInput(
            f"{name} has to be a JSON object.", hint='It is an object, such as {"rows": 12}.'
        )
    return found


def number_of(text: str) -> int:
    """A number of a task, a backfill or the like; 0, which none has, for what is no number."""
    if not text.isascii() or not text.isdecimal() or len(text) > 19:
        return 0
    return int(text) if int(text) <= _ID_MAX else 0


async def act(
    parts: Parts,
    handler: Handler,
    to: str,
    *,
    told: Told,
    ask: Ask | None = None,
    params: Ask | None = None,
) -> Done:
    """Call a handler of the API, and say what became of it. `to` is the page that says so."""
    try:
        answer = await handler(parts, Call(ask=ask, params=params, address=CONSOLE))
    except (PenstockError, TimeoutError) as error:
        problem = problem_of(error)
        if problem is None:
            raise
        answer = problem
    return done(answer, to, told=told)


def done(answer: Answer | Reply, to: str, *, told: Told) -> Done:
    """What an answer of the API is for somebody who sent a form."""
    body = answer.body if isinstance(answer, Reply) else answer
    if isinstance(body, Problem):
        return Done(sentence_of(body), to, is_well=False)
    if isinstance(body, ResultsAnswer):
        refused = [each for each in body.results if each.status >= 400]
        if refused:
            count = f"{number(len(refused))} of {number(len(body.results))}"
            return Done(f"{count} were refused. {refused[0].detail}", to, is_well=False)
    return Done(told if isinstance(told, str) else told(body), to)


def sentence_of(problem: Problem) -> str:
    """What is wrong, and what to do."""
    # Of several tasks the first says why, rather than that the answer says so.
    if len(problem.results) > 1:
        return f"{problem.title} {problem.results[0].detail}"
    return f"{problem.title} {problem.detail}".strip()


def _stripped(value: object) -> object:
    return value.strip() if isinstance(value, str) else value
