"""What is said of datasets as files: generations and columns, snapshots, and what was swept."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from msgspec import Meta

from penstock.dispatcher.wire.base import HELD, Answer, Ask, Name, Uuid
from penstock.dispatcher.wire.work import PartAnswer

SNAPSHOT_PARTS_MAX = 100_000


class SnapshotParams(Ask):
    name: Name
    generation: Uuid | None = None
    """None is the one that readers read."""
    partition_key: Annotated[str, Meta(min_length=1, max_length=500, pattern=HELD)] | None = None
    """None is all of them."""


class ColumnAnswer(Answer):
    name: str
    type: str
    is_nullable: bool = True


class KeepAnswer(Answer):
    """How much is kept, as the DAG says it; null is no bound."""

    partitions: int | None = None
    age: str | None = None
    generations: int | None = None


class CompactAnswer(Answer):
    files: int
    below: str


class MaintainedAnswer(Answer):
    """How files are looked after in place, as the DAG says it."""

    after: str
    compact: CompactAnswer | None = None
    cluster: list[str] = []


class GenerationDetail(Answer):
    """A generation, and all that is published of it. Sums are of what manifests say."""

    version: str
    state: str
    created_at: datetime
    changed_at: datetime
    is_dropped: bool
    """Whether what it held was given up, because that is how much is kept."""
    partitions: int
    files: int
    rows: int
    bytes: int
    unknown: int
    """How many partitions have parts of which nothing is known, and so are not in the sums."""
    columns: list[ColumnAnswer]


class DatasetDetail(Answer):
    """Everything about one dataset."""

    name: str
    uuid: str
    job: str | None
    keep: KeepAnswer | None
    revision: int
    """How often the current generation has moved."""
    is_projected: bool
    """Whether readers without Postgres are told of the current generation."""
    unprojected: int
    """Partitions of it of which they are not told yet, counted to 10,000 at most."""
    generations: list[GenerationDetail]
    """Those that are live, and the last that were."""
    maintain: MaintainedAnswer | None = None


class SnapshotPart(PartAnswer, omit_defaults=False):
    """Something that is published, as it is told to people."""

    files: int | None = None


class SnapshotAnswer(Answer):
    """All that was published of a generation at one moment, in the order of partitions."""

    dataset: str
    generation: str
    columns: list[ColumnAnswer]
    parts: list[SnapshotPart]


class SweepAsk(Ask):
    """Remove the files that nobody can be reading any more."""

    grace_seconds: Annotated[float, Meta(ge=0, le=3.2e9)] | None = None
    """How long ago nobody could any more; null is what the dispatcher is set to."""
    dry_run: bool = False
    """Remove nothing, and tell what would be removed."""


class SweepAnswer(Answer):
    """What was removed by this request. Ask again until it is over."""

    attempts: int
    files: int
    bytes: int
    left: int
    """Files that could not be removed now."""
    is_over: bool


class RefreshAsk(Ask):
    """Have every `current.json` of a dataset say what is published."""

    after: Annotated[str, Meta(max_length=600, pattern=HELD)] = ""
    """What the answer before has said; empty to begin."""


class RefreshAnswer(Answer):
    """What was done by this request. Ask again with `after`, until it is null."""

    looked: int
    """Partitions that were compared."""
    written: int
    """Files that said something else, and were written."""
    after: str | None


class MaintainAsk(Ask):
    """Rewrite the files of a dataset now, as the DAG says it, whatever their number and size."""

    partition_key: Annotated[str, Meta(min_length=1, max_length=500, pattern=HELD)] | None = None
    """None is all partitions."""


class MaintainAnswer(Answer):
    """The tasks that were made. Ask again for more, when these are over."""

    tasks: list[int]
    is_all: bool
    """Whether there is no more to be made now."""
