"""The way from a client to its connection, which needs httpx, which not everybody has."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from penstock.kernel.clock import Clock
from penstock.kernel.entropy import Entropy
from penstock.kernel.errors import InvalidInput

if TYPE_CHECKING:
    import httpx

    from penstock.dispatcher.client.connection import Connection


def checked_url(url: str) -> str:
    """The URL, if it may be that of a dispatcher; the connection looks closer."""
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname)
    except (ValueError, TypeError, AttributeError):
        is_url = False
    if not is_url:
        raise InvalidInput(
            f"{url!r} is not the URL of a dispatcher.", hint="For example: http://127.0.0.1:7070"
        )
    return url


def connect(
    url: str,
    token: str | None,
    clock: Clock,
    entropy: Entropy,
    transport: httpx.AsyncBaseTransport | None,
) -> Connection:
    """A connection that is not open yet."""
    try:
        module = import_module("penstock.dispatcher.client.connection")
    except ModuleNotFoundError as error:
        if error.name != "httpx":
            raise
        raise InvalidInput(
            "Talking to a dispatcher needs httpx, which is not installed.",
            hint="Install it with: pip install 'penstock[dispatcher]'",
        ) from error
    made: Connection = module.Connection(
        url, token=token, clock=clock, entropy=entropy, transport=transport
    )
    return made
