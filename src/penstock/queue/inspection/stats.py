"""Queue statistics: what waits and for how long, and which workers are there.

| what | requests at the most |
|---|---|
| `stats` | a survey, a LIST of `workers/`, one of `dead/`, `DOUBTS_MAX` + 3 GETs and one a worker |
| its `failures_of` | a GET for each of so many packs, those that settled last |
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field
from math import inf
from typing import Final

from penstock.kernel.errors import UnreadableObject
from penstock.queue.config import ConfigWatch
from penstock.queue.context import QueueContext
from penstock.queue.control import ControlState, HeldType, held
from penstock.queue.discovery.elected import MonitorTerm
from penstock.queue.ids import PackAt
from penstock.queue.inbox import WorkerRoster
from penstock.queue.ledger import Ledger, QueueTaskStatus
from penstock.queue.pack import Pack
from penstock.queue.settings import ShardLeaseSettings
from penstock.queue.shards import allocation as decide
from penstock.queue.shards.allocation import Cut
from penstock.queue.shards.registry import OwnerRole, Registration, ShardRegistry, StoredDocument
from penstock.queue.survey import Kind, Survey, dead_keys, document, surveyed
from penstock.store.metered import labelled

DOUBTS_MAX: Final = 50
_AT_ONCE: Final = 16
AGES_SECONDS: Final = (10.0, 60.0, 300.0, 900.0, 3600.0, 21_600.0, 86_400.0, inf)
"""What waits is counted by its age, up to these."""


@dataclass(slots=True)
class AgeStats:
    """Tasks that are younger than this, and not younger than the one before says."""

    below_seconds: float | None
    """None for all that are older."""
    ready: int = 0
    in_progress: int = 0


DIRECT: Final = "direct"
"""The role of a worker that has an inbox."""


@dataclass(slots=True)
class KnownRegistrations:
    """What somebody who looks often need not read again: the registrations, by their versions."""

    workers: dict[str, StoredDocument[Registration]] = field(default_factory=dict)


@dataclass(slots=True)
class TypeStats:
    """Tasks of one type, counted by their packs: those of a pack in progress all count as such."""

    type: str
    ready: int = 0
    delayed: int = 0
    in_progress: int = 0
    settled_recently: int = 0
    """Not yet in the archive."""
    failed_recently: int | None = None
    """Those of them that have failed; None if that was not looked at, a part if a note says so."""
    oldest_ready_at: float | None = None
    """When the task that waits longest was submitted or became due, in seconds."""


@dataclass(frozen=True, slots=True)
class ListedWorker:
    """A worker that is registered and whose registration has not ended."""

    name: str
    role: str
    """`owner` or `standby`; `direct` for one that has an inbox."""
    host: str
    pid: int
    concurrency: int
    """0 if it does not say, as those of `direct` do not."""
    handles: tuple[str, ...]
    shards: tuple[int, ...]
    of: int
    """Into how many shards the queue is cut for it; not as for others while it has not moved."""
    help_wanted: tuple[str, ...]
    ends_at: float
    """When it no longer counts unless it renews, in seconds."""
    renewed_at: float
    """When its registration was last written, in seconds."""


@dataclass(frozen=True, slots=True)
class Stats:
    """A queue in figures, at the store's time `at`."""

    queue: str
    at: float
    types: tuple[TypeStats, ...]
    workers: tuple[ListedWorker, ...]
    shards: int
    unowned: tuple[int, ...]
    monitor: str
    """The elected monitor of workers that own no shards, if there is one."""
    dead_letter_objects: int
    held: tuple[HeldType, ...]
    """What is paused or drained."""
    notes: tuple[str, ...]
    ages: tuple[AgeStats, ...]
    """All of `types` that is ready or in progress, by how long ago it was submitted or due."""


async def stats(
    access: QueueContext,
    *,
    survey: Survey | None = None,
    known: KnownRegistrations | None = None,
    failures_of: int = 0,
) -> Stats:
    """The queue in figures, from lists: what tasks wait, and who is there for them.

    A `survey` that was just made is not made again, and what is `known` is kept up to date. The
    ledgers of so many packs that have settled are read for `failures_of`.
    """
    with labelled("inspect"):
        now = await access.store.now()
        survey = survey or await surveyed(access)
        notes = survey.notes
        later = await _due_later(access, survey, now.middle)
        # The number of shards may have been changed since this queue was opened.
        config = await ConfigWatch(access.store, access.layout, access.config).read()
        workers, owned = await _workers(access, config.cut, notes, known or KnownRegistrations())
        if access.layout.inboxes in survey.folders:
            workers += await _direct_workers(access, config.cut)
        dead = await dead_keys(access, notes)
        elected = await _readable(access, access.layout.monitor, MonitorTerm, notes)
        control = await _readable(access, access.layout.control, ControlState, notes)
        types = _by_type(survey, later)
        if failures_of:
            await _count_failures(access, survey, types, most=failures_of)
    is_term = elected is not None and elected.expires_ms > now.earliest * 1000
    return Stats(
        queue=access.layout.queue,
        at=now.middle,
        types=types,
        workers=workers,
        shards=config.shards,
        unowned=decide.unowned(owned, shards=config.shards),
        monitor=elected.holder if elected and is_term else "",
        dead_letter_objects=len(dead),
        held=held(control),
        notes=tuple(notes),
        ages=_by_age(survey, later, now.middle),
    )


async def _readable(
    access: QueueContext, key: str, kind: type[Kind], notes: list[str]
) -> Kind | None:
    """What is at a key; if it cannot be read, a note says so."""
    try:
        return await document(access.store, key, kind)
    except UnreadableObject as error:
        notes.append(str(error))
        return None


async def _due_later(access: QueueContext, survey: Survey, now: float) -> set[PackAt]:
    """The packs that are not due yet. What is due within this very minute must be read."""
    alone = [at for at, (pack, ledger) in survey.pairs.items() if pack and not ledger]
    later = {at for at in alone if survey.minute(at) > now // 60}
    doubts = [at for at in alone if survey.minute(at) == now // 60][:DOUBTS_MAX]

    async def due(at: PackAt) -> bool | UnreadableObject:
        try:
            pack = await document(access.store, access.layout.pack(at), Pack)
        except UnreadableObject as error:
            return error
        return pack is None or pack.due_ms <= now * 1000

    for at, is_due in zip(doubts, await asyncio.gather(*map(due, doubts)), strict=True):
        if isinstance(is_due, UnreadableObject):
            survey.notes.append(str(is_due))
        elif not is_due:
            later.add(at)
    return later


def _by_type(survey: Survey, later: Collection[PackAt]) -> tuple[TypeStats, ...]:
    types: dict[str, TypeStats] = {}
    for at, (pack, ledger) in survey.pairs.items():
        counts = types.setdefault(at.type, TypeStats(at.type))
        if pack is None:
            counts.settled_recently += at.count
        elif ledger is not None:
            counts.in_progress += at.count
        elif at in later:
            counts.delayed += at.count
        else:
            counts.ready += at.count
            since = _waits_since(survey, at)
            counts.oldest_ready_at = min(since, counts.oldest_ready_at or since)
    return tuple(types[name] for name in sorted(types))


async def _count_failures(
    access: QueueContext, survey: Survey, types: tuple[TypeStats, ...], *, most: int
) -> None:
    """Read the ledgers of the packs that settled last, and count what has failed."""
    settled = {at: ledger for at, (pack, ledger) in survey.pairs.items() if pack is None and ledger}
    newest = sorted(settled, key=lambda at: -settled[at].modified)[:most]
    counts = {each.type: each for each in types}
    for each in types:
        each.failed_recently = 0
    for begin in range(0, len(newest), _AT_ONCE):
        some = newest[begin : begin + _AT_ONCE]
        reads = (_readable(access, access.layout.ledger(at), Ledger, survey.notes) for at in some)
        for at, ledger in zip(some, await asyncio.gather(*reads), strict=True):
            failed = (
                sum(task.status is QueueTaskStatus.FAILED for task in ledger.tasks) if ledger else 0
            )
            counts[at.type].failed_recently = (counts[at.type].failed_recently or 0) + failed
    if len(settled) > most:
        survey.notes.append(
            f"failures were counted in {most:,} of {len(settled):,} packs, those that settled last."
        )


def _waits_since(survey: Survey, at: PackAt) -> float:
    return max(survey.since(at), survey.minute(at) * 60.0)


def _by_age(survey: Survey, later: Collection[PackAt], now: float) -> tuple[AgeStats, ...]:
    ages = [AgeStats(below if below < inf else None) for below in AGES_SECONDS]
    for at, (pack, ledger) in survey.pairs.items():
        if pack is None or at in later:
            continue
        age = now - _waits_since(survey, at)
        counts = next(each for each, below in zip(ages, AGES_SECONDS, strict=True) if age < below)
        if ledger is None:
            counts.ready += at.count
        else:
            counts.in_progress += at.count
    return tuple(ages)


async def _workers(
    access: QueueContext, cut: Cut, notes: list[str], known: KnownRegistrations
) -> tuple[tuple[ListedWorker, ...], list[Collection[int]]]:
    """The workers that are live, and the shards of the present cut that they own."""
    leases = ShardLeaseSettings()
    registry = ShardRegistry(
        access.store,
        access.layout,
        cut=cut,
        entropy=access.entropy,
        standby_seconds=leases.standby_seconds,
        unreadable_seconds=leases.longest_ttl_seconds,
    )
    registry.workers = known.workers
    await registry.look(but="")
    known.workers = registry.workers
    for name, found in registry.workers.items():
        if found.document is None:
            key = access.layout.worker(name)
            notes.append(f"{key} is a registration that this release cannot read.")
    present = registry.live(access.now())
    seen = [
        ListedWorker(
            name=name,
            role=str(live.role),
            host=live.host,
            pid=live.pid,
            concurrency=live.concurrency,
            handles=live.handles,
            shards=tuple(sorted(live.shards)),
            of=live.of or cut.shards,
            help_wanted=live.help_wanted,
            ends_at=registry.ends(registry.workers[name]),
            renewed_at=registry.workers[name].modified,
        )
        for name, live in present.items()
    ]
    seen.sort(key=lambda worker: (worker.role != OwnerRole.OWNER, worker.name))
    return tuple(seen), [live.shards for live in present.values() if live.is_of(cut)]


async def _direct_workers(access: QueueContext, cut: Cut) -> tuple[ListedWorker, ...]:
    """The workers that have an inbox, and live: a LIST, and a GET each."""
    roster = WorkerRoster(access.store, access.layout)
    await roster.look()
    found = []
    for name in roster.live(access.now()):
        seen = roster.seen[name]
        assert seen.lease is not None, "one that cannot be read is not live"
        found.append(
            ListedWorker(
                name=name,
                role=DIRECT,
                host=seen.lease.host,
                pid=seen.lease.pid,
                concurrency=0,
                handles=seen.lease.handles,
                shards=(),
                of=cut.shards,
                help_wanted=(),
                ends_at=seen.modified + seen.lease.seconds,
                renewed_at=seen.modified,
            )
        )
    return tuple(found)
