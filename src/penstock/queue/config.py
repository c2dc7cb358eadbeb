"""What all who use a queue must agree on: one small object, written when the queue is made.

It is created once and not changed while the queue lives. Two who make the queue at the same time
agree on what the first of them wrote.
"""

from __future__ import annotations

from typing import ClassVar, Final

from penstock.kernel.errors import AlreadyExists, InvalidInput, QueueNotFound
from penstock.kernel.wire import Document, decode, encode
from penstock.queue.layout import QueueLayout
from penstock.queue.owning.shards import SHARDS_DEFAULT, check_shards
from penstock.queue.pack import RESEND_SECONDS
from penstock.store.base import CREATE, ObjectStore, find, pages

KEY_SECONDS: Final = 86_400
_QUEUES_SHOWN: Final = 10


class QueueConfig(Document, frozen=True, kw_only=True):
    """`shards` is a power of two; `key_seconds` is how long a settled task's key stays taken."""

    kind: ClassVar[str] = "queue"

    shards: int = SHARDS_DEFAULT
    key_seconds: int = KEY_SECONDS


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


async def no_such_queue(store: ObjectStore, layout: QueueLayout) -> QueueNotFound:
    """The error for a queue that is not there; it names those that are."""
    names: list[str] = []
    async for page in pages(store, "queues/", delimiter="/", page_keys=_QUEUES_SHOWN):
        names += [folder.removeprefix("queues/").rstrip("/") for folder in page.folders]
        break
    known = f"There are: {', '.join(names)}." if names else "There is none here yet."
    return QueueNotFound(
        f"There is no queue {layout.queue!r} in this store.",
        hint=f"{known} 'penstock queue submit' makes one.",
    )


def checked(config: QueueConfig) -> QueueConfig:
    """The settings, or `InvalidInput`."""
    check_shards(config.shards)
    if config.key_seconds < RESEND_SECONDS:
        raise InvalidInput(
            f"A key must be remembered for at least {RESEND_SECONDS:.0f} s,"
            f" not {config.key_seconds}: a submit may be sent again for that long."
        )
    return config
