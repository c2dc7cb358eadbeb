"""From the name of a file to its DAG, or to one sentence that says why there is none.

Whatever is wrong with a file is an `InvalidInput`: what it says is a `DagError`, which has lines,
and everything else is said here. At most `BYTES_MAX` bytes and one are read, so a device or a
pipe that never ends does no harm.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click

from penstock.dispatcher.dag.model import Dag
from penstock.dispatcher.dag.nodes import BYTES_MAX
from penstock.dispatcher.dag.parsing import parse
from penstock.kernel.errors import InvalidInput

FILE: Final = click.Path(readable=False)
"""What a verb's argument is. Only `read_dag` judges it, so that every verb says the same."""


def read_dag(file: str) -> Dag:
    """The DAG in a file; the runtimes that it names are not judged."""
    # A name that is no text in this locale could not be printed.
    where = click.format_filename(file)
    return parse(_decoded(_read(file, where=where), where=where), where)


def _read(file: str, *, where: str) -> bytes:
    try:
        with Path(file).open("rb") as opened:
            body = opened.read(BYTES_MAX + 1)
    except FileNotFoundError as error:
        raise InvalidInput(f"There is no file {where!r}.") from error
    except IsADirectoryError as error:
        raise InvalidInput(f"{where!r} is a folder; name a file in it.") from error
    except OSError as error:
        raise InvalidInput(f"{where!r} cannot be read: {error.strerror or error}.") from error
    if len(body) > BYTES_MAX:
        raise InvalidInput(
            f"{where!r} is larger than {BYTES_MAX:,} bytes; make several DAGs of it."
        )
    return body


def _decoded(body: bytes, *, where: str) -> str:
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as error:
        line = body[: error.start].count(b"\n") + 1
        raise InvalidInput(
            f"{where!r} is not UTF-8, as line {line} shows; save it as UTF-8."
        ) from error
