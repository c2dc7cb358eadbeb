"""Where an attempt writes, and where what it prints is kept: names only, nothing is made here.

    {root}/datasets/{dataset}/{generation}/{partition}/{random attempt id}
    {logs}/{task}-{attempt}.log

The id is random and not the attempt's number: what a zombie of an earlier life of the database
might still write can never be where a later attempt writes. Keys of partitions are any text, so
they are written with letters, digits, `_`, `-`, `=` and dots, and every other byte as `~` and two
hexadecimal digits. Two keys never share a name; one that is too long for a name of a file is cut
and has a digest instead. The names are the same in a URL, in a bucket and in a folder.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from penstock.kernel.entropy import Entropy, new_id
from penstock.kernel.errors import InvalidInput

WHOLE: Final = "~all"
"""Stands where a task has no partition. No key is written so: what follows a `~` is upper case."""
_PLAIN: Final = re.compile(rb"[A-Za-z0-9_=-]")
_CHARACTERS_MAX: Final = 150
_KEPT: Final = 100


@dataclass(frozen=True, slots=True)
class Places:
    """The roots below which attempts of this worker write."""

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
        partition = part(key) if isinstance(key, str) and key else WHOLE
        parts = ("datasets", part(dataset), part(generation), partition, attempt_id)
        return "/".join((self.root.rstrip("/"), *parts))

    def log(self, *, task_id: int, attempt: int) -> str:
        """The file for what an attempt prints; empty if nothing is kept."""
        return "" if self.logs is None else str(self.logs / f"{task_id}-{attempt}.log")


def part(text: str) -> str:
    """A text as one part of a path, different for different texts."""
    written = "".join(
        chr(byte) if _is_plain(byte, place) else f"~{byte:02X}"
        for place, byte in enumerate(text.encode("utf-8", "surrogatepass"))
    )
    if len(written) <= _CHARACTERS_MAX:
        return written
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{written[:_KEPT]}~~{digest[:32]}"


def attempt_id(entropy: Entropy) -> str:
    """A name that no other attempt has."""
    return new_id(entropy)


def _is_plain(byte: int, place: int) -> bool:
    # A dot that leads would make a hidden file, or the folder above.
    return _PLAIN.fullmatch(bytes((byte,))) is not None or (byte == ord(".") and place > 0)
