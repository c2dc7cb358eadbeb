"""The table `alerts` of the settings: what it may say, and what is told of what it may not."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from penstock.dispatcher.alerts.notifier import (
    SECRET_BYTES_MAX,
    AlertNotice,
    as_json,
    destinations_of,
)
from penstock.dispatcher.alerts.rules import (
    DEFAULT_RULES,
    AlertRule,
    AlertSettings,
    MailSecurity,
    MailSettings,
    RuleKind,
    SecretPlace,
    read_alerts,
)
from penstock.kernel.errors import InvalidInput

MAIL = {"host": "smtp.example", "from": "a@example", "to": ["b@example"]}
HOOK = "https://hooks.example/services/sesame"


def test_without_settings_some_rules_hold_and_nobody_is_told() -> None:
    settings = read_alerts({})
    assert settings == AlertSettings()
    names = ["dead_tasks", "dead_source", "no_workers", "parked_outbox", "table_behind"]
    assert [each.name for each in settings.rules] == names
    assert settings.destinations == ()
    assert destinations_of(settings, environment={}) == ()


def test_everything_that_may_be_said() -> None:
    settings = read_alerts(
        {
            "url": "https://console.example/",
            "webhook": HOOK,
            "webhook_secret_file": "/run/secrets/hook",
            "mail": {**MAIL, "security": "tls", "user": "u", "password_variable": "MAIL_PASSWORD"},
            "rules": {
                "dead_tasks": {"at_least": 5, "within": "1h", "jobs": ["load_*"]},
                "no_workers": {"longer_than": "90s", "if_waiting": True},
                "dead_source": {"enabled": False},
                "orders-late": {
                    "when": "stale_dataset",
                    "datasets": ["orders"],
                    "longer_than": "1h30m",
                },
                "pressure": {"longer_than": "10m"},
                "parked_outbox": {"at_least": 3},
                "failure_rate": {"percent": 20, "jobs": ["load_*"]},
            },
        }
    )
    assert settings.url == "https://console.example"
    assert settings.destinations == ("webhook", "mail")
    assert settings.webhook_secret == SecretPlace(file="/run/secrets/hook")
    assert settings.mail == MailSettings(
        host="smtp.example",
        port=465,
        sender="a@example",
        to=("b@example",),
        security=MailSecurity.TLS,
        user="u",
        password=SecretPlace(variable="MAIL_PASSWORD"),
    )
    dead, workers, parked, behind, late, pressure, failing = settings.rules
    assert behind.longer_than_seconds == 300
    assert dead == AlertRule(
        name="dead_tasks",
        kind=RuleKind.DEAD_TASKS,
        only=("load_*",),
        at_least=5,
        within_seconds=3600.0,
    )
    assert (workers.longer_than_seconds, workers.if_waiting) == (90.0, True)
    assert (late.kind, late.longer_than_seconds) == (RuleKind.STALE_DATASET, 5400.0)
    assert pressure.kind is RuleKind.PRESSURE
    assert "sesame" not in repr(settings)
    assert dead.words == "5 tasks or more of a job have died within 1h. Only load_*."
    assert late.words == "Nothing was published of a dataset for 1h30m. Only orders."
    assert parked.words == "3 messages or more of the outbox could not be sent and are parked."
    assert failing == AlertRule(
        name="failure_rate",
        kind=RuleKind.FAILURE_RATE,
        only=("load_*",),
        at_least=10,
        within_seconds=900.0,
        percent=20,
    )
    assert failing.words == (
        "20% of 10 or more attempts of a job have failed within 15m. Only load_*."
    )
    assert workers.words == "No worker was seen for 1m30s while tasks wait."


def test_a_rule_of_another_name_has_the_defaults_of_its_kind() -> None:
    (*_, rule) = read_alerts({"rules": {"mine": {"when": "no_workers"}}}).rules
    (default,) = [each for each in DEFAULT_RULES if each.kind is RuleKind.NO_WORKERS]
    assert rule.longer_than_seconds == default.longer_than_seconds


def test_names_are_matched_whole() -> None:
    rule = AlertRule(name="r", kind=RuleKind.PRESSURE, only=("load_*", "clean"))
    assert [rule.is_about(each) for each in ("load_a", "clean", "cleaner", "reload_a", "load")] == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert AlertRule(name="r", kind=RuleKind.PRESSURE).is_about("anything")


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ({"webhok": HOOK}, "Is webhook meant?"),
        ({"webhook": 7}, "alerts.webhook cannot be what it is. Write a text in quotes."),
        ({"webhook": "ftp://x/y"}, "alerts.webhook is not an http URL."),
        ({"webhook": "https://u:p@x/y"}, "alerts.webhook is not an http URL."),
        ({"webhook": "https://x:99999/y"}, "alerts.webhook is not an http URL."),
        ({"webhook": HOOK, "webhook_file": "/x"}, "alerts.webhook is given twice."),
        ({"webhook_secret_file": "/x"}, "a secret for a webhook, and no webhook"),
        ({"webhook": HOOK, "webhook_secret_file": "x"}, "is not an absolute path"),
        ({"webhook": HOOK, "webhook_secret_variable": "a b"}, "not the name of a variable"),
        ({"webhook": HOOK, "webhook_secret": "x"}, "which is not a setting"),
        ({"url": "console.example"}, "which is not the address of a console"),
        ({"mail": "a@example"}, "Write a table, as in [alerts.mail]."),
        ({"mail": {**MAIL, "host": ""}}, "alerts.mail.host is not the name of a mail server."),
        ({"mail": {**MAIL, "from": "a"}}, "alerts.mail.from has 'a'"),
        ({"mail": {**MAIL, "from": "a@b\r\nBcc: c@d"}}, "which is not a mail address"),
        ({"mail": {**MAIL, "to": []}}, "alerts.mail.to has ''"),
        ({"mail": {**MAIL, "to": "b@example"}}, "a list of at most 20 texts"),
        ({"mail": {**MAIL, "to": ["<b@example>"]}}, "which is not a mail address"),
        ({"mail": {**MAIL, "port": 0}}, "a whole number from 1 to 65535"),
        ({"mail": {**MAIL, "port": True}}, "a whole number from 1 to 65535"),
        ({"mail": {**MAIL, "security": "ssl"}}, "It is one of starttls, tls, none."),
        ({"mail": {**MAIL, "user": "u"}}, "a user without a password"),
        ({"mail": {**MAIL, "password": "p"}}, "which is not a setting"),
        (
            {"mail": {**MAIL, "security": "none", "user": "u", "password_file": "/p"}},
            "over a connection that anybody can read",
        ),
        ({"rules": []}, "Write a table, as in [alerts.rules]."),
        ({"rules": {"x": 7}}, "alerts.rules.x is not a table."),
        ({"rules": {"x": {}}}, "alerts.rules.x.when is missing."),
        ({"rules": {"x": {"when": "dead"}}}, "It is one of dead_tasks, stale_dataset"),
        ({"rules": {"Bad Name": {"when": "dead_tasks"}}}, "which is not the name of a rule"),
        ({"rules": {"pressure": {}}}, "alerts.rules.pressure.longer_than is missing."),
        ({"rules": {"pressure": {"longer_than": "long"}}}, "is not a duration"),
        ({"rules": {"pressure": {"longer_than": 600}}}, "a duration of a second or more"),
        ({"rules": {"pressure": {"longer_than": "1ms"}}}, "a duration of a second or more"),
        ({"rules": {"dead_tasks": {"at_least": 0}}}, "a whole number from 1 to 10000"),
        ({"rules": {"dead_tasks": {"datasets": ["x"]}}}, "which is not a setting"),
        ({"rules": {"dead_tasks": {"enabled": 1}}}, "Write true or false."),
        ({"rules": {f"r{n}": {"when": "dead_tasks"} for n in range(51)}}, "50 are allowed"),
    ],
)
def test_what_cannot_be_right_is_one_sentence(table: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        read_alerts(table)
    said = f"{caught.value.message} {caught.value.hint}"
    assert told in said
    assert "alerts" in said
    assert "sesame" not in said


def test_secrets_are_read_from_files_and_variables(tmp_path: Path) -> None:
    file = tmp_path / "hook"
    file.write_text(f"{HOOK}\n", "utf-8")
    settings = read_alerts({"webhook_file": str(file), "webhook_secret_variable": "S"})
    (found,) = destinations_of(settings, environment={"S": "a secret"})
    assert found.name == "webhook"
    assert "sesame" not in repr(found)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "No such file"),
        (b"", "which is empty or not there"),
        (b"\xff\xfe", "is not a text"),
        (b"x" * (SECRET_BYTES_MAX + 1), "is too long for a secret"),
        (b"not a url", "is not an http URL"),
    ],
)
def test_a_secret_that_cannot_be_had_is_said(
    tmp_path: Path, content: bytes | None, told: str
) -> None:
    file = tmp_path / "hook"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InvalidInput, match=told):
        destinations_of(read_alerts({"webhook_file": str(file)}), environment={})


def test_a_variable_that_is_not_there_is_said() -> None:
    settings = read_alerts({"webhook": HOOK, "webhook_secret_variable": "NOT_THERE"})
    with pytest.raises(InvalidInput, match="the variable NOT_THERE"):
        destinations_of(settings, environment={})


def _blocks(kind: str) -> list[str]:
    page = Path(__file__).parents[4] / "docs" / "alerts.md"
    return re.findall(rf"```{kind}\n(.*?)```", page.read_text("utf-8"), re.DOTALL)


def test_the_settings_of_the_documentation_are_right() -> None:
    (text,) = _blocks("toml")
    settings = read_alerts(tomllib.loads(text)["alerts"])
    assert [each.name for each in settings.rules] == [
        "dead_tasks",
        "dead_source",
        "parked_outbox",
        "table_behind",
        "orders-late",
        "loads-fail",
    ]
    assert settings.destinations == ("webhook", "mail")


def test_the_json_of_the_documentation_is_what_is_sent() -> None:
    (text,) = _blocks("json")
    said = json.loads(text)
    alert = {**said["alert"], "path": "/tasks?status=dead&job=clean"}
    notice = AlertNotice(
        id=said["id"], what=said["what"], alert=alert, url="https://penstock.example"
    )
    assert json.loads(as_json(notice)) == said
