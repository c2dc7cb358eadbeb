"""Snapshots of datasets: positions in the log of what was published.

**What there is.** Triggers write `publication_log` in the transactions that move publications
and generations: each part that was put in place or taken away, and each generation that became
the current one. A row is *fresh* until it is given to a snapshot, once. `table_part` says which
snapshots show a part: from `came` on, before `gone`. `table_snapshot` has the snapshots that
are kept, of two branches: `main` is the current generation, `building` what is being built. A
generation that was left is read at the last snapshot of `main` that was of it: a tag, which
later publications into that generation do not change.

**Who moves what.** Publishers insert into the log and nothing else; they take no number, no
lock that another publisher takes, and wait for nobody. `make` takes the lock of the dataset, or
leaves it to who has it, and gives all fresh rows that are committed to the next snapshot of
their branch in one statement, so of one moment (PUBLISH-17). Only it writes the other tables.

**Ids.** The id of a snapshot is the time of its latest publication in milliseconds, made
greater than every earlier id of the dataset (PUBLISH-18), which `table_state` remembers when
snapshots are forgotten. It is the sequence number and the time of the snapshot too: all three grow
strictly over both branches, also when the clock goes back, and a database that was brought back
to an earlier time gives no id out twice. It is not the time at which somebody asked: DuckDB
reads nothing that is younger than its own transaction, and would find nothing in a table that
it is the first to ask of.

**What goes wrong, and what is left.**

- A row commits after `make` has looked: it is in the next snapshot, with all that its transaction
  has published, so each publication is whole in one of the two.
- Rows of one partition: their ids are given under the lock of its publication, so they have the
  order of the commits, and the last word on a part counts. Between partitions no order is kept.
- Two make snapshots at once: the second finds the lock taken, and answers with what is there.
- A dispatcher dies in `make`: nothing is done, for it is one transaction. Between writing files and
  noting them (`writing`): the files are named by nobody, and are swept.
- A cut-over commits meanwhile: it is seen with all that came before it, or not at all.
- A generation is cleared bit by bit: it was dropped in a transaction before, and since then no
  branch and no tag is of it.
- A snapshot is forgotten while somebody reads it: it is told of no more, and its row stays for the
  grace of the sweeper. So do the folders, the manifests and the list that it shows, and its pages.
  When that is over, or when it is purged, it cannot be read from a moment on before anything of it
  goes; who reads asks after the parts whether it is still kept, and never takes some for all.
- The clock goes back: ids go on by one each, and the pause between two snapshots is not waited
  for.

**How long.** All snapshots of an hour, one a minute for a day, then one an hour, until
`history` of the dataset's `keep`; the newest of each branch and those that are tags always. A
folder is held while a snapshot that has a row shows it, or a fresh row of the log names it: see
`penstock_is_shown`. Rows of the log that are not fresh any more are removed after
`LOG_SECONDS`.

**What is asked of them.** `History` answers our own readers, whether the dataset is a table or
not. A moment is the id of a snapshot, or a time, which means the latest snapshot of `main` that
is kept and is not after it. Asking makes a snapshot of what is new first.

Called by the catalog when somebody asks, by the API and the console, and by a loop of every
dispatcher.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from penstock.dispatcher.database.pool import Connection, Database, fetch_rows, query
from penstock.dispatcher.datasets.sweeper import GRACE_SECONDS
from penstock.dispatcher.metrics import take_turn
from penstock.kernel.errors import InvalidInput
from penstock.kernel.units import age_ms
from penstock.protocol.datasets import (
    SNAPSHOT_PARTS_MAX,
    ColumnAnswer,
    DatasetChangesAnswer,
    PartChange,
    SnapshotAnswer,
    SnapshotPart,
    SnapshotRow,
    SnapshotsAnswer,
)

PACE_SECONDS: Final = 1.0
"""How long after a snapshot the next one of a dataset is made."""
QUIET_SECONDS: Final = 60.0
"""How old what is new may be before a snapshot is made that nobody has asked for."""
HISTORY_MS: Final = 7 * 86_400_000
"""How long snapshots are kept where `keep` does not say it."""
PARTITION_COLUMN: Final = "partition_key"
_TURN: Final = "snapshots"
_FORGET_TURN: Final = "snapshots: forget"
_FORGET_SECONDS: Final = 600.0
_DATASETS_MAX: Final = 1000
LOG_SECONDS: Final = 3600.0
_ROWS_MAX: Final = 5000
_SNAPSHOTS_MAX: Final = 500
_BATCHES_MAX: Final = 400
"""In a turn: more than 3,000 rows a second, of each table. A publication leaves two of the log."""


class Snapshots:
    """Makes and forgets snapshots."""

    def __init__(
        self,
        database: Database,
        *,
        pace_seconds: float = PACE_SECONDS,
        quiet_seconds: float = QUIET_SECONDS,
        history_ms: int = HISTORY_MS,
        grace_seconds: float = GRACE_SECONDS,
    ) -> None:
        self._database = database
        self._pace_seconds = pace_seconds
        self._quiet_seconds = quiet_seconds
        self._history_ms = history_ms
        self._grace_seconds = grace_seconds

    async def make(self, dataset: str) -> Sequence[int]:
        """Make snapshots of all that is new, and return their ids.

        None if nothing is new, if the last one is too young, or if somebody else is making one.
        """

        asked = {"dataset": dataset, "seconds": self._pace_seconds}
        # Mostly there is nothing, and no lock is needed to see that.
        (found,) = await self._database.fetch("is_snapshot_due", asked)
        if not found["is_due"]:
            return []

        async def work(connection: Connection) -> Sequence[int]:
            if not (await _one(connection, "hold_table", asked))["is_held"]:
                return []
            if not (await _one(connection, "is_snapshot_due", asked))["is_due"]:
                return []
            return await _make(connection, dataset)

        return await self._database.transact(work)

    async def turn(self) -> float | None:
        """Make what nobody has asked for, and forget what is old; the seconds until the next."""
        pace = self._quiet_seconds / 4
        if await take_turn(self._database, _TURN, seconds=pace / 2):
            asked = {"seconds": self._quiet_seconds, "limit": _DATASETS_MAX}
            for row in await self._database.fetch("datasets_to_snapshot", asked):
                await self.make(row["dataset"])
        if await take_turn(self._database, _FORGET_TURN, seconds=_FORGET_SECONDS):
            await self.forget()
        return pace

    async def forget(self) -> int:
        """Forget snapshots that are not kept any more, and how many; and what they alone showed."""

        async def thin(connection: Connection) -> int:
            rules = await fetch_rows(connection, "keep_rules", {})
            ages = {
                row["dataset"]: age_ms(row["keep"]["history"])
                for row in rules
                if row["keep"].get("history") is not None
            }
            asked = {
                "datasets": list(ages),
                "ages_ms": list(ages.values()),
                "age_ms": self._history_ms,
            }
            return (await connection.execute(query("forget_snapshots"), asked)).rowcount

        async def end(connection: Connection) -> None:
            asked = {"grace_seconds": self._grace_seconds}
            await connection.execute(query("end_forgotten"), asked)

        async def parts(connection: Connection) -> bool:
            asked = {"snapshots": _SNAPSHOTS_MAX, "limit": _ROWS_MAX}
            found = await _one(connection, "forget_parts", asked)
            return bool(found["parts"] == _ROWS_MAX or found["snapshots"] == _SNAPSHOTS_MAX)

        async def unshown(connection: Connection) -> bool:
            asked = {"limit": _ROWS_MAX}
            return (await connection.execute(query("forget_unshown"), asked)).rowcount == _ROWS_MAX

        async def log(connection: Connection) -> bool:
            asked = {"log_seconds": LOG_SECONDS, "limit": _ROWS_MAX}
            return (await connection.execute(query("forget_log"), asked)).rowcount == _ROWS_MAX

        forgotten = await self._database.transact(thin)
        await self._database.transact(end)
        for remove in (parts, unshown, log):
            for _ in range(_BATCHES_MAX):
                if not await self._database.transact(remove):
                    break
        return forgotten


async def _make(connection: Connection, dataset: str) -> Sequence[int]:
    made = await fetch_rows(connection, "assign_snapshots", {"dataset": dataset})
    for each in made:
        schema = await _schema(connection, dataset, each["generation"])
        asked = {"dataset": dataset, **each, "schema": schema, "operation": _operation(each)}
        if each["parts"] is None:
            asked |= await _one(connection, "count_parts", asked)
        await connection.execute(query("add_snapshot"), asked)
    return [each["id"] for each in made]


async def _schema(connection: Connection, dataset: str, generation: str) -> int:
    """The id of the schema that a generation has now; a new one if its columns have changed."""
    asked = {"dataset": dataset, "generation": generation}
    found = await _one(connection, "schema_of_table", asked)
    # One name for all of a table's life.
    column = found["known_column"]
    if found["is_partitioned"] and column is None:
        names = {each["name"].casefold() for each in found["columns"]}
        column = PARTITION_COLUMN
        while column in names:
            column = f"_{column}"
    now = (found["columns"], column)
    if found["id"] is not None and now == (found["held"], found["partition_column"]):
        return int(found["id"])
    columns = json.dumps(found["columns"])
    row = {**asked, "id": found["next"], "columns": columns, "partition_column": column}
    await connection.execute(query("add_schema"), row)
    return int(found["next"])


def _operation(made: Mapping[str, Any]) -> str:
    if made["is_moved"] or (made["added"] and made["removed"]):
        is_rewritten = made["is_rewritten"] and not made["is_moved"]
        return "replace" if is_rewritten else "overwrite"
    return "delete" if made["removed"] else "append"


async def _one(
    connection: Connection, statement: str, asked: Mapping[str, object]
) -> dict[str, Any]:
    (row,) = await fetch_rows(connection, statement, asked)
    return row


SNAPSHOTS_MAX: Final = 1000
CHANGES_MAX: Final = 10_000


class History:
    """The questions."""

    def __init__(self, database: Database, snapshots: Snapshots) -> None:
        self._database = database
        self._snapshots = snapshots

    async def listed(self, name: str, *, uuid: str, limit: int = SNAPSHOTS_MAX) -> SnapshotsAnswer:
        """The latest snapshots, the newest first."""
        await self._snapshots.make(uuid)
        return SnapshotsAnswer(snapshots=await self.latest(name, limit=limit))

    async def latest(self, name: str, *, limit: int) -> list[SnapshotRow]:
        """Those that are there."""
        rows = await self._rows("dataset_snapshots", name=name, limit=limit)
        return msgspec.convert(rows, list[SnapshotRow])

    async def at(self, name: str, moment: str, *, partition_key: str | None) -> SnapshotAnswer:
        """All that a snapshot shows. Raises `InvalidInput` for one that is not there."""
        found = await self._found(name, moment)
        rows = await self._rows(
            "shown_parts", **found, partition_key=partition_key, limit=SNAPSHOT_PARTS_MAX + 1
        )
        await self._check_kept(name, found)
        return SnapshotAnswer(
            dataset=name,
            generation=found["generation"],
            columns=msgspec.convert(found["columns"], list[ColumnAnswer]),
            parts=msgspec.convert(rows, list[SnapshotPart]),
            snapshot=found["id"],
        )

    async def changes(self, name: str, *, since: str, until: str) -> DatasetChangesAnswer:
        """What the later of two snapshots shows and the earlier does not, and the reverse."""
        before, after = await self._found(name, since), await self._found(name, until)
        asked = {
            "dataset": before["dataset"],
            "since": before["id"],
            "since_generation": before["generation"],
            "until": after["id"],
            "until_generation": after["generation"],
        }
        rows = await self._rows("changed_parts", **asked, limit=CHANGES_MAX + 1)
        for each in (before, after):
            await self._check_kept(name, each)
        changes = msgspec.convert(rows[:CHANGES_MAX], list[PartChange])
        return DatasetChangesAnswer(
            since=before["id"], until=after["id"], changes=changes, is_all=len(rows) <= CHANGES_MAX
        )

    async def _found(self, name: str, moment: str) -> dict[str, Any]:
        rows = await self._rows("snapshot_at", name=name, **moment_of(moment))
        if not rows:
            raise _not_kept(name, moment)
        found: dict[str, Any] = rows[0]
        return found

    async def _check_kept(self, name: str, found: Mapping[str, Any]) -> None:
        asked = {"dataset": found["dataset"], "snapshot": found["id"]}
        (row,) = await self._rows("is_snapshot_kept", **asked)
        if not row["is_kept"]:
            raise _not_kept(name, str(found["id"]))

    async def _rows(self, statement: str, /, **asked: object) -> Sequence[Any]:
        return await self._database.rows(statement, asked)


def _not_kept(name: str, moment: str) -> InvalidInput:
    return InvalidInput(
        f"The dataset {name!r} has no snapshot {moment}, or no longer keeps it.",
        hint="'penstock dataset snapshots' lists those that are kept.",
    )


def moment_of(text: str) -> Mapping[str, int | None]:
    """The id of a snapshot, or a time, as it is written."""
    if text.isascii() and text.isdigit() and len(text) <= 18:
        return {"id": int(text), "moment_ms": None}
    try:
        found = datetime.fromisoformat(text)
        # Without a zone it is UTC, as everywhere in a dispatcher.
        moment = found if found.tzinfo is not None else found.replace(tzinfo=UTC)
        return {"id": None, "moment_ms": int(moment.timestamp() * 1000)}
    except (ValueError, OverflowError) as error:
        raise InvalidInput(
            f"{text[:100]!r} is neither the id of a snapshot nor a time.",
            hint="Write a time as 2026-01-31T12:00:00Z.",
        ) from error
