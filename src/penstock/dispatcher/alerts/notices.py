"""A notice in the form of its destination: JSON with a signature, or mail. Pure.

The same notice is the same bytes and the same mail whoever sends it, and however often, but for the
signature, which holds the time of sending. docs/alerts.md tells receivers how to verify it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from email.message import EmailMessage
from email.policy import SMTP
from email.utils import format_datetime
from typing import Any, Final

from penstock.dispatcher.alerts.findings import moment

ID_HEADER: Final = "X-Penstock-Notice"
TIME_HEADER: Final = "X-Penstock-Timestamp"
SIGNATURE_HEADER: Final = "X-Penstock-Signature"
_SUBJECT_CHARACTERS_MAX: Final = 120
_TOLD: Final = ("id", "rule", "kind", "subject", "summary", "detail", "opened_at")


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """What is to be told."""

    id: str
    what: str
    """`opened` or `over`."""
    alert: Mapping[str, Any]
    url: str = ""
    """The console's address."""

    @property
    def link(self) -> str | None:
        """Where the alert is shown; None if nobody has said where the console is."""
        return f"{self.url}{self.alert['path']}" if self.url else None


def as_json(notice: Notice) -> bytes:
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


def as_mail(notice: Notice, *, sender: str, to: tuple[str, ...]) -> EmailMessage:
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


def _lines(notice: Notice) -> list[str]:
    alert = notice.alert
    opened = moment(datetime.fromisoformat(alert["opened_at"]))
    lines = [alert["summary"], ""]
    if notice.what == "over":
        over = moment(datetime.fromisoformat(alert["over_at"]))
        lines = [f"This is over since {over}: {alert['over_why']}", "", *lines]
    lines.append(f"Open since {opened}, by the rule {alert['rule']}.")
    if notice.link is not None:
        lines += ["", notice.link]
    return [*lines, "", f"Alert {alert['id']}, notice {notice.id}."]


def _seconds(at: str) -> int:
    return int(datetime.fromisoformat(at).timestamp())
