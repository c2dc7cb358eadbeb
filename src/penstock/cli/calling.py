"""Which dispatcher a verb talks to: the options that all such verbs share, and the way there.

What the dispatcher finds wrong with the words of a command is told as words that cannot be right,
with exit code 2; everything else that it refuses is a failure, with exit code 1.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

import click

from penstock.cli.queue.connection import json_option
from penstock.dispatcher.client import Client
from penstock.dispatcher.client.client import URL
from penstock.kernel.errors import DispatcherRefused, InvalidInput

Verb = TypeVar("Verb", bound=Callable[..., Any])
Told = TypeVar("Told")

WAIT_SECONDS: Final = 86_400.0
_WRONG_WORDS: Final = (400, 413, 414, 422)

_url_option = click.option(
    "--url",
    metavar="URL",
    envvar="PENSTOCK_URL",
    default=URL,
    show_default=True,
    help="The public address of the dispatcher; or set PENSTOCK_URL.",
)
_token_option = click.option(
    "--token",
    metavar="TOKEN",
    envvar="PENSTOCK_API_TOKEN",
    help="The token of its API, if it wants one; or set PENSTOCK_API_TOKEN.",
)
timeout_option = click.option(
    "--timeout",
    "timeout_seconds",
    metavar="SECONDS",
    type=click.FloatRange(0, 366 * 86_400),
    default=WAIT_SECONDS,
    show_default=True,
    help="With --wait: how long at most.",
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
        if error.status in _WRONG_WORDS:
            raise InvalidInput(error.message, hint=error.hint) from error
        raise


def connected(url: str, token: str | None) -> Client:
    """A client that is not open yet; tests put one here that goes to no network."""
    return Client(url, token or None)
