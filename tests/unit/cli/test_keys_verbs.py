"""The verbs on keys and on the audit: what they send, and what they say."""

from __future__ import annotations

from datetime import timedelta

import pytest

from penstock.protocol.keys import (
    AuditAnswer,
    AuditNote,
    KeyAnswer,
    KeysAnswer,
    KeyState,
    RevokeAnswer,
    RotateAnswer,
)
from tests.unit.cli.test_dispatcher_verbs import User, user
from tests.unit.dispatcher.client.scripted import NOW, problem

__all__ = ["user"]

MINUTE = timedelta(minutes=1)


def key(kid: str, state: KeyState, **fields: object) -> KeyAnswer:
    said: dict[str, object] = {
        "signer": "pem",
        "holder": "0123456789abcdef",
        "reference": f"{kid}.pem",
        "created_at": NOW - 10 * MINUTE,
        "signs_from": NOW - 9 * MINUTE,
        "seen_at": NOW,
    }
    return KeyAnswer(kid=kid, state=state, **{**said, **fields})  # type: ignore[arg-type] # above


def test_keys_are_listed(user: User) -> None:
    arn = "arn:aws:kms:eu-west-1:1:key/x"
    listed = KeysAnswer(
        keys=[
            key("new", KeyState.PUBLISHED, signs_from=NOW + MINUTE),
            key("late", KeyState.SIGNING, is_rotated=False),
            key("old", KeyState.RETIRED, retired_at=NOW - MINUTE),
            key("bad", KeyState.RETIRED, retired_at=NOW, revoked_at=NOW - 2 * MINUTE),
            key("kms", KeyState.SIGNING, signer="kms", holder="alias/penstock", reference=arn),
        ],
        rotation=1,
    )
    user.on("GET /v1/keys", listed)
    lines = user.said("keys list").splitlines()
    assert lines[0].split() == ["key", "state", "signer", "holder", "made", "seen"]
    assert "published" in lines[1]
    assert "signs in 1 min" in lines[1]
    assert "signing, to be rotated" in lines[2]
    assert "01234567 " in lines[2]
    assert "retired 1 min ago" in lines[3]
    assert "revoked 2 min ago" in lines[4]
    assert "alias/penstock" in lines[5]
    assert [each["kid"] for each in user.json("keys list")["keys"]] == [
        "new",
        "late",
        "old",
        "bad",
        "kms",
    ]
    user.on("GET /v1/keys", KeysAnswer(keys=[]))
    ran = user.types("keys list")
    assert (ran.returncode, ran.stdout) == (0, "")
    assert "no keys yet" in ran.stderr


@pytest.mark.parametrize("is_new", [True, False])
def test_keys_are_rotated(user: User, is_new: bool) -> None:
    answer = RotateAnswer(
        rotation=3, asked_at=NOW - MINUTE / 2, is_new=is_new, signs_from=NOW + MINUTE / 2
    )
    user.on("POST /v1/keys/rotate", answer)
    said = user.said("keys rotate --kms-key alias/next")
    assert ("no new one was started" in said) is not is_new
    assert "New keys sign in 30" in said
    assert user.bodies == [{"kms_key": "alias/next"}]
    assert user.json("keys rotate")["is_new"] is is_new
    assert user.bodies[1] == {}


def test_a_rotation_that_cannot_be(user: User) -> None:
    wrong = problem(422, title="This dispatcher signs with keys in files.")
    user.on("POST /v1/keys/rotate", wrong)
    ran = user.types("keys rotate --kms-key x")
    assert ran.returncode == 2
    assert ran.stderr.startswith("penstock: This dispatcher signs with keys in files.")


def test_the_audit_is_shown(user: User) -> None:
    note = AuditNote(
        id=17,
        first_at=NOW - 2 * MINUTE,
        last_at=NOW - MINUTE,
        times=1200,
        what="POST /v1/task/credentials",
        outcome="refused",
        task_id=7,
        attempt=2,
        caller="task:7:2",
        address="10.0.0.1",
        reason="expired\x1b[31m",
        detail={"asked": "task:8:1"},
    )
    user.on("GET /v1/audit", AuditAnswer(notes=[note], before=17))
    ran = user.types("audit --task 7 --outcome refused --limit 1 --before 20")
    assert ran.returncode == 0
    for word in ("17", "1 min ago", "refused", "1,200", "7, 2", "task:7:2", "10.0.0.1", "task:8:1"):
        assert word in ran.stdout
    assert "\x1b" not in ran.stdout
    assert "--before 17" in ran.stderr
    (heard,) = user.dispatcher.heard
    assert heard.query == "task=7&outcome=refused&limit=1&before=20"
    assert user.json("audit")["notes"][0]["reason"] == "expired\x1b[31m"
    user.on("GET /v1/audit", AuditAnswer(notes=[]))
    assert user.types("audit").stderr == "No audit records.\n"


def test_a_key_is_revoked_by_who_says_so(user: User) -> None:
    user.on("POST /v1/keys/revoke", RevokeAnswer(kid="old", revoked_at=NOW, is_new=True))
    ran = user.types("keys revoke old")
    assert (ran.returncode, user.bodies) == (2, [])
    assert "confirm with --yes" in ran.stderr
    assert "old is revoked" in user.said("keys revoke old --yes")
    assert user.json("keys revoke old --yes")["is_new"] is True
    user.on("POST /v1/keys/revoke", RevokeAnswer(kid="old", revoked_at=NOW, is_new=False))
    assert "was revoked before" in user.said("keys revoke old --yes")
