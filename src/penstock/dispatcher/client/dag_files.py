"""The text of a DAG as it is sent: read from a file or given as YAML, with the files that it names.

A DAG is a file by its name, or a text, which has no folder and so no files. Files are read from
the DAG's folder and what is below it, wherever links lead; what cannot be read is reported with
the line that names it, by parsing the DAG with the errors of its files. At most so many bytes and
one are read, so a device or a pipe that never ends does no harm. What needs PyYAML is imported
only for a DAG that names files. Called by `Client` and by the verbs of `penstock dag`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.kernel.errors import InvalidInput

if TYPE_CHECKING:
    from penstock.dispatcher.dag.files import Files, Unread

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
        files = _checked_files(text, Path(source).parent, where=name)
    except ModuleNotFoundError as error:
        if error.name != "yaml":
            raise
        raise InvalidInput(
            "Reading a DAG that names files needs PyYAML, which is not installed.",
            hint="Install it with: pip install 'penstock[dispatcher]'",
        ) from error
    return DagSource(text, name, files)


def named_files(text: str, folder: Path) -> Files:
    """What the files say that a DAG in this folder names, or why they could not be read."""
    from penstock.dispatcher.dag.files import Unread, references  # noqa: PLC0415 - needs PyYAML
    from penstock.dispatcher.dag.yaml_reader import BYTES_MAX  # noqa: PLC0415 - needs PyYAML

    found: dict[str, str | Unread] = {}
    left = BYTES_MAX
    for name in references(text):
        try:
            said = _read_named(name, folder)
        except InvalidInput as error:
            found[name] = Unread(error.message)
            continue
        left -= len(said.encode())
        too_much = f"The files of the DAG have more than {BYTES_MAX:,} bytes; make several DAGs."
        found[name] = said if left >= 0 else Unread(too_much)
    return found


def _checked_files(text: str, folder: Path, *, where: str) -> Mapping[str, str]:
    """What the files say; a `DagError` if one that is needed cannot be read."""
    from penstock.dispatcher.dag.parser import parse  # noqa: PLC0415 - needs PyYAML

    found = named_files(text, folder)
    read = {name: each for name, each in found.items() if isinstance(each, str)}
    if len(read) < len(found):
        # It fails, with all that is wrong, unless the DAG has the text of the file itself.
        parse(text, where, files=found)
    return read


def _read_named(name: str, folder: Path) -> str:
    from penstock.dispatcher.dag.files import (  # noqa: PLC0415 - needs PyYAML
        FILE_BYTES_MAX,
        OUTSIDE,
        too_large,
    )

    try:
        place = (folder / name).resolve()
        is_inside = place.is_relative_to(folder.resolve())
        is_there, is_special = place.exists(), not place.is_file() and not place.is_dir()
    except (OSError, RuntimeError, ValueError) as error:
        raise InvalidInput(f"{name!r} is not the name of a file.") from error
    if not is_inside:
        raise InvalidInput(f"{name!r} {OUTSIDE}.")
    if not is_there:
        raise InvalidInput(f"There is no file {name!r} in the folder of the DAG.")
    if is_special:
        raise InvalidInput(f"{name!r} is a device or a pipe; name a file.")
    return read_text(place, where=name, bytes_max=FILE_BYTES_MAX, too_large=too_large(name))


def read_text(
    file: str | os.PathLike[str], *, where: str, bytes_max: int, too_large: str = ""
) -> str:
    """The text of a file, which errors call `where`; `too_large` is said if it is."""
    body = _read(file, where=where, bytes_max=bytes_max)
    if len(body) > bytes_max:
        raise InvalidInput(
            too_large or f"{where!r} is larger than {bytes_max:,} bytes; make several DAGs of it."
        )
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as error:
        line = body[: error.start].count(b"\n") + 1
        raise InvalidInput(
            f"{where!r} is not UTF-8, as line {line} shows; save it as UTF-8."
        ) from error


def _read(file: str | os.PathLike[str], *, where: str, bytes_max: int) -> bytes:
    try:
        with Path(file).open("rb") as opened:
            return opened.read(bytes_max + 1)
    except FileNotFoundError as error:
        raise InvalidInput(f"There is no file {where!r}.") from error
    except IsADirectoryError as error:
        raise InvalidInput(f"{where!r} is a folder; name a file in it.") from error
    except OSError as error:
        raise InvalidInput(f"{where!r} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise InvalidInput(f"{where!r} is not the name of a file.") from error
