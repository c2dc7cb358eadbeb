"""Mail of alerts: what a task has said stays in its line."""

from __future__ import annotations

import email
from email.policy import SMTP

import pytest

from penstock.dispatcher.alerts.notifier import AlertNotice, as_mail

_AT = "2026-11-16T06:00:00+00:00"


@pytest.mark.parametrize(
    "reason",
    [
        "=?utf-8?q?x=0D=0AReply-To:_evil@x.y=0D=0A=0D=0AAll_is_well?=",
        "=?utf-7?q?+2AA-?=",
        "=?unicode_escape?q?=5Cud800?=",
        "==?utf-8?b?DQpCY2M6IGE=?=",
        "caf\u00e9 =?utf-8?q?=0D=0ABcc:_a@b?=",
    ],
)
def test_a_reason_is_never_a_header_and_never_stops_the_mail(reason: str) -> None:
    alert = {
        "id": 7,
        "rule": "dead_tasks",
        "subject": "clean",
        "summary": reason,
        "path": "/tasks",
        "opened_at": _AT,
        "over_at": None,
        "over_why": None,
        "detail": {},
    }
    notice = AlertNotice(id="7-opened", what="opened", alert=alert, url="http://127.0.0.1")
    written = as_mail(notice, sender="penstock@x.y", to=("people@x.y",)).as_bytes()
    read = email.message_from_bytes(written, policy=SMTP)
    assert read["Reply-To"] is None
    assert read["Bcc"] is None
    assert read["To"] == "people@x.y"
    assert "?=" in str(read["Subject"])
