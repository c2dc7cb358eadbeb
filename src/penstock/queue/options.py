"""How tasks are submitted: everything that is not their type and their input. Pure.

Options are checked when they are made, before anything is sent. Times are in seconds from the
submit on, and become the store's when the pack is made.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.kernel.errors import InvalidInput
from penstock.queue.pack import RESEND_SECONDS
from penstock.queue.places import check_limit, check_priority

DELAY_SECONDS_MAX: Final = 366 * 86_400
EXPIRES_SECONDS_MAX: Final = 2 * DELAY_SECONDS_MAX
TAGS_MAX: Final = 20
TAG_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,49}")
TAG_CHARACTERS_MAX: Final = 200
AFFINITY_CHARACTERS_MAX: Final = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How the tasks of one submit are to be treated."""

    delay: float = 0.0
    key: str | None = None
    key_seconds: float | None = None
    """How long the key stays taken after its task is settled, if not as the queue says."""
    same_input: bool = False
    """Whether a key that is taken by a task with another input is an error."""
    priority: int = 0
    """From -9 to 9; what is higher comes first."""
    limit: str = ""
    """The key of the limit that the tasks fall under."""
    expires: float | None = None
    """What has not begun so long after the submit is settled as expired."""
    tags: Mapping[str, str] = field(default_factory=dict)
    affinity: str = ""
    """What tasks have in common that one worker should run, a cache it keeps warm say. A hint."""
    batch: str = ""
    """The batch that the tasks belong to. Set by `penstock.queue.batches`."""
    trace: str = ""
    """The span of the submitter, as in the header `traceparent`."""

    def __post_init__(self) -> None:
        if not 0 <= self.delay <= DELAY_SECONDS_MAX:
            raise InvalidInput(
                f"A delay of {self.delay:g} s is not between 0 and a year.",
                hint=f"Give a number of seconds from 0 to {DELAY_SECONDS_MAX:,}.",
            )
        if self.key is None and (self.key_seconds is not None or self.same_input):
            raise InvalidInput("key_seconds and same_input are for a submit with a key.")
        if self.key_seconds is not None:
            check_key_seconds(self.key_seconds)
        check_priority(self.priority)
        if self.limit:
            check_limit(self.limit)
        if self.expires is not None and not self.delay < self.expires <= EXPIRES_SECONDS_MAX:
            raise InvalidInput(
                f"A task cannot expire after {self.expires} s: the time must be longer than its"
                " delay, and at most two years.",
                hint="It is counted from the submit on.",
            )
        _check_tags(self.tags)
        _check_affinity(self.affinity)


def check_key_seconds(seconds: float) -> None:
    """Raises `InvalidInput` for a time that no key can stay taken."""
    if not RESEND_SECONDS <= seconds <= EXPIRES_SECONDS_MAX:
        raise InvalidInput(
            f"A key must be remembered for at least {RESEND_SECONDS:.0f} s, and at most two years,"
            f" not {seconds:g}: a submit may be sent again for that long."
        )


def _check_affinity(affinity: Any) -> None:
    if not isinstance(affinity, str) or len(affinity) > AFFINITY_CHARACTERS_MAX:
        raise InvalidInput(
            f"An affinity is a text of at most {AFFINITY_CHARACTERS_MAX} characters.",
            hint="Name what the tasks share: a customer, a model, a file.",
        )
    try:
        affinity.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput("An affinity must be valid Unicode.") from error


def _check_tags(tags: Mapping[Any, Any]) -> None:
    if len(tags) > TAGS_MAX:
        raise InvalidInput(f"A task has at most {TAGS_MAX} tags, not {len(tags)}.")
    for name, value in tags.items():
        if not isinstance(name, str) or not TAG_NAME.fullmatch(name):
            raise InvalidInput(
                f"{str(name)[:60]!r} is not the name of a tag.",
                hint="Names have 1 to 50 letters, digits, '_', '-' and '.'.",
            )
        if not isinstance(value, str) or len(value) > TAG_CHARACTERS_MAX:
            raise InvalidInput(
                f"The tag {name!r} must have a text of at most {TAG_CHARACTERS_MAX} characters."
            )
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise InvalidInput(f"The tag {name!r} must be valid Unicode.") from error
