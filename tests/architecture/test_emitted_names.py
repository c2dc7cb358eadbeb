"""Names that leave Penstock, and that programs of others may hold on to, stay.

`emitted_names.json` has those that were there: of the OpenAPI documents which path has which
operation, and the schemas; errors by their class; what spans and figures of a queue say an attempt
has come to. What is there no more breaks clients that were generated, and rules that look for a
name: keep it, or say in CHANGELOG.md that it is gone and take it out of the file. New names need no
entry.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from penstock.dispatcher.api.endpoints import document
from penstock.dispatcher.api.routes import INTERNAL, PROBES, PUBLIC
from penstock.kernel import errors
from penstock.queue import tracing
from penstock.queue.execution import observer

_RECORDED = Path(__file__).with_name("emitted_names.json")


def emitted_names() -> Mapping[str, Collection[str]]:
    """What is emitted now."""
    found: list[dict[str, Any]] = [
        document("", (*INTERNAL, *PROBES)),
        document("", (*PUBLIC, *PROBES)),
    ]
    return {
        "operations": {
            f"{method.upper()} {path} {operation['operationId']}"
            for each in found
            for path, methods in each["paths"].items()
            for method, operation in methods.items()
        },
        "schemas": {name for each in found for name in each["components"]["schemas"]},
        "errors": {
            name
            for name, each in vars(errors).items()
            if inspect.isclass(each) and issubclass(each, Exception)
        },
        "span outcomes": _words_of(tracing._OUTCOMES),
        "figure outcomes": _words_of(observer._ENDINGS),
    }


def _words_of(outcomes: Mapping[type, str]) -> set[str]:
    """The outcomes of attempts, each with the words for it: two of them may not change places."""
    return {f"{kind.__name__} {word}" for kind, word in outcomes.items()}


def test_no_emitted_name_is_lost() -> None:
    recorded = json.loads(_RECORDED.read_text("utf-8"))
    now = emitted_names()
    lost = {kind: sorted(set(names) - set(now[kind])) for kind, names in recorded.items()}
    assert not any(lost.values()), lost
