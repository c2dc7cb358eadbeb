"""What is published, for readers without Postgres: `current.json` of partitions and of datasets.

Publication is a row. These objects are its shadow: the relay writes them after the transaction, so
they may be late, and they never go back (PUBLISH-14). A reader that has only the bucket starts at
`current.json` of the dataset, which names the generation, and follows `current.json` of its
partitions to the manifests, and these to the files. Parts without a manifest are folders of files.

A `current.json` has a revision that only grows, in the database, also when a publication is rolled
back or a partition is dropped (then it has no parts). `project` reads what is there, leaves it if
its revision is not lower, and else swaps it from the version that was read. So any number of
relays may write the same or different revisions in any order, any number of times: the highest
stays. A write whose answer was lost is settled by reading again. One that is still on its way is
conditional on a version that is gone when anything else was written, so it does no harm later.

A database that was brought back to an earlier time has lower revisions than the objects, which name
what it has forgotten. `amend` puts that right without trusting revisions: it reads the object, asks
the database after that, and swaps from the version that was read. Whatever the object said was
known to some database before it was read, so what is asked later is the truth. It is written under
a revision above the one that was there, so that revisions grow for readers all the same; from then
on the objects of these partitions are ahead of the database, and are always amended.

Called by the carrier of the outbox's rows of kind `project`, and by `datasets.refreshing` of the
dispatcher. A process that dies inside leaves the old object or the new one, and the row is carried
out again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import ClassVar, Final

import msgspec

from penstock.datasets.layout import dataset_current_key, partition_current_key
from penstock.kernel import document_format
from penstock.kernel.errors import AlreadyExists, NotFound, OutcomeUnknown, VersionConflict
from penstock.store.base import CREATE, Object, ObjectStore, PutMode, Swap

TRIES_MAX: Final = 20


class CurrentPart(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is published. `manifest` is the SHA-256 of its manifest, if it has one."""

    location: str
    manifest: str | None = None
    rows: int | None = None
    bytes: int | None = None


class CurrentPartition(document_format.Document, frozen=True, kw_only=True):
    """What is published of a partition; no parts if it was dropped."""

    kind: ClassVar[str] = "current-partition"

    dataset: str
    generation: str
    partition_key: str | None = None
    start: int | None = None
    end: int | None = None
    revision: int
    parts: tuple[CurrentPart, ...] = ()

    @property
    def key(self) -> str:
        """Where it is kept."""
        return partition_current_key(
            self.dataset, generation=self.generation, partition_key=self.partition_key
        )


class CurrentDataset(document_format.Document, frozen=True, kw_only=True):
    """Which generation of a dataset readers read."""

    kind: ClassVar[str] = "current-dataset"

    dataset: str
    generation: str
    revision: int

    @property
    def key(self) -> str:
        """Where it is kept."""
        return dataset_current_key(self.dataset)


Current = CurrentPartition | CurrentDataset


@dataclass(frozen=True, slots=True)
class Projected:
    """What there is after a projection: the revision, and whether it is what this call had."""

    revision: int
    is_written: bool


@dataclass(frozen=True, slots=True)
class Amended:
    """The database's revision of what there is now, and whether this call wrote it."""

    revision: int
    is_written: bool


async def project(store: ObjectStore, current: Current) -> Projected:
    """Make this the present state, unless a state at least as new is there.

    Afterwards what is there has at least the revision of `current`. Raises `VersionConflict` if
    others wrote lower revisions each time, `OutcomeUnknown` if answers were lost each time, and
    `UnreadableObject` if what is there is not ours, or from a later release.
    """
    key, body = current.key, document_format.encode(current)
    lost: OutcomeUnknown | None = None
    # The first revision is mostly the first object: that saves a reading.
    found = None if current.revision <= 1 else await _find(store, key)
    for _ in range(TRIES_MAX):
        if found is not None:
            there = document_format.decode(type(current), found.body, where=key)
            if there.revision >= current.revision:
                return Projected(there.revision, is_written=found.body == body)
        mode: PutMode = CREATE if found is None else Swap(found.version)
        try:
            await store.put(key, body, mode)
        except (AlreadyExists, VersionConflict):
            lost = None
        except OutcomeUnknown as error:
            lost = error
        else:
            return Projected(current.revision, is_written=True)
        found = await _find(store, key)
    raise lost or _contended(key)


async def amend(
    store: ObjectStore, key: str, now: Callable[[], Awaitable[Current | None]]
) -> Amended | None:
    """Make an object say what the database says, which `now` asks; None if that is nothing.

    Raises as `project` does.
    """
    lost: OutcomeUnknown | None = None
    for _ in range(TRIES_MAX):
        found = await _find(store, key)
        # After the reading, and never before it: see above.
        current = await now()
        if current is None:
            return None
        written = current
        if found is None:
            if isinstance(current, CurrentPartition) and not current.parts:
                # Nobody was told of it, and nobody needs to be told that it is gone.
                return Amended(current.revision, is_written=False)
        else:
            there = document_format.decode(type(current), found.body, where=key)
            if there.revision >= current.revision:
                if _says(there) == _says(current):
                    return Amended(current.revision, is_written=False)
                written = msgspec.structs.replace(current, revision=there.revision + 1)
        mode: PutMode = CREATE if found is None else Swap(found.version)
        try:
            await store.put(key, document_format.encode(written), mode)
        except (AlreadyExists, VersionConflict):
            lost = None
        except OutcomeUnknown as error:
            lost = error
        else:
            return Amended(current.revision, is_written=True)
    raise lost or _contended(key)


async def read_partition(
    store: ObjectStore, dataset: str, *, generation: str, partition_key: str | None
) -> CurrentPartition | None:
    """What readers are told of a partition; None if nothing yet."""
    key = partition_current_key(dataset, generation=generation, partition_key=partition_key)
    found = await _find(store, key)
    return (
        None if found is None else document_format.decode(CurrentPartition, found.body, where=key)
    )


async def read_dataset(store: ObjectStore, dataset: str) -> CurrentDataset | None:
    """What readers are told of a dataset; None if nothing yet."""
    key = dataset_current_key(dataset)
    found = await _find(store, key)
    return None if found is None else document_format.decode(CurrentDataset, found.body, where=key)


def _says(current: Current) -> Current:
    """The same, but for its revision."""
    return msgspec.structs.replace(current, revision=0)


def _contended(key: str) -> VersionConflict:
    return VersionConflict(
        f"The object {key!r} was changed by others in each of {TRIES_MAX} tries.", key=key
    )


async def _find(store: ObjectStore, key: str) -> Object | None:
    try:
        return await store.get(key)
    except NotFound:
        return None
