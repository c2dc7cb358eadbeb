"""What a transform is given besides its inputs.

    def clean(inputs, context):
        flights = inputs["flights"]
        return flights.where(flights.day == context.partition_key)

`inputs` has a DataFrame for each input. One of which nothing is published for this partition is not
`in` it, and asking for it fails the task with a sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql import DataFrame

from penstock.runtimes.secrets import Secrets


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """A partition that a transform is called for."""

    key: str
    start: int | None = None
    end: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """A task, as a transform sees it."""

    session: Any
    """The session of this task alone. What a transform makes in it is gone after the task."""
    task_id: int
    attempt: int
    job: str
    generation: str
    partition_key: str | None = None
    """None as well while one plan is made for many partitions (`partition_wise`)."""
    partitions: tuple[Partition, ...] = ()
    """All partitions that this call is for: its own, or with `partition_wise` one or more."""
    start: int | None = None
    end: int | None = None
    cursor: int | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """What the job's config says under `parameters`."""
    payload: Mapping[str, Any] = field(default_factory=dict)
    """What came with the event."""
    outputs: tuple[str, ...] = ()
    scratch: str = ""
    """A location that only this attempt writes to, and that is swept after it."""
    secrets: Mapping[str, str] = field(default_factory=Secrets)
    """The values of the job's `secrets`, by name. Use them here, in the driver: what is put into a
    DataFrame or a query is part of its plan, which Spark shows and logs."""


class Inputs(Mapping[str, DataFrame]):
    """The inputs as DataFrames, each made when it is asked for."""

    def __init__(
        self, there: Mapping[str, Callable[[], DataFrame]], refuse: Callable[[str], Exception]
    ) -> None:
        self._there = there
        self._refuse = refuse
        self._made: dict[str, DataFrame] = {}

    def __getitem__(self, name: str) -> DataFrame:
        if name not in self._there:
            raise self._refuse(name)
        if name not in self._made:
            self._made[name] = self._there[name]()
        return self._made[name]

    def get(self, name: str, default: Any = None) -> Any:
        """The input, or the default if nothing is published of it."""
        return self[name] if name in self._there else default

    def __contains__(self, name: object) -> bool:
        return name in self._there

    def __iter__(self) -> Iterator[str]:
        return iter(self._there)

    def __len__(self) -> int:
        return len(self._there)
