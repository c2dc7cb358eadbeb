"""What the outbox holds, and what carries it out: values and a protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol


class Kind(StrEnum):
    """The kinds of rows that there are today."""

    WAKE = "wake"
    """An operator has work: the body says `operator` and `priority`."""
    INVOKE = "invoke"
    """A function is to be invoked for the task `task_id` of the body."""
    PROJECT = "project"
    """What has moved of the `dataset` of the body, in its `generation` if there is one, is to be
    written for readers without Postgres."""


@dataclass(frozen=True, slots=True)
class Row:
    """One side effect that is due. Rows of one target may be carried out together."""

    id: int
    kind: str
    target: str
    body: Mapping[str, Any]
    tries: int
    """How often it could not be carried out."""


class Carrier(Protocol):
    """Carries out side effects of one kind."""

    async def carry(self, rows: Sequence[Row]) -> Mapping[int, str]:
        """Carry out rows of one target; returns why, by id, for those that could not be.

        An error that it raises is that of all rows. It is interrupted if it takes too long. It may
        be asked again for what it has done: a crash, or an answer that is late, forgets that.
        """
        ...
