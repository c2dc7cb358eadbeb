"""Mail: handed in to a server over SMTP, in a thread, within bounds.

The standard library's client waits in a thread. Every wait of it is bounded, and when the whole
takes too long, its socket is shut down from here, so that the thread ends as well. A mail that was
taken although its answer was lost comes again, with the same `Message-ID`. If the server takes it
for some of the receivers only, it is sent, and the outcome says so. What a server says is told cut,
and without the password; the password is sent over TLS only, or to this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import smtplib
import socket
import ssl
from typing import Final

from penstock.dispatcher.alerts.findings import one_line
from penstock.dispatcher.alerts.notices import Notice, as_mail
from penstock.dispatcher.alerts.rules import MailSecurity, MailSettings
from penstock.dispatcher.alerts.telling import Outcome, not_taken, taken
from penstock.runtimes.secrets import hidden

_STEP_SECONDS: Final = 10.0
_SECONDS_MAX: Final = 30.0


class Mail:
    """A mail server, and those who get the mail."""

    name = "mail"
    seconds_max = _SECONDS_MAX

    def __init__(self, settings: MailSettings, *, password: str = "") -> None:
        self._settings = settings
        self._password = password

    async def send(self, notice: Notice, *, at: float) -> Outcome:
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
        super().__init__(settings.host, settings.port, timeout=_STEP_SECONDS)

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
        super().__init__(settings.host, settings.port, timeout=_STEP_SECONDS, context=context)

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

    def send(self, notice: Notice) -> Outcome:
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

    def _hand_in(self, notice: Notice) -> int:
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
                return "The mail server broke off, or did not answer in time."
        return "The mail server cannot be reached."

    def _answered(self, error: smtplib.SMTPResponseException) -> str:
        said = error.smtp_error
        text = said.decode("utf-8", "replace") if isinstance(said, bytes) else str(said)
        kept = one_line(hidden(text, [self._password] if self._password else []))
        return f"The mail server answered {error.smtp_code}: {kept}"
