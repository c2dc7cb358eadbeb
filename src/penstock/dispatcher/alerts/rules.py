"""Alert rules and destinations: their values, the defaults, and the settings' table `alerts`. Pure.

`read_alerts` makes the values of the table. Every refusal says where it stands and what to
write; the value of a field that may be a secret is never repeated. Called by
`penstock.settings` to validate, and by the wiring for the values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import PurePath
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from penstock.kernel.errors import InvalidInput
from penstock.kernel.text import listed, nearest, shown
from penstock.kernel.units import DURATION_HOW, duration_ms, duration_text


class RuleKind(StrEnum):
    """What a rule looks at."""

    DEAD_TASKS = "dead_tasks"
    """Tasks of a job that will not be tried again by themselves."""
    STALE_DATASET = "stale_dataset"
    """A dataset of which nothing was published for too long."""
    PRESSURE = "pressure"
    """A queue that is over its limits for too long."""
    SILENT_SOURCE = "silent_source"
    """A source that has told of nothing for too long."""
    DEAD_SOURCE = "dead_source"
    """An always-on source whose task has died, until another one runs steadily."""
    NO_WORKERS = "no_workers"
    """No worker was heard of for too long, of a DAG that needs one, or of tasks that wait for one
    of their queue."""
    FAILURE_RATE = "failure_rate"
    """Too many of the attempts of a job that have ended lately have failed."""
    PARKED_OUTBOX = "parked_outbox"
    """Side effects that failed so often that the relay has given them up."""
    TABLE_BEHIND = "table_behind"
    """A table in Postgres that lacks for too long what is published of its dataset."""


ABSENCE: Final = frozenset({RuleKind.STALE_DATASET, RuleKind.SILENT_SOURCE, RuleKind.NO_WORKERS})
"""Kinds that are about what was not heard of: our own outage looks the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertRule:
    """When something is the matter. Which fields count depends on the kind; see `reading`."""

    name: str
    kind: RuleKind
    only: tuple[str, ...] = ()
    """Names of jobs or datasets that it is about, with `*` for any text; empty for all."""
    at_least: int = 1
    """How many tasks have to be dead, messages parked, or attempts to have ended for a rate."""
    within_seconds: float | None = None
    """Only what died or ended within that time; None is however long ago."""
    percent: int = 50
    """How many of a hundred attempts have to have failed."""
    longer_than_seconds: float = 0.0
    if_waiting: bool = False
    """Whether workers are missed only while tasks wait for them."""

    def is_about(self, subject: str) -> bool:
        return not self.only or any(fnmatchcase(subject, each) for each in self.only)

    @property
    def words(self) -> str:
        """The rule as a sentence."""
        long = duration_text(round(self.longer_than_seconds * 1000))
        which = f" Only {', '.join(self.only)}." if self.only else ""
        match self.kind:
            case RuleKind.DEAD_TASKS:
                within = self.within_seconds
                lately = f" within {duration_text(round(within * 1000))}" if within else ""
                many = "A task" if self.at_least == 1 else f"{self.at_least} tasks or more"
                has = "has" if self.at_least == 1 else "have"
                return f"{many} of a job {has} died{lately}.{which}"
            case (
                RuleKind.STALE_DATASET
                | RuleKind.PRESSURE
                | RuleKind.SILENT_SOURCE
                | RuleKind.TABLE_BEHIND
            ):
                return f"{_LASTING[self.kind]} for {long}.{which}"
            case RuleKind.DEAD_SOURCE:
                return f"An always-on source is dead.{which}"
            case RuleKind.NO_WORKERS:
                waiting = " while tasks wait" if self.if_waiting else ""
                return f"No worker was seen for {long}{waiting}."
            case RuleKind.FAILURE_RATE:
                lately = duration_text(round((self.within_seconds or 0) * 1000))
                many = f"{self.percent}% of {self.at_least} or more attempts of a job"
                return f"{many} have failed within {lately}.{which}"
            case RuleKind.PARKED_OUTBOX:
                if self.at_least == 1:
                    return "A message of the outbox could not be sent and is parked."
                many = f"{self.at_least} messages or more"
                return f"{many} of the outbox could not be sent and are parked."


_LASTING: Final = {
    RuleKind.STALE_DATASET: "Nothing was published of a dataset",
    RuleKind.PRESSURE: "The queue of a job has exceeded its limits",
    RuleKind.SILENT_SOURCE: "A source has sent no event",
    RuleKind.TABLE_BEHIND: "A table in Postgres has been behind its dataset",
}
DEFAULT_RULES: Final = (
    AlertRule(name="dead_tasks", kind=RuleKind.DEAD_TASKS),
    AlertRule(name="dead_source", kind=RuleKind.DEAD_SOURCE),
    AlertRule(name="no_workers", kind=RuleKind.NO_WORKERS, longer_than_seconds=300.0),
    AlertRule(name="parked_outbox", kind=RuleKind.PARKED_OUTBOX),
    AlertRule(name="table_behind", kind=RuleKind.TABLE_BEHIND, longer_than_seconds=300.0),
)
"""What is judged if nobody says otherwise; a rule of the same name takes the place of one."""
BASES: Final = (
    *DEFAULT_RULES,
    AlertRule(name="failure_rate", kind=RuleKind.FAILURE_RATE, at_least=10, within_seconds=900.0),
)
"""What a rule of a kind is where the settings do not say otherwise."""


class MailSecurity(StrEnum):
    """How the way to a mail server is kept from being read."""

    STARTTLS = "starttls"
    TLS = "tls"
    NONE = "none"
    """It is not; without a password only, but on this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretPlace:
    """Where a secret is: a file, or a variable of the environment. Never the secret itself."""

    file: str = ""
    variable: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MailSettings:
    """Where mail is handed in, from whom and for whom."""

    host: str
    port: int
    sender: str
    to: tuple[str, ...]
    security: MailSecurity = MailSecurity.STARTTLS
    user: str = ""
    password: SecretPlace | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertSettings:
    """What the table `alerts` says."""

    rules: tuple[AlertRule, ...] = DEFAULT_RULES
    url: str = ""
    """The console's address, for links; empty for links without it."""
    # The address of a webhook is often all that one needs to write to it.
    webhook: str = field(default="", repr=False)
    webhook_place: SecretPlace | None = None
    """Where the address of the webhook is, if it does not stand in the settings."""
    webhook_secret: SecretPlace | None = None
    mail: MailSettings | None = None

    @property
    def destinations(self) -> tuple[str, ...]:
        """The names of where notices go."""
        has_webhook = bool(self.webhook) or self.webhook_place is not None
        return (*(("webhook",) if has_webhook else ()), *(("mail",) if self.mail else ()))


RULES_MAX: Final = 50
NAMES_MAX: Final = 100
TO_MAX: Final = 20
LOOPBACK: Final = frozenset({"127.0.0.1", "::1", "localhost"})
_PORTS: Final = {MailSecurity.STARTTLS: 587, MailSecurity.TLS: 465, MailSecurity.NONE: 25}
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,199}")
_HOST: Final = re.compile(r"[A-Za-z0-9._:-]{1,253}")
_ADDRESS: Final = re.compile(r"[!-~]{1,64}@[A-Za-z0-9.-]{1,253}")
_NOT_IN_ADDRESS: Final = frozenset('<>(),;:"[]\\')

_TOP: Final = (
    *("url", "webhook", "webhook_file", "webhook_variable"),
    *("webhook_secret_file", "webhook_secret_variable", "mail", "rules"),
)
_MAIL: Final = (
    *("host", "port", "from", "to", "security"),
    *("user", "password_file", "password_variable"),
)
_LONG: Final = ("longer_than",)
_FIELDS: Final[Mapping[RuleKind, tuple[str, ...]]] = {
    RuleKind.DEAD_TASKS: ("jobs", "at_least", "within"),
    RuleKind.STALE_DATASET: ("datasets", *_LONG),
    RuleKind.PRESSURE: ("jobs", *_LONG),
    RuleKind.SILENT_SOURCE: ("jobs", *_LONG),
    RuleKind.DEAD_SOURCE: ("jobs",),
    RuleKind.NO_WORKERS: (*_LONG, "if_waiting"),
    RuleKind.FAILURE_RATE: ("jobs", "percent", "at_least", "within"),
    RuleKind.PARKED_OUTBOX: ("at_least",),
    RuleKind.TABLE_BEHIND: ("datasets", *_LONG),
}
_OF_DATASETS: Final = (RuleKind.STALE_DATASET, RuleKind.TABLE_BEHIND)
_MUST_SAY_HOW_LONG: Final = (RuleKind.STALE_DATASET, RuleKind.PRESSURE, RuleKind.SILENT_SOURCE)
Choice = TypeVar("Choice", bound=StrEnum)


def read_alerts(table: Mapping[str, Any]) -> AlertSettings:
    """The settings of alerts; raises `InvalidInput` for the first thing that is wrong."""
    section = _Section("alerts", table, _TOP)
    webhook = section.text("webhook")
    place = section.place("webhook")
    if webhook and place is not None:
        raise InvalidInput("alerts.webhook is given twice.", hint="Leave one of them.")
    if webhook and not is_http(webhook):
        raise InvalidInput(
            "alerts.webhook is not an http URL.", hint="Write it as https://HOST/PATH."
        )
    secret = section.place("webhook_secret")
    if secret is not None and not webhook and place is None:
        raise InvalidInput(
            "alerts has a secret for a webhook, and no webhook.", hint="Write alerts.webhook."
        )
    url = section.text("url").rstrip("/")
    if url and (not is_http(url) or urlsplit(url).query):
        raise InvalidInput(
            f"alerts.url has {shown(url)}, which is not the address of a console.",
            hint="Write it as https://HOST.",
        )
    return AlertSettings(
        rules=_rules(section.table("rules")),
        url=url,
        webhook=webhook,
        webhook_place=place,
        webhook_secret=secret,
        mail=_mail(section.table("mail")) if "mail" in table else None,
    )


def is_http(url: str) -> bool:
    """Whether a text is the URL of a place that can be posted to, without credentials in it."""
    try:
        parts = urlsplit(url)
        is_whole = parts.scheme in ("http", "https") and bool(parts.hostname)
        _ = parts.port
    except ValueError:
        return False
    return is_whole and "@" not in parts.netloc and url.isascii() and url.isprintable()


def _rules(table: Mapping[str, Any]) -> tuple[AlertRule, ...]:
    if len(table) > RULES_MAX:
        raise InvalidInput(f"alerts.rules has {len(table)} rules; {RULES_MAX} are allowed.")
    found = {each.name: each for each in DEFAULT_RULES}
    for name, said in table.items():
        if not _NAME.fullmatch(name):
            raise InvalidInput(
                f"alerts.rules has {shown(name)}, which is not the name of a rule.",
                hint="Names are made of a-z, 0-9, _ and -, as in orders-late.",
            )
        rule = _rule(name, said)
        if rule is None:
            found.pop(name, None)
        else:
            found[name] = rule
    return tuple(found.values())


def _rule(name: str, said: Any) -> AlertRule | None:
    """One rule; None for one that is switched off."""
    where = f"alerts.rules.{name}"
    if not isinstance(said, Mapping):
        raise InvalidInput(f"{where} is not a table.", hint=f"Write it as [{where}].")
    default = name if name in frozenset(map(str, RuleKind)) else None
    kind = _choice(where, "when", said.get("when", default), RuleKind)
    section = _Section(where, said, ("when", "enabled", *_FIELDS[kind]))
    if not section.flag("enabled", default=True):
        return None
    names = section.names("datasets" if kind in _OF_DATASETS else "jobs")
    # What is not said of one of the rules that hold anyway stays as it is there.
    base = next((each for each in BASES if each.kind is kind), None)
    rule = replace(base, name=name) if base is not None else AlertRule(name=name, kind=kind)
    if "longer_than" in said or kind in _MUST_SAY_HOW_LONG:
        rule = replace(rule, longer_than_seconds=section.seconds("longer_than"))
    if "within" in said:
        rule = replace(rule, within_seconds=section.seconds("within"))
    return replace(
        rule,
        only=names,
        at_least=section.number("at_least", rule.at_least, least=1, most=10_000),
        percent=section.number("percent", rule.percent, least=1, most=100),
        if_waiting=section.flag("if_waiting", default=False),
    )


def _mail(table: Mapping[str, Any]) -> MailSettings:
    section = _Section("alerts.mail", table, _MAIL)
    security = _choice("alerts.mail", "security", table.get("security", "starttls"), MailSecurity)
    host = section.text("host")
    if not _HOST.fullmatch(host):
        raise InvalidInput(
            "alerts.mail.host is not the name of a mail server.", hint='Write host = "smtp.HOST".'
        )
    user, password = section.text("user"), section.place("password")
    if bool(user) != (password is not None):
        raise InvalidInput(
            "alerts.mail has a user without a password, or a password without a user.",
            hint="Write user, and password_file or password_variable; or neither.",
        )
    if user and security is MailSecurity.NONE and host not in LOOPBACK:
        raise InvalidInput(
            "alerts.mail would send a password over a connection that anybody can read.",
            hint='Write security = "starttls" or "tls".',
        )
    to = section.names("to", most=TO_MAX)
    return MailSettings(
        host=host,
        port=section.number("port", _PORTS[security], least=1, most=65_535),
        sender=_address("alerts.mail.from", section.text("from")),
        to=tuple(_address("alerts.mail.to", each) for each in to or ("",)),
        security=security,
        user=user,
        password=password,
    )


def _address(where: str, text: str) -> str:
    if not _ADDRESS.fullmatch(text) or _NOT_IN_ADDRESS.intersection(text):
        raise InvalidInput(
            f"{where} has {shown(text)}, which is not a mail address.",
            hint="Write it as NAME@HOST, without anything around it.",
        )
    return text


def _choice(where: str, name: str, said: Any, choices: type[Choice]) -> Choice:
    if isinstance(said, str) and said in frozenset(map(str, choices)):
        return choices(said)
    what = f"{where}.{name} is missing" if said is None else f"{where}.{name} is {said!r:.60}"
    raise InvalidInput(f"{what}.", hint=f"It is one of {', '.join(choices)}.")


class _Section:
    """A table, and what is asked of its fields."""

    def __init__(self, where: str, table: Mapping[str, Any], known: tuple[str, ...]) -> None:
        self._where = where
        self._table = table
        for name in table:
            if name not in known:
                meant = nearest(str(name), known)
                ask = f"Is {meant} meant? " if meant else ""
                raise InvalidInput(
                    f"{where} has {shown(str(name))}, which is not a setting.",
                    hint=f"{ask}There are {listed(known)}.",
                )

    def text(self, name: str) -> str:
        found: str = self._get(name, "", lambda said: isinstance(said, str), "a text in quotes")
        return found

    def flag(self, name: str, *, default: bool) -> bool:
        found: bool = self._get(name, default, lambda said: isinstance(said, bool), "true or false")
        return found

    def number(self, name: str, default: int, *, least: int, most: int) -> int:
        found: int = self._get(
            name,
            default,
            lambda said: type(said) is int and least <= said <= most,
            f"a whole number from {least} to {most}",
        )
        return found

    def names(self, name: str, *, most: int = NAMES_MAX) -> tuple[str, ...]:
        found = self._get(
            name,
            [],
            lambda said: (
                isinstance(said, list)
                and len(said) <= most
                and all(isinstance(each, str) and 0 < len(each) <= 200 for each in said)
            ),
            f'a list of at most {most} texts, as in ["one", "two"]',
        )
        return tuple(found)

    def table(self, name: str) -> Mapping[str, Any]:
        how = f"a table, as in [{self._where}.{name}]"
        found: Mapping[str, Any] = self._get(name, {}, lambda said: isinstance(said, Mapping), how)
        return found

    def seconds(self, name: str) -> float:
        where = f"{self._where}.{name}"
        said = self._table.get(name)
        if said is None:
            raise InvalidInput(f"{where} is missing.", hint=f'Write it as {name} = "2h".')
        try:
            milliseconds = duration_ms(said) if isinstance(said, str) else 0
        except ValueError as error:
            raise InvalidInput(f"{where} {error}.") from None
        if milliseconds < 1000:
            hint = f"{DURATION_HOW[0].upper()}{DURATION_HOW[1:]}."
            raise InvalidInput(f"{where} is not a duration of a second or more.", hint=hint)
        return milliseconds / 1000

    def place(self, name: str) -> SecretPlace | None:
        """Where a secret is, if it is said."""
        file, variable = self.text(f"{name}_file"), self.text(f"{name}_variable")
        where = f"{self._where}.{name}"
        if file and variable:
            raise InvalidInput(f"{where} is given twice.", hint="Leave one of them.")
        if file and not PurePath(file).is_absolute():
            raise InvalidInput(f"{where}_file is not an absolute path.", hint="Write it from / on.")
        if variable and not _VARIABLE.fullmatch(variable):
            raise InvalidInput(
                f"{where}_variable is not the name of a variable of the environment.",
                hint="Write the variable's name, not what is in it.",
            )
        return SecretPlace(file=file, variable=variable) if file or variable else None

    def _get(self, name: str, default: Any, is_right: Callable[[Any], bool], how: str) -> Any:
        if name not in self._table:
            return default
        said = self._table[name]
        if not is_right(said):
            raise InvalidInput(f"{self._where}.{name} cannot be what it is.", hint=f"Write {how}.")
        return said
