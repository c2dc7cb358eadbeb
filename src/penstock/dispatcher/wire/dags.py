"""What is said of the DAG: versions, what is wrong with one, what one would break."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from msgspec import Meta

from penstock.dispatcher.wire.base import Answer, Ask, TaskNumber


class ApplyAsk(Ask):
    source: Annotated[str, Meta(max_length=2_000_000)]
    """The text of the YAML file."""
    where: Annotated[str, Meta(max_length=1000)] = "dag.yaml"
    """The name of the file, for messages."""
    force: bool = False


class RollbackAsk(Ask):
    version: TaskNumber | None = None
    """None is the one before the one that is in force."""


class DagProblem(Answer):
    line: int
    field: str
    message: str


class BreakAnswer(Answer):
    """Work that a change of the DAG would make useless."""

    job: str
    generation: str
    waiting: int
    running: int
    backfills: int


class AppliedAnswer(Answer):
    version: int
    hash: str
    is_changed: bool
    building: list[str]
    """The jobs of which an earlier generation is served until the new one is built."""
    cancelled: int


class VersionAnswer(Answer):
    id: int
    hash: str
    created_at: datetime
    is_current: bool


class VersionsAnswer(Answer):
    versions: list[VersionAnswer]


class DagAnswer(Answer):
    """The DAG that is in force."""

    version: VersionAnswer
    source: str
    since: datetime


class CutOverAsk(Ask):
    """Have readers read the generation that is being built."""

    force: bool = False
    """Also if partitions are missing that the current generation has."""


class CutOverAnswer(Answer):
    """Readers read this now, of all datasets of the same job."""

    dataset: str
    generation: str
