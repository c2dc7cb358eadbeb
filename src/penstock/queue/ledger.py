"""The ledger: the cell beside a pack that records everything that has happened to its tasks.

Lease, attempt and outcome of a task are in one object, so that a settlement proves with the
same write that its author still holds the claim. A ledger names the version of its pack; beside
another pack it is void.

| status | means | leaves by |
|---|---|---|
| READY | nobody runs it; may be claimed | claim, cancel |
| CLAIMED | an attempt holds it, until its lease ends | settle, give back, expiry, (cancel asks) |
| RETRYING | failed, or rescheduled by its handler; may be claimed when due | claim, cancel |
| SUCCEEDED, FAILED, CANCELLED, EXPIRED | settled; never leaves | |

Times are the store's, in milliseconds. Attempts are numbered from 1 and only grow. A claim has a
random id: tasks carry the id of the claim that holds them, which is the fence.

**Metadata.** Every write of a ledger names in the object's user metadata who holds a lease in it
(`holder`) and until when (`expires`), so that a HEAD shows both. Of several leases it is the one
that ends first. It is for people and other tools: nothing is decided by it.

**Touch.** A worker with `heartbeat="touch"` may renew by dating the ledger anew: a copy onto
itself, conditional on the version, which sends no body. Its lease says so with `touch_ms`, and
lasts until the later of `expires_ms` and the store's date of the object + `touch_ms`:

- **A claim, or a renewal by swap**, of such a holder: its lease has `touch_ms`.
- **A touch** is for the holder, if all leases in the ledger are its own, all its tasks run, and
  nothing is to be written. The object's date moves; its version need not.
- **Readers** see plain leases (`as_of`), with the end that they had at that moment.
- **Writers** write what they have read: the leases of others, plain and with that end.

So the writes of one worker never prolong the lease of another (QUEUE-11), and at most the last
writer can touch. The slack of two seconds in `touch_ms` covers dates that are cut to the
second: the holder counts from the moment at which it sent the touch, a challenger from the
store's date of it.

A touch is weaker than a swap: it may leave the version as it is. A challenger that read the ledger
before the touch, and writes when the lease that it read is over, wins although there is a fresh
touch. Two attempts of a task then run at once, and the outcome of the first is refused as
overtaken: it costs an attempt, never a task. So nothing *starts* on a touched lease (QUEUE-16): a
worker with tasks that wait to start writes, and the lease under which a handler starts was always
written by a swap. Nor does a touch prove that a ledger is no ghost (`pack_session`): a settlement
after it reads the pack.

A crash leaves the object dated before the touch or after it. A touch that arrives late or twice
delays others by one lease, if nobody has written since; otherwise it is refused, and a read and
a swap follow. A touch is priced as a copy, as much as the swap ($0.005 per 1,000): it saves
sending the body, which counts in packs of many tasks with large results.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum
from functools import lru_cache
from typing import ClassVar, Final, Self
from urllib.parse import quote

import msgspec

from penstock.kernel.document_format import Stamped
from penstock.kernel.errors import NotOurs
from penstock.queue.ids import PackAt


class QueueTaskStatus(StrEnum):
    """Where a task is: one letter in ledgers, and a word for people (decision 0122)."""

    READY = "r", "ready"
    CLAIMED = "c", "running"
    RETRYING = "w", "retrying"
    SUCCEEDED = "s", "succeeded"
    FAILED = "f", "failed"
    CANCELLED = "x", "cancelled"
    EXPIRED = "e", "expired"

    word: str
    """What views, listings and tables call it."""

    def __new__(cls, letter: str, word: str) -> Self:
        member = str.__new__(cls, letter)
        member._value_, member.word = letter, word
        return member

    @property
    def settled(self) -> bool:
        return self in _SETTLED


_SETTLED = frozenset(
    {
        QueueTaskStatus.SUCCEEDED,
        QueueTaskStatus.FAILED,
        QueueTaskStatus.CANCELLED,
        QueueTaskStatus.EXPIRED,
    }
)


NULL: Final = msgspec.Raw(b"null")
"""The result of an attempt that returns nothing."""


class LedgerFailure(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why an attempt did not succeed, in words for people."""

    error: str
    message: str
    trace: str = ""


CANCELLED_ERROR: Final = "Cancelled"


class LedgerProgress(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """How far an attempt says it is."""

    at_ms: int
    done: float
    total: float = 1.0
    message: str = ""


class QueueTaskState(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """One task. A task that nothing has happened to is the default."""

    status: QueueTaskStatus = QueueTaskStatus.READY
    attempt: int = 0
    """The number of the last attempt; 0 before the first."""
    given_back: int = 0
    """How many attempts do not count towards a limit: given back, or lost in company."""
    claim: str = ""
    """While CLAIMED: the claim that holds it. Settled: the claim that settled it, if one did."""
    at_ms: int = 0
    """RETRYING: when it is due. Settled: when it was."""
    cancel: bool = False
    """CLAIMED: its attempt is asked to stop. READY: it must not start again."""
    result: msgspec.Raw = NULL
    failure: LedgerFailure | None = None
    """FAILED, and RETRYING: why the last attempt failed; None if it was rescheduled.
    CANCELLED, or to be: the reason, if one was given, as a `CANCELLED_ERROR`."""
    is_ref: bool = False
    """SUCCEEDED: the result is a `PayloadReference` to a payload."""
    progress: LedgerProgress | None = None
    """What the last attempt has said of itself."""
    window_max: int = 0
    """Suspect, if not 0: so many at the most are claimed together with it (`transitions`);
    `LOST_EXCLUSIVE` if its last attempt was lost with nothing else on its worker."""


LOST_EXCLUSIVE: Final = -1


class ClaimLease(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Who holds a claim, and until when."""

    holder: str
    expires_ms: int
    touch_ms: int = 0
    """If not 0: it lasts at least so long after the store's date of the ledger (`ledger`)."""
    window: int = 1
    """How many tasks of the pack its holder may have started; 0 if none (`transitions`)."""
    exclusive: bool = False
    """Its holder runs nothing else, of any pack, for as long as it holds it (`transitions`)."""
    incarnation: str = ""
    """The process of its holder, of which a lock tells when it has ended (`incarnation`)."""


class LedgerEvent(StrEnum):
    """What a line of the log tells."""

    CLAIMED = "claimed"
    GIVEN_BACK = "given back"
    LEASE_EXPIRED = "lease expired"
    RETRYING = "retrying"
    RESCHEDULED = "rescheduled"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCEL_ASKED = "cancel asked"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


class LedgerLogLine(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """One thing that happened, at once, to one task or to many."""

    at_ms: int
    what: LedgerEvent
    runs: tuple[int, ...]
    """The places it happened to, as runs of neighbours: first, last, first, last, …"""
    attempt: int
    who: str = ""
    note: str = ""

    def is_about(self, place: int) -> bool:
        """Whether it happened to the task at this place."""
        pairs = zip(self.runs[::2], self.runs[1::2], strict=True)
        return any(first <= place <= last for first, last in pairs)


class Ledger(Stamped, frozen=True, kw_only=True):
    """The states of all tasks of a pack, the live leases, and the last lines of the log."""

    kind: ClassVar[str] = "ledger"

    pack_version: str
    born: str
    """Drawn when the ledger was created: another ledger under the same key is another one."""
    tasks: tuple[QueueTaskState, ...]
    leases: dict[str, ClaimLease] = msgspec.field(default_factory=dict)
    log: tuple[LedgerLogLine, ...] = ()
    inputs: tuple[msgspec.Raw, ...] = ()
    """Copied from the pack by the write that settles the last task: the complete record."""
    submitted_ms: int = 0
    """Likewise: when it was submitted."""
    due_ms: int = 0
    key: str | None = None
    key_ends_ms: int = 0
    """A pack with a key: until when an equal key is a duplicate."""
    refs: tuple[int, ...] = ()
    """Likewise copied, as all that follows: what the pack says of itself."""
    priority: int = 0
    limit: str = ""
    expires_ms: int = 0
    tags: dict[str, str] = msgspec.field(default_factory=dict)
    batch: str = ""
    trace: str = ""

    @property
    def settled(self) -> bool:
        """Whether every task is settled."""
        return all(task.status.settled for task in self.tasks)


def fresh(*, pack_version: str, born: str, count: int) -> Ledger:
    """The ledger of a pack that nobody has touched."""
    return Ledger(pack_version=pack_version, born=born, tasks=(QueueTaskState(),) * count)


def check_ledger(at: PackAt, ledger: Ledger) -> None:
    """Raises `NotOurs` unless the ledger is one of this pack."""
    if len(ledger.tasks) != at.count or len(ledger.inputs) not in (0, at.count):
        raise NotOurs(f"The ledger of {at.path} does not match its name.")


TOUCH_SLACK_MS: Final = 2_000
"""Stores date to the second, and cut or round: by so much a date may seem too early."""
_HOLDER_CHARACTERS_MAX: Final = 200


def as_of(ledger: Ledger, modified: float) -> Ledger:
    """A ledger as it was read from an object of this date: with plain leases only."""
    if not any(lease.touch_ms for lease in ledger.leases.values()):
        return ledger
    leases = {name: _plain(lease, modified) for name, lease in ledger.leases.items()}
    return msgspec.structs.replace(ledger, leases=leases)


def _plain(lease: ClaimLease, modified: float) -> ClaimLease:
    if not lease.touch_ms:
        return lease
    ends_ms = max(lease.expires_ms, int(modified * 1000) + lease.touch_ms)
    return msgspec.structs.replace(lease, expires_ms=ends_ms, touch_ms=0)


def may_touch(ledger: Ledger, claims: frozenset[str]) -> bool:
    """Whether these claims, which are one worker's, can be renewed by a touch of what it wrote."""
    touched = all(lease.touch_ms for lease in ledger.leases.values())
    return bool(claims) and claims == ledger.leases.keys() and touched


@lru_cache(maxsize=64)
def _header(holder: str) -> str:
    """Metadata travels in headers: printable ASCII, and not much of it."""
    return quote(holder[:_HOLDER_CHARACTERS_MAX], safe="@:+")[:600]


def metadata_of(ledger: Ledger, *, expires_ms: int = 0) -> Mapping[str, str]:
    """What the object says of its leases; nothing if there are none. `expires_ms` may tell more."""
    if not ledger.leases:
        return {}
    first = min(ledger.leases.values(), key=lambda lease: lease.expires_ms)
    ends = datetime.fromtimestamp(max(first.expires_ms, expires_ms) / 1000, UTC)
    return {
        "holder": _header(first.holder),
        "expires": ends.isoformat(timespec="milliseconds"),
    }
