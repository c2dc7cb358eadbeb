"""A service that gives keys which expire in seconds, as containers of Amazon's have one.

Whoever has its address in `AWS_CONTAINER_CREDENTIALS_FULL_URI` gets sessions of a role from a real
STS, each with its time of expiry. The server that checks them says no from then on.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from penstock.dispatcher.capabilities.credentials import SESSION_SECONDS, MintedCredentials
from tests.e2e.fleet import CLOCK
from tests.integration.minting_place import Place

STOP_SECONDS_MAX = 10.0


@dataclass(frozen=True, slots=True)
class Session:
    """Keys, and until when they are good."""

    minted: MintedCredentials
    token: str
    expires_at: float

    @property
    def is_over(self) -> bool:
        return CLOCK.wall() > self.expires_at


@dataclass(slots=True)
class ShortSessions:
    """Sessions for a folder of a place, each good for so many seconds."""

    place: Place
    folder: str
    seconds: int
    url: str = ""
    given: list[Session] = field(default_factory=list)

    def new(self) -> Session:
        minted = asyncio.run(self.place.mint(read=[self.folder], write=[self.folder]))
        now = int(CLOCK.wall())
        made = Session(
            minted, self.place.aged(minted, SESSION_SECONDS - self.seconds), now + self.seconds
        )
        self.given.append(made)
        return made

    def document(self) -> bytes:
        made = self.new()
        expires = datetime.fromtimestamp(made.expires_at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        said = {
            "AccessKeyId": made.minted.access_key,
            "SecretAccessKey": made.minted.secret_key,
            "Token": made.token,
            "Expiration": expires,
        }
        return json.dumps(said).encode()

    def client(self, session: Session) -> Any:
        """A client with these keys."""
        return self.place.as_minted(session.minted, aws_session_token=session.token)


@contextmanager
def short_sessions(place: Place, folder: str, *, seconds: int) -> Iterator[ShortSessions]:
    """The service, until the block ends."""
    made = ShortSessions(place, folder, seconds)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = made.document()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        made.url = f"http://127.0.0.1:{listening.server_address[1]}/keys"
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        try:
            yield made
        finally:
            listening.shutdown()
            thread.join(STOP_SECONDS_MAX)
