"""How a lease in a ledger is told beside it, and renewed without writing it. Pure.

**Metadata.** Every write of a ledger names in the object's user metadata who holds a lease in it
(`holder`) and until when (`expires`), so that a HEAD shows both. Of several leases it is the one
that ends first. This is for people and other tools: nothing is decided by it.

**Touch.** A worker with `heartbeat="touch"` may renew by dating the ledger anew: a copy onto
itself, conditional on the version, which sends no body. Its lease says so with `touch_ms`, and
lasts until the later of `expires_ms` and the store's date of the object + `touch_ms`:

- **A claim, or a renewal by swap**, of such a holder: its lease has `touch_ms`.
- **A touch** is for the holder, if all leases in the ledger are its own, all its tasks run, and
  nothing is to be written. The object's date moves; its version need not.
- **Whoever reads** sees plain leases (`as_of`), with the end that they had at that moment.
- **Whoever writes** writes what it has read: the leases of others, plain and with that end.

So the writes of one never prolong the lease of another (R10), and at the most the one who wrote
last can touch. The slack of two seconds in `touch_ms` is for dates that are cut to the second: the
holder counts from the moment at which it sent the touch, a challenger from the store's date of it.

What is weaker than a swap: a touch may leave the version as it is. A challenger that has read the
ledger before the touch, and writes when the lease that it read of is over, wins although there is a
fresh touch. Two attempts of a task then run at the same time, and the first one's ending is refused
like that of any other who was overtaken: it costs an attempt, never a task. So nothing *starts* on
a touched lease: whoever has tasks that wait to start writes, and the lease that a handler's start
rests on was always written by a swap that nobody can have overlooked. Nor does a touch prove that a
ledger is no ghost (`claims`): a settlement after it asks for the pack.

A crash leaves the object dated before the touch or after it. A touch that arrives late, or twice,
makes others wait one lease longer, if nobody has written since; otherwise it is refused. A touch
that is refused is followed by a read and a swap. A store that is away gives no renewal, and what is
not renewed is not trusted. A touch is priced as a copy, as much as the swap ($0.005 per 1,000):
what it saves is sending the body, which counts in packs of many with large results.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final
from urllib.parse import quote

import msgspec

from penstock.queue.ledger import Lease, Ledger

TOUCH_SLACK_MS: Final = 2_000
"""Stores date to the second, and cut or round: by so much a date may seem too early."""
_HOLDER_CHARACTERS_MAX: Final = 200


def as_of(ledger: Ledger, modified: float) -> Ledger:
    """A ledger as it was read from an object of this date: with plain leases only."""
    if not any(lease.touch_ms for lease in ledger.leases.values()):
        return ledger
    leases = {name: _plain(lease, modified) for name, lease in ledger.leases.items()}
    return msgspec.structs.replace(ledger, leases=leases)


def _plain(lease: Lease, modified: float) -> Lease:
    if not lease.touch_ms:
        return lease
    ends_ms = max(lease.expires_ms, int(modified * 1000) + lease.touch_ms)
    return msgspec.structs.replace(lease, expires_ms=ends_ms, touch_ms=0)


def may_touch(ledger: Ledger, claims: frozenset[str]) -> bool:
    """Whether these claims, which are one worker's, can be renewed by a touch of what it wrote."""
    touched = all(lease.touch_ms for lease in ledger.leases.values())
    return bool(claims) and claims == ledger.leases.keys() and touched


def metadata_of(ledger: Ledger, *, expires_ms: int = 0) -> Mapping[str, str]:
    """What the object says of its leases; nothing if there are none. `expires_ms` may tell more."""
    if not ledger.leases:
        return {}
    first = min(ledger.leases.values(), key=lambda lease: lease.expires_ms)
    ends = datetime.fromtimestamp(max(first.expires_ms, expires_ms) / 1000, UTC)
    return {
        # Metadata travels in headers: printable ASCII, and not much of it.
        "holder": quote(first.holder[:_HOLDER_CHARACTERS_MAX], safe="@:+")[:600],
        "expires": ends.isoformat(timespec="milliseconds"),
    }
