"""Where the objects of a queue are. The only module that makes or reads keys.

    queues/{queue}/tasks/{slot}/{name}                the pack
    queues/{queue}/tasks/{slot}/{name}.ledger         its ledger, in the same folder
    queues/{queue}/keyed/{slot}/{name}                a pack submitted with a key
    queues/{queue}/ready/{minute}/{slot}/{name}       a pack submitted with a delay
    queues/{queue}/ready/{minute}/{slot}/{nonce}@{name}   a pointer to a pack with a key
    queues/{queue}/config.json                        what all who use the queue must agree on
    queues/{queue}/workers/{worker}.json              a worker: its registration and its lease
    queues/{queue}/shard-leases/{shard}.json          who owns a shard, under which epoch
    queues/{queue}/monitor.json                       who repairs the queue where nobody owns shards
    queues/{queue}/archive/{stamp}-{stamp}-{nonce}    records of settled packs, in batches
    queues/{queue}/dead/{stamp}-{stamp}-{nonce}       the same, of packs in which a task failed
    queues/{queue}/replayed/{task}.{submitted}        as which task a settled one was replayed

A name is `{pack}~{count}~{type}`, so that a list shows how many tasks a pack has and of which
type. A pack's id is `{stamp}{nonce}`: the store's milliseconds at the first submit, so that names
sort by age, and randomness; for a submit with a key it is the hash of the key. There are 4,096
slots and they never change; a shard is a run of neighbouring slots. A pointer's key is random and
never used twice. A batch of the archive is named after the last and the first submit in it.

A task's id is `{place}.{slot}.{pack}.{count}.{index}.{type}`. It says where its pack is, so that
no index is needed to find it.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final, NewType

from penstock.kernel.entropy import Entropy, new_id
from penstock.kernel.errors import InvalidInput

TaskId = NewType("TaskId", str)
PackId = NewType("PackId", str)

SLOTS: Final = 4096
TASKS_PER_PACK_MAX: Final = 1000
KEY_CHARACTERS_MAX: Final = 1000
LEDGER: Final = ".ledger"

_MINUTE_MIN: Final = 10_000_000
_MINUTE_MAX: Final = 999_999_999
_NOW: Final = "now"
_KEYED: Final = "key"
_STAMP_CHARACTERS: Final = 9
NONCE_CHARACTERS: Final = 15
_DIGITS: Final = "0123456789abcdefghjkmnpqrstvwxyz"
_PLAIN_DIGITS: Final = str.maketrans(_DIGITS, "0123456789abcdefghijklmnopqrstuv")
_WORKER: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,120}")
_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}")
_ID: Final = re.compile(
    r"(now|key|[0-9]{8,9})\.([0-9a-f]{3})\.([0-9a-hjkmnp-tv-z]{24})\.([0-9]{1,4})\.([0-9]{1,3})\.(.+)"
)
_PACK: Final = re.compile(
    r"(?:(tasks)|(keyed)|ready/([0-9]{8,9}))/([0-9a-f]{3})/([0-9a-hjkmnp-tv-z]{24})~([0-9]{1,4})~([^/]+)"
)
_MINUTE: Final = re.compile(r"([0-9]{8,9})/")
_POINTER: Final = re.compile(r"ready/[0-9]{8,9}/([0-9a-f]{3})/([0-9a-hjkmnp-tv-z]{15})@(.+)")
_BATCH: Final = re.compile(r"([0-9a-hjkmnp-tv-z]{9})-([0-9a-hjkmnp-tv-z]{9})-[0-9a-hjkmnp-tv-z]+")


@dataclass(frozen=True, slots=True)
class PackAt:
    """A pack: what its key says of it."""

    place: str
    """`now`, `key`, or the minute since the epoch in which it becomes due."""
    slot: int
    pack: PackId
    count: int
    type: str

    @property
    def path(self) -> str:
        """Its key within the queue."""
        folder = {_NOW: "tasks", _KEYED: "keyed"}.get(self.place) or f"ready/{self.place}"
        return f"{folder}/{self.slot:03x}/{self.pack}~{self.count}~{self.type}"

    @property
    def due_minute(self) -> int | None:
        """The minute in which it becomes due, if it was submitted with a delay."""
        return None if self.place in (_NOW, _KEYED) else int(self.place)

    @property
    def submitted_ms(self) -> int | None:
        """The store's time of the first submit; None for a keyed pack, which says it inside."""
        return None if self.place == _KEYED else _milliseconds(self.pack[:_STAMP_CHARACTERS])

    def task(self, index: int) -> TaskId:
        """The id of one of its tasks."""
        return TaskId(f"{self.place}.{self.slot:03x}.{self.pack}.{self.count}.{index}.{self.type}")


@dataclass(frozen=True)
class QueueLayout:
    """The keys of one queue."""

    queue: str

    def __post_init__(self) -> None:
        check_name(self.queue, what="queue")

    @cached_property
    def root(self) -> str:
        return f"queues/{self.queue}/"

    def pack(self, at: PackAt) -> str:
        return self.root + at.path

    def ledger(self, at: PackAt) -> str:
        return self.root + at.path + LEDGER

    @cached_property
    def tasks(self) -> str:
        return f"{self.root}tasks/"

    @cached_property
    def ready(self) -> str:
        return f"{self.root}ready/"

    @cached_property
    def keyed(self) -> str:
        return f"{self.root}keyed/"

    @cached_property
    def workers(self) -> str:
        return f"{self.root}workers/"

    @cached_property
    def shard_leases(self) -> str:
        return f"{self.root}shard-leases/"

    @cached_property
    def config(self) -> str:
        return f"{self.root}config.json"

    @cached_property
    def monitor(self) -> str:
        return f"{self.root}monitor.json"

    @cached_property
    def archive(self) -> str:
        return f"{self.root}archive/"

    @cached_property
    def dead(self) -> str:
        return f"{self.root}dead/"

    def worker(self, worker: str) -> str:
        if not _WORKER.fullmatch(worker):
            raise InvalidInput(
                f"{worker[:120]!r} is not the name of a worker.",
                hint="Names have 1 to 120 letters, digits, '_', '-' and '.'.",
            )
        return f"{self.workers}{worker}.json"

    def read_worker(self, key: str) -> str | None:
        """The worker that a key is of; None if it is of none."""
        name = key.removeprefix(self.workers).removesuffix(".json")
        is_one = _WORKER.fullmatch(name) is not None and key == f"{self.workers}{name}.json"
        return name if is_one else None

    def shard_lease(self, shard: int) -> str:
        return f"{self.shard_leases}{shard}.json"

    def pointer(self, at: PackAt, *, due_ms: int, nonce: str) -> str:
        """The key of a pointer to a pack, in the minute in which it becomes due."""
        name = at.path.rpartition("/")[2]
        return f"{self.ready}{_minute(due_ms)}/{at.slot:03x}/{nonce}@{name}"

    def ready_minute(self, key: str) -> int | None:
        """The minute in which what is at this key becomes due; None if it is not in `ready`."""
        found = _MINUTE.match(key, len(self.ready)) if key.startswith(self.ready) else None
        return int(found[1]) if found else None

    def read_pointer(self, key: str) -> tuple[PackAt, str] | None:
        """The pack with a key that a pointer is to, and its nonce; None if it is no pointer."""
        found = _POINTER.fullmatch(key.removeprefix(self.root))
        if not found or not key.startswith(self.root):
            return None
        slot, nonce, name = found.groups()
        read = self.read(f"{self.keyed}{slot}/{name}")
        return None if read is None or read[1] else (read[0], nonce)

    def replayed(self, name: str) -> str:
        return f"{self.root}replayed/{name}"

    def batch(self, prefix: str, *, first_ms: int, last_ms: int, entropy: Entropy) -> str:
        """A new key for a batch of records, below `archive` or `dead`."""
        return f"{prefix}{_stamp(last_ms)}-{_stamp(first_ms)}-{new_id(entropy, characters=12)}"

    def read_batch(self, key: str) -> tuple[int, int] | None:
        """The first and the last submit in a batch, in milliseconds; None if it is no batch."""
        found = _BATCH.fullmatch(key.rpartition("/")[2])
        return (_milliseconds(found[2]), _milliseconds(found[1])) if found else None

    def after_submits_before(self, prefix: str, submitted_ms: int) -> str:
        """Where to start a list of batches that end at this submit or later."""
        return prefix + _stamp(max(0, submitted_ms - 1))

    def read(self, key: str) -> tuple[PackAt, bool] | None:
        """The pack that a key is of, and whether the key is its ledger; None if it is neither."""
        return _read(key.removeprefix(self.root)) if key.startswith(self.root) else None


def new_pack(*, type: str, count: int, submitted_ms: int, entropy: Entropy) -> PackAt:
    """Where a pack that is due at once goes."""
    if not 0 < count <= TASKS_PER_PACK_MAX:
        raise InvalidInput(f"A pack has 1 to {TASKS_PER_PACK_MAX} tasks, not {count}.")
    pack = _stamp(submitted_ms) + new_id(entropy, characters=NONCE_CHARACTERS)
    return PackAt(
        _NOW, entropy.randrange(SLOTS), PackId(pack), count, check_name(type, what="type")
    )


def delayed_pack(
    *, type: str, count: int, submitted_ms: int, due_ms: int, entropy: Entropy
) -> PackAt:
    """Where a pack that becomes due later goes: into the minute in which it does."""
    at = new_pack(type=type, count=count, submitted_ms=submitted_ms, entropy=entropy)
    return PackAt(str(_minute(due_ms)), at.slot, at.pack, at.count, at.type)


def keyed_pack(*, type: str, key: str) -> PackAt:
    """Where the pack of a key goes, whoever submits it and whenever."""
    if not 0 < len(key) <= KEY_CHARACTERS_MAX:
        raise InvalidInput(f"An idempotency key has 1 to {KEY_CHARACTERS_MAX} characters.")
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
    found = _ID.fullmatch(task)
    if found:
        place, slot, pack, count, index, type_ = found.groups()
        at = PackAt(place, int(slot, 16), PackId(pack), int(count), type_)
        # One task has one id: what merely reads the same is refused.
        if int(index) < at.count and _is_sound(at) and at.task(int(index)) == task:
            return at, int(index)
    raise InvalidInput(
        f"{task[:120]!r} is not the id of a task.",
        hint="Ids are printed by 'penstock queue submit'.",
    )


def check_name(name: str, *, what: str) -> str:
    """The name of a queue or a type, or `InvalidInput`."""
    if not _NAME.fullmatch(name) or name.endswith(LEDGER):
        raise InvalidInput(
            f"{name[:120]!r} is not the name of a {what}.",
            hint="Names have 1 to 100 letters, digits, '_', '-' and '.', and begin with no '.'.",
        )
    return name


# Every look of a worker sees what the looks before it saw.
@lru_cache(maxsize=20_000)
def _read(path: str) -> tuple[PackAt, bool] | None:
    name = path.removesuffix(LEDGER)
    found = _PACK.fullmatch(name)
    if not found:
        return None
    tasks, keyed, minute, slot, pack, count, type_ = found.groups()
    place = _NOW if tasks else _KEYED if keyed else minute
    at = PackAt(place, int(slot, 16), PackId(pack), int(count), type_)
    return (at, name != path) if _is_sound(at) and at.path == name else None


def _is_sound(at: PackAt) -> bool:
    named = _NAME.fullmatch(at.type) is not None and not at.type.endswith(LEDGER)
    return named and 0 < at.count <= TASKS_PER_PACK_MAX


def _minute(due_ms: int) -> int:
    if not _MINUTE_MIN <= due_ms // 60_000 <= _MINUTE_MAX:
        raise InvalidInput(f"{due_ms} ms since the epoch is no time at which a task can be due.")
    return due_ms // 60_000


def _stamp(milliseconds: int) -> str:
    return "".join(
        _DIGITS[milliseconds >> (5 * place) & 31] for place in reversed(range(_STAMP_CHARACTERS))
    )


def _milliseconds(stamp: str) -> int:
    # Python's own base 32 has other digits.
    return int(stamp.translate(_PLAIN_DIGITS), 32)
