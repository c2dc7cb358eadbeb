"""What goes into deployment and what comes out of it: values only.

A call that was refused is a value too, with the list of what it would have broken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum


class GenerationState(StrEnum):
    """What a generation of a dataset is."""

    BUILDING = "building"
    """It takes the place of the current one when it covers it."""
    CURRENT = "current"
    """The one that readers read."""
    RETIRED = "retired"
    """It was current; a rollback makes it so again."""
    ABANDONED = "abandoned"
    """It was being built when the DAG moved on."""


@dataclass(frozen=True, slots=True)
class Version:
    """A version of the DAG."""

    id: int
    hash: str
    created_at: datetime
    is_current: bool
    since: datetime | None = None
    """When it was put in force last."""


@dataclass(frozen=True, slots=True)
class VersionText:
    """What was applied as a version: the DAG, and the files that it names, by their names."""

    source: str
    files: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class DeployedJob:
    """A job of the DAG that is in force."""

    name: str
    job_id: int
    definition_id: int
    generation: str
    outputs: Mapping[str, str]
    """The datasets that it writes: the uuid by the name."""
    is_building: bool
    """Whether readers are still served an earlier generation of an output."""


@dataclass(frozen=True, slots=True)
class Deployed:
    """The DAG that is in force."""

    version: Version
    text: VersionText
    since: datetime
    jobs: tuple[DeployedJob, ...]


@dataclass(frozen=True, slots=True)
class Break:
    """Work of one job and one generation that a change would make useless."""

    job: str
    generation: str
    waiting: int
    running: int
    backfills: int


@dataclass(frozen=True, slots=True)
class Loss:
    """What a rebuild cannot make again of a dataset that is appended to: retention has removed the
    events, or the inputs were replaced since."""

    dataset: str
    job: str
    publications: int
    """How many the current generation has."""
    lost: int
    """How many of them would be missing."""


@dataclass(frozen=True, slots=True)
class Applied:
    """The DAG is in force."""

    version_id: int
    hash: str
    is_changed: bool
    """False if it was in force already."""
    building: tuple[str, ...] = ()
    """The jobs of which readers are served an earlier generation until the cut-over."""
    cancelled: int = 0
    """How many waiting tasks were cancelled."""
    before: int | None = None
    """The version that was in force until then; None if this is the first."""
    returned: tuple[str, ...] = ()
    """The jobs whose earlier generation is served again at once."""
    resumed: tuple[str, ...] = ()
    """Those that are built on from their earlier generation, which lacks something."""
    losses: tuple[Loss, ...] = ()
    """What cannot be built anew, for which the cut-over waits."""


@dataclass(frozen=True, slots=True)
class Foreseen:
    """What a change of the DAG would do. Nothing was changed."""

    version_id: int | None
    """None for one that was never in force, which would get a number."""
    hash: str
    is_changed: bool
    building: tuple[str, ...] = ()
    before: int | None = None
    breaks: tuple[Break, ...] = ()
    returned: tuple[str, ...] = ()
    resumed: tuple[str, ...] = ()
    losses: tuple[Loss, ...] = ()
    replaced: tuple[str, ...] = ()
    """The generations that readers have until others take their place, at once or when built."""
    others: tuple[str, ...] = ()


class WhyNotApplied(StrEnum):
    """Why a change of the DAG was refused."""

    BREAKS = "breaks"
    """It makes work useless that waits or runs; force does it all the same."""
    UNKNOWN = "unknown"
    """There is no such version."""
    FIRST = "first version"
    """No other version was in force before."""
    NONE = "none"
    """No version is in force."""


@dataclass(frozen=True, slots=True)
class NotApplied:
    """A change of the DAG that changed nothing."""

    why: WhyNotApplied
    breaks: tuple[Break, ...] = ()


class CutOver(StrEnum):
    """What became of a cut-over."""

    DONE = "done"
    NOTHING = "nothing"
    """No generation of this dataset is being built."""
    UNCOVERED = "uncovered"
    """The current generation has a partition, or a part of one that is appended to, that the one
    being built does not have. `force` lets it be missing."""
    UPSTREAM = "upstream"
    """That is so of a generation that this one is built of. `force` lets it be missing."""
    BACKFILL = "backfill"
    """A backfill of the generation being built is not over."""
    CHANGES = "changes"
    """What appends changes keeps nothing: it reads all anew, and would have it twice."""
    COMPACTED = "compacted"
    """What would be kept was put together in files with parts that were made anew."""
    UNKNOWN = "unknown"
    """There is no such dataset."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What could not be built anew is part of the generation that is being built, as it was."""

    publications: int


@dataclass(frozen=True, slots=True)
class NotKept:
    """Nothing of the current generation was kept in the one that is being built."""

    why: CutOver | None
    """None if it has other columns."""
    detail: str = ""
