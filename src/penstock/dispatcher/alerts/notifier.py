"""The notifier: sends due notices to their destinations. Every dispatcher has one.

Notices are lent in one short transaction (`SKIP LOCKED`), sent outside of any, and recorded one
by one. Destinations are served side by side; after a failure a destination rests until the next
turn, and what else was lent for it is given back untried. Pauses grow up to a quarter of an
hour; after a day of failures a notice is given up, logged and shown. `NOTICES_MAX` notices a
turn, each within the destination's `seconds_max`. See the package for what a crash leaves.

The same notice is the same bytes and the same mail whoever sends it, but for the signature,
which holds the time of sending. docs/alerts.md tells receivers how to verify it.

- `WebhookDestination`: a POST with JSON, signed if there is a secret. Taken is 2xx; a redirect
  is
  not followed, for the address is a secret. The body of the answer is not read, and neither the
  address nor the secret is in any outcome.
- `MailDestination`: SMTP in a thread, every wait bounded; at the end of the whole bound the
  socket
  is shut down from here. A mail whose answer was lost comes again with the same `Message-ID`. Some
  receivers refused is sent, and the outcome says so. The password goes over TLS or to this machine.

`destinations_of` makes them of the settings; secrets are read once, when a dispatcher starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import logging
import smtplib
import socket
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from email.message import EmailMessage
from email.policy import SMTP
from email.utils import format_datetime
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

from penstock.dispatcher.alerts.evaluator import GIVE_UP_SECONDS, moment, one_line
from penstock.dispatcher.alerts.rules import (
    LOOPBACK,
    AlertSettings,
    MailSecurity,
    MailSettings,
    SecretPlace,
    is_http,
)
from penstock.dispatcher.database.pool import Connection, Database, query
from penstock.dispatcher.tasks.rows import storable
from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.errors import InvalidInput
from penstock.runtimes.secrets import hidden

ID_HEADER: Final = "X-Penstock-Notice"
TIME_HEADER: Final = "X-Penstock-Timestamp"
SIGNATURE_HEADER: Final = "X-Penstock-Signature"
_SUBJECT_CHARACTERS_MAX: Final = 120
_TOLD: Final = ("id", "rule", "kind", "subject", "summary", "detail", "opened_at")


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertNotice:
    """A notification to send."""

    id: str
    what: str
    """`opened` or `over`."""
    alert: Mapping[str, Any]
    url: str = ""
    """The console's address."""

    @property
    def link(self) -> str | None:
        """Where the alert is shown; None if the URL of the console is not set."""
        return f"{self.url}{self.alert['path']}" if self.url else None


def as_json(notice: AlertNotice) -> bytes:
    """The body of a webhook."""
    alert = {name: notice.alert[name] for name in _TOLD}
    alert["over_at"] = notice.alert.get("over_at")
    alert["over_why"] = notice.alert.get("over_why")
    alert["link"] = notice.link
    said = {"id": notice.id, "what": notice.what, "alert": alert}
    return json.dumps(said, sort_keys=True, separators=(",", ":")).encode()


def signature(body: bytes, *, secret: str, timestamp: int) -> str:
    """What stands in the header `X-Penstock-Signature`: over the time and the body."""
    signed = b"%d." % timestamp + body
    return f"v1={hmac.new(secret.encode(), signed, hashlib.sha256).hexdigest()}"


def as_mail(notice: AlertNotice, *, sender: str, to: tuple[str, ...]) -> EmailMessage:
    """The same as mail; those of one alert are one conversation."""
    alert = notice.alert
    is_over = notice.what == "over"
    mail = EmailMessage(policy=SMTP)
    head = f"{'Over' if is_over else 'Alert'}: {alert['summary']}"
    if len(head) > _SUBJECT_CHARACTERS_MAX:
        head = f"{head[: _SUBJECT_CHARACTERS_MAX - 1]}…"
    # What looks like an encoded word would be decoded into the header, ends of lines included.
    head = head.replace("=?", "= ?")
    host = sender.rpartition("@")[2]
    at = datetime.fromisoformat(alert["over_at"] if is_over else alert["opened_at"])
    mail["Subject"] = f"[penstock] {head}"
    mail["From"] = sender
    mail["To"] = ", ".join(to)
    mail["Date"] = format_datetime(at)
    mail["Message-ID"] = f"<{notice.id}@{host}>"
    mail["References"] = f"<alert-{alert['id']}.{_seconds(alert['opened_at'])}@{host}>"
    mail["Auto-Submitted"] = "auto-generated"
    mail[ID_HEADER] = notice.id
    mail.set_content("\n".join(_lines(notice)))
    return mail


def _lines(notice: AlertNotice) -> list[str]:
    alert = notice.alert
    opened = moment(datetime.fromisoformat(alert["opened_at"]))
    lines = [alert["summary"], ""]
    if notice.what == "over":
        over = moment(datetime.fromisoformat(alert["over_at"]))
        lines = [f"Resolved at {over}: {alert['over_why']}", "", *lines]
    lines.append(f"Open since {opened}, by the rule {alert['rule']}.")
    if notice.link is not None:
        lines += ["", notice.link]
    return [*lines, "", f"Alert {alert['id']}, notice {notice.id}."]


def _seconds(at: str) -> int:
    return int(datetime.fromisoformat(at).timestamp())


_log = logging.getLogger(__name__)

NOTIFIER_PACE_SECONDS: Final = 5.0
NOTICES_MAX: Final = 10
_FIRST_MS: Final = 5_000
_MAX_MS: Final = 900_000
_LENT_SECONDS_MORE: Final = 30.0
_ERROR_CHARACTERS_MAX: Final = 500


@dataclass(frozen=True, slots=True)
class DeliveryOutcome:
    """What became of sending a notice."""

    is_sent: bool
    note: str = ""
    """Why it was not sent, or what is to be known although it was. No secrets."""


def taken(note: str = "") -> DeliveryOutcome:
    """The destination has it."""
    return DeliveryOutcome(is_sent=True, note=note)


def not_taken(why: str) -> DeliveryOutcome:
    """It has to be sent again."""
    return DeliveryOutcome(is_sent=False, note=why)


class NoticeDestination(Protocol):
    """Where notices go."""

    name: str
    seconds_max: float
    """How long sending one takes at most."""

    async def send(self, notice: AlertNotice, *, at: float) -> DeliveryOutcome:
        """Send one, at this time in seconds since the epoch. What goes wrong is an outcome."""
        ...


@dataclass(frozen=True, slots=True)
class _Lent:
    notice: AlertNotice
    tries: int


class Notifier:
    """Sends notices to these destinations."""

    def __init__(
        self,
        database: Database,
        destinations: Sequence[NoticeDestination],
        *,
        url: str = "",
        clock: Clock | None = None,
    ) -> None:
        self._database = database
        self._destinations = {each.name: each for each in destinations}
        self._url = url
        self._clock = clock or SystemClock()
        longest = max((each.seconds_max for each in destinations), default=0.0)
        self._lent_seconds = NOTICES_MAX * longest + _LENT_SECONDS_MORE

    async def turn(self) -> float | None:
        """Send what is due; at once again if there may be more."""
        if not self._destinations:
            return None
        rows = await self._take()
        if not rows:
            return None
        taken_at = self._clock.monotonic()
        lent: dict[str, list[_Lent]] = {}
        for row in rows:
            notice = AlertNotice(id=row["id"], what=row["what"], alert=row["body"], url=self._url)
            lent.setdefault(row["destination"], []).append(_Lent(notice, row["tries"]))
        # The database's time of sending, carried forward by our own clock.
        ahead = rows[0]["now"] - taken_at
        # One destination whose outcome cannot be written down does not interrupt the others.
        outcomes = await asyncio.gather(
            *(self._deliver(self._destinations[name], some, ahead) for name, some in lent.items()),
            return_exceptions=True,
        )
        for each in outcomes:
            if isinstance(each, BaseException):
                raise each
        is_well = all(outcomes)
        return 0.0 if is_well and len(rows) == NOTICES_MAX else None

    async def _deliver(self, to: NoticeDestination, some: Sequence[_Lent], ahead: float) -> bool:
        """Send some to one destination, until one fails; whether none has."""
        for place, each in enumerate(some):
            outcome = await self._sent(to, each.notice, at=ahead + self._clock.monotonic())
            if outcome.is_sent:
                await self._record_sent(each, outcome)
                continue
            await self._record_failed(to, each, outcome)
            await self._return(some[place + 1 :])
            return False
        return True

    async def _sent(
        self, to: NoticeDestination, notice: AlertNotice, *, at: float
    ) -> DeliveryOutcome:
        try:
            async with asyncio.timeout(to.seconds_max):
                return await to.send(notice, at=at)
        except TimeoutError:
            return not_taken(f"The delivery timed out after {to.seconds_max:g} s.")
        except Exception as error:  # noqa: BLE001 - whatever it is, only this notice has failed
            # What it says may hold an address or a password.
            _log.warning(
                "failed to send a notice by %s: unexpected %s", to.name, type(error).__name__
            )
            return not_taken(f"Sending failed: {type(error).__name__}.")

    async def _take(self) -> list[dict[str, Any]]:
        asked = {
            "destinations": list(self._destinations),
            "limit": NOTICES_MAX,
            "lent_seconds": self._lent_seconds,
        }

        async def work(connection: Connection) -> list[dict[str, Any]]:
            return await (await connection.execute(query("take_notices"), asked)).fetchall()

        rows = await self._database.transact(work)
        # What an update returns has no order.
        return sorted(rows, key=lambda row: (row["body"]["id"], row["what"]))

    async def _record_sent(self, each: _Lent, outcome: DeliveryOutcome) -> None:
        asked = {"id": each.notice.id, "note": _cut(outcome.note) or None}

        async def work(connection: Connection) -> None:
            await connection.execute(query("record_notice_sent"), asked)

        await self._database.transact(work)

    async def _record_failed(
        self, to: NoticeDestination, each: _Lent, outcome: DeliveryOutcome
    ) -> None:
        asked = {
            "id": each.notice.id,
            "tries": each.tries,
            "why": _cut(outcome.note),
            "first_ms": _FIRST_MS,
            "max_ms": _MAX_MS,
            "give_up_seconds": GIVE_UP_SECONDS,
        }

        async def work(connection: Connection) -> dict[str, Any] | None:
            return await (await connection.execute(query("record_notice_failed"), asked)).fetchone()

        row = await self._database.transact(work)
        number = each.notice.alert["id"]
        if row is not None and row["is_given_up"]:
            _log.error("gave up on notifying %s of alert %d: %s", to.name, number, asked["why"])
        elif each.tries == 0:
            _log.warning(
                "failed to notify %s of alert %d; it will be retried: %s",
                to.name,
                number,
                asked["why"],
            )

    async def _return(self, some: Sequence[_Lent]) -> None:
        if not some:
            return
        asked = {
            "ids": [each.notice.id for each in some],
            "tries": [each.tries for each in some],
            "pause_seconds": _FIRST_MS / 1000,
        }

        async def work(connection: Connection) -> None:
            await connection.execute(query("return_notices"), asked)

        await self._database.transact(work)


def _cut(text: str) -> str:
    return storable(text[:_ERROR_CHARACTERS_MAX])


_CONNECT_SECONDS: Final = 5.0
_WEBHOOK_SECONDS_MAX: Final = 15.0


class WebhookDestination:
    """A receiver of notices."""

    name = "webhook"
    seconds_max = _WEBHOOK_SECONDS_MAX

    def __init__(self, url: str, *, secret: str = "") -> None:
        self._url = url
        self._secret = secret
        import httpx  # noqa: PLC0415 - most installations send no webhooks, and need no client

        self._trusted = httpx.create_ssl_context()

    async def send(self, notice: AlertNotice, *, at: float) -> DeliveryOutcome:
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
        import httpx  # noqa: PLC0415 - see above

        try:
            async with (
                httpx.AsyncClient(
                    verify=self._trusted,
                    timeout=httpx.Timeout(_WEBHOOK_SECONDS_MAX, connect=_CONNECT_SECONDS),
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


_MAIL_STEP_SECONDS: Final = 10.0
_MAIL_SECONDS_MAX: Final = 30.0


class MailDestination:
    """A mail server, and those who get the mail."""

    name = "mail"
    seconds_max = _MAIL_SECONDS_MAX

    def __init__(self, settings: MailSettings, *, password: str = "") -> None:
        self._settings = settings
        self._password = password

    async def send(self, notice: AlertNotice, *, at: float) -> DeliveryOutcome:
        """Hand one in."""
        del at
        session = _Session(self._settings, self._password)
        try:
            return await asyncio.to_thread(session.send, notice)
        finally:
            # If the time is up, or we are stopped, the thread ends by this.
            session.end()


class _Plain(smtplib.SMTP):
    """A client that can be ended from outside, also while it connects."""

    def __init__(self, session: _Session, settings: MailSettings) -> None:
        self._session = session
        session.client = self
        super().__init__(settings.host, settings.port, timeout=_MAIL_STEP_SECONDS)

    def getreply(self) -> tuple[int, bytes]:
        # There is a socket by now: from here on `end` reaches it.
        self._session.go_on(self)
        return super().getreply()


class _Tls(smtplib.SMTP_SSL):
    """The same, with TLS from the beginning."""

    def __init__(self, session: _Session, settings: MailSettings) -> None:
        self._session = session
        session.client = self
        context = ssl.create_default_context()
        super().__init__(settings.host, settings.port, timeout=_MAIL_STEP_SECONDS, context=context)

    def getreply(self) -> tuple[int, bytes]:
        self._session.go_on(self)
        return super().getreply()


class _Session:
    """One mail on its way; `send` runs in a thread, `end` is called from outside of it."""

    def __init__(self, settings: MailSettings, password: str) -> None:
        self._settings = settings
        self._password = password
        self._is_ended = False
        self.client: smtplib.SMTP | None = None

    def send(self, notice: AlertNotice) -> DeliveryOutcome:
        """Hand a notice in; whatever the server does is an outcome."""
        try:
            refused = self._hand_in(notice)
        except (smtplib.SMTPException, OSError) as error:
            return not_taken(self._why(error))
        if refused:
            return taken(f"{refused} of {len(self._settings.to)} receivers were refused.")
        return taken()

    def end(self) -> None:
        """Have the thread end, also if it waits for the server."""
        self._is_ended = True
        opened = getattr(self.client, "sock", None)
        if isinstance(opened, socket.socket):
            with contextlib.suppress(OSError):
                opened.shutdown(socket.SHUT_RDWR)

    def go_on(self, client: smtplib.SMTP) -> None:
        """Raise if nobody waits for the mail to be sent any more."""
        if self._is_ended:
            client.close()
            raise smtplib.SMTPServerDisconnected

    def _hand_in(self, notice: AlertNotice) -> int:
        """How many receivers were refused; not all, for that is an error."""
        settings = self._settings
        mail = as_mail(notice, sender=settings.sender, to=settings.to)
        is_tls = settings.security is MailSecurity.TLS
        with _Tls(self, settings) if is_tls else _Plain(self, settings) as client:
            if settings.security is MailSecurity.STARTTLS:
                client.starttls(context=ssl.create_default_context())
            if settings.user:
                client.login(settings.user, self._password)
            return len(client.send_message(mail))

    def _why(self, error: Exception) -> str:
        match error:
            case ssl.SSLError():
                return "The mail server's certificate is not trusted, or it speaks no TLS."
            case smtplib.SMTPNotSupportedError():
                return "The mail server does not offer what is set: STARTTLS, or a login."
            case smtplib.SMTPAuthenticationError():
                return f"The mail server refused the login, with {error.smtp_code}."
            case smtplib.SMTPRecipientsRefused():
                return "The mail server refused every receiver."
            case smtplib.SMTPResponseException():
                return self._answered(error)
            case TimeoutError():
                return "The mail server did not answer in time."
            case smtplib.SMTPServerDisconnected():
                return "The mail server closed the connection, or did not answer in time."
        return "The mail server cannot be reached."

    def _answered(self, error: smtplib.SMTPResponseException) -> str:
        said = error.smtp_error
        text = said.decode("utf-8", "replace") if isinstance(said, bytes) else str(said)
        kept = one_line(hidden(text, [self._password] if self._password else []))
        return f"The mail server answered {error.smtp_code}: {kept}"


SECRET_BYTES_MAX: Final = 10_000


def destinations_of(
    settings: AlertSettings, *, environment: Mapping[str, str]
) -> tuple[NoticeDestination, ...]:
    """Where notices go; raises `InvalidInput` if a secret is not where the settings say."""
    found: list[NoticeDestination] = []
    url = settings.webhook or _secret("webhook", settings.webhook_place, environment)
    if url:
        if not is_http(url):
            raise InvalidInput(
                "What alerts.webhook names is not an http URL.", hint="It is https://HOST/PATH."
            )
        secret = _secret("webhook_secret", settings.webhook_secret, environment)
        found.append(WebhookDestination(url, secret=secret))
    if settings.mail is not None:
        password = _secret("mail.password", settings.mail.password, environment)
        found.append(MailDestination(settings.mail, password=password))
    return tuple(found)


def _secret(name: str, place: SecretPlace | None, environment: Mapping[str, str]) -> str:
    if place is None:
        return ""
    if place.variable:
        value = environment.get(place.variable, "").strip()
        where = f"the variable {place.variable}"
    else:
        value = _in_file(name, place.file)
        where = place.file
    if not value:
        raise InvalidInput(f"alerts.{name} is to be in {where}, which is empty or not there.")
    return value


def _in_file(name: str, file: str) -> str:
    try:
        with Path(file).open("rb") as opened:
            content = opened.read(SECRET_BYTES_MAX + 1)
        if len(content) > SECRET_BYTES_MAX:
            raise InvalidInput(f"alerts.{name}: {file} is too long for a secret.")
        return content.decode("utf-8").strip()
    except OSError as error:
        raise InvalidInput(
            f"alerts.{name} cannot be read from {file}: {error.strerror or error}."
        ) from error
    except UnicodeDecodeError:
        raise InvalidInput(f"alerts.{name}: {file} is not a text.") from None
