"""The DAG: versions, what is wrong with one, what one would break."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from msgspec import Meta

from penstock.protocol.base import Answer, Ask, TaskNumber

FileName = Annotated[str, Meta(min_length=1, max_length=1000)]
FileText = Annotated[str, Meta(max_length=1_000_000)]


class ApplyAsk(Ask):
    source: Annotated[str, Meta(max_length=2_000_000)]
    """The text of the YAML file."""
    where: Annotated[str, Meta(max_length=1000)] = "dag.yaml"
    """The name of the file, for messages."""
    files: Annotated[dict[FileName, FileText], Meta(max_length=1000)] = {}
    """The texts of the files that the DAG names, as `sql_file`, by the names that it gives them."""
    force: bool = False
    dry_run: bool = False
    """Change nothing; report what would happen."""


class RollbackAsk(Ask):
    version: TaskNumber | None = None
    """None is the one that was in force before."""
    dry_run: bool = False
    """Change nothing; report what would happen."""


class DagProblem(Answer):
    line: int
    field: str
    message: str


class BreakAnswer(Answer):
    """Tasks and backfills that a change of the DAG would invalidate."""

    job: str
    generation: str
    waiting: int
    running: int
    backfills: int


class ChangeAnswer(Answer):
    """What is different in a job."""

    fields: list[str]
    keeps_generation: bool
    """Whether its data stays as it is."""


class DagChangesAnswer(Answer):
    """The difference between two versions of the DAG, by job."""

    added: list[str]
    removed: list[str]
    changed: dict[str, ChangeAnswer]
    rebuilt: list[str]
    """Not changed themselves, but something upstream of them was."""


class LossAnswer(Answer):
    """What cannot be built anew of a dataset that is appended to."""

    dataset: str
    job: str
    publications: int
    """How many there are."""
    lost: int
    """Of how many the event was removed by retention, or the input was replaced since."""


class AppliedAnswer(Answer):
    version: int | None
    """None, with `dry_run`, for one that would be new."""
    hash: str
    is_changed: bool
    building: list[str]
    """The jobs of which an earlier generation is served until the new one is built."""
    cancelled: int
    before: int | None = None
    """The version that was in force until then."""
    changes: DagChangesAnswer | None = None
    """None if this release cannot read what was in force."""
    is_dry_run: bool = False
    """Nothing was changed; this is what would have happened."""
    breaks: list[BreakAnswer] = []
    """With `dry_run`: the work that would be invalidated, for which `force` is needed."""
    returned: list[str] = []
    """The jobs whose earlier generation is served again at once."""
    resumed: list[str] = []
    """Of those that are built, the ones whose earlier generation is brought up to date."""
    losses: list[LossAnswer] = []
    """What would be missing; readers keep the present generation until somebody decides."""


class VersionAnswer(Answer):
    id: int
    hash: str
    created_at: datetime
    is_current: bool
    since: datetime | None = None
    """When it was put in force last."""


class VersionsAnswer(Answer):
    versions: list[VersionAnswer]


class DagAnswer(Answer):
    """The current DAG."""

    version: VersionAnswer
    source: str
    since: datetime
    files: dict[str, str] = {}
    """The texts of the files that it names."""


class CutOverAsk(Ask):
    """Make the generation that is being built the current one."""

    force: bool = False
    """Also if something is missing that the current generation has."""
    keep: bool = False
    """Take over from the current generation, as it is, what could not be built anew."""


class CutOverAnswer(Answer):
    """The generation that is current now, of all datasets of the same job."""

    dataset: str
    generation: str
    kept: int | None = None
    """How many publications were taken over, if that was asked for."""
    is_waiting: bool = False
    """The cut-over waits until everything downstream is built; readers see no change yet."""
