"""`penstock alerts`: what it sends, and what it says."""

from __future__ import annotations

from datetime import timedelta

from penstock.protocol.steering import (
    AlertAnswer,
    AlertsAnswer,
    AlertState,
    NoticeAnswer,
    NoticeState,
    RuleAnswer,
)
from tests.unit.cli.test_dispatcher_verbs import User, user
from tests.unit.dispatcher.client.scripted import NOW

__all__ = ["user"]

MINUTE = timedelta(minutes=1)


def notice(state: NoticeState) -> NoticeAnswer:
    return NoticeAnswer(
        id="an id",
        what="opened",
        destination="webhook",
        state=state,
        tries=1,
        last_error=None,
        created_at=NOW,
        due_at=None,
        sent_at=None,
        given_up_at=None,
    )


def alert(id: int, *, over: bool = False, state: NoticeState = NoticeState.SENT) -> AlertAnswer:
    return AlertAnswer(
        id=id,
        rule="dead_tasks",
        kind="dead_tasks",
        subject="clean",
        state=AlertState.OVER if over else AlertState.OPEN,
        summary="2 tasks are dead: \x1b[31mboom",
        path="/tasks",
        detail={},
        opened_at=NOW - 5 * MINUTE,
        clear_since=None,
        over_at=NOW - MINUTE if over else None,
        over_why="so" if over else None,
        notices=[notice(state)],
    )


def answer(*alerts: AlertAnswer, before: int | None = None) -> AlertsAnswer:
    rules = [RuleAnswer(name="dead_tasks", words="A task of a job has died.")]
    return AlertsAnswer(
        alerts=list(alerts), before=before, rules=rules, destinations=["webhook"], judged_at=NOW
    )


def test_alerts_are_shown(user: User) -> None:
    found = [alert(9), alert(8, over=True), alert(7, state=NoticeState.GIVEN_UP)]
    user.on("GET /v1/alerts", answer(*found, before=7))
    ran = user.types("alerts --all --limit 3 --before 10")
    assert ran.returncode == 0
    heads, first, second, third = ran.stdout.splitlines()
    assert heads.split() == ["id", "status", "since", "until", "rule", "told", "what"]
    assert first.split()[:2] == ["9", "open"]
    assert "5 min ago" in first
    assert "1 min ago" in second
    assert "webhook: given up" in third
    assert "\x1b" not in ran.stdout
    assert "--before 7" in ran.stderr
    (heard,) = user.dispatcher.heard
    assert heard.query == "limit=3&before=10"
    assert user.json("alerts")["alerts"][0]["id"] == 9
    assert user.dispatcher.heard[-1].query == "state=open&limit=100"


def test_a_check_fails_while_one_is_open(user: User) -> None:
    user.on("GET /v1/alerts", answer(alert(1)))
    assert user.types("alerts").returncode == 0
    assert user.types("alerts --check").returncode == 1
    user.on("GET /v1/alerts", answer())
    ran = user.types("alerts --check")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "No alert is open.\n")


def test_rules_are_shown(user: User) -> None:
    user.on("GET /v1/alerts", answer())
    said = user.said("alerts --rules")
    assert "dead_tasks  A task of a job has died." in said
    assert "1 rule; notices go to: webhook." in said
