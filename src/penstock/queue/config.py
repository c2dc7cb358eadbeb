"""The settings that all users of a queue share: one small object, created with the queue.

It is created once: two who create the queue at the same time use what the first wrote.
`change_config` swaps it and increments `revision`; of two concurrent changes neither is lost. A
crash leaves the object before or after the change.

Readers: whoever opens the queue; workers that own shards every 30 s, and any worker before it
takes a shard, through a `ConfigWatch` (`penstock.queue.shards.reshard`); maintenance when it
needs a setting. Producers keep what they read when they opened the queue. A watch asks with
"unless unchanged": a GET, $0.035 a month at one every 30 s.

`era` counts the changes of the number of shards. It is part of the keys of shard leases, so that
shard 5 of 64 and shard 5 of 128 are never confused, nor two periods in which the queue had 64.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import ClassVar, Final

import msgspec

from penstock.kernel.document_format import Stamped, decode, encode
from penstock.kernel.entropy import Entropy
from penstock.kernel.errors import (
    AlreadyExists,
    InvalidInput,
    NotFound,
    QueueNotFound,
    UnreadableObject,
)
from penstock.queue.ids import check_name, is_name
from penstock.queue.layout import QUEUES, QueueLayout
from penstock.queue.pack import RESEND_SECONDS
from penstock.queue.shards.allocation import SHARDS_DEFAULT, Cut, check_shards
from penstock.store.base import CREATE, PAGE_KEYS_MAX, ObjectStore, Version, find, pages
from penstock.store.cell import Cell

_log = logging.getLogger(__name__)

KEY_SECONDS: Final = 86_400
EVERY_TYPE: Final = "*"
DAYS_MAX: Final = 36_500
ASKED: Final = ("shards", "key_seconds", "archive_days", "dead_letter_days", "direct")
"""What users set; the rest is counted here."""
_QUEUES_SHOWN: Final = 10


class QueueConfig(Stamped, frozen=True, kw_only=True):
    """`shards` is a power of two; `key_seconds` is how long a settled task's key stays taken."""

    kind: ClassVar[str] = "queue"

    shards: int = SHARDS_DEFAULT
    key_seconds: int = KEY_SECONDS
    archive_days: int | None = None
    """How long the records of settled tasks are kept, with their payloads; None is for ever."""
    dead_letter_days: int | None = None
    """The same for packs in which a task failed."""
    direct: tuple[str, ...] = ()
    """The types that are announced to one worker when they are submitted; `("*",)` for all."""

    schemas: dict[str, msgspec.Raw] = msgspec.field(default_factory=dict)
    """The JSON schema of inputs by type (`penstock.queue.submit_options`)."""

    revision: int = 0
    """How often it was changed."""
    era: int = 0
    """How often the number of shards was changed."""

    @property
    def cut(self) -> Cut:
        """How the queue is cut into shards."""
        return Cut(shards=self.shards, era=self.era)

    def is_direct(self, type: str) -> bool:
        """Whether this type is announced to a worker (`penstock.queue.discovery.direct`)."""
        return type in self.direct or self.direct == (EVERY_TYPE,)


async def read_config(store: ObjectStore, layout: QueueLayout) -> QueueConfig | None:
    """The queue's settings; None if there is no such queue."""
    found = await find(store, layout.config)
    return checked(decode(QueueConfig, found.body, where=layout.config)) if found else None


async def make_queue(store: ObjectStore, layout: QueueLayout, wanted: QueueConfig) -> QueueConfig:
    """Make the queue unless it is there; returns the settings that hold."""
    try:
        await store.put(layout.config, encode(checked(wanted)), CREATE)
    except AlreadyExists:
        return await read_config(store, layout) or wanted
    return wanted


async def change_config(
    store: ObjectStore,
    layout: QueueLayout,
    change: Callable[[QueueConfig], QueueConfig],
    *,
    entropy: Entropy,
) -> QueueConfig:
    """Make `change(present)` the queue's settings; returns those that hold then.

    `revision` and `era` are counted here. Nothing is written if nothing changes. Raises
    `QueueNotFound`, and `InvalidInput` for settings that cannot be.
    """

    def apply(present: QueueConfig | None) -> QueueConfig:
        if present is None:
            raise QueueNotFound(f"The queue {layout.queue!r} is gone.")
        wanted = checked(change(present))
        if wanted == present:
            return present
        era = present.era + (wanted.shards != present.shards)
        return msgspec.structs.replace(wanted, revision=present.revision + 1, era=era)

    changed = await Cell(store, layout.config, QueueConfig, entropy=entropy).update(apply)
    assert changed is not None
    return changed


def differences(wanted: QueueConfig, found: QueueConfig) -> list[str]:
    """What was asked for and is not so, in words; what was left as by default was not asked for."""
    plain = QueueConfig()
    return [
        f"{name} is {getattr(found, name)!r} and not {asked!r}"
        for name in ASKED
        if (asked := getattr(wanted, name)) != getattr(plain, name)
        and asked != getattr(found, name)
    ]


async def reshard(
    store: ObjectStore, layout: QueueLayout, shards: int, *, entropy: Entropy
) -> QueueConfig:
    """Change the number of shards; see `penstock.queue.shards.reshard` for what workers do."""
    check_shards(shards)
    return await change_config(
        store,
        layout,
        lambda present: msgspec.structs.replace(present, shards=shards),
        entropy=entropy,
    )


class ConfigWatch:
    """The settings as one process last read them."""

    def __init__(self, store: ObjectStore, layout: QueueLayout, config: QueueConfig) -> None:
        self.config = config
        self._store = store
        self._key = layout.config
        self._version: Version | None = None
        self._has_complained = False

    async def read(self) -> QueueConfig:
        """Read them again. What is gone or cannot be read stays as it was known."""
        try:
            found = await self._store.get(self._key, unless=self._version)
            if found is not None:
                self.config = checked(decode(QueueConfig, found.body, where=self._key))
                self._version = found.version
        except (NotFound, UnreadableObject, InvalidInput) as error:
            if not self._has_complained:
                _log.warning("failed to read the queue's settings, keeping the old: %s", error)
            self._has_complained = True
        else:
            self._has_complained = False
        return self.config


async def queue_names(store: ObjectStore, *, names_max: int) -> tuple[str, ...]:
    """The first queues of a store, in order: one LIST, or a few where pages come short."""
    names: list[str] = []
    async for page in pages(store, QUEUES, delimiter="/", page_keys=min(names_max, PAGE_KEYS_MAX)):
        names += [folder.removeprefix(QUEUES).rstrip("/") for folder in page.folders]
        if len(names) >= names_max:
            break
    return tuple(name for name in names[:names_max] if is_name(name))


async def no_such_queue(store: ObjectStore, layout: QueueLayout) -> QueueNotFound:
    """The error for a queue that is not there; it names those that are."""
    names = await queue_names(store, names_max=_QUEUES_SHOWN)
    known = f"There are: {', '.join(names)}." if names else "There are no queues here yet."
    return QueueNotFound(
        f"There is no queue {layout.queue!r} in this store.",
        hint=f"{known} 'penstock queue submit' creates one.",
    )


def checked(config: QueueConfig) -> QueueConfig:
    """The settings, or `InvalidInput`."""
    _check_type(config)
    check_shards(config.shards)
    for type_ in config.direct if config.direct != (EVERY_TYPE,) else ():
        check_name(type_, what="type")
    for days in (config.archive_days, config.dead_letter_days):
        check_days(days)
    if config.key_seconds < RESEND_SECONDS:
        raise InvalidInput(
            f"A key must be remembered for at least {RESEND_SECONDS:.0f} s,"
            f" not {config.key_seconds}: a submit may be sent again for that long."
        )
    return config


def _check_type(config: object) -> None:
    if not isinstance(config, QueueConfig):
        raise InvalidInput(
            f"config= takes a QueueConfig, not a value of type {type(config).__name__!r}.",
            hint="Write config=QueueConfig(shards=64).",
        )


def check_days(days: int | None) -> int | None:
    """How long something is kept, or `InvalidInput`."""
    if days is not None and (isinstance(days, bool) or not 1 <= days <= DAYS_MAX):
        raise InvalidInput(
            f"The archive is kept for 1 to {DAYS_MAX:,} days, not {days!r}.",
            hint="None, or 'forever' on the command line, keeps everything.",
        )
    return days
