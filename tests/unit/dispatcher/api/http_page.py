"""docs/http.md: its tables, made of the endpoints and of the OpenAPI documents that they serve.

What stands before these is written by hand. `python -m tests.unit.dispatcher.api.http_page` makes
the rest anew; a test compares.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from penstock.dispatcher.api.endpoints import PARAMETER, ApiEndpoint, RequiredProof, document
from penstock.dispatcher.api.routes import INTERNAL, PROBES, PUBLIC
from tests.architecture.source import ROOT

Schema = Mapping[str, Any]

PAGE: Final = ROOT / "docs" / "http.md"
_MADE: Final = "## The public listener\n"
_PROOFS: Final = {
    RequiredProof.NONE: "none",
    RequiredProof.WORKER: "worker",
    RequiredProof.SOURCE: "worker or webhook",
    RequiredProof.WORKER_OR_INVOCATION: "worker or invocation",
    RequiredProof.TASK: "task",
    RequiredProof.EACH_TASK: "task",
    RequiredProof.API_TOKEN: "API token",
    RequiredProof.LOOKING: "API or viewer token",
    RequiredProof.READING: "API, viewer or read token",
    RequiredProof.QUERY: "task or query",
    RequiredProof.QUERY_END: "task or query",
}
_NAMED: Final = "#/components/schemas/"


def page() -> str:
    """The whole page, with the beginning that it has."""
    return PAGE.read_text("utf-8").partition(_MADE)[0] + made()


def made() -> str:
    """What is made of the page."""
    public, internal = (*PUBLIC, *PROBES), (*INTERNAL, *PROBES)
    parts = [
        _MADE,
        *_table(public, document("public", public)),
        "\n## The internal listener\n",
        *_table(internal, document("internal", internal)),
        "\n## Bodies\n",
        "A field with a star is needed. What fields hold further is in the OpenAPI documents.\n",
        *_bodies((*PUBLIC, *INTERNAL)),
    ]
    return "\n".join(parts) + "\n"


def _table(endpoints: Sequence[ApiEndpoint], described: Schema) -> Iterator[str]:
    yield "| call | what it does | proof | asks | answers | refuses also |"
    yield "|---|---|---|---|---|---|"
    for each in sorted(endpoints, key=lambda each: (each.path, each.method)):
        path = PARAMETER.sub(r"{\1}", each.path)
        operation = described["paths"][path][each.method.lower()]
        asked = [f"`?{one['name']}`" for one in operation.get("parameters", ()) if _in_query(one)]
        if each.ask is not None:
            asked.append(f"`{each.ask.__name__}`" + (" or nothing" if each.may_omit_body else ""))
        answer = f"`{each.answer.__name__}`" if each.answer is not None else "text"
        cells = (
            f"`{each.method} {path}`",
            each.summary,
            _PROOFS[each.proof],
            ", ".join(asked),
            answer,
            ", ".join(str(status) for status in sorted(each.problems)),
        )
        yield f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |")


def _in_query(parameter: Schema) -> bool:
    return bool(parameter["in"] == "query")


def _bodies(endpoints: Sequence[ApiEndpoint]) -> Iterator[str]:
    schemas = document("all", endpoints)["components"]["schemas"]
    names = sorted({each.ask.__name__ for each in endpoints if each.ask is not None})
    yield "| body | fields |"
    yield "|---|---|"
    for name in names:
        schema = schemas[name]
        # A body that is one of several forms has none of its own.
        needed = set(schema.get("required", ()))
        told = [
            f"`{field}`{'*' if field in needed else ''} {_form(of)}"
            for field, of in schema.get("properties", {}).items()
        ]
        yield f"| `{name}` | {', '.join(told)} |"


def _form(schema: Schema) -> str:
    """What a field holds, in a word or two."""
    if "$ref" in schema:
        return f"({schema['$ref'].removeprefix(_NAMED)})"
    if "enum" in schema:
        return "(" + " or ".join(f"`{each}`" for each in schema["enum"]) + ")"
    if "anyOf" in schema:
        forms = [_form(each) for each in schema["anyOf"] if each.get("type") != "null"]
        return " or ".join(dict.fromkeys(forms))
    match schema.get("type"):
        case "array":
            inner = _form(schema.get("items", {})).strip("()")
            return f"(list of {inner})" if inner else "(list)"
        case "string":
            return "(text)"
        case "integer":
            return "(whole number)"
        case "number":
            return "(number)"
        case "boolean":
            return "(true or false)"
        case "object":
            return "(object)"
    return ""


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
