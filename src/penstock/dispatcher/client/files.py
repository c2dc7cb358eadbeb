"""From the name of a file to its text, or to one sentence that says why there is none.

At most so many bytes and one are read, so a device or a pipe that never ends does no harm. Called
by `sending` and `named`, and by the verbs of `penstock dag`.
"""

from __future__ import annotations

import os
from pathlib import Path

from penstock.kernel.errors import InvalidInput


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
