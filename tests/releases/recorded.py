"""The files of a release: what was said over HTTP, and what was stored.

VERSION/wire/NN-WHO-WHAT.json   a request and its answer, in the order of one conversation
VERSION/bucket/KEY              objects, as they were stored
VERSION/bucket.json             when each was written, and its metadata, by key
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A request and its answer. What proves something is not kept, only that it was there."""

    who: str
    """`worker`, `source` or `function`."""
    method: str
    path: str
    protocol: str | None
    """What it said of its release."""
    headers: list[str]
    request: Any
    status: int
    answer: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """An object."""

    key: str
    body: bytes
    modified: float
    metadata: Mapping[str, str]


def releases() -> Sequence[str]:
    """The releases that were recorded, the earliest first."""
    found = [each.name for each in FOLDER.iterdir() if (each / "bucket.json").exists()]
    return sorted(found, key=lambda name: [int(part) for part in name.split(".")])


def exchanges(release: str) -> Sequence[Exchange]:
    """The conversation of a release, in its order."""
    files = sorted((FOLDER / release / "wire").glob("*.json"))
    return [Exchange(**json.loads(each.read_text())) for each in files]


def stored(release: str) -> Sequence[Stored]:
    """The objects of a release."""
    folder = FOLDER / release
    told = json.loads((folder / "bucket.json").read_text())
    return [
        Stored(key=key, body=(folder / "bucket" / key).read_bytes(), **facts)
        for key, facts in told.items()
    ]


def keep_exchanges(release: str, every: Sequence[Exchange]) -> None:
    folder = FOLDER / release / "wire"
    folder.mkdir(parents=True)
    for number, each in enumerate(every, 1):
        what = each.path.rpartition("/")[2]
        text = json.dumps(asdict(each), indent=1, ensure_ascii=False)
        (folder / f"{number:02d}-{each.who}-{what}.json").write_text(f"{text}\n")


def keep_stored(release: str, every: Sequence[Stored]) -> None:
    folder = FOLDER / release
    for each in every:
        path = folder / "bucket" / each.key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(each.body)
    told = {
        each.key: {"modified": each.modified, "metadata": dict(each.metadata)} for each in every
    }
    (folder / "bucket.json").write_text(f"{json.dumps(told, indent=1)}\n")
