"""Datasets as files: generations, columns, snapshots, sweeps; Iceberg REST catalog requests.

What later versions of the catalog's protocol send besides is ignored.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from msgspec import Meta

from penstock.protocol.base import HELD, Answer, Ask, Name, Uuid
from penstock.protocol.work import PartAnswer

SNAPSHOT_PARTS_MAX = 100_000


PartitionKey = Annotated[str, Meta(min_length=1, max_length=500, pattern=HELD)]
Moment = Annotated[str, Meta(min_length=1, max_length=100)]
"""The id of a snapshot, or a time in ISO 8601."""


class SnapshotParams(Ask):
    name: Name
    generation: Uuid | None = None
    """None is the one that readers read."""
    partition_key: PartitionKey | None = None
    """None is all of them."""
    at: Moment | None = None
    """The id of a snapshot that is kept, or a time; None is now."""


class ChangesParams(Ask):
    name: Name
    since: Moment
    until: Moment


class ColumnAnswer(Answer):
    name: str
    type: str
    is_nullable: bool = True


class KeepAnswer(Answer):
    """How much is kept, as the DAG says it; null is no bound."""

    partitions: int | None = None
    age: str | None = None
    generations: int | None = None
    history: str | None = None
    """How long what was replaced can be read as it was; null is seven days."""


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


class HotTableAnswer(Answer):
    """How far the table of a dataset is that follows what is published."""

    dataset: str
    is_served: bool
    """Whether readers of its view have the current generation."""
    partitions: int
    """Of the current generation."""
    behind: int
    """Those of them that the table does not have as they are published."""
    behind_seconds: float
    """How long the first of these has been so."""
    events: int
    """Those that wait for it."""
    problem: str | None
    """Why it is behind, if that is not only for a moment."""
    url: str = ""
    """Where to read it; without a password."""


class RebuildTableAnswer(Answer):
    """What is to be loaded again."""

    partitions: int


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
    table: HotTableAnswer | None = None
    """The table in Postgres that has its rows too."""


class SnapshotPart(PartAnswer, omit_defaults=False):
    """Something that is published, as it is told to people."""

    files: int | None = None


class SnapshotAnswer(Answer):
    """All that was published of a generation at one moment, in the order of partitions."""

    dataset: str
    generation: str
    columns: list[ColumnAnswer]
    parts: list[SnapshotPart]
    snapshot: int | None = None
    """Which of those that are kept it is, if one was asked for."""


class SnapshotRow(Answer):
    """A snapshot that is kept. Its id is the time of what was published last, in milliseconds."""

    id: int
    generation: str
    branch: str
    """`main` is the current generation, `building` what is being built."""
    operation: str
    """`append`, `delete`, or `overwrite` for everything else."""
    added: int
    """Parts that came with it, and that went."""
    removed: int
    partitions: int
    files: int | None
    rows: int | None
    bytes: int | None
    made_at: datetime


class SnapshotsAnswer(Answer):
    """The latest snapshots that are kept, the newest first."""

    snapshots: list[SnapshotRow]


class PartChange(Answer):
    """A part that one snapshot shows and another does not."""

    change: str
    """`put`, or `removed`."""
    partition_key: str | None
    location: str
    rows: int | None
    bytes: int | None
    task_id: int | None
    """The task that has made it."""


class DatasetChangesAnswer(Answer):
    """What has changed from one snapshot to another, by partition."""

    since: int
    until: int
    changes: list[PartChange]
    is_all: bool
    """Whether there is no more."""


class ReadTokenAsk(Ask):
    """A token for reading tables."""

    name: Name
    datasets: Annotated[list[Name], Meta(max_length=1000)] = []
    """Those that it is for; none is all."""
    days: Annotated[float, Meta(gt=0, le=36500)] | None = None
    """For how long it is good; null is until it is removed."""


class ReadTokenAnswer(Answer):
    """A new token. It is shown only once."""

    name: str
    token: str


class ReadTokenRow(Answer):
    name: str
    datasets: list[str]
    created_at: datetime
    expires_at: datetime | None
    is_over: bool


class ReadTokensAnswer(Answer):
    """The read tokens, without their secrets."""

    tokens: list[ReadTokenRow]


class RemoveTokenAsk(Ask):
    """Revoke a read token."""

    name: Name


class RemoveTokenAnswer(Answer):
    name: str


class SweepAsk(Ask):
    """Remove orphaned files: those that no reader can still use."""

    grace_seconds: Annotated[float, Meta(ge=0, le=3.2e9)] | None = None
    """How long ago nobody could any more; null is what the dispatcher is set to."""
    dry_run: bool = False
    """Remove nothing, and tell what would be removed."""


class SweepAnswer(Answer):
    """What this request removed. Repeat it until `is_over`."""

    attempts: int
    files: int
    bytes: int
    left: int
    """Files that could not be removed now."""
    is_over: bool


class RefreshAsk(Ask):
    """Rewrite every `current.json` of a dataset that is not up to date."""

    after: Annotated[str, Meta(max_length=600, pattern=HELD)] = ""
    """What the answer before has said; empty to begin."""


class RefreshAnswer(Answer):
    """What this request did. Repeat it with `after`, until that is null."""

    looked: int
    """Partitions that were compared."""
    written: int
    """Files that said something else, and were written."""
    after: str | None


class PurgeAsk(Ask):
    """Purge old generations of a dataset, or some partitions of it."""

    partition_keys: Annotated[
        list[Annotated[str, Meta(min_length=1, max_length=500, pattern=HELD)]],
        Meta(max_length=1000),
    ] = []
    """None is the whole dataset."""
    is_current: bool = False
    """Also what readers read now of these partitions."""


class PurgeAnswer(Answer):
    """What was purged. The sweeper removes the files."""

    snapshots: int
    publications: int
    generations: int
    generations_left: int
    """Generations that were left and stay, because something that is live reads them."""


class MaintainAsk(Ask):
    """Rewrite the files of a dataset now, as the DAG says it, whatever their number and size."""

    partition_key: PartitionKey | None = None
    """None is all partitions."""


class MaintainAnswer(Answer):
    """The tasks that were created. Repeat the request for more when these have ended."""

    tasks: list[int]
    is_all: bool
    """Whether there is no more to be made now."""


PAGE_MAX = 1000
NAMES_MAX = 100_000
"""Of an answer without pages."""


class _CatalogAsk(Ask, forbid_unknown_fields=False, rename="kebab", kw_only=True):
    pass


class _CatalogParams(Ask, forbid_unknown_fields=False, rename="camel", kw_only=True):
    pass


class ConfigParams(_CatalogParams, kw_only=True):
    warehouse: str = ""


class NamespacesParams(_CatalogParams, kw_only=True):
    parent: str = ""


class NamespaceParams(_CatalogParams, kw_only=True):
    namespace: str


class TablesParams(NamespaceParams, kw_only=True):
    page_token: Annotated[str, Meta(max_length=200, pattern=HELD)] | None = None
    page_size: Annotated[int, Meta(ge=1)] = PAGE_MAX


class TableParams(NamespaceParams, kw_only=True):
    table: Name
    snapshots: str = "all"
    """`refs` is those that are named; all else is all."""


class CancelParams(TableParams, kw_only=True):
    plan: str


class PlanAsk(_CatalogAsk, kw_only=True):
    """A scan of a snapshot, which is that of `main` if none is named."""

    snapshot_id: int | None = None
    filter: Any = None
    case_sensitive: bool = True
    use_snapshot_schema: bool = False
    start_snapshot_id: int | None = None
    end_snapshot_id: int | None = None


class TasksAsk(_CatalogAsk, kw_only=True):
    plan_task: Annotated[str, Meta(max_length=4_000_000)]


class ReportAsk(_CatalogAsk, kw_only=True):
    """Metrics of a client, which are ignored."""


class BufferAnswer(Answer):
    """A buffered dataset, and the batches that wait for its sink; 10,000 stands for many."""

    dataset: str
    job: str
    rejected: str
    """The dataset of rows that did not fit."""
    held: int
    """Of attempts that have not completed."""
    waiting: int
    taken: int
    """That tasks of the sink write now, or will try again."""
    waited_seconds: float = 0.0
    rows: int = 0
    """Of all of these batches, as far as they are counted."""
    unknown: int = 0
    """Batches whose rows nobody has counted."""
    oldest_at: datetime | None = None
    """When the first of those that wait or are taken was released."""
    pressed: str | None = None
    """Why nothing more is taken for now."""


class BuffersAnswer(Answer):
    buffers: list[BufferAnswer]


class RejectedParams(Ask):
    name: Name
    """The buffered dataset."""
    limit: Annotated[int, Meta(ge=1, le=1000)] = 100


class RejectedRow(Answer):
    """A row that a sink did not write."""

    sequence: int
    """The batch that it came in."""
    place: int
    """Its place in that batch; -1 for the batch as a whole."""
    reason: str
    batch: str
    task: int
    row: str | None = None
    """Its text; none of a batch that could not be read, or of a row that is too long."""
    partition_key: str | None = None


class RejectedAnswer(Answer):
    """The rows of the batches that were rejected last, without those that were dealt with."""

    rows: list[RejectedRow]
    is_cut: bool = False
    """Whether there may be more."""
    unread: int = 0
    """How many files of rejected rows could not be read, or not to their end."""


class RejectedPlace(Ask):
    sequence: Annotated[int, Meta(ge=1, le=2**63 - 1)]
    place: Annotated[int, Meta(ge=-1, le=2**53)]
    row: Annotated[str, Meta(min_length=2, max_length=256 * 1024, pattern=HELD)] | None = None
    """What is published in its place, a JSON object; none is the row as it was."""


class RejectedAsk(Ask):
    """Give rows back to the buffer, as they were or mended, or drop them."""

    rows: Annotated[list[RejectedPlace], Meta(min_length=1, max_length=1000)]
    is_dropped: bool = False


class RejectedDoneAnswer(Answer):
    rows: int
    """How many were dealt with; the others were before."""
    batches: list[int] = []
    """The sequences of the batches that they were given back in."""
