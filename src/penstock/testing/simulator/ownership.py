"""What the referee states of shards: epochs only grow, and no live owner is ended.

An operator deletes and damages leases and registrations; what is written by hand is not judged,
what follows from it is. One thing is let pass: after a delete by hand the network may deliver the
create and the swap of an earlier take once more, byte for byte, and so bring that take back. It
gives nobody anything, since its worker is gone, and the next take is beyond it.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.kernel.errors import UnreadableObject
from penstock.kernel.wire import decode
from penstock.queue.layout import QueueLayout
from penstock.queue.owning.registry import Registration, Role, ShardLease
from penstock.queue.places import SLOTS
from penstock.testing.simulator.chronicle import Chronicle

_OPERATOR = "operator"


class Ownership:
    """Judges registrations and shard leases."""

    def __init__(
        self,
        layout: QueueLayout,
        chronicle: Chronicle,
        now: Callable[[], float],
        is_gone: Callable[[str, str], bool],
    ) -> None:
        self._layout = layout
        self._chronicle = chronicle
        self._now = now
        self._is_gone = is_gone
        self._epochs: dict[int, int] = {}
        self._takes: set[bytes] = set()

    def saw(self, who: str, key: str, *, before: bytes | None, after: bytes | None) -> None:
        """One change."""
        if who == _OPERATOR or after is None:
            return
        if key.startswith(self._layout.shard_leases):
            name = key.removeprefix(self._layout.shard_leases).removesuffix(".json")
            era, _, shard = name.rpartition("/")
            number = _number(int(shard), era=int(era or 0))
            self._lease(who, number, decode(ShardLease, after, where=key), after)
        elif before is not None:
            self._registration(who, key, before, after)

    def _lease(self, who: str, shard: int, lease: ShardLease, body: bytes) -> None:
        if not lease.worker:
            return
        subject = ("shard", shard)
        self._chronicle.note(who, f"{lease.worker} owns it, epoch {lease.epoch}", subject)
        if lease.epoch <= self._epochs.get(shard, 0) and body not in self._takes:
            self._chronicle.accuse(f"The epoch of shard {shard} went back.", subject)
        self._epochs[shard] = max(lease.epoch, self._epochs.get(shard, 0))
        self._takes.add(body)

    def _registration(self, who: str, key: str, before: bytes, after: bytes) -> None:
        try:
            was = decode(Registration, before, where=key)
        except UnreadableObject:
            return
        is_ = decode(Registration, after, where=key)
        worker = self._layout.read_worker(key) or ""
        ended = was.role is Role.OWNER and is_.role is Role.GONE
        # Machine and worker have the same name, but for what makes each incarnation unique.
        machine = worker.rpartition("-")[0]
        is_live = was.expires_ms > self._now() * 1000 and not self._is_gone(machine, who)
        if ended and is_live and machine != who:
            shards = [("shard", _number(shard, era=was.era)) for shard in was.shards]
            self._chronicle.accuse(f"The owner {worker} was ended while its lease ran.", *shards)


def _number(shard: int, *, era: int) -> int:
    """One number for a shard of an era: that of another era is another one."""
    return era * SLOTS + shard
