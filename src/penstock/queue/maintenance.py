"""Maintenance of a queue: the monitor, periodic tasks, and running both without a worker.

`Monitor` repairs pointers and archives settled packs. It is run by the owner of a shard in
`leased`, an elected worker in the other modes, or `penstock queue monitor`. Several at once are
safe: all writes are conditional, or under keys of their own.

- **Settled ledgers** are archived in batches, when their pack is gone and cannot come back: W
  after the submit and after the last write, for a key after its lifetime (QUEUE-3). A list that
  began after that moment must have shown that the pack is gone.
- **Void ledgers** are removed: not settled, without a pack, and with no live lease (QUEUE-1).
- **Missing pointers** are written again: a pack with a key to which no entry of `ready/` points
  would never be found. Late or duplicate ones are removed by whoever follows them.

Settled ledgers cost nothing to notice: the lists of discovery show them. The sweep for pointers
is one LIST of `keyed/` a period, and one of `ready/` if there are packs, for every 1,000
objects: at the default of 600 s, four to nine cents a month for a small queue. A worker that
begins to guard slots sweeps them within `MAINTAIN_SECONDS`. A pointer that a look has shown is
missed by the next look (`penstock.queue.execution.pack_memory`): a HEAD for each that somebody
else removed. So a lost pointer delays its task by less than a minute; one that is lost before
any look has shown it, while its slot is guarded, waits for the period.

`MaintenanceTask` is done for a whole queue every so often: schedules, batches, retention
(`penstock.queue.worker.maintenance_tasks` lists them). The worker that guards the first slot
runs them (`MaintenanceLoop`). While owners change that can be two workers, or none: a task must
tolerate both.

`run_monitor` does all that without a worker, and beside workers does no harm. Tasks run when
they are due, not only when there is a pass; if only so many passes are wanted, once before the
first. A pass is one LIST for every 1,000 objects in `tasks/` and what is due of `ready/`, one
of `keyed/`, and one of `ready/` if there are packs with a key: three for a small queue. A
settled pack costs a GET, and a put for every 500 or so. At 600 s that is 13,000 LISTs or seven
cents a month, and $0.41 per million settled tasks that were submitted one by one.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final

from penstock.kernel.clock import Clock
from penstock.kernel.document_format import decode, encode
from penstock.kernel.entropy import Entropy, new_id
from penstock.kernel.errors import NotFound, StoreError, UnreadableObject, VersionConflict
from penstock.queue import transitions
from penstock.queue.archive import keep
from penstock.queue.batch_marks import mark_before_archiving
from penstock.queue.context import LogLimiter, QueueContext
from penstock.queue.discovery.base import Discovery
from penstock.queue.discovery.scanner import ALL, Run, Scanner
from penstock.queue.ids import NONCE_CHARACTERS, PackAt
from penstock.queue.layout import QueueLayout
from penstock.queue.ledger import Ledger, as_of
from penstock.queue.pack import Pack, forgotten_ms
from penstock.queue.submitter import Pointer
from penstock.queue.survey import foreign
from penstock.store.base import CREATE, Entry, ObjectStore, Version, find, pages
from penstock.store.metered import labelled
from penstock.store.time import Interval

_log = logging.getLogger(__name__)

BATCH: Final = 500
"""So many settled ledgers leave at once, or fewer after `WAIT_SECONDS`."""
WAIT_SECONDS: Final = 120.0
REMEMBERED_MAX: Final = 5_000
REMEMBERED_BYTES_MAX: Final = 32 * 1024 * 1024
_AT_ONCE: Final = 16
_YOUNG_SECONDS: Final = 60.0
_LEFT_SECONDS: Final = 3600.0


@dataclass(frozen=True, slots=True)
class _Settled:
    at: PackAt
    version: Version
    looked_ms: float
    """The store's time when the list began that did not show the pack."""
    noted_at: float


class Monitor:
    """Repairs the part of a queue that it is told to."""

    def __init__(
        self, store: ObjectStore, layout: QueueLayout, *, key_seconds: int, entropy: Entropy
    ) -> None:
        self._store = store
        self._layout = layout
        self._key_seconds = key_seconds
        self._entropy = entropy
        self._clock = store.clock.machine
        self._waiting: dict[PackAt, _Settled] = {}
        self._left: dict[PackAt, float] = {}
        self._known: dict[PackAt, tuple[Ledger, Version, int]] = {}
        self._known_bytes = 0

    def remember(self, at: PackAt, ledger: Ledger, version: Version) -> None:
        """What this worker has settled itself: it need not be read again."""
        size = 256 + sum(len(bytes(each)) for each in ledger.inputs) + 300 * len(ledger.tasks)
        self._forget(at)
        self._known[at] = (ledger, version, size)
        self._known_bytes += size
        while len(self._known) > REMEMBERED_MAX or self._known_bytes > REMEMBERED_BYTES_MAX:
            self._forget(next(iter(self._known)))

    def _forget(self, at: PackAt) -> tuple[Ledger | None, Version | None]:
        ledger, version, size = self._known.pop(at, (None, None, 0))
        self._known_bytes -= size
        return ledger, version

    def note(self, settled: Sequence[tuple[PackAt, Entry]], looked: Interval) -> None:
        """Take in ledgers that a list, begun at `looked`, has shown without their pack."""
        instant = self._clock.monotonic()
        for at, entry in settled:
            if self._left.get(at, 0.0) > instant or at in self._waiting:
                continue
            if self._may_leave_ms(at, entry) <= looked.earliest * 1000:
                self._waiting[at] = _Settled(at, entry.version, looked.earliest * 1000, instant)

    def _may_leave_ms(self, at: PackAt, entry: Entry) -> float:
        """When nothing of the pack can come any more: neither its submit nor an old claim."""
        written_ms = int(entry.modified * 1000)
        if at.submitted_ms is not None:
            return forgotten_ms(max(at.submitted_ms, written_ms))
        return forgotten_ms(written_ms + self._key_seconds * 1000)

    async def clear(self, *, at_once: bool = False) -> int:
        """Archive what has been noted, if it is enough or has waited long enough.

        Returns how many ledgers have left.
        """
        oldest = min((each.noted_at for each in self._waiting.values()), default=None)
        if oldest is None:
            return 0
        due = at_once or self._clock.monotonic() - oldest >= WAIT_SECONDS
        if not due and len(self._waiting) < BATCH:
            return 0
        batch = list(self._waiting.values())[: BATCH * 2]
        with labelled("monitor"):
            return await self._archive(batch)

    async def _archive(self, batch: Sequence[_Settled]) -> int:
        slots = asyncio.Semaphore(_AT_ONCE)

        async def read(each: _Settled) -> Ledger | None:
            async with slots:
                return await self._read(each)

        async def remove(each: _Settled) -> None:
            async with slots:
                try:
                    await self._store.delete(self._layout.ledger(each.at), version=each.version)
                except VersionConflict:
                    return
                except StoreError as error:
                    _log.warning("failed to delete an archived ledger: %s", error)
                    self._leave(each.at)

        ledgers = await asyncio.gather(*(read(each) for each in batch))
        now = await self._store.now()
        records, gone = [], []
        for each, ledger in zip(batch, ledgers, strict=True):
            if ledger is not None and ledger.settled:
                if ledger.key is None or forgotten_ms(ledger.key_ends_ms) <= each.looked_ms:
                    records.append((each.at, ledger))
                    gone.append(each)
                else:
                    # Its submit has given it a longer life than the queue does.
                    seconds = (forgotten_ms(ledger.key_ends_ms) - each.looked_ms) / 1000
                    self._leave(each.at, seconds)
            elif ledger is not None and _is_void(ledger, now):
                gone.append(each)
        await mark_before_archiving(self._store, self._layout, records)
        await keep(self._store, self._layout, records, entropy=self._entropy)
        await asyncio.gather(*(remove(each) for each in gone))
        for each in batch:
            self._waiting.pop(each.at, None)
        return len(gone)

    async def _read(self, each: _Settled) -> Ledger | None:
        ledger, version = self._forget(each.at)
        if ledger is not None and version == each.version:
            return ledger
        key = self._layout.ledger(each.at)
        try:
            found = await self._store.get(key)
            if found is None or found.version != each.version:
                return None
            return as_of(decode(Ledger, found.body, where=key), found.modified)
        except NotFound:
            return None
        except UnreadableObject as error:
            _log.warning("skipped a ledger: %s", error)
            self._leave(each.at)
            return None

    def _leave(self, at: PackAt, seconds: float = _LEFT_SECONDS) -> None:
        """Nothing can be done with this one now: do not try again for a while."""
        self._left[at] = self._clock.monotonic() + seconds
        while len(self._left) > REMEMBERED_MAX:
            del self._left[next(iter(self._left))]

    async def sweep(self, runs: Sequence[Run]) -> int:
        """Write the pointers that are missing in these slots; returns how many there were."""
        with labelled("monitor"):
            packs: list[PackAt] = []
            for run in runs:
                packs += await self._keyed(run)
            if not packs:
                return 0
            pointed: set[PackAt] = set()
            for prefix in (self._layout.ready, self._layout.unhurried):
                async for page in pages(self._store, prefix):
                    read = (self._layout.read_pointer(entry.key) for entry in page.entries)
                    pointed |= {found.at for found in read if found}
            missing = [at for at in packs if at not in pointed]
            for at in missing:
                await self._point(at)
        if missing:
            _log.warning("restored the missing pointers of %d packs with a key", len(missing))
        return len(missing)

    async def point_again(self, at: PackAt) -> bool:
        """Write a pointer to a pack whose pointer is gone; False if the pack is gone too."""
        with labelled("monitor"):
            try:
                await self._store.head(self._layout.pack(at))
            except NotFound:
                return False
            await self._point(at)
        _log.warning("restored the missing pointer of the pack %s", at.path)
        return True

    async def _keyed(self, run: Run) -> list[PackAt]:
        """The packs with a key in these slots; ledgers that are alone are noted."""
        looked = await self._store.now()
        prefix, last = self._layout.keyed, f"{self._layout.keyed}{run[1]:03x}/~~"
        pairs: dict[PackAt, list[Entry | None]] = {}
        async for page in pages(self._store, prefix, start_after=f"{prefix}{run[0]:03x}/"):
            for entry in page.entries:
                read = self._layout.read(entry.key)
                if read is not None and entry.key < last:
                    pairs.setdefault(read[0], [None, None])[read[1]] = entry
            if page.entries and page.entries[-1].key >= last:
                break
        alone = [(at, ledger) for at, (pack, ledger) in pairs.items() if ledger and not pack]
        self.note(alone, looked)
        old = looked.earliest - _YOUNG_SECONDS
        return [at for at, (pack, _) in pairs.items() if pack and pack.modified <= old]

    async def _point(self, at: PackAt) -> None:
        found = await find(self._store, self._layout.pack(at))
        if found is None:
            return
        pack = decode(Pack, found.body, where=found.key)
        due_ms = int((await self._store.now()).latest * 1000)
        key = self._layout.pointer(
            at,
            due_ms=due_ms,
            nonce=new_id(self._entropy, characters=NONCE_CHARACTERS),
            priority=pack.priority,
            limit=pack.limit,
        )
        await self._store.put(key, encode(Pointer(submitted_ms=due_ms)), CREATE)


def _is_void(ledger: Ledger, now: Interval) -> bool:
    """Whether no lease in it is live: without its pack it is nothing then (QUEUE-1)."""
    due_ms = transitions.next_due_ms(transitions.expire(ledger, now))
    return due_ms is None or due_ms <= now.earliest * 1000


MAINTAIN_SECONDS: Final = 15.0
_GUARD_SECONDS: Final = 5.0
_AGAIN_SECONDS: Final = 30.0


class MaintenanceTask(ABC):
    """Something that is done for a whole queue, every so often, by whoever guards its first slot.

    It is done by one as a rule, and sometimes by two at the same time or by none: what it does is
    conditional, or the same if it is done twice.
    """

    name: str
    """What it does, for the log: "the schedules", say."""

    @abstractmethod
    async def turn(self) -> float:
        """Do what is due; returns the seconds until the next turn. May raise `StoreError`."""

    async def release(self) -> None:  # noqa: B027 - most have nothing to let go of
        """The worker stops: let go of what others wait for. Within a bound; never fails."""


class MaintenanceLoop:
    """Maintains what one worker guards, until cancelled."""

    def __init__(
        self,
        access: QueueContext,
        discovery: Discovery,
        monitor: Monitor,
        maintenance: Sequence[MaintenanceTask],
        *,
        sweep_seconds: float,
        found: Callable[[], None],
    ) -> None:
        self._access = access
        self._discovery = discovery
        self._monitor = monitor
        self._maintenance = tuple(maintenance)
        self._sweep_seconds = sweep_seconds
        self._found = found
        self._clock = access.store.clock.machine
        self._warn = LogLimiter(self._clock)

    def loops(self) -> list[Coroutine[Any, Any, None]]:
        """Everything that is to run beside the worker's own search."""
        return [self._maintain(), *map(self._do, self._maintenance)]

    async def release(self) -> None:
        """Let each task release what it holds."""
        for task in self._maintenance:
            await task.release()

    async def _maintain(self) -> None:
        """Archive and repair what this worker guards."""
        period = self._sweep_seconds
        sweep_at = self._clock.monotonic() + self._access.entropy.uniform(0, period)
        swept: Sequence[Run] = ()
        while True:
            await self._clock.sleep(MAINTAIN_SECONDS)
            runs = self._discovery.guarded()
            if not runs:
                continue
            try:
                await self._monitor.clear()
                is_new = not set(runs) <= set(swept)
                if is_new or self._clock.monotonic() >= sweep_at:
                    sweep_at, swept = self._clock.monotonic() + period, runs
                    if await self._monitor.sweep(runs):
                        self._found()
            except (StoreError, UnreadableObject) as error:
                self._warn(f"failed to repair the queue, retrying: {error}")

    def _do(self, task: MaintenanceTask) -> Coroutine[Any, Any, None]:
        return run_repeatedly(task, clock=self._clock, warn=self._warn, is_ours=self._is_ours)

    def _is_ours(self) -> bool:
        """Whether this worker does the maintenance of the queue."""
        return any(first == 0 for first, _ in self._discovery.guarded())


async def run_repeatedly(
    task: MaintenanceTask, *, clock: Clock, warn: Callable[[str], None], is_ours: Callable[[], bool]
) -> None:
    """Run a task repeatedly, whenever it is ours to do, until cancelled."""
    while True:
        if not is_ours():
            await clock.sleep(_GUARD_SECONDS)
            continue
        try:
            seconds = await task.turn()
        except Exception as error:  # noqa: BLE001 - it must not end the worker that does it
            warn(f"maintenance of {task.name} failed, retrying: {error!r}")
            seconds = _AGAIN_SECONDS
        await clock.sleep(seconds)


PERIOD_SECONDS: Final = 600.0
"""How often a monitor that runs alone looks."""
_CLEARS_MAX: Final = 100


@dataclass(frozen=True, slots=True)
class MonitorPass:
    """What one pass of a monitor has seen and done."""

    settled_seen: int
    """Packs without a key that are settled and not archived; keyed ones come on top."""
    ledgers_archived: int
    """Or removed, because they were void."""
    pointers_written: int
    notes: tuple[str, ...]


async def run_monitor(
    access: QueueContext,
    *,
    tell: Callable[[MonitorPass], None],
    stopping: asyncio.Event,
    period_seconds: float = PERIOD_SECONDS,
    passes_max: int | None = None,
    maintenance: Sequence[MaintenanceTask] = (),
) -> None:
    """Look at everything, archive what is settled, write missing pointers; then again.

    Ends when `stopping` is set, between two passes, or after `passes_max`. Of a store that fails,
    the last pass raises the error; before it, the next pass comes in time. A pass looks at 50,000
    objects of `tasks/` at the most; the next goes on from there.
    """
    if passes_max is not None:
        for task in maintenance:
            await task.turn()
        await _passes(access, tell, stopping, period_seconds, passes_max)
        return
    try:
        await _beside(
            access, maintenance, _passes(access, tell, stopping, period_seconds, passes_max)
        )
    except ExceptionGroup as group:
        # As it is, not as one of a group.
        raise group.exceptions[0] from None


async def _beside(
    access: QueueContext, maintenance: Sequence[MaintenanceTask], passes: Coroutine[Any, Any, None]
) -> None:
    """Run the maintenance tasks beside the passes, until those end."""
    clock = access.store.clock.machine
    async with asyncio.TaskGroup() as group:
        minding = [
            group.create_task(
                run_repeatedly(each, clock=clock, warn=LogLimiter(clock), is_ours=lambda: True)
            )
            for each in maintenance
        ]
        await passes
        for each in minding:
            each.cancel()
    for task in maintenance:
        await task.release()


async def _passes(
    access: QueueContext,
    tell: Callable[[MonitorPass], None],
    stopping: asyncio.Event,
    period_seconds: float,
    passes_max: int | None,
) -> None:
    scanner = Scanner(access.store, access.layout)
    monitor = Monitor(
        access.store,
        access.layout,
        key_seconds=access.config.key_seconds,
        entropy=access.entropy,
    )
    number = 0
    while not stopping.is_set():
        number += 1
        try:
            tell(await _pass(access, scanner, monitor))
        except (StoreError, UnreadableObject) as error:
            if number == passes_max:
                raise
            _log.warning("failed to repair the queue, retrying: %s", error)
        if number == passes_max:
            return
        try:
            async with asyncio.timeout(period_seconds):
                await stopping.wait()
        except TimeoutError:
            continue


async def _pass(access: QueueContext, scanner: Scanner, monitor: Monitor) -> MonitorPass:
    looked = await access.store.now()
    view = await scanner.look(ALL, minute=int(looked.earliest // 60), worth=lambda _: 0, wanted=1)
    monitor.note(view.settled, looked)
    pointers = await monitor.sweep(ALL)
    left = 0
    for _ in range(_CLEARS_MAX):
        some = await monitor.clear(at_once=True)
        left += some
        if not some:
            break
    return MonitorPass(
        settled_seen=len(view.settled),
        ledgers_archived=left,
        pointers_written=pointers,
        notes=tuple(foreign(key) for key in view.foreign),
    )
