"""Deleting settled tasks: by age (retention) and by request (purge).

Both may run several times at once: they delete the same things.

**Retention** (`ArchiveRetention`) applies `QueueConfig.archive_days` and `dead_letter_days`
(None, the default, is for ever), once a day by maintenance and by `Queue.archive.retain`. (1)
*Batches* go that were written longer ago than that, and whose last submit is. (A task that was
delayed for a year was submitted long before it was archived.) (2) *Payloads* go that were
submitted longer ago than `archive_days` and that no pack, ledger or record needs, orphans
included. Batches go first: a crash between leaves payloads that no record refers to, for the
next turn. So a readable record has its payloads. No pack and no ledger is ever deleted here.

A day costs a LIST of `archive/`, `dead/` and `payloads/` each, $0.0005 a month, and a GET of the
settings. For every day with old payloads: a LIST, at most `DAYS_MAX`, two HEADs a pack that has
some, a GET for every batch that is left of that day, and two more LISTs. With no retention set:
the GET. A worker begins ten minutes after its start.

**Who needs a payload** (`PayloadOwners`). Its key names its owner, a task, and the day of its
submit: a task with a key has the same name in each life. An owner moves one way: pack, settled
ledger, record in the archive, each written before the previous is deleted (QUEUE-19). So these
questions are asked in this order, and an owner that moves on meanwhile is met at the next:

1. Is there a pack of that task, submitted on that day?
2. Is there a settled ledger of it? (An unsettled one without a pack is void and removed by the
   monitor; until then it counts.)
3. Does a record in a batch of the archive, listed after that, refer to the payload?

What cannot be read may need it, and counts as a yes. A payload is asked for only when its pack
can no longer come: W after the submit, and here it is days. A batch that was listed may be gone
when it is read, and its content be in a newer one: the archive is listed again until no batch
of these days is new; if there always is one, its days count as needed.

**Purge** (`Purger`), for users, with filters: type, status, age.

- *Live tasks* are cancelled as `Queue.cancel` does, running ones are asked to stop. No pack and
  no
  ledger is deleted: a ledger keeps a task from running again.
- *Tasks settled minutes ago* stay, as tombstones for at least W (QUEUE-3). What may leave is
  archived first, so that it can be deleted here; the rest is for a later purge, or retention.
- *Records* go a pack at a time, if all of its tasks are selected. A batch that keeps some is
  swapped, under its key, for one without the others; one that keeps none is deleted in the version
  that was read. On a conflict it is read again: no purge writes back a record that another has
  dropped. Only then the payloads go, unless a pack or a ledger of that life is there. A crash
  leaves orphans.

A delete cannot decide between two purges: some stores report success for what is gone. It need
not: only what is selected whole is deleted, and a batch that is gone has no records. A purge
costs a LIST for every 1,000 objects, two GETs and a put or two for every pack that is
cancelled, a GET for every batch that is old enough, and a put for those that keep a part.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from typing import Final, TypedDict, Unpack

import msgspec

from penstock.kernel.document_format import decode
from penstock.kernel.errors import (
    InvalidInput,
    NotFound,
    StoreError,
    TaskNotFound,
    UnreadableObject,
    VersionConflict,
)
from penstock.kernel.text import listed
from penstock.queue import archive
from penstock.queue.canceller import cancel_tasks
from penstock.queue.config import read_config
from penstock.queue.context import QueueContext
from penstock.queue.ids import PackAt, check_name, day_of, payload_at
from penstock.queue.ledger import Ledger, QueueTaskStatus
from penstock.queue.maintenance import MaintenanceTask, run_monitor
from penstock.queue.pack import Pack
from penstock.queue.payloads import references
from penstock.queue.task_reader import QueueTaskReader
from penstock.queue.task_views import STATES
from penstock.store.base import Entry, Version, find, pages
from penstock.store.metered import labelled


@dataclass(frozen=True, slots=True)
class PayloadOwners:
    """Asks for the owners of payloads in one queue."""

    access: QueueContext

    async def is_live(self, at: PackAt, day: str) -> bool:
        """Whether there is a pack or a ledger of the life that began on that day."""
        if at.submitted_ms is not None:
            layout = self.access.layout
            return await self._is_there(layout.pack(at)) or await self._is_there(layout.ledger(at))
        try:
            pack = await self._pack(at)
            if pack is not None and day_of(pack.submitted_ms) == day:
                return True
            ledger = await self._ledger(at)
        except UnreadableObject:
            return True
        if ledger is None:
            return False
        return day_of(ledger.submitted_ms) == day if ledger.settled else pack is None

    async def _is_there(self, key: str) -> bool:
        try:
            await self.access.store.head(key)
        except NotFound:
            return False
        return True

    async def _pack(self, at: PackAt) -> Pack | None:
        found = await find(self.access.store, self.access.layout.pack(at))
        return decode(Pack, found.body, where=found.key) if found else None

    async def _ledger(self, at: PackAt) -> Ledger | None:
        found = await find(self.access.store, self.access.layout.ledger(at))
        return decode(Ledger, found.body, where=found.key) if found else None

    async def recorded(self, days: Collection[str]) -> ArchivedReferences:
        """What the records of tasks that were submitted on these days refer to.

        Two LISTs for every 1,000 batches, and a GET for each that overlaps one of the days.
        """
        store, layout = self.access.store, self.access.layout
        recorded = ArchivedReferences()
        seen: set[str] = set()
        for _ in range(archive.LOOKS_MAX):
            new = [each for each in await self._batches(days) if each[0] not in seen]
            if not new:
                return recorded
            for key, within in new:
                seen.add(key)
                try:
                    async for _, ledger in archive.read(store, layout, key):
                        recorded.paths.update(ref.key for ref in references(ledger))
                except (UnreadableObject, msgspec.MsgspecError):
                    recorded.doubtful.update(within)
        for key, within in await self._batches(days):
            if key not in seen:
                recorded.doubtful.update(within)
        return recorded

    async def _batches(self, days: Collection[str]) -> list[tuple[str, list[str]]]:
        """The batches with submits of these days, and of which."""
        store, layout = self.access.store, self.access.layout
        found: list[tuple[str, list[str]]] = []
        for prefix in (layout.archive, layout.dead):
            async for entry in archive.batches(store, layout, prefix):
                first_ms, last_ms = layout.read_batch(entry.key) or (0, 0)
                within = [day for day in days if day_of(first_ms) <= day <= day_of(last_ms)]
                if within:
                    found.append((entry.key, within))
        return found


@dataclass(slots=True)
class ArchivedReferences:
    """What the archive refers to, and of which days it cannot be told."""

    paths: set[str] = field(default_factory=set)
    doubtful: set[str] = field(default_factory=set)

    def needs(self, path: str, day: str) -> bool:
        """Whether a payload of that day must stay."""
        return day in self.doubtful or path in self.paths


def ends_of(day: str) -> float:
    """When a day ends, in seconds; infinity if it is no day."""
    try:
        following = date.fromisoformat(day) + timedelta(days=1)
    except (ValueError, OverflowError):
        return float("inf")
    return datetime(following.year, following.month, following.day, tzinfo=UTC).timestamp()


def days_of(folders: Iterable[str], prefix: str) -> list[str]:
    """The days that folders below the payloads are named after, the first first."""
    names = (folder.removeprefix(prefix).rstrip("/") for folder in folders)
    return sorted(name for name in names if ends_of(name) < float("inf"))


DAY_SECONDS: Final = 86_400.0
TURN_SECONDS: Final = DAY_SECONDS
FIRST_SECONDS: Final = 600.0
MORE_SECONDS: Final = 60.0
BATCHES_MAX: Final = 5_000
PAYLOADS_MAX: Final = 20_000
DAYS_MAX: Final = 100
"""So much a turn deals with at the most; the next one comes sooner then."""
YOUNG_SECONDS: Final = 2 * DAY_SECONDS
"""A payload that is younger stays: what refers to it may still come."""
_AT_ONCE: Final = 16


@dataclass(frozen=True, slots=True)
class RetentionResult:
    """What one turn has removed. `is_whole` is false if it did not get to the end."""

    batches: int = 0
    dead_letter_batches: int = 0
    payloads: int = 0
    is_whole: bool = True


@dataclass(frozen=True, slots=True)
class _Old:
    path: str
    day: str
    at: PackAt


class ArchiveRetention:
    """Forgets what is old in one queue."""

    def __init__(self, access: QueueContext) -> None:
        self._access = access
        self._owners = PayloadOwners(access)
        self._after = ""
        """The day up to which payloads were looked at, if the last turn did not see all."""

    async def retain(
        self, *, archive_days: int | None, dead_letter_days: int | None
    ) -> RetentionResult:
        """Delete what is older. May raise `StoreError`; what is deleted by then is deleted."""
        layout = self._access.layout
        with labelled("retention"):
            now = (await self._access.store.now()).earliest
            batches = await self._batches(layout.archive, now, archive_days)
            dead = await self._batches(layout.dead, now, dead_letter_days)
            payloads, is_all = 0, True
            if archive_days is not None:
                payloads, is_all = await self._payloads(now, now - archive_days * DAY_SECONDS)
        is_whole = is_all and max(batches, dead) < BATCHES_MAX
        return RetentionResult(batches, dead, payloads, is_whole)

    async def _batches(self, prefix: str, now: float, days: int | None) -> int:
        """Delete the batches that were written, and submitted, before that."""
        if days is None:
            return 0
        before = now - days * DAY_SECONDS
        old: list[str] = []
        async for entry in archive.batches(self._access.store, self._access.layout, prefix):
            _, last_ms = self._access.layout.read_batch(entry.key) or (0, 0)
            # They are listed by their last submit, and were written after it.
            if last_ms >= before * 1000 or len(old) == BATCHES_MAX:
                break
            if entry.modified < before:
                old.append(entry.key)
        await self._delete(old)
        return len(old)

    async def _payloads(self, now: float, before: float) -> tuple[int, bool]:
        """Delete the payloads of days that ended before that, and that nobody needs."""
        days, is_all = await self._days(min(before, now - YOUNG_SECONDS))
        if not days:
            return 0, is_all
        old: list[_Old] = []
        for number, day in enumerate(days):
            old += await self._old(day, now - YOUNG_SECONDS)
            if len(old) > PAYLOADS_MAX and number + 1 < len(days):
                # The rest of the days is for the next turn.
                days, is_all = days[: number + 1], False
                break
        self._after = "" if is_all else days[-1]
        needless = await self._unowned(old)
        recorded = await self._owners.recorded(days) if needless else None
        gone = [
            each.path for each in needless if recorded and not recorded.needs(each.path, each.day)
        ]
        await self._delete([self._access.layout.payload(path) for path in gone])
        return len(gone), is_all

    async def _days(self, before: float) -> tuple[list[str], bool]:
        """The days with payloads that are long over, from where the last turn ended."""
        prefix = self._access.layout.payloads
        folders: list[str] = []
        async for page in pages(self._access.store, prefix, delimiter="/"):
            folders += page.folders
        days = [day for day in days_of(folders, prefix) if ends_of(day) <= before]
        left = [day for day in days if day > self._after]
        return left[:DAYS_MAX], len(left) <= DAYS_MAX

    async def _old(self, day: str, before: float) -> list[_Old]:
        """The payloads of a day; what is not ours is left alone."""
        layout = self._access.layout
        found: list[_Old] = []
        async for page in pages(self._access.store, f"{layout.payloads}{day}/"):
            found += _ours(page.entries, layout.root, before)
        return found

    async def _unowned(self, payloads: Sequence[_Old]) -> list[_Old]:
        """Those of which there is neither a pack nor a ledger any more."""
        slots = asyncio.Semaphore(_AT_ONCE)

        async def ask(at: PackAt, day: str) -> bool:
            async with slots:
                return await self._owners.is_live(at, day)

        owners = list({(each.at, each.day) for each in payloads})
        answers = await asyncio.gather(*(ask(at, day) for at, day in owners))
        live = dict(zip(owners, answers, strict=True))
        return [each for each in payloads if not live[each.at, each.day]]

    async def _delete(self, keys: Sequence[str]) -> None:
        slots = asyncio.Semaphore(_AT_ONCE)

        async def delete(key: str) -> StoreError | None:
            async with slots:
                try:
                    await self._access.store.delete(key)
                except StoreError as error:
                    return error
                return None

        for error in await asyncio.gather(*map(delete, keys)):
            if error is not None:
                raise error


def _ours(entries: Iterable[Entry], root: str, before: float) -> list[_Old]:
    found: list[_Old] = []
    for entry in entries:
        path = entry.key.removeprefix(root)
        owner = payload_at(path)
        if owner is not None and entry.modified < before:
            found.append(_Old(path, owner.day, owner.at))
    return found


class RetentionTask(MaintenanceTask):
    """Keeps the archive as long as the queue's settings say."""

    name = "the retention of the archive"

    def __init__(self, access: QueueContext) -> None:
        self._access = access
        self._retention = ArchiveRetention(access)
        self._has_begun = False

    async def turn(self) -> float:
        """Forget what is old, once a day."""
        if not self._has_begun:
            # Workers that come and go must not list the archive each time.
            self._has_begun = True
            return FIRST_SECONDS
        with labelled("retention"):
            config = await read_config(self._access.store, self._access.layout)
        if config is None or config.archive_days is config.dead_letter_days is None:
            return TURN_SECONDS
        retained = await self._retention.retain(
            archive_days=config.archive_days, dead_letter_days=config.dead_letter_days
        )
        return TURN_SECONDS if retained.is_whole else MORE_SECONDS


LIVE: Final = frozenset(STATES[:4])
SETTLED: Final = frozenset(STATES[4:])
_PURGED_AT_ONCE: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PurgeSelection:
    """Which tasks a purge is about."""

    types: frozenset[str] | None = None
    """None for all."""
    statuses: frozenset[str] = frozenset(STATES)
    older_than_seconds: float = 0.0
    """Submitted at least so long ago."""

    def __post_init__(self) -> None:
        for each in self.types or ():
            check_name(each, what="type")
        unknown = sorted(self.statuses - set(STATES))
        if unknown or not self.statuses:
            named = f"{unknown[0]!r} is not a status" if unknown else "No status is named"
            raise InvalidInput(f"{named}.", hint=f"There are {listed(STATES)}.")
        if not 0 <= self.older_than_seconds < float("inf"):
            raise InvalidInput(f"An age is at least 0 s, not {self.older_than_seconds}.")


@dataclass(slots=True)
class PurgeResult:
    """What a purge has done, or would do."""

    cancelled: int = 0
    asked_to_stop: int = 0
    tasks_forgotten: int = 0
    payloads_deleted: int = 0
    batches_deleted: int = 0
    batches_rewritten: int = 0
    tasks_kept: int = 0
    """Settled tasks that were meant, in packs of which others were not."""
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Parts:
    """What of a batch goes, and what stays."""

    left: list[archive.Member] = field(default_factory=list)
    dropped: list[archive.Member] = field(default_factory=list)
    tasks_kept: int = 0


class Purger:
    """One purge of one queue. With `dry_run` it only says what it would do."""

    def __init__(
        self, access: QueueContext, chosen: PurgeSelection, *, dry_run: bool = False
    ) -> None:
        self._access = access
        self._chosen = chosen
        self._dry_run = dry_run
        self._owners = PayloadOwners(access)
        self._before_ms = 0.0
        self.purged = PurgeResult()

    async def run(self) -> PurgeResult:
        """Cancel and forget. May raise `StoreError`; what is done by then is in `purged`."""
        with labelled("purge"):
            now = await self._access.store.now()
            self._before_ms = (now.latest - self._chosen.older_than_seconds) * 1000
            if self._chosen.statuses & LIVE:
                await self._cancel()
            if self._chosen.statuses & SETTLED:
                if not self._dry_run:
                    await self._flush()
                await self._forget()
        return self.purged

    async def _cancel(self) -> None:
        layout = self._access.layout
        for top in (layout.ready, layout.tasks, layout.keyed, layout.unhurried):
            async for page in pages(self._access.store, top):
                packs = [
                    read[0]
                    for read in (layout.read(entry.key) for entry in page.entries)
                    if read is not None and not read[1] and self._may_be(read[0])
                ]
                for place in range(0, len(packs), _PURGED_AT_ONCE):
                    await asyncio.gather(
                        *map(self._cancel_in, packs[place : place + _PURGED_AT_ONCE])
                    )

    def _may_be(self, at: PackAt) -> bool:
        types = self._chosen.types
        return (types is None or at.type in types) and (at.submitted_ms or 0) <= self._before_ms

    async def _cancel_in(self, at: PackAt) -> None:
        """Cancel what is meant of a pack."""
        statuses = self._chosen.statuses & LIVE
        try:
            views = await QueueTaskReader(self._access).views(at)
            meant = [
                view
                for view in views
                if view.status in statuses and view.submitted_at * 1000 <= self._before_ms
            ]
            after = {view.id: view for view in meant}
            if meant and not self._dry_run:
                after = await cancel_tasks(self._access, [view.id for view in meant])
        except TaskNotFound:
            return  # It has gone meanwhile.
        except UnreadableObject as error:
            self.purged.notes.append(str(error))
            return
        for view in after.values():
            is_running = view.status == QueueTaskStatus.CLAIMED.word
            if view.status == QueueTaskStatus.CANCELLED.word or (self._dry_run and not is_running):
                self.purged.cancelled += 1
            elif view.cancel_asked or self._dry_run:
                self.purged.asked_to_stop += 1

    async def _flush(self) -> None:
        """Archive what may leave: only then it can be forgotten."""
        await run_monitor(self._access, tell=lambda _: None, stopping=asyncio.Event(), passes_max=1)

    async def _forget(self) -> None:
        store, layout = self._access.store, self._access.layout
        for prefix in (layout.archive, layout.dead):
            keys = [entry.key async for entry in archive.batches(store, layout, prefix)]
            for key in keys:
                first_ms, _ = layout.read_batch(key) or (0, 0)
                if first_ms <= self._before_ms:
                    await self._forget_in(key)

    async def _forget_in(self, key: str) -> None:
        """Forget what is meant of a batch."""
        problem = "it is written too often"
        for _ in range(archive.LOOKS_MAX):
            try:
                found = await archive.whole(self._access.store, key)
                if found is None:
                    return
                version, records = found
                parts = self._parted(records)
            except (UnreadableObject, msgspec.MsgspecError) as error:
                problem = str(error)
                break
            if await self._cut(key, parts, version):
                self.purged.tasks_kept += parts.tasks_kept
                if parts.dropped:
                    self.purged.batches_rewritten += bool(parts.left)
                    self.purged.batches_deleted += not parts.left
                    self.purged.tasks_forgotten += sum(at.count for at, _ in parts.dropped)
                    await self._drop_payloads(parts.dropped)
                return
        self.purged.notes.append(f"{key} is skipped: {problem}")

    async def _cut(self, key: str, parts: _Parts, version: Version) -> bool:
        """Drop records from a batch; false if it is no longer in the version that was read."""
        if self._dry_run or not parts.dropped:
            return True
        store = self._access.store
        try:
            if parts.left:
                await archive.rewrite(store, key, parts.left, version=version)
            else:
                await store.delete(key, version=version)
        except VersionConflict:
            return False
        return True

    def _parted(self, records: Sequence[archive.Member]) -> _Parts:
        """What is to be forgotten of these, which is packs of which all tasks are meant."""
        parts = _Parts()
        for at, ledger in records:
            is_old = self._may_be(at) and ledger.submitted_ms <= self._before_ms
            statuses = self._chosen.statuses if is_old else ()
            meant = sum(task.status.word in statuses for task in ledger.tasks)
            if is_old and meant == len(ledger.tasks):
                parts.dropped.append((at, ledger))
            else:
                parts.left.append((at, ledger))
                parts.tasks_kept += meant
        return parts

    async def _drop_payloads(self, dropped: Sequence[tuple[PackAt, Ledger]]) -> None:
        for at, ledger in dropped:
            paths = owned(at, ledger)
            if not paths or await self._owners.is_live(at, day_of(ledger.submitted_ms)):
                continue
            self.purged.payloads_deleted += len(paths)
            for path in () if self._dry_run else paths:
                await self._access.store.delete(self._access.layout.payload(path))


def owned(at: PackAt, ledger: Ledger) -> list[str]:
    """The payloads of a settled pack that are its own, as all should be."""
    day = day_of(ledger.submitted_ms)
    found = ((ref.key, payload_at(ref.key)) for ref in references(ledger))
    return [path for path, owner in found if owner and (owner.at, owner.day) == (at, day)]


class PurgeArguments(TypedDict, total=False):
    """What a purge may be told; what is not named is not asked for."""

    types: Collection[str]
    statuses: Collection[str]
    older_than: float
    """Submitted at least so many seconds ago."""
    dry_run: bool


async def purge(access: QueueContext, **choice: Unpack[PurgeArguments]) -> PurgeResult:
    """Cancel what has not ended and forget what has, of these types, statuses and ages."""
    types = choice.get("types")
    chosen = PurgeSelection(
        types=None if types is None else frozenset(types),
        statuses=frozenset(choice.get("statuses", STATES)),
        older_than_seconds=choice.get("older_than", 0.0),
    )
    return await Purger(access, chosen, dry_run=choice.get("dry_run", False)).run()
