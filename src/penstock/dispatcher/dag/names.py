"""How things in a DAG may be called.

Names of jobs, outputs, datasets and runtimes become parts of keys, table rows and URLs, so they are
plain. An operator may also name a Python callable, as in `my.module:function`.

Tasks wait, are claimed, counted and limited by operator and queue: `in_queue` is the name of both,
which is the operator's own in the default queue. See decision 0029.
"""

from __future__ import annotations

import re
from typing import Final

from penstock.runtimes import DEFAULT_QUEUE

NAME_CHARACTERS_MAX: Final = 64
OPERATOR_CHARACTERS_MAX: Final = 200
_QUEUE_SIGN: Final = "@"

_NAME = re.compile(rf"[a-z0-9_-]{{1,{NAME_CHARACTERS_MAX}}}")
_OPERATOR = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9_.:-]{{0,{OPERATOR_CHARACTERS_MAX - 1}}}")


def is_name(text: str) -> bool:
    """Whether a job, an output, a dataset, a runtime or a queue may be called so."""
    return _NAME.fullmatch(text) is not None


def is_operator(text: str) -> bool:
    """Whether an operator may be called so."""
    return _OPERATOR.fullmatch(text) is not None


def in_queue(operator: str, queue: str) -> str:
    """What tasks of an operator wait as in a queue.

    >>> in_queue("jobs:train", "gpu")
    'jobs:train@gpu'
    """
    return operator if queue == DEFAULT_QUEUE else f"{operator}{_QUEUE_SIGN}{queue}"


def queue_of(name: str) -> str:
    """The queue of what `in_queue` has named; no operator has an @ of its own."""
    return name.partition(_QUEUE_SIGN)[2] or DEFAULT_QUEUE
