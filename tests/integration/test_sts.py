"""The way to STS, over real sockets: what it says is understood, and logged nowhere."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from penstock.dispatcher.capabilities.credentials import RoleSession, StsSessions
from penstock.kernel.aws import Aws
from penstock.kernel.errors import CredentialsUnavailable

ROLE = "arn:aws:iam::123456789012:role/tasks"
SECRET = "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY"
_ANSWER = f"""<AssumeRoleResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">
<AssumeRoleResult><Credentials><AccessKeyId>ASIA1</AccessKeyId>
<SecretAccessKey>{SECRET}</SecretAccessKey><SessionToken>a-session-token</SessionToken>
<Expiration>2026-01-01T00:00:00Z</Expiration></Credentials></AssumeRoleResult>
</AssumeRoleResponse>"""


@contextmanager
def server(status: int, body: str) -> Iterator[str]:
    """An STS that has one answer."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(status)
            self.send_header("content-type", "text/xml")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{listening.server_address[1]}"
        listening.shutdown()
        thread.join()


async def assume(sessions: StsSessions) -> RoleSession:
    return await sessions.assume(role=ROLE, name="penstock-7-1", policy="{}")


def aws(endpoint: str) -> Aws:
    return Aws(region="us-east-1", endpoint=endpoint, access_key="own", secret_key="own-secret")


def test_nothing_of_what_sts_answers_is_logged_even_when_everything_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    logging.getLogger("botocore").setLevel(logging.NOTSET)
    with server(200, _ANSWER) as endpoint:
        sessions = StsSessions(aws(endpoint))
        made = asyncio.run(assume(sessions))
        sessions.close()
    assert (made.secret_key, made.session_token) == (SECRET, "a-session-token")
    assert made.expires_at == datetime(2026, 1, 1, tzinfo=UTC)
    for secret in (SECRET, "a-session-token", "own-secret"):
        assert secret not in caplog.text


def test_a_real_answer_of_no_is_understood() -> None:
    body = (
        "<ErrorResponse><Error><Type>Sender</Type><Code>AccessDenied</Code>"
        "<Message>not you</Message></Error></ErrorResponse>"
    )
    with server(403, body) as endpoint:
        sessions = StsSessions(aws(endpoint))
        said = f"cannot assume {ROLE} now: AccessDenied"
        with pytest.raises(CredentialsUnavailable, match=said) as no:
            asyncio.run(assume(sessions))
        sessions.close()
    assert "docs/iam.md" in no.value.hint


def test_an_sts_that_is_not_there_is_not_now() -> None:
    sessions = StsSessions(aws("http://127.0.0.1:9"))
    with pytest.raises(CredentialsUnavailable, match="Failed to reach STS"):
        asyncio.run(assume(sessions))
    sessions.close()
