"""Ids of tasks and packs, and the names of their objects. Pure.

A pack's name is `{pack}~{count}~{type}`, so that a list shows how many tasks a pack has and of
which type. A pack's id is `{stamp}{nonce}`: the store's milliseconds at the first submit, so
that names sort by age, and randomness; for a submit with a key it is the hash of the key. There
are 4,096 slots and they never change; a shard is a run of neighbouring slots.

A pack with a priority or a limit has the name `{pack}~{count}~{type}~{priority}~{limit}`: a
LIST then shows its order and its limit without a read. Urgent packs lie in `ready/`, in a
minute long past, the most urgent in the first; low priorities lie in `unhurried/`, behind
everything else. The pack of a key must be found by its key alone: its name has neither, and the
pointer to it has both.

A task's id is `{place}.{slot}.{pack}.{count}.{index}.{type}`, with `~{priority}~{limit}` if the
pack's name has it. It says where its pack is, so that no index is needed to find it.

A payload of a task is at `payloads/{day}/{task}/{nonce}`, in the day of the task's submit.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache
from typing import Final, NamedTuple, NewType

from penstock.kernel.entropy import Entropy, new_id
from penstock.kernel.errors import InvalidInput

TaskId = NewType("TaskId", str)
PackId = NewType("PackId", str)

SLOTS: Final = 4096
TASKS_PER_PACK_MAX: Final = 1000
KEY_CHARACTERS_MAX: Final = 1000
PRIORITY_MAX: Final = 9
LEDGER: Final = ".ledger"
NONCE_CHARACTERS: Final = 15

URGENT_MINUTE: Final = 10_000_000
"""Packs of priority `PRIORITY_MAX` are in this minute of `ready/`, those below it in the next."""
_MINUTE_MIN: Final = 20_000_000
_MINUTE_MAX: Final = 999_999_999
_NOW: Final = "now"
_KEYED: Final = "key"
_STAMP_CHARACTERS: Final = 9
_DIGITS: Final = "0123456789abcdefghjkmnpqrstvwxyz"
_PLAIN_DIGITS: Final = str.maketrans(_DIGITS, "0123456789abcdefghijklmnopqrstuv")
_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}")
_LIMIT: Final = re.compile(r"[A-Za-z0-9_.-]{0,60}")
_ENDING: Final = r"([^/~]+)(?:~(-?[0-9])~([A-Za-z0-9_.-]{0,60}))?"
_ID: Final = re.compile(
    r"(now|key|[0-9]{8,9})\.([0-9a-f]{3})\.([0-9a-hjkmnp-tv-z]{24})\.([0-9]{1,4})\.([0-9]{1,3})\."
    + _ENDING
)
_PACK: Final = re.compile(
    r"(?:(tasks)|(keyed)|unhurried/[1-9]|ready/([0-9]{8,9}))/([0-9a-f]{3})"
    r"/([0-9a-hjkmnp-tv-z]{24})~([0-9]{1,4})~" + _ENDING
)
_PAYLOAD: Final = re.compile(
    r"payloads/([0-9]{4}-[0-9]{2}-[0-9]{2})/([^/]+)/[0-9a-hjkmnp-tv-z]{24}"
)


@dataclass(frozen=True, slots=True)
class PackAt:
    """A pack: what its key says of it."""

    place: str
    """`now`, `key`, or the minute since the epoch in which it becomes due."""
    slot: int
    pack: PackId
    count: int
    type: str
    priority: int = 0
    """From -9 to 9; higher comes first."""
    limit: str = ""
    """The key of the limit that its tasks fall under."""

    @property
    def path(self) -> str:
        """Its key within the queue."""
        return f"{self._folder}/{self.slot:03x}/{self.name}"

    @property
    def name(self) -> str:
        """Its key within its slot."""
        return f"{self.pack}~{self.count}~{self.type}{self._suffix}"

    @property
    def _suffix(self) -> str:
        return f"~{self.priority}~{self.limit}" if self.priority or self.limit else ""

    @property
    def _folder(self) -> str:
        if self.place == _KEYED:
            return "keyed"
        if self.place != _NOW:
            return f"ready/{self.place}"
        return folder_of(self.priority) or "tasks"

    @property
    def due_minute(self) -> int | None:
        """The minute in which it becomes due, if it was submitted with a delay."""
        return None if self.place in (_NOW, _KEYED) else int(self.place)

    @property
    def submitted_ms(self) -> int | None:
        """The store's time of the first submit; None for a keyed pack, which says it inside."""
        return None if self.place == _KEYED else milliseconds_of(self.pack[:_STAMP_CHARACTERS])

    def task(self, index: int) -> TaskId:
        """The id of one of its tasks."""
        (task,) = self.tasks((index,))
        return task

    def tasks(self, indexes: Iterable[int]) -> list[TaskId]:
        """The ids of these of its tasks."""
        head = f"{self.place}.{self.slot:03x}.{self.pack}.{self.count}."
        tail = f".{self.type}{self._suffix}"
        return [TaskId(f"{head}{index}{tail}") for index in indexes]


def folder_of(priority: int) -> str:
    """The folder of what is due at once and has this priority; empty for the usual one."""
    if priority > 0:
        return f"ready/{URGENT_MINUTE + PRIORITY_MAX - priority}"
    return f"unhurried/{-priority}" if priority < 0 else ""


def new_pack(
    *,
    type: str,
    count: int,
    submitted_ms: int,
    entropy: Entropy,
    priority: int = 0,
    limit: str = "",
    affinity: str = "",
) -> PackAt:
    """Where a pack that is due at once goes: into any slot, or into that of its affinity."""
    if not 0 < count <= TASKS_PER_PACK_MAX:
        raise InvalidInput(f"A pack has 1 to {TASKS_PER_PACK_MAX} tasks, not {count}.")
    pack = PackId(stamp_of(submitted_ms) + new_id(entropy, characters=NONCE_CHARACTERS))
    slot = slot_of_affinity(type, affinity) if affinity else entropy.randrange(SLOTS)
    return PackAt(_NOW, slot, pack, count, check_name(type, what="type"), priority, limit)


def slot_of_affinity(type: str, affinity: str) -> int:
    """The slot of all packs of a type with this affinity, and so of whoever owns its shard."""
    digest = hashlib.blake2b(f"{type}\0{affinity}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % SLOTS


def delayed(at: PackAt, *, due_ms: int) -> PackAt:
    """Where a pack that becomes due later goes: into the minute in which it does."""
    return replace(at, place=str(minute_of(due_ms)))


def keyed_pack(*, type: str, key: str) -> PackAt:
    """Where the pack of a key goes, whoever submits it and whenever."""
    if not _is_text(key) or not 0 < len(key) <= KEY_CHARACTERS_MAX:
        raise InvalidInput(f"An idempotency key is a text of 1 to {KEY_CHARACTERS_MAX} characters.")
    try:
        text = f"{type}\0{key}".encode()
    except UnicodeEncodeError as error:
        raise InvalidInput("An idempotency key must be valid Unicode.") from error
    digest = hashlib.blake2b(text, digest_size=17).digest()
    bits = int.from_bytes(digest, "big")
    pack = "".join(_DIGITS[bits >> (5 * place) & 31] for place in range(24))
    return PackAt(_KEYED, bits >> 120 & (SLOTS - 1), PackId(pack), 1, check_name(type, what="type"))


def task_at(task: str) -> tuple[PackAt, int]:
    """Where a task is: its pack, and its place in it. Raises `InvalidInput`."""
    found = _ID.fullmatch(task) if _is_text(task) else None
    if found:
        place, slot, pack, count, index, type_, priority, limit = found.groups()
        at = PackAt(
            place, int(slot, 16), PackId(pack), int(count), type_, int(priority or 0), limit or ""
        )
        # One task has one id: what merely reads the same is refused.
        if int(index) < at.count and _is_sound(at) and at.task(int(index)) == task:
            return at, int(index)
    raise InvalidInput(
        f"{str(task)[:120]!r} is not the id of a task.",
        hint="Ids are printed by 'penstock queue submit'.",
    )


def _is_text(value: object) -> bool:
    """Whether it is a text, whatever its type promises: users may give anything."""
    return isinstance(value, str)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_name(name: str) -> bool:
    """Whether this can be the name of a queue or a type."""
    return _is_text(name) and _NAME.fullmatch(name) is not None and not name.endswith(LEDGER)


def check_name(name: str, *, what: str) -> str:
    """The name of a queue or a type, or `InvalidInput`."""
    if not is_name(name):
        raise InvalidInput(
            f"{str(name)[:120]!r} is not the name of a {what}.",
            hint="Names have 1 to 100 letters, digits, '_', '-' and '.', and begin with no '.'.",
        )
    return name


def check_limit(limit: str) -> str:
    """The key of a limit, or `InvalidInput`."""
    if not limit or not _is_text(limit) or not _LIMIT.fullmatch(limit) or limit.endswith(LEDGER):
        raise InvalidInput(
            f"{str(limit)[:120]!r} is not the key of a limit.",
            hint="Keys of limits have 1 to 60 letters, digits, '_', '-' and '.'.",
        )
    return limit


def check_priority(priority: int) -> int:
    """A priority, or `InvalidInput`."""
    if not _is_whole(priority) or not -PRIORITY_MAX <= priority <= PRIORITY_MAX:
        raise InvalidInput(
            f"A priority is a whole number from {-PRIORITY_MAX} to {PRIORITY_MAX},"
            f" not {priority!r}.",
            hint="0 is the usual one; what is higher comes first.",
        )
    return priority


# Every look of a worker sees what the looks before it saw.
@lru_cache(maxsize=20_000)
def pack_at(path: str) -> tuple[PackAt, bool] | None:
    """The pack that a key within a queue is of, and whether it is its ledger; or None."""
    name = path.removesuffix(LEDGER)
    found = _PACK.fullmatch(name)
    if not found:
        return None
    tasks, keyed, minute, slot, pack, count, type_, priority, limit = found.groups()
    is_now = tasks or not minute or int(minute) < _MINUTE_MIN
    place = _KEYED if keyed else _NOW if is_now else minute
    at = PackAt(
        place, int(slot, 16), PackId(pack), int(count), type_, int(priority or 0), limit or ""
    )
    return (at, name != path) if _is_sound(at) and at.path == name else None


def _is_sound(at: PackAt) -> bool:
    named = _NAME.fullmatch(at.type) is not None and not at.type.endswith(LEDGER)
    plain = at.place != _KEYED or not (at.priority or at.limit)
    delayed = at.due_minute is None or at.due_minute >= _MINUTE_MIN
    whole = 0 < at.count <= TASKS_PER_PACK_MAX and not at.limit.endswith(LEDGER)
    return named and plain and delayed and whole


class PayloadAt(NamedTuple):
    """What the key of a payload says: in which day its task was submitted, and which it is."""

    day: str
    at: PackAt
    place: int


def payload_path(task: TaskId, *, submitted_ms: int, entropy: Entropy) -> str:
    """A new key within a queue for a payload of a task that was submitted then."""
    return f"payloads/{day_of(submitted_ms)}/{task}/{new_id(entropy, characters=24)}"


def payload_at(path: str) -> PayloadAt | None:
    """Whose payload is at a key within a queue; None if it is nobody's."""
    found = _PAYLOAD.fullmatch(path)
    if found is None:
        return None
    try:
        return PayloadAt(found[1], *task_at(found[2]))
    except InvalidInput:
        return None


def day_of(milliseconds: int) -> str:
    """The day of a time, in UTC, as text that sorts as the days do."""
    try:
        return datetime.fromtimestamp(milliseconds / 1000, tz=UTC).date().isoformat()
    except (ValueError, OverflowError, OSError) as error:
        raise InvalidInput(
            f"{milliseconds} ms since the epoch is out of the range of dates."
        ) from error


def minute_of(due_ms: int) -> int:
    """The minute of a time, which must be one that a task can be due at."""
    if not _MINUTE_MIN <= due_ms // 60_000 <= _MINUTE_MAX:
        raise InvalidInput(f"{due_ms} ms since the epoch is out of the range of due times.")
    return due_ms // 60_000


def stamp_of(milliseconds: int) -> str:
    """A time as text that sorts as the times do."""
    return "".join(
        _DIGITS[milliseconds >> (5 * place) & 31] for place in reversed(range(_STAMP_CHARACTERS))
    )


def milliseconds_of(stamp: str) -> int:
    """The time of a stamp. Python's own base 32 has other digits."""
    return int(stamp.translate(_PLAIN_DIGITS), 32)
