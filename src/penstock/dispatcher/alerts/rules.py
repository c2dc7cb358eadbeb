"""Rules and destinations as values, and the rules that hold without any settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Final

from penstock.dispatcher.dag.units import duration_text


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


ABSENCE: Final = frozenset({RuleKind.STALE_DATASET, RuleKind.SILENT_SOURCE, RuleKind.NO_WORKERS})
"""Kinds that are about what was not heard of: our own outage looks the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
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
            case RuleKind.STALE_DATASET:
                return f"Nothing was published of a dataset for {long}.{which}"
            case RuleKind.PRESSURE:
                return f"The queue of a job is over its limits for {long}.{which}"
            case RuleKind.SILENT_SOURCE:
                return f"A source has told of nothing for {long}.{which}"
            case RuleKind.DEAD_SOURCE:
                return f"An always-on source is dead.{which}"
            case RuleKind.NO_WORKERS:
                waiting = " while tasks wait" if self.if_waiting else ""
                return f"No worker was heard of for {long}{waiting}."
            case RuleKind.FAILURE_RATE:
                lately = duration_text(round((self.within_seconds or 0) * 1000))
                many = f"{self.percent}% of {self.at_least} or more attempts of a job"
                return f"{many} have failed within {lately}.{which}"
            case RuleKind.PARKED_OUTBOX:
                if self.at_least == 1:
                    return "A message of the outbox could not be sent and is parked."
                many = f"{self.at_least} messages or more"
                return f"{many} of the outbox could not be sent and are parked."


DEFAULT_RULES: Final = (
    Rule(name="dead_tasks", kind=RuleKind.DEAD_TASKS),
    Rule(name="dead_source", kind=RuleKind.DEAD_SOURCE),
    Rule(name="no_workers", kind=RuleKind.NO_WORKERS, longer_than_seconds=300.0),
    Rule(name="parked_outbox", kind=RuleKind.PARKED_OUTBOX),
)
"""What is judged if nobody says otherwise; a rule of the same name takes the place of one."""
BASES: Final = (
    *DEFAULT_RULES,
    Rule(name="failure_rate", kind=RuleKind.FAILURE_RATE, at_least=10, within_seconds=900.0),
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

    rules: tuple[Rule, ...] = DEFAULT_RULES
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
