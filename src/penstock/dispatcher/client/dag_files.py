"""Reads the files that a DAG names, from its folder and what is below it, wherever links lead.

What cannot be read is reported with the line that names it, by parsing the DAG with the errors
of its files. Called by `dag_source`, which sends the texts with the DAG, and by `penstock dag`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from penstock.dispatcher.client.files import read_text
from penstock.dispatcher.dag.files import (
    FILE_BYTES_MAX,
    OUTSIDE,
    Files,
    Unread,
    references,
    too_large,
)
from penstock.dispatcher.dag.parser import parse
from penstock.dispatcher.dag.yaml_reader import BYTES_MAX
from penstock.kernel.errors import InvalidInput


def named_files(text: str, folder: Path) -> Files:
    """What the files say that a DAG in this folder names, or why they could not be read."""
    found: dict[str, str | Unread] = {}
    left = BYTES_MAX
    for name in references(text):
        try:
            said = _read(name, folder)
        except InvalidInput as error:
            found[name] = Unread(error.message)
            continue
        left -= len(said.encode())
        too_much = f"The files of the DAG have more than {BYTES_MAX:,} bytes; make several DAGs."
        found[name] = said if left >= 0 else Unread(too_much)
    return found


def checked_files(text: str, folder: Path, *, where: str) -> Mapping[str, str]:
    """What the files say; a `DagError` if one that is needed cannot be read."""
    found = named_files(text, folder)
    if any(isinstance(each, Unread) for each in found.values()):
        # It fails, with all that is wrong, unless the DAG has the text of the file itself.
        parse(text, where, files=found)
    return {name: each for name, each in found.items() if isinstance(each, str)}


def _read(name: str, folder: Path) -> str:
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
