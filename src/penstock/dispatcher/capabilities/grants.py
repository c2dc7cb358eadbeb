"""What an attempt may touch, derived from its own task and from nothing else. Pure.

| of a task | is granted |
|---|---|
| an input | to read the folders of the parts that are published of it for the task |
| an input with `read: all` | to read the folder of the generation: that is what the DAG says |
| what was kept in it of an earlier generation | to read the folders of those parts |
| an output | to write the folder of this attempt |
| one with `partition_by` | the same: one folder, for all the partitions that it will find |
| an output that is merged | to read the folder of its partition, and what was kept in that |
| one that is both | to read the folder of its generation: any partition may be one of its own |
| the attempt itself | to read and write its scratch folder |

Deny by default: what cannot be named in the one spelling of `penstock.tokens.scopes`, or does not
lie below the folder of its own dataset in the store, is not granted. Inputs without data (sources
that run nothing, ranges) have nothing to read. A token has room for so much: an input of more than
`FOLDERS_MAX` folders has none of them granted, and if all inputs together are too long to name, the
longest ones are left out until the others have room. What is left out is counted in the grant, so
that whoever needs it can be told why it is missing, and what to do. Outputs come first. A job with
more of them than a token can name is refused when it is applied (`check_outputs`); if its keys are
so long that they do not fit all the same, it may not publish the last ones, for a token that cannot
be signed would keep all others of its operator from being claimed.

Called by `issuing`, in the transaction of a claim, for each attempt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from penstock.datasets.layout import (
    DATASETS,
    attempt_name,
    attempt_prefix,
    many_prefix,
    part,
    scratch_prefix,
)
from penstock.dispatcher.dag.model import DISPATCHER_RUNTIME, Dag
from penstock.dispatcher.tasks.values import Claimed
from penstock.kernel.errors import InvalidInput
from penstock.tokens.claims import Grants, ReadGrant, WriteGrant
from penstock.tokens.scopes import Root, Scope, scope_of_location

FOLDERS_MAX: Final = 32
"""The most folders that are named of one input."""
GRANTS_BYTES_MAX: Final = 9_000
"""Room for the grants of a token, whose text is a third longer and goes into a header."""
WRITES_BYTES_MAX: Final = 11_000
"""Room for outputs, if there is nothing else."""
KEY_CHARACTERS: Final = 32
"""How long a partition's key is taken to be when a job is judged."""
_GENERATION_CHARACTERS: Final = 36
_ATTEMPT_CHARACTERS: Final = 40
_ALL: Final = "all"
_GRANT_BYTES: Final = 130
"""What a grant takes besides its prefixes: two uuids and the names of its fields."""
_QUOTE_BYTES: Final = 3


def grants_of(claimed: Claimed, root: Root) -> Grants:
    """The grants of an attempt whose store is at `root`."""
    folder = attempt_name(
        task_id=claimed.task_id, attempt=claimed.attempt, lease_token=claimed.lease_token
    )
    scratch = str(root.folder(scratch_prefix(folder)))
    write: list[WriteGrant] = []
    taken = len(scratch)
    for each in _writes(claimed, root, folder):
        taken += _GRANT_BYTES + len(each.prefix)
        if taken > WRITES_BYTES_MAX:
            break
        write.append(each)
    reads = [*_merges(claimed, root), *_reads(claimed, root)]
    read = _fitted(reads, room=GRANTS_BYTES_MAX - taken)
    return Grants(read=read, write=tuple(write), scratch=scratch)


def check_outputs(dag: Dag, root: Root) -> None:
    """Raise `InvalidInput` for a job with more outputs than a token can name.

    How long the keys of partitions are is not known here: they are taken to have `KEY_CHARACTERS`.
    """
    for job in dag.jobs:
        if not job.runs or job.runtime == DISPATCHER_RUNTIME:
            continue
        folders = [
            attempt_prefix(
                each.dataset,
                generation="g" * _GENERATION_CHARACTERS,
                partition_key="k" * KEY_CHARACTERS,
                attempt="a" * _ATTEMPT_CHARACTERS,
            )
            for each in job.outputs
        ]
        left = WRITES_BYTES_MAX - len(str(root)) - len(scratch_prefix("a" * _ATTEMPT_CHARACTERS))
        for named, folder in enumerate(folders):
            left -= _GRANT_BYTES + len(str(root)) + len(folder) + 1
            if left < 0:
                raise InvalidInput(
                    f"The job {job.name} has {len(folders)} outputs, and the token of a task has"
                    f" room for the folders of {named} of them.",
                    hint="Make several jobs of it.",
                )


def _writes(claimed: Claimed, root: Root, folder: str) -> Iterator[WriteGrant]:
    uuids = _mapping(claimed.definition.get("datasets"))
    key = claimed.payload.get("partition_key")
    for each in _list(claimed.definition.get("outputs")):
        said = _mapping(each)
        dataset = said.get("dataset", said.get("name"))
        uuid = uuids.get(dataset) if isinstance(dataset, str) else None
        if not isinstance(dataset, str) or not isinstance(uuid, str):
            continue
        prefix = attempt_prefix(
            dataset,
            generation=claimed.generation,
            partition_key=key if isinstance(key, str) else None,
            attempt=folder,
        )
        if said.get("partition_by"):
            prefix = many_prefix(dataset, generation=claimed.generation, attempt=folder)
        # The longest names do not fit into a folder of a bucket: then there is none to write.
        if (scope := _folder(root, prefix)) is not None:
            yield WriteGrant(dataset=uuid, version=claimed.generation, prefix=str(scope))


def _merges(claimed: Claimed, root: Root) -> Iterator[ReadGrant]:
    """What is published of the task's own partitions: it may move while the task runs."""
    if claimed.current is None:
        return
    uuids = _mapping(claimed.definition.get("datasets"))
    key = claimed.payload.get("partition_key")
    for each in _list(claimed.definition.get("outputs")):
        said = _mapping(each)
        dataset = said.get("dataset", said.get("name"))
        uuid = uuids.get(dataset) if isinstance(dataset, str) else None
        if not isinstance(dataset, str) or not isinstance(uuid, str):
            continue
        own = attempt_prefix(
            dataset,
            generation=claimed.generation,
            partition_key=key if isinstance(key, str) else None,
            attempt="",
        )
        if said.get("partition_by"):
            own = f"{DATASETS}{part(dataset)}/{part(claimed.generation)}"
        found = _folder(root, own.rstrip("/"))
        home = _folder(root, DATASETS + part(dataset))
        kept = [one for one in claimed.current.get(dataset, ()) if not _is_below(one, found)]
        prefixes, omitted = _parts(kept, home)
        yield ReadGrant(
            dataset=uuid,
            version=claimed.generation,
            prefixes=(*([] if found is None else [str(found)]), *prefixes),
            omitted=omitted + int(found is None),
        )


def _reads(claimed: Claimed, root: Root) -> Iterator[ReadGrant]:
    whole = set(_whole(claimed.definition))
    for name, given in sorted(claimed.inputs.items()):
        if not given.get("has_data", True):
            continue
        dataset, version = str(given["dataset"]), str(given["generation"])
        home = _folder(root, DATASETS + part(dataset))
        if name in whole:
            found = _folder(root, f"{DATASETS}{part(dataset)}/{part(version)}")
            # What was kept of earlier generations lies in their folders.
            kept = [each for each in _list(given.get("parts")) if not _is_below(each, found)]
            prefixes, omitted = _parts(kept, home)
            prefixes = [*([] if found is None else [str(found)]), *prefixes]
            omitted += int(found is None)
        else:
            prefixes, omitted = _parts(_list(given.get("parts")), home)
        yield ReadGrant(
            dataset=str(given["uuid"]), version=version, prefixes=tuple(prefixes), omitted=omitted
        )


def _whole(definition: Mapping[str, Any]) -> Iterator[str]:
    """The names of the inputs of which everything is read."""
    for each in _list(definition.get("inputs")):
        said = _mapping(each)
        if said.get("read") == _ALL:
            yield str(said.get("as", said.get("from")))


def _parts(parts: Sequence[Any], home: Scope | None) -> tuple[list[str], int]:
    """The folders of parts, each once, and how many could not be granted.

    If there are too many of either kind none is, and the others are not looked at: a claim holds
    locks while this goes on.
    """
    found: dict[str, None] = {}
    omitted = 0
    for each in parts:
        if len(found) > FOLDERS_MAX or omitted > FOLDERS_MAX:
            return [], len(parts)
        scope = _scope(_mapping(each).get("location"))
        # The dataset's own folder holds all generations: it is none of a part.
        if scope is not None and home is not None and home.covers(scope) and scope != home:
            found[str(scope)] = None
        else:
            omitted += 1
    if len(found) > FOLDERS_MAX:
        return [], omitted + len(found)
    return list(found), omitted


def _fitted(reads: list[ReadGrant], *, room: int) -> tuple[ReadGrant, ...]:
    """The grants, the longest of them without folders if there is no room for all."""
    lengths = [sum(len(each) + _QUOTE_BYTES for each in read.prefixes) for read in reads]
    for _ in reads:
        if sum(lengths) + _GRANT_BYTES * len(reads) <= room:
            return tuple(reads)
        longest = lengths.index(max(lengths))
        read = reads[longest]
        omitted = read.omitted + len(read.prefixes)
        reads[longest] = ReadGrant(dataset=read.dataset, version=read.version, omitted=omitted)
        lengths[longest] = 0
    # Now none of them grants anything.
    return tuple(reads[: max(0, room) // _GRANT_BYTES])


def _is_below(given: object, folder: Scope | None) -> bool:
    location = _mapping(given).get("location")
    if folder is None or not isinstance(location, str):
        return False
    # Mostly it is spelt as we do, and there may be thousands.
    scope = None if location.startswith(f"{str(folder).rstrip('/')}/") else _scope(location)
    return scope is None or folder.covers(scope)


def _scope(location: object) -> Scope | None:
    try:
        return scope_of_location(location) if isinstance(location, str) else None
    except InvalidInput:
        return None


def _folder(root: Root, key: str) -> Scope | None:
    try:
        return root.folder(key)
    except InvalidInput:
        return None


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()
