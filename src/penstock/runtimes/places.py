"""Where an attempt writes, and where what it prints is kept: names only, nothing is made here.

    {root}/datasets/{dataset}/{generation}/{partition}/{attempt}
    {root}/datasets/{dataset}/{generation}/~many/{attempt}   for an output with `partition_by`
    {root}/scratch/{attempt}
    {logs}/{task}-{attempt}.log

The names are those of `penstock.datasets.layout`; an attempt's is made by its `attempt_name`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from penstock.datasets.layout import attempt_prefix, many_prefix, scratch_prefix
from penstock.kernel.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Places:
    """The roots below which an attempt writes: the dispatcher's, and its worker's for logs."""

    root: str
    """A URL: file:///FOLDER or s3://BUCKET/PREFIX."""
    logs: Path | None = None

    def __post_init__(self) -> None:
        parsed = urlsplit(self.root)
        is_file = parsed.scheme == "file" and parsed.path.startswith("/")
        if not is_file and not (parsed.scheme == "s3" and parsed.netloc):
            raise InvalidInput(
                f"{self.root!r} is no place for outputs.",
                hint="Write it as file:///FOLDER or s3://BUCKET/PREFIX.",
            )
        if parsed.query or parsed.fragment:
            raise InvalidInput(
                f"{self.root!r} has a query.", hint="Give the place for outputs without one."
            )

    def output(
        self, dataset: str, *, generation: str, payload: Mapping[str, Any], attempt_id: str
    ) -> str:
        """Where an attempt may write this output."""
        key = payload.get("partition_key")
        prefix = attempt_prefix(
            dataset,
            generation=generation,
            partition_key=key if isinstance(key, str) else None,
            attempt=attempt_id,
        )
        return f"{self.root.rstrip('/')}/{prefix}"

    def many(self, dataset: str, *, generation: str, attempt_id: str) -> str:
        """Where an attempt may write the partitions of this output that it finds by itself."""
        prefix = many_prefix(dataset, generation=generation, attempt=attempt_id)
        return f"{self.root.rstrip('/')}/{prefix}"

    def scratch(self, attempt_id: str) -> str:
        """Where an attempt may write what is not to be published."""
        return f"{self.root.rstrip('/')}/{scratch_prefix(attempt_id)}"

    def log(self, *, task_id: int, attempt: int) -> str:
        """The file for what an attempt prints; empty if nothing is kept."""
        return "" if self.logs is None else str(self.logs / f"{task_id}-{attempt}.log")
