"""Names that leave Penstock, and that programs of others may hold on to, stay.

`emitted_names.json` has those that were there. What is there no more breaks clients that were
generated from the OpenAPI documents, and rules that look for the name of an error: keep the name,
or say in CHANGELOG.md that it is gone and take it out of the file. New names need no entry.
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

_RECORDED = Path(__file__).with_name("emitted_names.json")


def emitted_names() -> Mapping[str, Collection[str]]:
    """What is emitted now: operations and schemas of the API, and errors by their class."""
    found: list[dict[str, Any]] = [
        document("", (*INTERNAL, *PROBES)),
        document("", (*PUBLIC, *PROBES)),
    ]
    return {
        "operations": {
            operation["operationId"]
            for each in found
            for methods in each["paths"].values()
            for operation in methods.values()
        },
        "schemas": {name for each in found for name in each["components"]["schemas"]},
        "errors": {
            name
            for name, each in vars(errors).items()
            if inspect.isclass(each) and issubclass(each, Exception)
        },
    }


def test_no_emitted_name_is_lost() -> None:
    recorded = json.loads(_RECORDED.read_text("utf-8"))
    now = emitted_names()
    lost = {kind: sorted(set(names) - set(now[kind])) for kind, names in recorded.items()}
    assert lost == {"operations": [], "schemas": [], "errors": []}
