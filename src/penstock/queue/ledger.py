"""The ledger: the cell beside a pack that holds everything that has happened to its tasks.

Lease, attempt and outcome of a task are in one object, so that whoever settles proves with the
same write that it was still the one to settle. A ledger names the version of its pack; beside
another pack it is void.

| status | means | leaves by |
|---|---|---|
| READY | nobody runs it; may be claimed | claim, cancel |
| CLAIMED | an attempt holds it, until its lease ends | settle, give back, expiry, (cancel asks) |
| RETRYING | failed, or rescheduled by its handler; may be claimed when due | claim, cancel |
| SUCCEEDED, FAILED, CANCELLED, EXPIRED | settled; never leaves | |

Times are the store's, in milliseconds. Attempts are numbered from 1 and only grow. A claim has a
random id: tasks carry the id of the claim that holds them, which is the fence.
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar, Final

import msgspec

from penstock.kernel.errors import NotOurs
from penstock.kernel.wire import Stamped
from penstock.queue.places import PackAt


class Status(StrEnum):
    """Where a task is. One letter on the wire."""

    READY = "r"
    CLAIMED = "c"
    RETRYING = "w"
    SUCCEEDED = "s"
    FAILED = "f"
    CANCELLED = "x"
    EXPIRED = "e"

    @property
    def settled(self) -> bool:
        return self in _SETTLED


_SETTLED = frozenset({Status.SUCCEEDED, Status.FAILED, Status.CANCELLED, Status.EXPIRED})


NULL: Final = msgspec.Raw(b"null")
"""The result of an attempt that returns nothing."""


class Failure(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why an attempt did not succeed, in words for people."""

    error: str
    message: str
    trace: str = ""


CANCELLED_ERROR: Final = "Cancelled"


class Progress(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """How far an attempt says it is."""

    at_ms: int
    done: float
    total: float = 1.0
    message: str = ""


class TaskState(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """One task. A task that nothing has happened to is the default."""

    status: Status = Status.READY
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
    failure: Failure | None = None
    """FAILED, and RETRYING: why the last attempt failed; None if it was rescheduled.
    CANCELLED, or to be: the reason, if one was given, as a `CANCELLED_ERROR`."""
    is_ref: bool = False
    """SUCCEEDED: the result is a `Reference` to a payload."""
    progress: Progress | None = None
    """What the last attempt has said of itself."""
    window_max: int = 0
    """Suspect, if not 0: so many at the most are claimed together with it (`windows`);
    `LOST_EXCLUSIVE` if its last attempt was lost with nothing else on its worker."""


LOST_EXCLUSIVE: Final = -1


class Lease(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Who holds a claim, and until when."""

    holder: str
    expires_ms: int
    touch_ms: int = 0
    """If not 0: it lasts at least so long after the store's date of the ledger (`heartbeats`)."""
    window: int = 1
    """How many tasks of the pack its holder may have started; 0 if none (`windows`)."""
    exclusive: bool = False
    """Its holder runs nothing else, of any pack, for as long as it holds it (`windows`)."""
    incarnation: str = ""
    """The process of its holder, of which a lock tells when it has ended (`incarnation`)."""


class Happening(StrEnum):
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


class LogLine(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """One thing that happened, at once, to one task or to many."""

    at_ms: int
    what: Happening
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
    tasks: tuple[TaskState, ...]
    leases: dict[str, Lease] = msgspec.field(default_factory=dict)
    log: tuple[LogLine, ...] = ()
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
    return Ledger(pack_version=pack_version, born=born, tasks=(TaskState(),) * count)


def check_ledger(at: PackAt, ledger: Ledger) -> None:
    """Raises `NotOurs` unless the ledger is one of this pack."""
    if len(ledger.tasks) != at.count or len(ledger.inputs) not in (0, at.count):
        raise NotOurs(f"The ledger of {at.path} does not hold what its name says.")
