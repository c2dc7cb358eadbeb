"""What a submit is checked for before anything is sent: options, times, inputs, JSON schemas.

- `SubmitOptions` is everything besides type and input. Options are checked when they are made.
  Times are in seconds from the submit and become the store's when the pack is made; `delay_until`
  and `expires_until` convert a time with a zone.
- Inputs become the JSON that is stored, once (`input_json`).
- A schema of a type is part of the queue's settings (`QueueConfig.schemas`), so all producers
  that
  have opened the queue since agree on it. Inputs of `submit`, `submit_many`, `submit_mixed`, of
  batches and of schedules are checked; a replay and a batch's follow-up are not. Workers never
  check: what was accepted before a schema came, or by an older release, runs as it is.

A schema refers to nothing outside of itself: no address is ever fetched. Validators are compiled
once for each schema and kept. The package `jsonschema-rs` is imported only where a type has a
schema; without it such a submit is refused. Pure but for that import and the store's clock.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from importlib import import_module
from typing import Any, Final

import msgspec

from penstock.kernel.errors import InvalidInput
from penstock.queue.attempt_outcomes import DEPTH_MAX, is_too_deep
from penstock.queue.execution.retry import is_number
from penstock.queue.ids import check_limit, check_name, check_priority
from penstock.queue.pack import RESEND_SECONDS, PayloadReference
from penstock.store.base import ObjectStore

DELAY_SECONDS_MAX: Final = 366 * 86_400
EXPIRES_SECONDS_MAX: Final = 2 * DELAY_SECONDS_MAX
TAGS_MAX: Final = 20
TAG_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,49}")
TAG_CHARACTERS_MAX: Final = 200
AFFINITY_CHARACTERS_MAX: Final = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitOptions:
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
        check_duration("delay", self.delay)
        if not 0 <= self.delay <= DELAY_SECONDS_MAX:
            raise InvalidInput(
                f"A delay of {self.delay:g} s is not between 0 and a year.",
                hint=f"Give a number of seconds from 0 to {DELAY_SECONDS_MAX:,}.",
            )
        if self.key is None and (self.key_seconds is not None or self.same_input):
            raise InvalidInput("key_seconds and same_input are for a submit with a key.")
        if self.expires is not None:
            check_duration("expires", self.expires)
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


def check_duration(name: str, seconds: object) -> None:
    """Raises `InvalidInput` for what is no number of seconds."""
    if not is_number(seconds):
        raise InvalidInput(
            f"{name} is a number of seconds, not {str(seconds)[:60]!r}.",
            hint="Lengths with units, such as '1h', are for the command line and for settings.",
        )


def checked_inputs(inputs: object) -> list[object]:
    """The inputs of many tasks, or `InvalidInput`."""
    if isinstance(inputs, str | bytes | Mapping) or not isinstance(inputs, Iterable):
        raise InvalidInput(
            f"The inputs of many tasks are a list, not a value of type {type(inputs).__name__!r}.",
            hint='Write submit_many("resize", [{"n": 1}, {"n": 2}]), or use submit for one task.',
        )
    return list(inputs)


def check_key_seconds(seconds: float) -> None:
    """Raises `InvalidInput` for a time that no key can stay taken."""
    check_duration("key_seconds", seconds)
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


def _check_tags(tags: Any) -> None:
    if not isinstance(tags, Mapping):
        raise InvalidInput(
            f"Tags are names with values, not {str(tags)[:60]!r}.", hint='Write {"env": "prod"}.'
        )
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


def _has_zone(time: object) -> bool:
    return isinstance(time, datetime) and time.tzinfo is not None


async def delay_until(store: ObjectStore, delay: float, at: datetime | None) -> float:
    """How long from now a task is to start, by the store's clock, if it is to start at a time."""
    if at is None:
        return delay
    if delay or not _has_zone(at):
        raise InvalidInput(
            "A task starts at a time with a time zone, or after a delay: give one of them.",
            hint="Write at=datetime(YEAR, 1, 31, 6, tzinfo=ZoneInfo('Europe/Paris')).",
        )
    found = max(0.0, at.timestamp() - (await store.now()).latest)
    if found > DELAY_SECONDS_MAX:
        raise InvalidInput(
            f"{at.isoformat()} is more than a year from now.",
            hint="A task starts within a year: give an earlier time.",
        )
    return found


async def expires_until(
    store: ObjectStore, expires: float | None, expires_at: datetime | None
) -> float | None:
    """How long from now a task may begin, by the store's clock, if that ends at a time."""
    if expires_at is None:
        return expires
    if expires is not None or not _has_zone(expires_at):
        raise InvalidInput(
            "A task expires at a time with a time zone, or some seconds after its submit.",
            hint="Give one of expires=SECONDS and expires_at=datetime(..., tzinfo=UTC).",
        )
    found = expires_at.timestamp() - (await store.now()).latest
    if found <= 0:
        raise InvalidInput(
            f"{expires_at.isoformat()} is in the past: the task would never start.",
            hint="'await queue.now()' is the store's time.",
        )
    return found


HELD_BYTES_MAX: Final = 64 * 1024


def held_input(value: object, *, what: str, levels: int = 0) -> msgspec.Raw:
    """An input that is kept in an object of the queue until its task is submitted.

    It will be wrapped into so many `levels` more then.
    """
    return input_json(value, what=what, bytes_max=HELD_BYTES_MAX, levels=levels)


def input_json(value: object, *, what: str, bytes_max: int, levels: int = 0) -> msgspec.Raw:
    """An input as JSON, or `InvalidInput`. `what` begins the sentence: "The input of …"."""
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
        body = text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(
            f"{what} is not JSON: {error}.",
            hint="Use None, booleans, finite numbers, text, lists and dicts with text keys.",
        ) from error
    if len(body) > bytes_max:
        raise InvalidInput(
            f"{what} has {len(body):,} bytes; at most {bytes_max:,} are taken.",
            hint="Store it in the bucket and give its key.",
        )
    if is_too_deep(b"[" * levels + body + b"]" * levels):
        raise InvalidInput(f"{what} is nested more than {DEPTH_MAX - levels} levels deep.")
    return msgspec.Raw(body)


def is_same_input(stored: msgspec.Raw, given: msgspec.Raw, refs: Collection[int]) -> bool:
    """Whether the first input of a pack, which has these `refs`, is the one that is given.

    The order of keys does not matter; of one that is large, and so elsewhere, every byte does.
    """
    if 0 in refs:
        told = msgspec.json.decode(bytes(stored), type=PayloadReference)
        return told.sha256 == hashlib.sha256(bytes(given)).hexdigest()
    return _canonical(stored) == _canonical(given)


def _canonical(value: msgspec.Raw) -> str:
    return json.dumps(json.loads(bytes(value)), sort_keys=True)


SCHEMAS_MAX: Final = 100
SCHEMA_BYTES_MAX: Final = 64 * 1024
ALL_BYTES_MAX: Final = 512 * 1024
_WHY_CHARACTERS_MAX: Final = 200

Schemas = Mapping[str, msgspec.Raw]


def changed_schemas(present: Schemas, wanted: Mapping[str, object]) -> dict[str, msgspec.Raw]:
    """The schemas with these set, and those taken away that are None; or `InvalidInput`."""
    found = dict(present)
    for type_, schema in wanted.items():
        check_name(type_, what="type")
        if schema is None:
            found.pop(type_, None)
        else:
            found[type_] = _checked(type_, schema)
    if len(found) > SCHEMAS_MAX or sum(map(_size, found.values())) > ALL_BYTES_MAX:
        raise InvalidInput(
            f"A queue has at most {SCHEMAS_MAX} schemas, of {ALL_BYTES_MAX:,} bytes together."
        )
    return found


def check_inputs(schemas: Schemas, inputs: Iterable[tuple[str, str, msgspec.Raw]]) -> None:
    """Raise `InvalidInput` at the first that does not fit; each a type, its name, and its JSON."""
    if not schemas:
        return
    for type_, what, body in inputs:
        schema = schemas.get(type_)
        if schema is not None:
            _check(type_, what, body, _validator(bytes(schema)))


def _check(type_: str, what: str, body: msgspec.Raw, validator: Any) -> None:
    error = next(iter(validator.iter_errors(json.loads(bytes(body)))), None)
    if error is None:
        return
    path = "".join(f"/{each}" for each in error.instance_path)
    why = error.message[:_WHY_CHARACTERS_MAX]
    raise InvalidInput(
        f"{what} does not fit the schema of {type_!r}{f' at {path[:200]}' if path else ''}: {why}.",
        hint="'penstock queue config show' shows the schemas of a queue.",
    )


def _checked(type_: str, schema: object) -> msgspec.Raw:
    """A schema as it is stored, or `InvalidInput`."""
    try:
        body = json.dumps(schema, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
        stored = body.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(f"The schema of {type_!r} is not JSON: {error}.") from error
    if len(stored) > SCHEMA_BYTES_MAX:
        raise InvalidInput(
            f"The schema of {type_!r} has {len(stored):,} bytes; at most {SCHEMA_BYTES_MAX:,} are"
            " taken."
        )
    package = _package()
    try:
        _validator(stored)
    except (package.ValidationError, package.ReferencingError, ValueError) as error:
        why = str(error).splitlines()[0][:_WHY_CHARACTERS_MAX]
        raise InvalidInput(
            f"What is given for {type_!r} is not a JSON schema: {why}.",
            hint="Schemas are of draft 4 to 2020-12, and refer to nothing outside of themselves.",
        ) from error
    return msgspec.Raw(stored)


@lru_cache(maxsize=SCHEMAS_MAX)
def _validator(schema: bytes) -> Any:
    return _package().validator_for(json.loads(schema), retriever=_nothing_else)


def _nothing_else(address: str) -> Any:
    raise ValueError(f"{address[:100]} is not part of it")


def _package() -> Any:
    try:
        return import_module("jsonschema_rs")
    except ModuleNotFoundError as error:
        raise InvalidInput(
            "Inputs of this type are checked by a schema, which needs the package jsonschema-rs.",
            hint="Install it with: pip install 'penstock[schemas]'",
        ) from error


def _size(schema: msgspec.Raw) -> int:
    return memoryview(schema).nbytes
