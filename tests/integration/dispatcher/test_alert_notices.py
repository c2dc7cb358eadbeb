"""Notices sent to a real receiver and a real mail server on loopback, by one teller and by two."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hmac
import json
import re
import ssl
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from penstock.dispatcher.alerts.evaluator import AWAY_SECONDS
from penstock.dispatcher.alerts.notifier import (
    NOTICES_MAX,
    AlertNotice,
    DeliveryOutcome,
    MailDestination,
    NoticeDestination,
    Notifier,
    WebhookDestination,
    as_json,
    destinations_of,
    signature,
    taken,
)
from penstock.dispatcher.alerts.rules import read_alerts
from penstock.dispatcher.database.pool import Answer, Connection, Database
from penstock.dispatcher.views.status import AlertViews
from penstock.protocol.steering import NoticeState
from tests.integration.dispatcher.alerting import (
    MailServer,
    alerts,
    judge_of,
    mailing,
    notices,
    receiving,
)
from tests.integration.dispatcher.test_alerts import HOOK, die
from tests.integration.dispatcher.test_deployment import Pipeline, chain
from tests.integration.dispatcher.world import Play, World

SECRET = "open sesame, please"
MAIL: dict[str, Any] = {
    "host": "127.0.0.1",
    "from": "penstock@here.example",
    "to": ["ann@example", "ben@example"],
    "security": "none",
}


async def opened(world: World, table: dict[str, Any]) -> list[int]:
    """An alert that is open, with its notices due; the dead tasks that it is about."""
    pipeline = Pipeline(world)
    await pipeline.apply(chain())
    dead = await die(pipeline, reason="no table <b>orders</b>")
    await judge_of(world, table).turn()
    return dead


async def over(world: World, table: dict[str, Any], dead: list[int]) -> None:
    await Pipeline(world).tasks.replay(dead)
    await judge_of(world, table).turn()
    world.later(60)
    await judge_of(world, table).turn()


def teller_of(world: World, *destinations: NoticeDestination, **fields: Any) -> Notifier:
    return Notifier(fields.pop("database", world.database), destinations, **fields)


def test_a_webhook_is_told_once_that_it_is_open_and_once_that_it_is_over(play: Play) -> None:
    async def story(world: World) -> None:
        async with receiving() as receiver:
            table = {"webhook": receiver.url, "url": "https://console.example/"}
            settings = read_alerts(table)
            (hook,) = destinations_of(settings, environment={})
            teller = teller_of(world, hook, url=settings.url)
            dead = await opened(world, table)
            for _ in range(3):
                await teller.turn()
                await judge_of(world, table).turn()
            await over(world, table, dead)
            for _ in range(3):
                await teller.turn()
            first, second = receiver.heard
            alert = first.said["alert"]
            assert (first.said["what"], second.said["what"]) == ("opened", "over")
            assert alert["summary"] == "1 task of job clean is dead: no table <b>orders</b>"
            assert alert["link"] == "https://console.example/tasks?status=dead&job=clean"
            assert alert["opened_at"] == "2030-01-01T00:00:00+00:00"
            assert (alert["over_at"], alert["over_why"]) == (None, None)
            assert second.said["alert"]["id"] == alert["id"]
            assert second.said["alert"]["over_at"] == "2030-01-01T00:01:00+00:00"
            assert first.said["id"] != second.said["id"]
            assert first.headers["x-penstock-notice"] == first.said["id"]
            assert abs(int(first.headers["x-penstock-timestamp"]) - _epoch(world)) <= 120
            assert "x-penstock-signature" not in first.headers
            sent = [("webhook", "opened", True, 1), ("webhook", "over", True, 1)]
            assert await notices(world) == sent

    play(story)


def _epoch(world: World) -> float:
    return datetime(2030, 1, 1, tzinfo=UTC).timestamp() + world.offset_seconds[0]


def _page_code() -> str:
    """The code in docs/alerts.md that receivers verify signatures with."""
    page = Path(__file__).parents[3] / "docs" / "alerts.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    (code,) = [each for each in blocks if "def is_from_penstock" in each]
    return str(code)


def test_the_documentation_verifies_what_is_signed_and_refuses_the_rest(play: Play) -> None:
    verifying: dict[str, Any] = {}
    exec(_page_code(), verifying)
    is_from_penstock = verifying["is_from_penstock"]

    async def story(world: World) -> None:
        async with receiving() as receiver:
            table = {"webhook": receiver.url, "webhook_secret_variable": "HOOK_SECRET"}
            settings = read_alerts(table)
            destinations = destinations_of(settings, environment={"HOOK_SECRET": f"{SECRET}\n"})
            await opened(world, table)
            await teller_of(world, *destinations).turn()
            (heard,) = receiver.heard
            now = int(heard.headers["x-penstock-timestamp"])
            assert is_from_penstock(heard.headers, heard.body, secret=SECRET, now=now + 299)
            assert not is_from_penstock(heard.headers, heard.body, secret="another", now=now)
            assert not is_from_penstock(heard.headers, heard.body + b" ", secret=SECRET, now=now)
            assert not is_from_penstock(heard.headers, heard.body, secret=SECRET, now=now + 301)
            later = {**heard.headers, "x-penstock-timestamp": str(now + 301)}
            assert not is_from_penstock(later, heard.body, secret=SECRET, now=now + 301)
            assert not is_from_penstock({}, heard.body, secret=SECRET, now=now)

    play(story)


@pytest.mark.parametrize(
    ("status", "why"),
    [(500, "answered 500"), (302, "answered 302"), (404, "answered 404")],
)
def test_what_a_webhook_refuses_is_sent_again_later_and_again(
    play: Play, status: int, why: str
) -> None:
    async def story(world: World) -> None:
        async with receiving(status=status, location="http://127.0.0.1:9/elsewhere") as receiver:
            table = {"webhook": receiver.url}
            teller = teller_of(world, WebhookDestination(receiver.url))
            await opened(world, table)
            await teller.turn()
            await teller.turn()
            assert len(receiver.heard) == 1
            (notice,) = (await AlertViews(world.database).alerts()).alerts[0].notices
            assert why in (notice.last_error or "")
            assert "sesame" not in (notice.last_error or "")
            assert (notice.state, notice.tries) == (NoticeState.DUE, 1)
            pauses = []
            for _ in range(4):
                ahead = await world.value(
                    "SELECT extract(epoch FROM due_at - penstock_now())::float FROM alert_notice"
                )
                pauses.append(ahead)
                world.later(ahead)
                await teller.turn()
            assert len(receiver.heard) == 5
            assert pauses == sorted(pauses)
            assert pauses[-1] > 2 * pauses[0]
            receiver.status = 204
            world.later(900)
            await teller.turn()
            assert await notices(world) == [("webhook", "opened", True, 6)]
            assert len({each.body for each in receiver.heard}) == 1

    play(story)


def test_after_a_day_it_is_given_up_where_everybody_sees_it(
    play: Play, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(world: World) -> None:
        async with receiving(status=503) as receiver:
            table = {"webhook": receiver.url}
            teller = teller_of(world, WebhookDestination(receiver.url))
            dead = await opened(world, table)
            await over(world, table, dead)
            tries = 0
            while world.offset_seconds[0] < 86_400:
                await teller.turn()
                world.later(3600)
                tries += 1
                assert tries < 50
            await teller.turn()
            assert {each.said["what"] for each in receiver.heard} == {"opened"}
            found = (await AlertViews(world.database).alerts()).alerts[0].notices
            states = {each.what: each.state for each in found}
            assert states == {"opened": NoticeState.GIVEN_UP, "over": NoticeState.DUE}
            # That it is over is told all the same.
            receiver.status = 200
            await teller.turn()
            assert receiver.heard[-1].said["what"] == "over"
            count = len(receiver.heard)
            world.later(86_400)
            await teller.turn()
            assert len(receiver.heard) == count

    play(story)
    assert "gave up on notifying webhook of alert 1: The webhook answered 503." in caplog.text
    assert "sesame" not in caplog.text


def test_one_that_hangs_is_left_and_the_others_are_told(play: Play) -> None:
    class Slow(WebhookDestination):
        seconds_max = 0.05

    async def story(world: World) -> None:
        async with receiving(status=0) as receiver, mailing() as server:
            table = {"webhook": receiver.url, "mail": {**MAIL, "port": server.port}}
            mail = destinations_of(read_alerts({"mail": table["mail"]}), environment={})
            await opened(world, table)
            await teller_of(world, Slow(receiver.url), *mail).turn()
            told = [("mail", "opened", True, 1), ("webhook", "opened", False, 1)]
            assert await notices(world) == told

    play(story)


def test_nobody_listens(play: Play) -> None:
    async def story(world: World) -> None:
        mail = {**MAIL, "port": 9}
        table = {**HOOK, "mail": mail}
        await opened(world, table)
        destinations = destinations_of(read_alerts(table), environment={})
        await teller_of(world, *destinations).turn()
        found = (await AlertViews(world.database).alerts()).alerts[0].notices
        assert {each.destination: each.last_error for each in found} == {
            "webhook": "The webhook cannot be reached.",
            "mail": "The mail server cannot be reached.",
        }

    play(story)


def test_mail_is_handed_in_with_what_a_person_has_to_know(play: Play) -> None:
    async def story(world: World) -> None:
        async with mailing() as server:
            table = {"url": "https://console.example", "mail": {**MAIL, "port": server.port}}
            settings = read_alerts(table)
            teller = teller_of(world, *destinations_of(settings, environment={}), url=settings.url)
            dead = await opened(world, table)
            await teller.turn()
            await over(world, table, dead)
            await teller.turn()
            first, second = server.mails
            told = "1 task of job clean is dead: no table <b>orders</b>"
            assert first["Subject"] == f"[penstock] Alert: {told}"
            assert first["From"] == "penstock@here.example"
            assert first["To"] == "ann@example, ben@example"
            assert first["Date"].datetime == datetime(2030, 1, 1, tzinfo=UTC)
            assert first["Auto-Submitted"] == "auto-generated"
            assert first.get_content_type() == "text/plain"
            text = first.get_content()
            assert "https://console.example/tasks?status=dead&job=clean" in text
            assert "by the rule dead_tasks" in text
            assert second["Subject"] == f"[penstock] Over: {told}"
            assert "Resolved at 2030-01-01 00:01:00 UTC" in second.get_content()
            assert first["Message-ID"] != second["Message-ID"]
            assert first["References"] == second["References"]
            receivers = [each for each in server.commands if each.startswith("rcpt")]
            assert receivers == ["rcpt TO:<ann@example>", "rcpt TO:<ben@example>"] * 2

    play(story)


def _certificate(folder: Path) -> tuple[ssl.SSLContext, Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)  # noqa: TID251 - certificates are of this machine's time
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    file = folder / "both.pem"
    plain = serialization.NoEncryption()
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
    file.write_bytes(private + made.public_bytes(pem))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    public = folder / "public.pem"
    public.write_bytes(made.public_bytes(pem))
    return context, public


def notice() -> AlertNotice:
    alert = {
        "id": 7,
        "rule": "dead_tasks",
        "kind": "dead_tasks",
        "subject": "load",
        "summary": "1 task of job load is dead: boom",
        "detail": {},
        "path": "/tasks",
        "opened_at": "2030-01-01T00:00:00+00:00",
    }
    return AlertNotice(id="1c0f6b1e-0000-4000-8000-000000000000", what="opened", alert=alert)


async def sent_by_mail(server: MailServer, *, password: str = "", **fields: Any) -> DeliveryOutcome:
    table = {**MAIL, "host": "localhost", "port": server.port, **fields}
    settings = read_alerts({"mail": table}).mail
    assert settings is not None
    return await MailDestination(settings, password=password).send(notice(), at=0)


@pytest.mark.parametrize("security", ["starttls", "tls"])
def test_a_password_is_sent_over_tls_to_who_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, security: str
) -> None:
    context, public = _certificate(tmp_path)
    fields = {"security": security, "user": "ann", "password_variable": "P"}

    async def story() -> None:
        async with mailing(
            is_tls=security == "tls", tls=context, offers=("STARTTLS", "AUTH PLAIN")
        ) as server:
            # Whose certificate is not known gets nothing.
            outcome = await sent_by_mail(server, password=SECRET, **fields)
            assert not outcome.is_sent
            assert "not trusted" in outcome.note
            assert not [each for each in server.commands if "AUTH" in each.upper()]
            monkeypatch.setenv("SSL_CERT_FILE", str(public))
            assert await sent_by_mail(server, password=SECRET, **fields) == taken()
            assert server.is_tls == [True]
            assert any(each.upper().startswith("AUTH PLAIN") for each in server.commands)

    asyncio.run(story())


@pytest.mark.parametrize(
    ("answers", "fields", "told"),
    [
        ({"RCPT": "550 no such box"}, {}, "refused every receiver"),
        ({"MAIL": "451 try later"}, {}, "answered 451: try later"),
        ({"MAIL-END": "554 not this"}, {}, "answered 554: not this"),
        ({}, {"security": "starttls"}, "does not offer what is set"),
        (
            {"AUTH": f"535 wrong: {SECRET}"},
            {"host": "127.0.0.1", "user": "ann", "password_variable": "P"},
            "refused the login, with 535",
        ),
    ],
)
def test_what_a_mail_server_refuses_is_said(
    answers: dict[str, str], fields: dict[str, Any], told: str
) -> None:
    async def story() -> None:
        async with mailing(answers=answers, offers=("AUTH PLAIN",)) as server:
            outcome = await sent_by_mail(server, password=SECRET, **fields)
            assert not outcome.is_sent
            assert told in outcome.note
            assert SECRET not in outcome.note

    asyncio.run(story())


def test_mail_that_some_get_is_sent_and_not_sent_again() -> None:
    async def story() -> None:
        async with mailing() as server:
            server.answers = _OneRefused(server)
            outcome = await sent_by_mail(server)
            assert outcome == taken("1 of 2 receivers were refused.")
            assert len(server.mails) == 1

    asyncio.run(story())


class _OneRefused(dict[str, str]):
    """Refuses the second receiver."""

    def __init__(self, server: MailServer) -> None:
        super().__init__()
        self._server = server

    def __contains__(self, command: object) -> bool:
        return command == "RCPT" and "ben" in self._server.commands[-1]

    def __getitem__(self, command: str) -> str:
        return "550 no"


def test_a_mail_server_that_says_nothing_holds_no_thread() -> None:
    async def story() -> None:
        async with mailing(is_mute=True) as server:
            sending = asyncio.get_running_loop().create_task(sent_by_mail(server))
            await server.came.wait()
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sending
            # The pool of threads ends with the loop; the test hangs if one still waits.
            async with asyncio.timeout(5):
                await asyncio.get_running_loop().shutdown_default_executor()

    asyncio.run(story())
    # A socket that is left open is a warning, and warnings are errors.
    gc.collect()


def test_many_are_sent_in_turns_and_a_failure_leaves_the_rest_for_later(play: Play) -> None:
    async def story(world: World) -> None:
        async with receiving(status=500) as receiver:
            table = {"webhook": receiver.url}
            await opened(world, table)
            await world.rows(
                "INSERT INTO alert (rule, kind, subject, summary, path)"
                " SELECT 'r', 'k', n::text, 'so', '/x' FROM generate_series(1, 24) AS n"
            )
            settings = read_alerts({**table, "rules": {"r": {"when": "dead_source"}}})
            await judge_of(world, {**table, "rules": {"r": {"when": "dead_source"}}}).turn()
            teller = teller_of(world, *destinations_of(settings, environment={}))
            assert await teller.turn() is None
            assert len(receiver.heard) == 1
            receiver.status = 200
            world.later(60)
            assert await teller.turn() == 0.0
            assert len(receiver.heard) == 1 + NOTICES_MAX
            assert await teller.turn() == 0.0
            assert await teller.turn() is None
            assert len({each.said["id"] for each in receiver.heard}) == 25
            assert len(receiver.heard) == 26

    play(story)


class Killed(Exception):
    """The dispatcher is gone."""


class Mortal(Database):
    """A database whose user dies at one of its requests: before it, or after it was committed."""

    def __init__(self, database: Database, *, dies_at: int, is_done: bool) -> None:
        self._inner = database
        self._dies_at = dies_at
        self._is_done = is_done
        self.requests = 0

    async def transact(self, work: Callable[[Connection], Awaitable[Answer]]) -> Answer:
        self.requests += 1
        if self.requests > self._dies_at or (self.requests == self._dies_at and not self._is_done):
            raise Killed
        found = await self._inner.transact(work)
        if self.requests == self._dies_at:
            raise Killed
        return found


async def _live(world: World, database: Database, url: str, name: str, dead: list[int]) -> None:
    """All of a dispatcher's part in the life of one alert."""
    table = _only_of_deaths(url)
    judge = judge_of(world, table, name=name, database=database)
    teller = teller_of(world, WebhookDestination(url), database=database)
    await judge.turn()
    await teller.turn()
    await Pipeline(world).tasks.replay(dead)
    await judge.turn()
    world.later(60)
    await judge.turn()
    await teller.turn()


@pytest.mark.parametrize("is_done", [False, True])
def test_a_dispatcher_killed_anywhere_loses_nothing_and_doubles_by_id_only(
    play: Play, is_done: bool
) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        for dies_at in range(1, 9):
            async with receiving() as receiver:
                world.later(AWAY_SECONDS)
                dead = await die(pipeline)
                mortal = Mortal(world.database, dies_at=dies_at, is_done=is_done)
                with contextlib.suppress(Killed):
                    await _live(world, mortal, receiver.url, f"first {dies_at}", dead)
                # The other one takes over when the first is not heard of any more.
                await _finish(world, receiver.url, name=f"second {dies_at}", dead=dead)
                whats = {each.said["id"]: each.said["what"] for each in receiver.heard}
                # If it died before anybody had looked, there was nothing to be told of.
                is_seen = not (dies_at == 1 and not is_done)
                assert sorted(whats.values()) == (["opened", "over"] if is_seen else [])
                order = [each.said["what"] for each in receiver.heard]
                assert order == sorted(order)
                assert len(order) <= 3, "one notice at most is doubled"
                await pipeline.tasks.cancel(dead, reason="It has played its part.")
        assert {each[2] for each in await alerts(world)} == {False}

    play(story)


def _only_of_deaths(url: str) -> dict[str, Any]:
    # Nobody works here, and the minutes pass.
    return {"webhook": url, "rules": {"no_workers": {"enabled": False}}}


async def _finish(world: World, url: str, *, name: str, dead: list[int]) -> None:
    await Pipeline(world).tasks.replay(dead)
    judge = judge_of(world, _only_of_deaths(url), name=name)
    teller = teller_of(world, WebhookDestination(url))
    for _ in range(12):
        world.later(60)
        await judge.turn()
        await teller.turn()


def test_two_tellers_at_once_send_each_notice_once(play: Play) -> None:
    async def story(world: World) -> None:
        async with receiving() as receiver:
            table = {"webhook": receiver.url, "rules": {"r": {"when": "dead_source"}}}
            await world.rows(
                "INSERT INTO alert (rule, kind, subject, summary, path)"
                " SELECT 'r', 'k', n::text, 'so', '/x' FROM generate_series(1, 30) AS n"
            )
            await judge_of(world, table).turn()
            tellers = [teller_of(world, WebhookDestination(receiver.url)) for _ in range(2)]
            for _ in range(4):
                await asyncio.gather(*(each.turn() for each in tellers))
            ids = [each.said["id"] for each in receiver.heard]
            assert len(ids) == len(set(ids)) == 30

    play(story)


def test_a_notice_is_the_same_bytes_whenever_it_is_sent() -> None:
    body = as_json(notice())
    assert body == as_json(notice())
    assert json.loads(body)["alert"]["link"] is None
    assert signature(body, secret="a", timestamp=1) != signature(body, secret="a", timestamp=2)
    # The same by openssl: printf '12.x' | openssl dgst -sha256 -hmac key
    by_hand = hmac.digest(b"key", b"12.x", "sha256").hex()
    assert signature(b"x", secret="key", timestamp=12) == f"v1={by_hand}"
