"""The names of everything that datasets are made of, in a bucket or a folder alike.

    datasets/{dataset}/current.json                                       the current generation
    datasets/{dataset}/{generation}/{partition}/current.json              what is published of it
    datasets/{dataset}/{generation}/{partition}/{attempt}/manifest.json   what an attempt has made
    datasets/{dataset}/{generation}/{partition}/{attempt}/part-*.parquet
    datasets/{dataset}/{generation}/{partition}/{attempt}/_manifest.json  of a function's own files
    datasets/{dataset}/{generation}/{partition}/{attempt}/_deleted/…      keys of deleted rows
    datasets/{dataset}/{generation}/~many/{attempt}/{partition}/…         of one of many partitions
    datasets/{dataset}/{generation}/~many/{attempt}/~merge-2/{partition}/…  the same, merged again
    scratch/{attempt}/…                                                   what it needed on the way
    buffers/{dataset}/{attempt}/…                  batches that it has published into a buffered one

Keys are relative to the root of the store. An attempt is `{task}-{attempt}-{digest}`: the numbers
tell a sweeper whose folder it is. The digest is one of the attempt's lease token, which is random:
it keeps what a zombie of an earlier life of the database might still write away from where a later
attempt writes, and whoever knows the fence knows the folder, so nothing has to be stored for it.

An attempt whose output has `partition_by` finds its partitions while it runs, so it is given one
folder for all of them, and each is a folder below that, with a manifest of its own. The place of
such a publication is that inner folder: each departs, and is swept, by itself.

Names and keys of partitions are any text, so they are written with letters, digits, `_`, `-`, `=`
and single dots, and every other byte as `~` and two hexadecimal digits. Two texts never share a
name; one that is too long for the name of a file is cut and has a digest instead. Names are the
same in a URL, in a bucket and in a folder.

What users call their files may be anything. In a `file://` location it is escaped, and here alone
one is made of the other: `path_of` decodes a location once, and refuses what would lead elsewhere;
`location_below` writes a name that was listed so that it means that file and no other. Pure; used
by workers, by the relay and by the sweeper.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote

from penstock.kernel.errors import InvalidInput

DATASETS: Final = "datasets/"
"""The prefix of all datasets."""
SCRATCH: Final = "scratch/"
"""The prefix of what attempts do not publish."""
BUFFERS: Final = "buffers/"
"""The prefix of batches of rows that were published into buffered datasets."""
MANIFEST: Final = "manifest.json"
HIDDEN_MANIFEST: Final = "_manifest.json"
"""Of what users' own code has written. Readers of whole folders, such as those of pyarrow, pandas
and Spark, pass over such a name; and the other one may be that of a file of theirs."""
DELETED: Final = "_deleted"
"""The folder of the keys of deleted rows, below that of what was merged: readers pass over it."""
CURRENT: Final = "current.json"
WHOLE: Final = "~all"
"""Stands where there is no partition. No key is written so: what follows a `~` is upper case."""
MANY: Final = "~many"
"""Stands where an attempt finds its partitions by itself. No key is written so, either."""
AGAIN: Final = "~merge-"
"""With a number, stands before the partitions of such an attempt that had to merge again."""

_FILE: Final = "file://"
_PLAIN: Final = re.compile(rb"[A-Za-z0-9_=-]")
_CHARACTERS_MAX: Final = 150
_KEPT: Final = 100
_DIGEST_CHARACTERS: Final = 24
_MANY_AT: Final = 2
_PLAIN_PARTS: Final = 4
_ATTEMPT: Final = re.compile(
    rf"([1-9][0-9]{{0,18}})-([1-9][0-9]{{0,9}})-[0-9a-z]{{{_DIGEST_CHARACTERS}}}"
)
# As in the function `penstock_place` of 0016_many_partitions.sql. The form of the attempt's name is
# part of it: a root may itself have a folder that is called `datasets`, and so may be a dataset.
_NAMED: Final = rf"[0-9]+-[0-9]+-[0-9a-z]{{{_DIGEST_CHARACTERS}}}"
_PLACE: Final = re.compile(
    rf"/datasets/([^/]+/[^/]+/(?:{MANY}/{_NAMED}/(?:{AGAIN}[0-9]+/)?[^/]+|[^/]+/{_NAMED}))(?:/|\Z)"
)
# Of what stands in our names, what some who write URLs escape: `Path.as_uri` the one, others the
# other. It means the same.
_ESCAPED: Final = re.compile("%3[Dd]|%7[Ee]")


@dataclass(frozen=True, slots=True)
class AttemptOf:
    """Whose folder it is."""

    task_id: int
    attempt: int


@lru_cache(maxsize=4096)
def part(text: str) -> str:
    """A text as one part of a path, different for different texts."""
    data = text.encode("utf-8", "surrogatepass")
    written = "".join(
        chr(byte) if _is_plain(data, place) else f"~{byte:02X}" for place, byte in enumerate(data)
    )
    if len(written) <= _CHARACTERS_MAX:
        return written
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{written[:_KEPT]}~~{digest[:32]}"


def partition_part(partition_key: str | None) -> str:
    """A partition as one part of a path; None and the empty text are the whole dataset."""
    return part(partition_key) if partition_key else WHOLE


def attempt_name(*, task_id: int, attempt: int, lease_token: str) -> str:
    """The name of an attempt's folders, which no other attempt has. It gives no token away."""
    digest = hashlib.sha256(b"penstock attempt\x00" + lease_token.encode()).hexdigest()
    return f"{task_id}-{attempt}-{digest[:_DIGEST_CHARACTERS]}"


def attempt_of(name: str) -> AttemptOf | None:
    """Which attempt a folder of this name is of; None for a name that is not ours."""
    found = _ATTEMPT.fullmatch(name)
    return None if found is None else AttemptOf(int(found[1]), int(found[2]))


def attempt_prefix(
    dataset: str, *, generation: str, partition_key: str | None, attempt: str
) -> str:
    """The key of an attempt's folder, without a slash at its end."""
    folders = (part(dataset), part(generation), partition_part(partition_key), attempt)
    return DATASETS + "/".join(folders)


def many_prefix(dataset: str, *, generation: str, attempt: str) -> str:
    """The key of the folder of an attempt that finds its partitions itself, without a slash."""
    return DATASETS + "/".join((part(dataset), part(generation), MANY, attempt))


def attempt_of_place(place: str) -> AttemptOf | None:
    """Which attempt a place is of, as `place_of` has it, or the name of a scratch folder."""
    parts = place.split("/")
    is_many = len(parts) > _PLAIN_PARTS and parts[_MANY_AT] == MANY
    return attempt_of(parts[_MANY_AT + 1] if is_many else parts[-1])


def scratch_prefix(attempt: str) -> str:
    """The key of an attempt's scratch folder, without a slash at its end."""
    return SCRATCH + attempt


def buffer_prefix(dataset: str, *, attempt: str) -> str:
    """The key of the folder of an attempt's batches for a buffered dataset, without a slash."""
    return f"{BUFFERS}{part(dataset)}/{attempt}"


def place_of_key(key: str) -> str | None:
    """The place, as the sweeper names it, of a key in a folder of an attempt; None for others."""
    first, _, rest = key.partition("/")
    parts = rest.split("/")
    depth = {SCRATCH: 1, BUFFERS: 2}.get(f"{first}/")
    if depth is None:
        return place_of(f"/{key}")
    is_ours = len(parts) > depth and attempt_of(parts[depth - 1]) is not None
    return "/".join(parts[:depth]) if is_ours else None


def partition_current_key(dataset: str, *, generation: str, partition_key: str | None) -> str:
    """The key of what readers without Postgres are told of a partition."""
    return f"{DATASETS}{part(dataset)}/{part(generation)}/{partition_part(partition_key)}/{CURRENT}"


def dataset_current_key(dataset: str) -> str:
    """The key of what readers without Postgres are told of a dataset."""
    return f"{DATASETS}{part(dataset)}/{CURRENT}"


def place_of(location: str) -> str | None:
    """`dataset/generation/partition/attempt` of a location, however it is spelt.

    Of one of many partitions it is `dataset/generation/~many/attempt/partition`, or the same with
    `~merge-2` before the partition.

    None for a location that is not below the folder of an attempt.
    """
    plain = _ESCAPED.sub(lambda found: "=" if found[0][1] == "3" else "~", location)
    found = _PLACE.search(plain)
    return None if found is None else found[1]


def path_of(location: str) -> Path:
    """The path of a `file://` location."""
    rest = location.removeprefix(_FILE)
    if rest == location or not rest.startswith("/"):
        raise InvalidInput(
            f"{location!r} is not a file of this machine; read and write it by its location."
        )
    # As `os.fsdecode` does it: names that are no UTF-8 are there and back the same.
    path = unquote(rest, errors="surrogateescape")
    is_elsewhere = path.count("/") != rest.count("/") or {".", ".."} & set(path.split("/"))
    if is_elsewhere or "\0" in path or "?" in rest or "#" in rest:
        raise InvalidInput(
            f"{location!r} is no location of a file: it has a '?', a '#', a '..', or something that"
            " may not be escaped.",
            hint="Write what is special in a name as % and two hexadecimal digits.",
        )
    return Path(path)


def location_below(location: str, name: str) -> str:
    """The location of a file that was listed by this name below a location."""
    base = location.rstrip("/")
    if not base.startswith(_FILE):
        return f"{base}/{name}"
    return f"{base}/{quote(name, safe='/=', errors='surrogateescape')}"


def root_characters(path: str) -> int | None:
    """How many characters of a path are the root of its store; None if it lies in no attempt's."""
    found = _PLACE.search(path)
    return None if found is None else found.start()


def _is_plain(data: bytes, place: int) -> bool:
    if data[place] == ord("."):
        # One that leads would make a hidden file, or the folder above; and no grant has two in a
        # row, wherever they stand (`penstock.tokens.scopes`).
        return place > 0 and data[place - 1] != ord(".")
    return _PLAIN.fullmatch(data[place : place + 1]) is not None
