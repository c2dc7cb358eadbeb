"""Where the dispatcher is that somebody at a prompt means, and what it wants to be shown.

The first that is there of: `--url`, the variable `PENSTOCK_URL`, the public listener that the
settings name (`penstock.toml` here, `PENSTOCK_PORT`), the default. So a verb finds what `penstock
up` has started in the same folder. The token is `--token`, `PENSTOCK_API_TOKEN`, or that of the
settings; the last goes to the listener of the settings only, and to no other address.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.kernel.errors import InvalidInput
from penstock.settings import Told, read_settings

URL: Final = "http://127.0.0.1:7070"
"""Where `penstock up` serves if nobody says otherwise."""
_EVERYWHERE: Final = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}  # noqa: S104 - nothing is bound here


@dataclass(frozen=True, slots=True)
class Address:
    """A dispatcher, and its token if there is one."""

    url: str
    token: str | None


def address(url: str | None = None, token: str | None = None) -> Address:
    """The dispatcher that is meant. Raises `InvalidInput` if the settings cannot be read."""
    url = url or os.environ.get("PENSTOCK_URL") or None
    token = token or os.environ.get("PENSTOCK_API_TOKEN") or None
    if url is not None:
        return Address(url, token)
    told = read_settings({}, environment=os.environ, folder=Path.cwd())
    return Address(_public(told), token or told.settings.api_token or None)


def likely_address(url: str | None = None, token: str | None = None) -> Address:
    """The same, for who has nobody to tell that the settings are wrong."""
    try:
        return address(url, token)
    except (InvalidInput, OSError):
        return Address(url or URL, token)


def _public(told: Told) -> str:
    settings = told.settings
    host = _EVERYWHERE.get(settings.host, settings.host)
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    # A port of 0 is any: who has such settings says where it is.
    return f"http://{host}:{settings.port}" if settings.port else URL
