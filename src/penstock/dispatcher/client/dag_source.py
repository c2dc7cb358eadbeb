"""The text of a DAG as it is sent: read from a file or given as YAML, with the files that it names.

A DAG is a file by its name, or a text, which has no folder and so no files. `dag_files` is
loaded only for a DAG that names files, since it needs PyYAML. Called by `Client`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Final

from penstock.dispatcher.client.files import read_text
from penstock.kernel.errors import InvalidInput

SOURCE_BYTES_MAX: Final = 2_000_000
"""What fits into a request; the dispatcher may allow less, and says so."""
_FIELD: Final = "sql_file"


@dataclass(frozen=True, slots=True)
class DagSource:
    """A DAG as it is sent: its text, what to call it, and the files that it names."""

    text: str
    where: str
    files: Mapping[str, str] = field(default_factory=dict)


def dag_source(source: str | os.PathLike[str], where: str | None) -> DagSource:
    """A DAG: a file by its name, or YAML of several lines."""
    if isinstance(source, str) and "\n" in source:
        return DagSource(source, where or "dag.yaml")
    name = where or str(Path(source))
    text = read_text(source, where=name, bytes_max=SOURCE_BYTES_MAX)
    if _FIELD not in text:
        # To find files that are named needs PyYAML, which not every client has.
        return DagSource(text, name)
    try:
        named = import_module("penstock.dispatcher.client.dag_files")
    except ModuleNotFoundError as error:
        if error.name != "yaml":
            raise
        raise InvalidInput(
            "Reading a DAG that names files needs PyYAML, which is not installed.",
            hint="Install it with: pip install 'penstock[dispatcher]'",
        ) from error
    return DagSource(text, name, named.checked_files(text, Path(source).parent, where=name))
