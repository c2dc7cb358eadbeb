"""The filter of an edge in the form that the router's statement decides by. Pure.

A filter is stored as its comparisons, which are data, and a path over their results, which is made
of numbers only: `{"terms": [{"field", "operation", "value"}, …], "path": "$c1 == true && …"}`. The
statement judges every comparison by itself and then the path. So nothing that a user has
written becomes part of a statement or of a path; a glob becomes the pattern of a LIKE. Called by
deployment, which stores filters; `dag.filters.accepts` says the same in Python.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.dispatcher.dag.filters import Comparison, Either, Every, Operation, Where


def stored_filter(where: Where) -> Mapping[str, Any]:
    """What is stored of a filter."""
    terms: list[Mapping[str, Any]] = []
    path = _path(where, terms)
    return {"terms": terms, "path": path}


def _path(where: Where, terms: list[Mapping[str, Any]]) -> str:
    match where:
        case Comparison(field, operation, value):
            is_glob = operation in (Operation.GLOB, Operation.NOT_GLOB)
            stored = _like(str(value)) if is_glob else value
            terms.append({"field": field, "operation": operation.value, "value": stored})
            # Numbered from 1, as the statement counts them.
            return f"$c{len(terms)} == true"
        case Every(parts):
            return " && ".join(f"({_path(part, terms)})" for part in parts)
        case Either(parts):
            return " || ".join(f"({_path(part, terms)})" for part in parts)


def _like(glob: str) -> str:
    escaped = glob.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    return escaped.replace("*", "%").replace("?", "_")
