"""Whether what an attempt says that it has made lies where it was allowed to write. Pure.

Every output has a location, and the location is the folder that the attempt's token grants for that
dataset, or lies below it. Both are compared as canonical scopes (`penstock.tokens.scopes`), so a
location with `..`, an escape, an empty part or a wildcard is none at all. What is published is the
canonical spelling: all who look for the folder of an attempt in a location, as the sweeper does,
find the one that was judged here. The grants come from the attempt's own token, which is signed by
us: nothing is looked up, and without a token nothing is published. A task may have made ten
thousand partitions, and all others wait while they are judged: what is spelt as we do, below its
folder and plainly, is canonical without being taken apart. Called by `api.working`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import Final

from penstock.dispatcher.wire.work import OutputAsk
from penstock.kernel.errors import InvalidInput
from penstock.tokens.claims import Grants
from penstock.tokens.scopes import PREFIX_BYTES_MAX, Scope, scope_of_location

_SCHEMES: Final = ("s3", "file")
_PART: Final = r"[A-Za-z0-9_=~-](?:[A-Za-z0-9_=~-]|\.(?!\.)){0,254}"
_PLAINLY_BELOW: Final = re.compile(rf"{_PART}(?:/{_PART})*")


def misplaced(outputs: Iterable[OutputAsk], grants: Grants) -> tuple[OutputAsk, str] | None:
    """The first output that lies where it may not, and why it may not; None if there is none."""
    allowed = {each.dataset: each.prefix for each in grants.write}
    for each in outputs:
        if (prefix := allowed.get(each.dataset)) is None:
            return each, f"Dataset {each.dataset} is not an output of this task."
        if not (_is_plain(each.location, prefix) or _lies_in(each.location, prefix)):
            return each, (
                f"An output of dataset {each.dataset} does not lie in the folder of this attempt,"
                f" {prefix}."
            )
    return None


def canonical(location: str, grants: Grants) -> str:
    """The one spelling of a location that is not misplaced, without a slash at its end."""
    if any(_is_plain(location, each.prefix) for each in grants.write):
        return location
    return str(scope_of_location(location)).removesuffix("/")


def _is_plain(location: str, prefix: str) -> bool:
    """Whether a location is a folder below a granted one, and has no other spelling."""
    return (
        location.startswith(prefix)
        and len(location) < PREFIX_BYTES_MAX
        and _PLAINLY_BELOW.fullmatch(location, len(prefix)) is not None
        and _is_canonical(prefix)
    )


@functools.lru_cache(maxsize=1_000)
def _is_canonical(prefix: str) -> bool:
    try:
        return str(Scope.parse(prefix, schemes=_SCHEMES)) == prefix
    except InvalidInput:
        return False


def _lies_in(location: str, prefix: str) -> bool:
    try:
        return Scope.parse(prefix, schemes=_SCHEMES).covers(scope_of_location(location))
    except InvalidInput:
        return False
