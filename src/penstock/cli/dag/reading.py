"""From the name of a file to its DAG, or to one sentence that says why there is none.

Whatever is wrong with a file is an `InvalidInput`: what it says is a `DagError`, which has lines,
and everything else is said by `penstock.dispatcher.client.files`. The files that a DAG names are
read with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click

from penstock.dispatcher.client.files import read_text
from penstock.dispatcher.client.named import named_files
from penstock.dispatcher.dag.errors import DagError, Problem
from penstock.dispatcher.dag.functions import missing_functions
from penstock.dispatcher.dag.model import Dag
from penstock.dispatcher.dag.nodes import BYTES_MAX
from penstock.dispatcher.dag.parsing import parse
from penstock.dispatcher.dag.runtimes import Runtimes

FILE: Final = click.Path(readable=False)
"""What a verb's argument is. Only `read_dag` judges it, so that every verb says the same."""


def read_dag(file: str, *, runtimes: Runtimes | None = None) -> Dag:
    """The DAG in a file. Without `runtimes`, those that it names are not judged."""
    return _read(file, runtimes)[0]


def judge_dag(file: str, *, runtimes: Runtimes) -> tuple[Dag, Sequence[Problem]]:
    """The DAG in a file, and what workers will need that is not found here.

    A function that is not in the file where it should be is a `DagError` as anything else is.
    """
    dag, text, where = _read(file, runtimes)
    missing = missing_functions(text, dag, (Path(file).parent, Path.cwd()))
    if missing.functions:
        raise DagError(missing.functions, where=where)
    return dag, missing.modules


def _read(file: str, runtimes: Runtimes | None) -> tuple[Dag, str, str]:
    # A name that is no text in this locale could not be printed.
    where = click.format_filename(file)
    text = read_text(file, where=where, bytes_max=BYTES_MAX)
    files = named_files(text, Path(file).parent)
    return parse(text, where, runtimes=runtimes, files=files), text, where
