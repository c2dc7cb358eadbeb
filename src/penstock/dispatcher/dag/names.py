"""How things in a DAG may be called.

Names of jobs, outputs, datasets and runtimes become parts of keys, table rows and URLs, so they are
plain. An operator may also name a Python callable, as in `my.module:function`.
"""

from __future__ import annotations

import re
from typing import Final

NAME_CHARACTERS_MAX: Final = 64
OPERATOR_CHARACTERS_MAX: Final = 200

_NAME = re.compile(rf"[a-z0-9_-]{{1,{NAME_CHARACTERS_MAX}}}")
_OPERATOR = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9_.:-]{{0,{OPERATOR_CHARACTERS_MAX - 1}}}")


def is_name(text: str) -> bool:
    """Whether a job, an output, a dataset or a runtime may be called so."""
    return _NAME.fullmatch(text) is not None


def is_operator(text: str) -> bool:
    """Whether an operator may be called so."""
    return _OPERATOR.fullmatch(text) is not None
