"""The keys of a queue's objects. With `penstock.queue.ids`, all that builds or parses keys.

    queues/{queue}/tasks/{slot}/{name}                the pack
    queues/{queue}/tasks/{slot}/{name}.ledger         its ledger, in the same folder
    queues/{queue}/keyed/{slot}/{name}                a pack submitted with a key
    queues/{queue}/ready/{minute}/{slot}/{name}       a pack submitted with a delay, or urgent
    queues/{queue}/ready/{minute}/{slot}/{nonce}@{name}   a pointer to a pack with a key
    queues/{queue}/unhurried/{level}/{slot}/{name}    a pack of a low priority
    queues/{queue}/unhurried/{level}/{slot}/{nonce}@{name}   a pointer to one with a key
    queues/{queue}/config.json                        what all who use the queue must agree on
    queues/{queue}/control.json                       what is paused and drained
    queues/{queue}/workers/{worker}.json              a worker: its registration and its lease
    queues/{queue}/shard-leases/{shard}.json          who owns a shard, under which epoch
    queues/{queue}/shard-leases/{era}/{shard}.json    the same, after the number of shards changed
    queues/{queue}/monitor.json                       who repairs the queue where nobody owns shards
    queues/{queue}/inbox/{worker}/{minute}/{nonce}@{task}   direct: a pointer for one worker
    queues/{queue}/inbox/@leases/{worker}.json        direct: whose inbox it is, and until when
    queues/{queue}/inbox/@cursors/{worker}.json       direct: up to where an inbox was worked off
    queues/{queue}/limits/{key}.json                  a limit, and who holds how much of it
    queues/{queue}/schedules/{name}.json              a schedule
    queues/{queue}/bell.json                          rings when a schedule or a batch is new
    queues/{queue}/doorbell.json                      rings when tasks come that nobody expects
    queues/{queue}/batches/open/{batch}.json          a batch that has not ended
    queues/{queue}/batches/ended/{batch}.json         one that has, and how
    queues/{queue}/batches/marks/{batch}/{pack}~…     a pack of it that is settled, and how
    queues/{queue}/payloads/{day}/{task}/{nonce}      an input or a result that is large
    queues/{queue}/archive/{stamp}-{stamp}-{nonce}.jsonl.gz   records of settled packs, in batches
    queues/{queue}/dead/{stamp}-{stamp}-{nonce}.jsonl.gz      those in which a task failed
    queues/{queue}/replayed/{task}.{submitted}        as which task a settled one was replayed

A list of the whole queue from `ready/` on returns urgent packs first, then due ones, then
`tasks/`, then `unhurried/`. A pointer's key is random and never used twice; its name is that of
the pack, with the priority and the limit that the pack's own name has not. An entry of an inbox
ends in the id of its pack's first task, and for a pack with a key in `@{priority}~{limit}`; what
is urgent lies in the same minutes, long past, as in `ready/`. A batch of the archive is named
after the last and the first submit in it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, NamedTuple

from penstock.kernel.entropy import Entropy, new_id
from penstock.kernel.errors import InvalidInput
from penstock.queue.ids import (
    LEDGER,
    PackAt,
    check_limit,
    check_name,
    folder_of,
    milliseconds_of,
    minute_of,
    pack_at,
    stamp_of,
    task_at,
)

QUEUES: Final = "queues/"
"""The folder of all queues of a store."""
_WORKER: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,120}")
_MINUTE: Final = re.compile(r"([0-9]{8,9})/")
_POINTER: Final = re.compile(
    r"(?:ready/[0-9]{8,9}|unhurried/[1-9])/([0-9a-f]{3})/([0-9a-hjkmnp-tv-z]{15})@(.+)"
)
_POINTED: Final = re.compile(r"([^~]+~[^~]+~[^~]+)(?:~(-?[0-9])~([A-Za-z0-9_.-]{0,60}))?")
_MARK: Final = re.compile(
    r"([0-9a-hjkmnp-tv-z]{24})/([0-9a-hjkmnp-tv-z]{24})"
    r"~([0-9]{1,4})~([0-9]{1,4})~([0-9]{1,4})~([0-9]{1,4})"
)
_BATCH_ID: Final = re.compile(r"[0-9a-hjkmnp-tv-z]{24}")
_INBOX: Final = re.compile(
    r"([A-Za-z0-9_-][A-Za-z0-9_.-]{0,120})/([0-9]{8,9})/([0-9a-hjkmnp-tv-z]{15})@([^@/]+)"
    r"(?:@(-?[0-9])~([A-Za-z0-9_.-]{0,60}))?"
)
_BATCH: Final = re.compile(
    r"([0-9a-hjkmnp-tv-z]{9})-([0-9a-hjkmnp-tv-z]{9})-[0-9a-hjkmnp-tv-z]+(?:\.[a-z.]{1,20})?"
)


class MarkAt(NamedTuple):
    """What the key of a mark says: how many tasks of a batch's pack have ended in which way."""

    batch: str
    pack: str
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    expired: int = 0


class PointerAt(NamedTuple):
    """What the key of a pointer says: the pack with a key, and what its own name has not."""

    at: PackAt
    nonce: str
    priority: int = 0
    limit: str = ""


class InboxAt(NamedTuple):
    """What the key of an entry of an inbox says."""

    worker: str
    minute: int
    to: PointerAt


@dataclass(frozen=True)
class QueueLayout:
    """The keys of one queue."""

    queue: str

    def __post_init__(self) -> None:
        check_name(self.queue, what="queue")

    @cached_property
    def root(self) -> str:
        return f"{QUEUES}{self.queue}/"

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
    def unhurried(self) -> str:
        return f"{self.root}unhurried/"

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
    def control(self) -> str:
        return f"{self.root}control.json"

    @cached_property
    def monitor(self) -> str:
        return f"{self.root}monitor.json"

    @cached_property
    def inboxes(self) -> str:
        return f"{self.root}inbox/"

    @cached_property
    def limits(self) -> str:
        return f"{self.root}limits/"

    @cached_property
    def schedules(self) -> str:
        return f"{self.root}schedules/"

    @cached_property
    def batches(self) -> str:
        return f"{self.root}batches/"

    @cached_property
    def open_batches(self) -> str:
        return f"{self.batches}open/"

    @cached_property
    def ended_batches(self) -> str:
        return f"{self.batches}ended/"

    @cached_property
    def all_marks(self) -> str:
        return f"{self.batches}marks/"

    def open_batch(self, batch: str) -> str:
        return f"{self.open_batches}{check_batch(batch)}.json"

    def ended_batch(self, batch: str) -> str:
        return f"{self.ended_batches}{check_batch(batch)}.json"

    def read_batch_id(self, key: str) -> str | None:
        """The batch that a key of an open or an ended one is of; None if it is of none."""
        name = key.rpartition("/")[2].removesuffix(".json")
        return name if is_batch(name) and key.startswith(self.batches) else None

    def marks(self, batch: str) -> str:
        return f"{self.all_marks}{check_batch(batch)}/"

    def mark(self, mark: MarkAt) -> str:
        """The key that says how a pack of a batch has ended."""
        return f"{self.all_marks}{mark.batch}/{'~'.join(map(str, mark[1:]))}"

    def read_mark(self, key: str) -> MarkAt | None:
        """What a mark says; None if the key is not that of a mark."""
        found = _MARK.fullmatch(key.removeprefix(self.all_marks))
        return MarkAt(found[1], found[2], *map(int, found.groups()[2:])) if found else None

    @cached_property
    def bell(self) -> str:
        return f"{self.root}bell.json"

    @cached_property
    def doorbell(self) -> str:
        return f"{self.root}doorbell.json"

    @cached_property
    def payloads(self) -> str:
        return f"{self.root}payloads/"

    def payload(self, path: str) -> str:
        """The key of a payload, by its key within the queue."""
        return self.root + path

    @cached_property
    def archive(self) -> str:
        return f"{self.root}archive/"

    @cached_property
    def dead(self) -> str:
        return f"{self.root}dead/"

    @cached_property
    def inbox_leases(self) -> str:
        return f"{self.inboxes}@leases/"

    def inbox_lease(self, worker: str) -> str:
        return f"{self.inbox_leases}{self._checked(worker)}.json"

    def inbox_cursor(self, worker: str) -> str:
        return f"{self.inboxes}@cursors/{self._checked(worker)}.json"

    def inbox(self, worker: str) -> str:
        """The folder of a worker's inbox."""
        return f"{self.inboxes}{self._checked(worker)}/"

    def read_inbox_lease(self, key: str) -> str | None:
        """The worker that a lease of an inbox is of; None if it is of none."""
        return _named(key, self.inbox_leases)

    def inbox_of(self, folder: str) -> str | None:
        """The worker that a folder below `inboxes` is of; None if it is of none."""
        name = folder.removeprefix(self.inboxes).removesuffix("/")
        return name if _WORKER.fullmatch(name) and folder == f"{self.inboxes}{name}/" else None

    def inbox_entry(self, worker: str, to: PointerAt, *, minute: int) -> str:
        """The key of an entry in a worker's inbox."""
        at, nonce, priority, limit = to
        has_more = at.submitted_ms is None and (priority or limit)
        more = f"@{priority}~{limit}" if has_more else ""
        return f"{self.inbox(worker)}{minute}/{nonce}@{at.task(0)}{more}"

    def read_inbox_entry(self, key: str) -> InboxAt | None:
        """What an entry of an inbox is to; None if the key is not that of one."""
        found = _INBOX.fullmatch(key.removeprefix(self.inboxes))
        if not found or not key.startswith(self.inboxes):
            return None
        worker, minute, nonce, task, priority, limit = found.groups()
        try:
            at, place = task_at(task)
        except InvalidInput:
            return None
        priority, limit = (priority, limit) if priority else (at.priority, at.limit)
        read = InboxAt(worker, int(minute), PointerAt(at, nonce, int(priority), limit or ""))
        is_same = self.inbox_entry(worker, read.to, minute=read.minute) == key
        is_sound = place == 0 and not read.to.limit.endswith(LEDGER)
        return read if is_sound and is_same else None

    def limit(self, key: str) -> str:
        return f"{self.limits}{check_limit(key)}.json"

    def schedule(self, name: str) -> str:
        return f"{self.schedules}{check_name(name, what='schedule')}.json"

    def read_schedule(self, key: str) -> str | None:
        """The schedule that a key is of; None if it is of none."""
        name = key.removeprefix(self.schedules).removesuffix(".json")
        try:
            return name if key == self.schedule(name) else None
        except InvalidInput:
            return None

    def worker(self, worker: str) -> str:
        return f"{self.workers}{self._checked(worker)}.json"

    def _checked(self, worker: str) -> str:
        if not _WORKER.fullmatch(worker):
            raise InvalidInput(
                f"{worker[:120]!r} is not the name of a worker.",
                hint="Names have 1 to 120 letters, digits, '_', '-' and '.'.",
            )
        return worker

    def read_worker(self, key: str) -> str | None:
        """The worker that a key is of; None if it is of none."""
        return _named(key, self.workers)

    def shard_leases_of(self, era: int) -> str:
        return f"{self.shard_leases}{era}/" if era else self.shard_leases

    def shard_lease(self, shard: int, *, era: int = 0) -> str:
        return f"{self.shard_leases_of(era)}{shard}.json"

    def pointer(
        self,
        at: PackAt,
        *,
        due_ms: int,
        nonce: str,
        priority: int = 0,
        limit: str = "",
        is_delayed: bool = False,
    ) -> str:
        """The key of a pointer to a pack with a key: in its minute, or where its priority is."""
        folder = "" if is_delayed else folder_of(priority)
        named = replace(at, priority=priority, limit=limit).name
        where = folder or f"ready/{minute_of(due_ms)}"
        return f"{self.root}{where}/{at.slot:03x}/{nonce}@{named}"

    def ready_minute(self, key: str) -> int | None:
        """The minute in which what is at this key becomes due; None if it is not in `ready`."""
        found = _MINUTE.match(key, len(self.ready)) if key.startswith(self.ready) else None
        return int(found[1]) if found else None

    def read_pointer(self, key: str) -> PointerAt | None:
        """What a pointer is to; None if the key is not that of a pointer."""
        found = _POINTER.fullmatch(key.removeprefix(self.root))
        named = _POINTED.fullmatch(found[3]) if found and key.startswith(self.root) else None
        if not found or not named:
            return None
        read = self.read(f"{self.keyed}{found[1]}/{named[1]}")
        limit = named[3] or ""
        if read is None or read[1] or limit.endswith(LEDGER):
            return None
        return PointerAt(read[0], found[2], int(named[2] or 0), limit)

    def replayed(self, name: str) -> str:
        return f"{self.root}replayed/{name}"

    def batch(self, prefix: str, *, first_ms: int, last_ms: int, entropy: Entropy) -> str:
        """A new key for a batch of records, below `archive` or `dead`."""
        nonce = new_id(entropy, characters=12)
        return f"{prefix}{stamp_of(last_ms)}-{stamp_of(first_ms)}-{nonce}.jsonl.gz"

    def read_batch(self, key: str) -> tuple[int, int] | None:
        """The first and the last submit in a batch, in milliseconds; None if it is no batch."""
        found = _BATCH.fullmatch(key.rpartition("/")[2])
        return (milliseconds_of(found[2]), milliseconds_of(found[1])) if found else None

    def after_submits_before(self, prefix: str, submitted_ms: int) -> str:
        """Where to start a list of batches that end at this submit or later."""
        return prefix + stamp_of(max(0, submitted_ms - 1))

    def read(self, key: str) -> tuple[PackAt, bool] | None:
        """The pack that a key is of, and whether the key is its ledger; None if it is neither."""
        return pack_at(key.removeprefix(self.root)) if key.startswith(self.root) else None


def is_used_once(key: str) -> bool:
    """Whether nothing that counts is written here over a version that somebody may delete.

    Then deletes need not be atomic (`penstock.store.tombstoned`). A pack without a key is created
    once, never changed, and deleted when all of it is settled or void. A ledger of such a pack is
    deleted in the version in which it was seen after the pack had gone, for good, and so after
    everything in it was settled that ever will be: either it is that record, which is final and in
    the archive by then, or it is of nobody, and no task of it can start or settle. A batch of the
    archive is deleted if all of it is to be forgotten, and only ever loses records otherwise. The
    pack of a key, and its ledger, have a name that is used again.
    """
    if not key.startswith(QUEUES):
        return False
    path = key[len(QUEUES) :].partition("/")[2]
    read = pack_at(path)
    is_pack = read is not None and read[0].submitted_ms is not None
    return is_pack or path.startswith(("archive/", "dead/"))


def is_batch(text: str) -> bool:
    """Whether this can be the id of a batch of tasks."""
    return _BATCH_ID.fullmatch(text) is not None


def check_batch(batch: str) -> str:
    """The id of a batch of tasks, or `InvalidInput`."""
    if not is_batch(batch):
        raise InvalidInput(
            f"{batch[:120]!r} is not the id of a batch.",
            hint="Ids have 24 letters and digits; 'penstock queue batch' lists them.",
        )
    return batch


def _named(key: str, folder: str) -> str | None:
    """The worker whose document in a folder has this key; None if it is none's."""
    name = key.removeprefix(folder).removesuffix(".json")
    return name if _WORKER.fullmatch(name) and key == f"{folder}{name}.json" else None
