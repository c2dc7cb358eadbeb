"""How a verb talks to a dispatcher: the options of all such verbs, the call, and how answers look.

What the dispatcher finds wrong with the words of a command is an error in usage, with exit code
2; everything else that it refuses is a failure, with exit code 1. Answers are shown with ages
instead of times and in tables that fit the terminal; programs get the answer itself. What
others have written is shown on one line, without what a terminal would obey.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Any, Final, TypeVar

import click
import msgspec

from penstock.cli import output
from penstock.cli.format import age, print_json
from penstock.cli.options import DURATION, Seconds, json_option
from penstock.cli.start_page import URL, address, likely_address
from penstock.dispatcher.client import Client
from penstock.kernel.errors import DispatcherRefused, InvalidInput, PenstockError
from penstock.kernel.text import nearest
from penstock.protocol.base import Answer

fitted, cut = output.table, output.cut
_PLACES: Final = ("Traceback (most recent call last)", 'File "')


def show_json(answer: Answer) -> None:
    """An answer for programs."""
    print_json(msgspec.to_builtins(answer))


def ago(at: datetime | None, *, now: float) -> str:
    """How long ago something was, or how soon it is, or with `--absolute` when; else nothing."""
    return "" if at is None else age(at.timestamp(), now=now)


def line(text: str | None, *, characters_max: int = 200) -> str:
    """Somebody's words as one line that does nothing to a terminal."""
    shown = "".join(each if each.isprintable() else " " for each in text or "").strip()
    return shown if len(shown) <= characters_max else f"{shown[: characters_max - 1]}…"


def lines(text: str | None, *, characters_max: int = 4000) -> str:
    """Somebody's words with their own line ends and indentation, harmless to a terminal."""
    kept = []
    for each in (text or "").expandtabs(4).splitlines():
        indent = len(each) - len(each.lstrip(" "))
        kept.append(f"{'':<{indent}}{line(each, characters_max=characters_max)}".rstrip())
    return "\n".join(kept)


def gist(reason: str | None) -> str:
    """Why something failed, in one line: of an error with its traceback the error itself.

    Ours begin with it. Those of Python end with it, and begin with where it was.
    """
    own = [each for each in (reason or "").splitlines() if each.strip()]
    if own and own[0].lstrip().startswith(_PLACES):
        last = [each for each in own if not each.startswith((" ", "\t", *_PLACES))]
        own = last[-1:] or own
    return line(own[0]) if own else ""


def counted(number: int, noun: str) -> str:
    """A number and what it counts."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


Verb = TypeVar("Verb", bound=Callable[..., Any])
Told = TypeVar("Told")

WAIT_SECONDS: Final = 86_400.0
_WRONG_WORDS: Final = (400, 413, 414, 422)
_NOT_THERE: Final = 404
_LISTS: Final = {
    "job": "penstock status",
    "dataset": "penstock dataset list",
    "backfill": "penstock backfill list",
    "task": "penstock task list",
    "operator": "penstock operator list",
    "version": "penstock dag list",
}
"""Which verb shows those that there are."""

_UNKNOWN: Final = re.compile(r"\bno (?P<noun>job|dataset) '?(?P<word>[\w.-]*\w)")

_SETTINGS_URL: Final = "penstock.url"


def _url(context: click.Context, _parameter: click.Parameter, value: str | None) -> str:
    if value:
        return value
    meant = likely_address() if context.resilient_parsing else address()
    context.meta[_SETTINGS_URL] = meant
    return meant.url


def _token(context: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    # The token of the settings is for the address of the settings, and for no other.
    meant = context.meta.get(_SETTINGS_URL)
    return value or (meant.token if meant is not None else None)


_url_option = click.option(
    "--url",
    metavar="URL",
    envvar="PENSTOCK_URL",
    is_eager=True,
    callback=_url,
    help=f"URL of the dispatcher; or set PENSTOCK_URL.  [default: as the settings say, {URL}]",
)
_token_option = click.option(
    "--token",
    metavar="TOKEN",
    envvar="PENSTOCK_API_TOKEN",
    callback=_token,
    help="API token, if required. Other users of this machine can see it here;"
    " prefer PENSTOCK_API_TOKEN.",
)
timeout_option = click.option(
    "--timeout",
    "timeout_seconds",
    metavar=DURATION,
    type=Seconds(0, 366 * 86_400),
    default=WAIT_SECONDS,
    show_default=True,
    help="With --wait: the timeout.",
)


def on_a_dispatcher(verb: Verb) -> Verb:
    """Give a verb `url`, `token` and `as_json`."""
    return _url_option(_token_option(json_option(verb)))


def asked(
    url: str, token: str | None, work: Callable[[Client], Awaitable[Told]]
) -> tuple[Told, float]:
    """What came of asking a dispatcher, and its time then."""

    async def ask() -> tuple[Told, float]:
        async with connected(url, token) as client:
            return await work(client), client.now()

    try:
        return asyncio.run(ask())
    except DispatcherRefused as error:
        # It is told to programs as well.
        error.hint = error.hint.replace(", or force=True", "")
        if error.status in _WRONG_WORDS:
            raise InvalidInput(error.message, hint=error.hint) from error
        if error.status == _NOT_THERE and not error.hint:
            error.hint = f"{_meant(url, token, error.message)}{_where_they_are(error.message)}"
        raise


def _where_they_are(message: str) -> str:
    """The next step for who has named something that is not there."""
    words = message.split()
    named = next((noun for noun in reversed(words) if noun in _LISTS), None)
    return f"'{_LISTS[named]}' lists them." if named is not None else ""


def _meant(url: str, token: str | None, message: str) -> str:
    """Which job or dataset was probably meant, if the dispatcher has one of a name like that."""
    found = _UNKNOWN.search(message)
    if found is None:
        return ""
    noun, word = found["noun"], found["word"]

    async def names() -> list[str]:
        async with connected(url, token) as client:
            if noun == "job":
                return [each.name for each in (await client.status()).jobs]
            return [each.name for each in (await client.datasets()).datasets]

    try:
        meant = nearest(word, asyncio.run(names()))
    except PenstockError:
        return ""
    return f"Did you mean {meant!r}? " if meant else ""


def connected(url: str, token: str | None) -> Client:
    """A client that is not open yet; tests put one here that goes to no network."""
    return Client(url, token or None)
