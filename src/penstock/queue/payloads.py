"""Payloads: inputs and results that are too large for a pack or a ledger, as objects of their own.

The pack or ledger then holds a `PayloadReference`: the key, the length and the SHA-256. A
payload is plain JSON, so that any tool can read it.

- **Written** by the submitter before the pack, by the worker before the settlement. A crash
  between leaves an orphan.
- **Fetched** by whoever starts the task or reads it; length and checksum are checked.
- **Deleted** by `penstock.queue.retention`, when no pack, ledger or record refers to it. A crash
  leaves the rest for the next run.

Invariants
- A payload is written before anything refers to it (QUEUE-19), under a key that is never used
  twice, and never changes. So a reference can be followed as long as its holder exists.
- A payload has one owner: the task in its key, in the life that began on the day of its key (a
  key
  can be used again). A replay copies the payload. So only the owner's pack, ledger and record
  decide whether it may be deleted.
- An orphan costs its storage, and nothing else.

It costs one put to offload and one GET to fetch. Small tasks cost nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from penstock.kernel.entropy import Entropy
from penstock.kernel.errors import NotFound, PayloadLost, Unavailable
from penstock.queue.ids import PackAt, TaskId, payload_at, payload_path
from penstock.queue.layout import QueueLayout
from penstock.queue.ledger import Ledger
from penstock.queue.pack import RESEND_SECONDS, PayloadReference
from penstock.store.base import REPLACE, ObjectStore
from penstock.store.metered import labelled

INLINE_BYTES_MAX: Final = 64 * 1024
"""What is longer becomes a payload."""
PAYLOAD_BYTES_MAX: Final = 64 * 1024 * 1024
PAYLOADS_OF_A_PACK_BYTES_MAX: Final = PAYLOAD_BYTES_MAX
"""What all payloads of a pack have together: they must all be sent before it, within W."""
REFERENCE_BYTES: Final = 400
"""At least what a reference takes in a pack or a ledger."""
_UPLOAD_SECONDS_MAX: Final = RESEND_SECONDS * 0.8
_AT_ONCE: Final = 8


@dataclass(frozen=True, slots=True)
class Payloads:
    """The payloads of one queue."""

    store: ObjectStore
    layout: QueueLayout
    entropy: Entropy

    async def put(self, task: TaskId, body: bytes, *, submitted_ms: int) -> PayloadReference:
        """Store a payload of a task that was submitted then. May raise `StoreError`."""
        path = payload_path(task, submitted_ms=submitted_ms, entropy=self.entropy)
        with labelled("payload"):
            # The key is new: to write it again, after a lost answer, writes the same.
            await self.store.put(self.layout.payload(path), body, REPLACE)
        return PayloadReference(path, len(body), hashlib.sha256(body).hexdigest())

    async def offload(
        self, at: PackAt, inputs: Sequence[msgspec.Raw], *, submitted_ms: int
    ) -> tuple[tuple[msgspec.Raw, ...], tuple[int, ...]]:
        """Store the large ones of a pack's inputs; returns what the pack holds, and which are refs.

        Raises `Unavailable` if that took so long that the pack would be void (QUEUE-2).
        """
        refs = tuple(place for place, body in enumerate(inputs) if is_large(body))
        if not refs:
            return tuple(inputs), ()
        slots = asyncio.Semaphore(_AT_ONCE)

        async def put(place: int) -> msgspec.Raw:
            async with slots:
                body = bytes(inputs[place])
                reference = await self.put(at.task(place), body, submitted_ms=submitted_ms)
                return raw(reference)

        stored: dict[int, msgspec.Raw] = {}
        # All of them end before this does, also if one fails.
        sent = await asyncio.gather(*map(put, refs), return_exceptions=True)
        for place, answer in zip(refs, sent, strict=True):
            if isinstance(answer, BaseException):
                raise answer
            stored[place] = answer
        if (await self.store.now()).latest * 1000 >= submitted_ms + _UPLOAD_SECONDS_MAX * 1000:
            raise Unavailable(
                f"The large inputs took longer than {_UPLOAD_SECONDS_MAX:.0f} s to send: nothing of"
                " their pack was submitted.",
                hint="Submit fewer of them at once, or over a faster connection to the store.",
            )
        return tuple(stored.get(n, body) for n, body in enumerate(inputs)), refs

    async def fetch(self, reference: PayloadReference) -> msgspec.Raw:
        """A payload, checked. Raises `PayloadLost` if it is gone or damaged; may `StoreError`."""
        found = payload_at(reference.key)
        if found is None:
            raise PayloadLost(f"{reference.key[:200]!r} is not the key of a payload.")
        task = found.at.task(found.place)
        try:
            with labelled("payload"):
                stored = await self.store.get(self.layout.payload(reference.key))
        except NotFound as error:
            raise _lost("is gone", reference, task) from error
        assert stored is not None
        if len(stored.body) != reference.bytes:
            what = f"has {len(stored.body):,} bytes and not {reference.bytes:,}: it is damaged"
            raise _lost(what, reference, task)
        if hashlib.sha256(stored.body).hexdigest() != reference.sha256:
            raise _lost("has another checksum than what was stored: it is damaged", reference, task)
        return msgspec.Raw(stored.body)


def is_large(body: msgspec.Raw) -> bool:
    """Whether an input is for a payload."""
    return memoryview(body).nbytes > INLINE_BYTES_MAX  # Without a copy of it.


def raw(reference: PayloadReference) -> msgspec.Raw:
    """A reference as packs and ledgers hold it."""
    return msgspec.Raw(msgspec.json.encode(reference))


def reference(body: bytes) -> PayloadReference:
    """Where a payload is, as packs and ledgers say it."""
    return msgspec.json.decode(body, type=PayloadReference)


def references(ledger: Ledger) -> list[PayloadReference]:
    """The payloads that a settled pack refers to."""
    inputs = [ledger.inputs[place] for place in ledger.refs if place < len(ledger.inputs)]
    results = [task.result for task in ledger.tasks if task.is_ref]
    return [reference(bytes(each)) for each in (*inputs, *results)]


def _lost(what: str, reference: PayloadReference, task: TaskId) -> PayloadLost:
    return PayloadLost(
        f"The payload {reference.key} {what}.",
        task=task,
        hint="Was it deleted by hand, or by a lifecycle rule? Submit the input again.",
    )
