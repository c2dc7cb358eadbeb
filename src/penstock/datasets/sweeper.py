"""What attempts left behind is removed, and nothing that a reader may still read.

Everything below `datasets/`, `scratch/` and `buffers/` lies in the folder of an attempt, named
after it, but for the files `current.json`. Where an attempt has made many partitions by
`partition_by`, the folder of each is meant, inside of it. The folder goes through these states:

| state | who moves it on |
|---|---|
| written: its attempt runs | the attempt ends, or is reaped |
| published: a row names it | a later publication replaces it, retention drops it: it departs |
| departed: readers may still be at it | the grace passes, attempts that began before it end |
| orphaned: its attempt is over, and nothing of it was ever published | the grace passes |
| gone: for ever; no row will ever name it | the sweeper removes its files |

A folder with a batch that was accepted, and is not written yet, is not gone either.

Only the book, which stands on the database, knows the state. Its word GONE is final (PUBLISH-15).
It is given for what is not published and belongs to an attempt that is over and can no longer
complete, and if it was published once, only when
- no attempt runs that began before it departed;
- `current.json` is confirmed not to name it any more;
- the grace has passed since the later of its departure and that confirmation: until then somebody
  may have read its name there.
For everything else the book says KEEP, and what it says nothing of is kept.

The sweeper adds a rule of its own: a folder is left alone while anything in it is younger than the
grace, on the store's clock. So a zombie that still writes into its own folder is not raced; what it
wrote is removed when it has been quiet for so long, however often it comes back. And another: what
`current.json` of its partition names is left alone, whatever the book says (PUBLISH-16). A database
that was brought back to an earlier time gives out numbers of tasks again, and takes the folders of
those it has forgotten for those of others; readers of the bucket are still sent there. That costs a
reading for each partition of which something is removed.

Why a reader never loses a file: a reader is an attempt, which the book knows, or somebody who read
`current.json`, or a snapshot of the dispatcher's, less than a grace ago. All of them read what was
published or named at that moment, and from that moment it is not gone for a grace at least.

What is not ours (other files, folders with other names) is never touched, nor is `current.json`. A
process that dies in between leaves some files of a folder that is gone; the next round finds
them. Any number of sweepers may walk at once. Work is bounded: a turn lists at most `PAGES_MAX`
pages, and the next goes on where it ended. Called by the dispatcher's loop, and by hand through
its API.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Protocol

from penstock.datasets.layout import (
    AGAIN,
    BUFFERS,
    CURRENT,
    DATASETS,
    MANY,
    SCRATCH,
    attempt_of,
    part,
    place_of,
)
from penstock.datasets.projection import CurrentPartition
from penstock.kernel.document_format import decode
from penstock.kernel.errors import StoreError, UnreadableObject
from penstock.store.base import Entry, ObjectStore, find, pages

PAGES_MAX: Final = 20
"""Pages that are listed in a turn."""
DELETES_AT_ONCE: Final = 16
ROUND_TURNS_MAX: Final = 100_000
FOLDER_FILES_MAX: Final = 100_000
"""Files of one folder that are removed in a round; the next one removes more."""
_DEPTHS: Final = {DATASETS: 5, SCRATCH: 2, BUFFERS: 3}

_log = logging.getLogger(__name__)


class Verdict(StrEnum):
    """What the book says of a folder."""

    KEEP = "keep"
    GONE = "gone"


class SweepRecords(Protocol):
    """What is known of the folders of attempts."""

    async def verdicts(self, places: Sequence[str]) -> Mapping[str, Verdict]:
        """What is to become of these folders, at most a page of them.

        A place is `dataset/generation/partition/attempt` for what may be published, or
        `dataset/generation/~many/attempt/partition`, as `layout.place_of` has it, and just
        `attempt` for scratch. What is left out is kept.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """What was removed. `is_round_over` if everything has been looked at since the last time."""

    attempts: int = 0
    files: int = 0
    bytes: int = 0
    left: int = 0
    """Files that could not be removed now; the next round finds them."""
    is_round_over: bool = False

    def __add__(self, other: Swept) -> Swept:
        return Swept(
            attempts=self.attempts + other.attempts,
            files=self.files + other.files,
            bytes=self.bytes + other.bytes,
            left=self.left + other.left,
            is_round_over=other.is_round_over,
        )


@dataclass(slots=True)
class _Found:
    """The folder of an attempt, as far as it was listed."""

    place: str
    prefix: str
    files: list[Entry] = field(default_factory=list)
    newest: float = 0.0
    """When the last of all its files was modified, also of those beyond `files`."""

    def add(self, entry: Entry) -> None:
        self.newest = max(self.newest, entry.modified)
        if len(self.files) < FOLDER_FILES_MAX:
            self.files.append(entry)


class Sweeper:
    """Walks the folders of attempts; of one dataset, or of all and their scratch."""

    def __init__(
        self,
        store: ObjectStore,
        book: SweepRecords,
        *,
        grace_seconds: float,
        dataset: str | None = None,
    ) -> None:
        self._store = store
        self._book = book
        self._grace_seconds = grace_seconds
        self._prefixes = (
            (DATASETS, SCRATCH, BUFFERS) if dataset is None else (f"{DATASETS}{part(dataset)}/",)
        )
        self._at = 0
        self._after = ""

    async def round(self) -> Swept:
        """Look at everything once, from the beginning."""
        self._at, self._after = 0, ""
        swept = Swept()
        for _ in range(ROUND_TURNS_MAX):
            swept += await self.turn()
            if swept.is_round_over:
                break
        return swept

    async def turn(self) -> Swept:
        """Look at the next pages, and remove what is gone. Raises what the store or book raises.

        What was removed before an error stays removed, and the next turn begins at the same page.
        """
        swept = Swept()
        for _ in range(PAGES_MAX):
            prefix = self._prefixes[self._at]
            folders, after, is_last = await self._look(prefix)
            swept += await self._sweep(folders)
            self._after = after
            if is_last:
                self._at, self._after = (self._at + 1) % len(self._prefixes), ""
                if self._at == 0:
                    return swept + Swept(is_round_over=True)
        return swept

    async def _look(self, prefix: str) -> tuple[list[_Found], str, bool]:
        """The folders of the next page, each complete, and the key that they end with."""
        async for page in pages(self._store, prefix, start_after=self._after):
            if not page.entries:
                continue  # A page may be empty and not the last.
            folders: dict[str, _Found] = {}
            for entry in page.entries:
                found = _folder_of(entry.key)
                if found is not None:
                    folders.setdefault(found.prefix, found).add(entry)
            after, is_last = page.entries[-1].key, page.cursor is None
            cut = _folder_of(after)
            if cut is not None and not is_last:
                # Its other files are on the next page, and one of them may be young.
                folders[cut.prefix], after = await self._whole(cut, after)
            return list(folders.values()), after, is_last
        return [], self._after, True

    async def _whole(self, folder: _Found, after: str) -> tuple[_Found, str]:
        async for page in pages(self._store, folder.prefix):
            for entry in page.entries:
                folder.add(entry)
                after = entry.key
        return folder, after

    async def _sweep(self, folders: Sequence[_Found]) -> Swept:
        if not folders:
            return Swept()
        verdicts = await self._book.verdicts([each.place for each in folders])
        now = (await self._store.now()).earliest
        swept = Swept()
        for each in folders:
            is_gone = verdicts.get(each.place) is Verdict.GONE
            is_quiet = each.newest + self._grace_seconds < now
            if is_gone and is_quiet and not await self._is_named(each):
                swept += await self._remove(each)
        return swept

    async def _is_named(self, folder: _Found) -> bool:
        """Whether readers without Postgres are sent to a folder, or may be."""
        if not folder.prefix.startswith(DATASETS):
            return False
        parts = folder.prefix.rstrip("/").split("/")
        # Of one of many partitions, its attempt's folder stands before it.
        home = [*parts[:3], parts[-1]] if parts[3] == MANY else parts[:4]
        key = "/".join((*home, CURRENT))
        found = await find(self._store, key)
        if found is None:
            return False
        try:
            current = decode(CurrentPartition, found.body, where=key)
        except UnreadableObject as error:
            _log.warning("failed to sweep %s: %s", folder.place, error.message)
            return True
        return any(place_of(each.location) == folder.place for each in current.parts)

    async def _remove(self, folder: _Found) -> Swept:
        removed, size, problem = 0, 0, ""
        for start in range(0, len(folder.files), DELETES_AT_ONCE):
            some = folder.files[start : start + DELETES_AT_ONCE]
            outcomes = await asyncio.gather(
                *(self._store.delete(entry.key) for entry in some), return_exceptions=True
            )
            for entry, outcome in zip(some, outcomes, strict=True):
                if isinstance(outcome, StoreError):
                    problem = outcome.message
                elif isinstance(outcome, BaseException):
                    raise outcome
                else:
                    removed, size = removed + 1, size + entry.size
        left = len(folder.files) - removed
        if left:
            # One folder that cannot be removed does not keep the others from it.
            _log.warning("failed to delete %s files of %s: %s", left, folder.place, problem)
        return Swept(attempts=int(removed > 0), files=removed, bytes=size, left=left)


def _folder_of(key: str) -> _Found | None:
    """The folder of an attempt that a key lies in; None if it lies in none."""
    depth = _DEPTHS.get(key.partition("/")[0] + "/")
    if depth is None:
        return None
    parts = key.split("/")
    # The last part is the file; current.json lies above the folders of attempts.
    if len(parts) <= depth or attempt_of(parts[depth - 1]) is None:
        return None
    if parts[depth - 2] == MANY:
        # Each partition of the attempt is swept by itself; beside them lies nothing of ours.
        depth += 2 if parts[depth].startswith(AGAIN) else 1
        if len(parts) <= depth:
            return None
    return _Found("/".join(parts[1:depth]), "/".join(parts[:depth]) + "/")
