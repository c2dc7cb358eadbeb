"""A short look at a dispatcher, for what must not keep anybody waiting.

`penstock` alone and the completion of words ask whether somebody answers, and live well without an
answer. So a look has a bound, whatever the network does, needs none of the packages that the client
of a dispatcher stands on, and never raises: there is an answer, or there is none.

One request; a look that was given up is left to a thread that ends with the process.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, Final
from urllib.parse import urlencode, urlsplit

_ANSWER_BYTES_MAX: Final = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Glance:
    """What a dispatcher answered: a status of HTTP, and a JSON object, empty if it was none."""

    status: int
    body: Mapping[str, Any]


def glance(
    url: str,
    path: str,
    *,
    token: str | None,
    seconds: float,
    asked: Mapping[str, str] | None = None,
) -> Glance | None:
    """What is answered within this time; None for nothing."""
    found: list[Glance] = []

    def look() -> None:
        try:
            found.append(_looked(url, f"{path}?{urlencode(asked or {})}", token, seconds=seconds))
        except (OSError, HTTPException, ValueError):
            return

    # In a thread, because names are looked up without a bound, and answers may come in drops.
    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    looking.join(seconds)
    return found[0] if found else None


def _looked(url: str, path: str, token: str | None, *, seconds: float) -> Glance:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(url)
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    connection = kind(parts.hostname, parts.port, timeout=seconds)
    headers = {"Accept": "application/json"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    try:
        connection.request("GET", parts.path.rstrip("/") + path, headers=headers)
        answer = connection.getresponse()
        body = answer.read(_ANSWER_BYTES_MAX)
    finally:
        connection.close()
    return Glance(answer.status, _object(body))


def _object(body: bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
