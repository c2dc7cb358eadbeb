"""The applier: has the tables of Postgres data follow what the state says is published.

A hot table is a projection of published files (decision 0130). Attempts publish files, as ever; the
applier alone loads them, in every dispatcher, for any dataset that nobody else has in hand. What is
to be done follows from rows of the state: `hot_partition` has, for each partition, the revision
that is wanted and the one that is applied.

The steps of one dataset, under its advisory lock in Postgres data:

| step | in | is |
|---|---|---|
| compare | both | `position`, the random name of the last transaction there, with the state's |
| prepare | data | a table for each live generation, with its columns |
| intend | state | the name of the next transaction is written down |
| load | data | some partitions, each with its revision, and the name: **one transaction** |
| confirm | state | these are applied; once, by the name |
| serve | data | readers are sent to the current generation, if its table lacks nothing |
| release | state | the events of what is applied, and served, are `pending`: they are routed |

So the state cuts over first, and readers of the table follow when it has all that was published
before the cut-over; until then the events of the new generation wait.

What a crash leaves, and who puts it right:

| after | is found as | and |
|---|---|---|
| intend, or in the load | the data's name is the one that is confirmed | is loaded by the next |
| the load's commit | the one that is intended | is confirmed by the next, as `hot_store` has it |
| confirm | a table that readers are not sent to, events that wait | the next serves, and releases |
| a restore of either database | neither of the two | what differs (`stamp`) is loaded anew |

Two appliers: the lock. One that hangs and comes back: its connection is gone, and with it the lock
and the transaction. Lower revisions, or the same, are left out by the transaction that loads
(PUBLISH-31). The rows of a zombie are not published, and so never here. Events are released by
PUBLISH-32; what a restore leaves is settled by PUBLISH-33.

A partition that cannot be loaded is noted (`hot_table.problem`), holds back its own events and no
other partition, and is tried again ever more seldom, with its dataset. If Postgres data is away,
all events of hot datasets wait, and nothing else.

Parquet is read by the closed process of `datasets.parquet`; nothing of a task is parsed here.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import msgspec
import psycopg

from penstock.datasets.layout import DATASETS, place_of
from penstock.datasets.parquet import copied
from penstock.datasets.schema import Column
from penstock.datasets.snapshot import DataFile, read
from penstock.datasets.transfer import Transfer
from penstock.dispatcher.database.pool import Connection, Database, first_line
from penstock.dispatcher.datasets.hot_tables import (
    AppliedPartition,
    HotDataset,
    HotGeneration,
    HotLoad,
    HotRelation,
    HotTableBusy,
    PostgresData,
)
from penstock.dispatcher.tasks.rows import storable
from penstock.dispatcher.tasks.schemas import declared_columns
from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.entropy import Entropy, new_id, system_entropy
from penstock.kernel.errors import Damaged, DatabaseUnavailable, PenstockError

PARTITIONS_MAX: Final = 100
"""How many partitions one transaction loads, at most."""
BYTES_MAX: Final = 256 * 1024 * 1024
"""How much of files it loads, if that is more than one partition."""
LOADS_MAX: Final = 1000
FILE_SECONDS_MAX: Final = 3600.0
COPIED_BYTES_MIN: Final = 1024 * 1024 * 1024
EXPANSION_MAX: Final = 64
"""How much the rows of one load may be as text: so much, and so many times what its files are."""
COMPARE_SECONDS: Final = 15.0
"""How often the positions of all datasets are compared, whether or not there is work."""
_AGAIN_SECONDS: Final = 1.0
_NOWHERE: Final = (
    "This dispatcher knows no Postgres for tables: set `postgres_data`, or take `storage: postgres`"
    " out of the DAG."
)
_AGAIN_SECONDS_MAX: Final = 60.0
_REST_FACTOR: Final = 4
"""So many times as long as a try took that failed, the others have before the next one."""
_POSITION_CHARACTERS: Final = 24
_PROBLEM_CHARACTERS_MAX: Final = 1_000


@dataclass(frozen=True, slots=True)
class _Part:
    """A folder that is published."""

    location: str
    manifest: str | None
    first_revision: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPartition:
    """A partition that is behind, and what it is to have."""

    generation: str
    partition_key: str
    applied: int
    revision: int
    stamp: str
    bytes: int
    is_anew: bool
    is_added: bool
    parts: tuple[_Part, ...]
    planned_at: datetime

    @property
    def wanted(self) -> AppliedPartition:
        return AppliedPartition(
            generation=self.generation,
            partition_key=self.partition_key,
            revision=self.revision,
            stamp=self.stamp,
        )

    @property
    def loaded(self) -> tuple[_Part, ...]:
        """The parts that are to be loaded."""
        if not self.is_added:
            return self.parts
        return tuple(each for each in self.parts if each.first_revision > self.applied)


def batches(planned: Sequence[PlannedPartition]) -> Sequence[PlannedPartition]:
    """As many of these, from the first, as one transaction may load."""
    found: list[PlannedPartition] = []
    left = BYTES_MAX
    for each in planned:
        left -= each.bytes
        if found and left < 0:
            break
        found.append(each)
    return found


class Applier:
    """Loads what is published of hot datasets. `turn` is that of a loop."""

    def __init__(
        self,
        database: Database,
        data: PostgresData | None,
        transfer: Transfer,
        *,
        root: str,
        released: Callable[[], None] = lambda: None,
        clock: Clock | None = None,
        entropy: Entropy | None = None,
    ) -> None:
        self._database = database
        self._data = data
        self._transfer = transfer
        self._root = root
        self._released = released
        self._clock = clock or SystemClock()
        self._entropy = entropy or system_entropy()
        self._compared_at: float | None = None
        self._waits: dict[str, tuple[float, float]] = {}
        """By dataset: not before, and the pause that this was."""

    async def turn(self) -> float | None:
        """Bring all datasets forward that are behind; returns when one is to be tried again."""
        now = self._clock.monotonic()
        compares = self._compared_at is None or now - self._compared_at >= COMPARE_SECONDS
        if compares:
            await self._ask("begin_hot")
        known = await self._database.fetch("hot_datasets")
        if not known:
            self._compared_at = now
            return None
        if self._data is None:
            await self._note([row["dataset"] for row in known], _NOWHERE)
            return None
        if not compares and not self._due(known, None):
            return self._pause(now)
        try:
            async with self._data.connection() as connection:
                positions = await self._data.positions(connection) if compares else None
                for row in self._due(known, positions):
                    await self._try(self._data, connection, row)
        except DatabaseUnavailable as error:
            datasets = [row["dataset"] for row in known]
            await self._note(datasets, error.message)
            raise
        self._compared_at = now if compares else self._compared_at
        return self._pause(now)

    def _pause(self, now: float) -> float:
        """Until the next look at all, or the next try of one that has failed."""
        later = [at - now for at, _ in self._waits.values()]
        return min(COMPARE_SECONDS, max(_AGAIN_SECONDS, min(later, default=COMPARE_SECONDS)))

    def _due(
        self, known: Sequence[Mapping[str, Any]], positions: Mapping[str, str | None] | None
    ) -> list[Mapping[str, Any]]:
        now = self._clock.monotonic()
        return [
            row
            for row in known
            if self._waits.get(row["dataset"], (now, 0.0))[0] <= now
            and (
                row["is_due"]
                or row["problem"] is not None
                or (positions is not None and positions.get(row["dataset"]) != row["position"])
            )
        ]

    async def _try(
        self, data: PostgresData, connection: Connection, row: Mapping[str, Any]
    ) -> None:
        dataset, began = row["dataset"], self._clock.monotonic()
        try:
            async with data.locked(connection, dataset, row["name"]) as tables:
                if tables is None:
                    self._wait(dataset)
                    return
                problem = await self._bring_forward(tables, dataset)
        except DatabaseUnavailable:
            raise
        except PenstockError as error:
            problem = f"{error.message} {error.hint}".strip()
        except psycopg.Error as error:
            if connection.closed:
                raise
            problem = f"Postgres data refused it: {first_line(error)}"
        if problem:
            await self._note([dataset], problem)
            self._wait(dataset, _REST_FACTOR * (self._clock.monotonic() - began))
        else:
            self._waits.pop(dataset, None)

    def _wait(self, dataset: str, rest: float = 0.0) -> None:
        """Not before a pause that grows, or this rest if it is longer."""
        pause = min(_AGAIN_SECONDS_MAX, 2 * self._waits.get(dataset, (0.0, _AGAIN_SECONDS / 2))[1])
        self._waits[dataset] = (self._clock.monotonic() + max(pause, rest), pause)

    async def _bring_forward(self, tables: HotDataset, dataset: str) -> str:
        """All steps of one dataset; returns why not all of them could be done."""
        await tables.look()
        await self._settle(tables, dataset)
        live = await self._generations(dataset)
        if not live:
            await tables.clear(is_all=True)
            await self._release(dataset, [], None)
            await self._ask("forget_hot", dataset=dataset)
            return ""
        relations, unsure = await tables.prepare([each for each, _ in live])
        # After the tables: whoever comes next would not know of them.
        await self._ask("forget_hot", dataset=dataset)
        if unsure:
            await self._compare(tables, dataset)
        problem = await self._load(tables, dataset, relations)
        return await self._serve(tables, dataset, live, relations) or problem

    async def _settle(self, tables: HotDataset, dataset: str) -> None:
        """Have both databases agree on which transaction was the last there."""
        rows = await self._ask("hot_position", dataset=dataset)
        known = rows[0] if rows else {"position": None, "intended": None}
        if tables.position == known["position"]:
            return
        if tables.position is not None and tables.position == known["intended"]:
            done = await tables.applied(tables.position)
            await self._confirm(dataset, tables.position, done, planned_at=None)
        else:
            await self._compare(tables, dataset)

    async def _compare(self, tables: HotDataset, dataset: str) -> None:
        """After a restore: load anew whatever the tables do not have as it is published."""
        held = await tables.applied()
        await self._ask(
            "compare_applied",
            dataset=dataset,
            position=tables.position,
            generations=[each.generation for each in held],
            keys=[each.partition_key for each in held],
            revisions=[each.revision for each in held],
            stamps=[each.stamp for each in held],
        )

    async def _generations(self, dataset: str) -> list[tuple[HotGeneration, datetime]]:
        rows = await self._ask("hot_generations", dataset=dataset)
        return [
            (
                HotGeneration(
                    generation=row["generation"],
                    is_current=row["state"] == "current",
                    columns=declared_columns(row["hot"]["columns"]),
                    keys=tuple(row["hot"]["keys"]) if row["hot"]["mode"] == "merge" else (),
                ),
                row["changed_at"],
            )
            for row in rows
        ]

    async def _load(
        self, tables: HotDataset, dataset: str, relations: Sequence[HotRelation]
    ) -> str:
        """Load what is behind, some partitions a transaction; returns why some could not be."""
        by_generation = {each.generation: each for each in relations}
        passed: set[tuple[str, str]] = set()
        problem = ""
        for _ in range(LOADS_MAX):
            rows = await self._ask(
                "unapplied_partitions", dataset=dataset, limit=PARTITIONS_MAX + len(passed)
            )
            planned = [msgspec.convert(row, PlannedPartition) for row in rows]
            planned = [x for x in planned if (x.generation, x.partition_key) not in passed]
            if not planned:
                return problem
            some = batches(planned[:PARTITIONS_MAX])
            position = new_id(self._entropy, characters=_POSITION_CHARACTERS)
            await self._ask("intend_position", dataset=dataset, position=position)
            done: list[AppliedPartition] = []
            async with tables.loading(position) as load:
                for each in some:
                    try:
                        await self._load_one(load, by_generation[each.generation], each)
                    except (PenstockError, OSError, psycopg.Error) as error:
                        if load.is_lost:
                            raise
                        passed.add((each.generation, each.partition_key))
                        problem = _problem(each, error)
                    else:
                        done.append(each.wanted)
            await self._confirm(dataset, position, done, planned_at=planned[0].planned_at)
        return problem

    async def _load_one(
        self, load: HotLoad, relation: HotRelation, planned: PlannedPartition
    ) -> None:
        if not planned.is_anew and await load.has(planned.wanted):
            return
        pieces = self._pieces(planned.loaded, relation.columns)
        await load.load(relation, planned.wanted, pieces, is_added=planned.is_added)

    def _pieces(
        self, parts: Sequence[_Part], columns: Sequence[Column]
    ) -> Generator[Generator[bytes]]:
        """The rows of each file, in turn. Blocks, and is asked off the loop."""
        left = COPIED_BYTES_MIN

        def rows(file: DataFile) -> Generator[bytes]:
            nonlocal left
            left += EXPANSION_MAX * file.bytes
            with self._transfer.open(file.location) as opened:
                for piece in copied(opened, columns, seconds_max=FILE_SECONDS_MAX):
                    left -= len(piece)
                    if left < 0:
                        most = f"{COPIED_BYTES_MIN} bytes and {EXPANSION_MAX} times its size"
                        raise PenstockError(f"{file.location} unpacks to more than {most}.")
                    yield piece

        for part in parts:
            self._check(part)
            (contents,) = read([part], self._transfer)
            if contents.others:
                raise PenstockError(f"{part.location} has files that are not Parquet.")
            for file in contents.files:
                if file.rows != 0:
                    yield rows(file)

    def _check(self, part: _Part) -> None:
        """Raise `Damaged` for what is no folder of an attempt of this installation."""
        inside = f"{self._root}/{DATASETS}"
        if part.manifest is None or not part.location.startswith(inside):
            raise Damaged(f"{part.location} is no folder of an attempt.", location=part.location)
        if place_of(part.location) is None:
            raise Damaged(f"{part.location} is no folder of an attempt.", location=part.location)

    async def _confirm(
        self,
        dataset: str,
        position: str,
        done: Sequence[AppliedPartition],
        *,
        planned_at: datetime | None,
    ) -> None:
        await self._ask(
            "confirm_applied",
            dataset=dataset,
            position=position,
            planned_at=planned_at,
            generations=[each.generation for each in done],
            keys=[each.partition_key for each in done],
            revisions=[each.revision for each in done],
        )

    async def _serve(
        self,
        tables: HotDataset,
        dataset: str,
        live: Sequence[tuple[HotGeneration, datetime]],
        relations: Sequence[HotRelation],
    ) -> str:
        """Send readers to what is current, and release the events of what they can read."""
        problem = ""
        for each, changed_at in live:
            if not each.is_current:
                continue
            behind = await self._ask(
                "is_behind", dataset=dataset, generation=each.generation, moment=changed_at
            )
            if tables.served is None or tables.served == each.generation or not behind[0]["is_so"]:
                try:
                    await tables.serve(each, relations)
                except HotTableBusy as error:
                    problem = f"{error.message} {error.hint}"
        await self._release(dataset, [each.generation for each, _ in live], tables.served)
        with suppress(HotTableBusy):
            await tables.clear(is_all=False)
        is_served = all(tables.served == one.generation for one, _ in live if one.is_current)
        if not problem:
            await self._ask("note_served", dataset=dataset, is_served=is_served)
        return problem

    async def _release(self, dataset: str, generations: Sequence[str], served: str | None) -> None:
        asked = {"dataset": dataset, "generations": list(generations), "served": served}
        (row,) = await self._ask("release_applied", **asked)
        if row["released"]:
            self._released()

    async def _note(self, datasets: Sequence[str], problem: str) -> None:
        said = storable(problem[:_PROBLEM_CHARACTERS_MAX])
        await self._ask("note_hot_problem", datasets=list(datasets), problem=said)

    async def _ask(self, statement: str, /, **asked: object) -> list[dict[str, Any]]:
        return await self._database.fetch(statement, asked)


def _problem(planned: PlannedPartition, error: Exception) -> str:
    said = error.message if isinstance(error, PenstockError) else first_line(error)
    named = f"The partition {planned.partition_key!r}" if planned.partition_key else "It"
    return f"{named} cannot be loaded: {said}"
