"""What GitHub, Stripe, Slack and others sign, in their own published examples and against them."""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

import pytest

from penstock.dispatcher.sources.cron import milliseconds
from penstock.dispatcher.sources.webhook_request import WebhookRequest, prove
from penstock.protocol.events import AuthAnswer
from tests.unit.dispatcher.sources.scripted import BEGIN, ScriptedDispatcher, webhook_source
from tests.unit.dispatcher.sources.test_webhook import PLACES, SECRET, ask

NOW = milliseconds(BEGIN) // 1000
BODY = b'{"id": "evt_1", "event_id": "Ev1", "more": "\xc3\xa9"}'


def signature(message: bytes, secret: str = SECRET) -> str:
    return hmac.new(secret.encode(), message, hashlib.sha256).hexdigest()


def github(body: bytes, *, at: int = NOW, secret: str = SECRET) -> dict[str, str]:
    return {"X-Hub-Signature-256": f"sha256={signature(body, secret)}", "X-GitHub-Delivery": "d1"}


def stripe(body: bytes, *, at: int = NOW, secret: str = SECRET) -> dict[str, str]:
    right = signature(f"{at}.".encode() + body, secret)
    return {"Stripe-Signature": f"t={at},v0=old,v1={'0' * 64},v1={right}"}


def slack(body: bytes, *, at: int = NOW, secret: str = SECRET) -> dict[str, str]:
    right = signature(f"v0:{at}:".encode() + body, secret)
    return {"X-Slack-Request-Timestamp": str(at), "X-Slack-Signature": f"v0={right}"}


def plain(body: bytes, *, at: int = NOW, secret: str = SECRET) -> dict[str, str]:
    return {"X-Shop-Sum": signature(body, secret), "Idempotency-Key": "i1"}


SENDERS = {"github": github, "stripe": stripe, "slack": slack, "hmac": plain}
IDS = {"github": "d1", "stripe": "evt_1", "slack": "Ev1", "hmac": "i1"}
DATED = ("stripe", "slack")


def made(kind: str, **fields: Any) -> ScriptedDispatcher:
    auth = AuthAnswer(type=kind, secrets=["file:next", "env:SHOP"], header="X-Shop-Sum", **fields)
    return ScriptedDispatcher([webhook_source(auth=auth)])


@pytest.mark.parametrize("kind", SENDERS)
def test_what_is_signed_is_taken_once(kind: str) -> None:
    dispatcher = made(kind)
    for secret in (SECRET, PLACES["file:next"]):
        answer = ask(dispatcher, content=BODY, headers=SENDERS[kind](BODY, secret=secret))
        assert (answer.status_code, answer.json()["is_id_made"]) == (202, False)
    # Sent again, and signed anew with the other secret: the same event by the sender's own id.
    assert dispatcher.ids == [IDS[kind]]


@pytest.mark.parametrize("kind", SENDERS)
def test_what_is_not_signed_is_refused(kind: str) -> None:
    dispatcher = made(kind)
    right = SENDERS[kind](BODY)
    for headers, body in (
        ({}, BODY),
        (right, BODY + b" "),
        (right, BODY.replace(b"evt_1", b"evt_2")),
        (SENDERS[kind](BODY, secret="another-secret-of-it"), BODY),
        ({name: text[:-1] for name, text in right.items()}, BODY),
        (dict.fromkeys(right, ""), BODY),
        ({name: "\u00e9".encode() for name in right}, BODY),
        ({"Authorization": f"Bearer {SECRET}"}, BODY),
    ):
        answer = ask(dispatcher, content=body, headers=headers)
        assert (answer.status_code, answer.json()["type"]) == (401, "unidentified")
        assert signature(BODY) not in answer.text
    assert dispatcher.kept == []
    assert {each.reason for each in dispatcher.noted} == {"no signature", "wrong signature"}


@pytest.mark.parametrize("kind", DATED)
def test_a_request_is_taken_while_it_is_young(kind: str) -> None:
    for seconds, status in ((-301, 401), (-300, 202), (300, 202), (301, 401)):
        headers = SENDERS[kind](BODY, at=NOW + seconds)
        assert ask(made(kind), content=BODY, headers=headers).status_code == status
    dispatcher = made(kind, tolerance_seconds=60.0)
    ask(dispatcher, content=BODY, headers=SENDERS[kind](BODY, at=NOW - 61))
    ask(dispatcher, content=BODY, headers=SENDERS[kind](BODY, at=NOW + 61))
    assert [each.reason for each in dispatcher.noted] == ["too old", "ahead of time"]


@pytest.mark.parametrize("kind", DATED)
def test_what_was_recorded_makes_no_other_event(kind: str) -> None:
    dispatcher = made(kind)
    body = b"no=id&in=it"
    for more in ({}, {"Idempotency-Key": "x"}, {"X-Request-Id": "y"}, {"X-GitHub-Delivery": "z"}):
        headers = SENDERS[kind](body) | more
        assert ask(dispatcher, content=body, headers=headers).status_code == 202
    (kept,) = dispatcher.ids
    assert kept.startswith("signed:")
    answer = ask(dispatcher, "/orders?event_id=new", content=body, headers=SENDERS[kind](body))
    assert (answer.status_code, answer.json()["field"]) == (422, "event_id")
    # What is sent again, and signed at another time, is another request.
    ask(dispatcher, content=body, headers=SENDERS[kind](body, at=NOW + 1))
    assert len(dispatcher.ids) == 2


def test_the_time_of_stripe_is_one() -> None:
    headers = stripe(BODY, at=NOW - 9999)
    headers["Stripe-Signature"] = f"t={NOW}," + headers["Stripe-Signature"]
    assert ask(made("stripe"), content=BODY, headers=headers).status_code == 401


@pytest.mark.parametrize("kind", DATED)
@pytest.mark.parametrize("at", ["\ud800", "١٨٩٣٤٥٦٠٠٠", f"-{NOW}", f"{NOW}.0", f"+{NOW}", ""])
def test_a_time_that_is_none_is_refused_in_the_headers_of_a_function_too(
    kind: str, at: str
) -> None:
    right = signature({"stripe": "", "slack": "v0:"}[kind].encode() + BODY)
    headers = {
        "stripe-signature": f"t={at},v1={right}",
        "x-slack-request-timestamp": at,
        "x-slack-signature": f"v0={right}",
    }
    auth = AuthAnswer(type=kind, secrets=["env:SHOP"])
    found = prove(auth, WebhookRequest("POST", "/orders", headers, BODY), [SECRET], now=NOW)
    assert found.why_not == "no signature"


def test_slack_is_told_its_challenge_when_it_has_signed_it() -> None:
    dispatcher = made("slack")
    body = b'{"type": "url_verification", "challenge": "3eZbrw1aB"}'
    answer = ask(dispatcher, content=body, headers=slack(body))
    assert (answer.status_code, answer.text) == (200, "3eZbrw1aB")
    assert ask(dispatcher, content=body).status_code == 401
    assert dispatcher.kept == []


def test_the_published_examples() -> None:
    """The one of GitHub's documentation, and the one of Slack's."""
    auth = AuthAnswer(type="github", secrets=[])
    said = "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17"
    request = WebhookRequest("POST", "/", {"x-hub-signature-256": said}, b"Hello, World!")
    assert prove(auth, request, ["It's a Secret to Everybody"], now=0.0).why_not == ""
    auth = AuthAnswer(type="slack", secrets=[])
    body = (
        b"token=xyzz0WbapA4vBCDEFasx0q6G&team_id=T1DC2JH3J&team_domain=testteamnow"
        b"&channel_id=G8PSS9T3V&channel_name=foobar&user_id=U2CERLKJA&user_name=roadrunner"
        b"&command=%2Fwebhook-collect&text=&response_url=https%3A%2F%2Fhooks.slack.com%2Fcommands"
        b"%2FT1DC2JH3J%2F397700885554%2F96rGlfmibIGlgcZRskXaIFfN"
        b"&trigger_id=398738663015.47445629121.803a0bc887a14d10d2c447fce8b6703c"
    )
    headers = {
        "x-slack-request-timestamp": "1531420618",
        "x-slack-signature": "v0=a2114d57b48eac39b9ad189dd8316235a7b4a8d21a10bd27519666489c69b503",
    }
    request = WebhookRequest("POST", "/", headers, body)
    secret = "8f742231b10e8888abcd99yyyzzz85a5"
    assert prove(auth, request, [secret], now=1531420618.0).why_not == ""
