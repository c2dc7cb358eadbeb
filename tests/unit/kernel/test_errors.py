"""Errors are a sentence for people, fields for programs, and survive being copied."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from collections.abc import Callable

import pytest

from penstock.kernel import errors
from penstock.kernel.errors import (
    AlreadyExists,
    NotFound,
    OutcomeUnknown,
    PenstockError,
    StoreError,
    Superseded,
    Throttled,
    Unavailable,
    VersionConflict,
)

ERRORS = [
    found
    for _, found in inspect.getmembers(errors, inspect.isclass)
    if issubclass(found, PenstockError)
]


def test_the_tree_that_is_drawn_is_the_tree_that_is_there() -> None:
    drawn: dict[str, str] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").split("```")[1].strip().splitlines():
        found = re.fullmatch(r"([│├└─ ]*)(\w+).*", line)
        assert found is not None, line
        depth = len(found[1]) // 4
        path[depth:] = [found[2]]
        drawn[found[2]] = path[depth - 1] if depth else "Exception"
    assert drawn == {kind.__name__: kind.__bases__[0].__name__ for kind in ERRORS}


@pytest.mark.parametrize("kind", ERRORS)
def test_a_message_and_a_hint(kind: type[PenstockError]) -> None:
    error = kind("It broke.", hint="Mend it.")
    assert (str(error), error.message, error.hint) == ("It broke.", "It broke.", "Mend it.")
    assert kind("It broke.").hint == ""


def _pickled(error: Throttled) -> Throttled:
    copied = pickle.loads(pickle.dumps(error))
    assert isinstance(copied, Throttled)
    return copied


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, _pickled])
def test_errors_are_copied_with_their_fields(clone: Callable[[Throttled], Throttled]) -> None:
    error = Throttled("Slow down.", key="a/b", hint="Wait.", retry_after_seconds=7.5)
    copied = clone(error)
    assert copied is not error
    assert vars(copied) == vars(error)
    assert str(copied) == "Slow down."


def test_outcomes_are_told_apart() -> None:
    """What callers act on differently is never caught for something else."""
    outcomes = (NotFound, AlreadyExists, VersionConflict, Throttled, Unavailable, OutcomeUnknown)
    for one in outcomes:
        assert [other for other in outcomes if issubclass(one, other)] == [one]
        assert issubclass(one, StoreError)
    assert issubclass(Superseded, VersionConflict)
