"""The webhook: a POST with JSON, signed if there is a secret.

Taken is what is answered with 2xx; a redirect is not followed, for the address is a secret that was
meant for one place. What the answer says is not read. Neither the address nor the secret is in any
outcome.
"""

from __future__ import annotations

import ssl
from typing import Final
from urllib.parse import urlsplit

import httpx

from penstock.dispatcher.alerts.notices import (
    ID_HEADER,
    SIGNATURE_HEADER,
    TIME_HEADER,
    Notice,
    as_json,
    signature,
)
from penstock.dispatcher.alerts.reading import LOOPBACK
from penstock.dispatcher.alerts.telling import Outcome, not_taken, taken

_CONNECT_SECONDS: Final = 5.0
_SECONDS_MAX: Final = 15.0


class Webhook:
    """A receiver of notices."""

    name = "webhook"
    seconds_max = _SECONDS_MAX

    def __init__(self, url: str, *, secret: str = "") -> None:
        self._url = url
        self._secret = secret
        self._trusted = httpx.create_ssl_context()

    async def send(self, notice: Notice, *, at: float) -> Outcome:
        """Post one."""
        body = as_json(notice)
        headers = {
            "Content-Type": "application/json",
            "User-Agent": "penstock",
            ID_HEADER: notice.id,
            TIME_HEADER: str(int(at)),
        }
        if self._secret:
            signed = signature(body, secret=self._secret, timestamp=int(at))
            headers[SIGNATURE_HEADER] = signed
        try:
            async with (
                httpx.AsyncClient(
                    verify=self._trusted,
                    timeout=httpx.Timeout(_SECONDS_MAX, connect=_CONNECT_SECONDS),
                    follow_redirects=False,
                    # A proxy is the way out of a network; this machine is not out there.
                    trust_env=urlsplit(self._url).hostname not in LOOPBACK,
                ) as client,
                client.stream("POST", self._url, content=body, headers=headers) as response,
            ):
                status = response.status_code
        except httpx.TimeoutException:
            return not_taken("The webhook did not answer in time.")
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            if isinstance(error.__cause__ and error.__cause__.__cause__, ssl.SSLError):
                return not_taken("The webhook's certificate is not trusted.")
            return not_taken("The webhook cannot be reached.")
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
            return not_taken(f"The connection to the webhook failed: {type(error).__name__}.")
        if 200 <= status < 300:
            return taken()
        return not_taken(f"The webhook answered {status}.")
