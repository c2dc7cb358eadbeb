"""The OpenAPI document of a table of endpoints. Pure.

Types become schemas by `msgspec`, which also decodes by them: what the document says of a field is
what is checked. Every refusal is a `Problem`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Any, Final

import msgspec

from penstock.dispatcher.api.endpoints import PARAMETER, Endpoint, Proof
from penstock.dispatcher.wire.base import TASK_HEADER, WORKER_HEADER, Answer, Ask
from penstock.dispatcher.wire.problem import Problem

Document = dict[str, Any]

_REFERENCE: Final = "#/components/schemas/{name}"
_PHRASES: Final = {
    200: "It is done.",
    207: "Some of it is done: each task has its own answer.",
    400: "The body is not JSON.",
    401: "The caller does not say who it is, or brings no token.",
    403: "The caller is not who it says to be, may not do this, or asks for another site's page.",
    404: "There is nothing of this name or number.",
    408: "The body did not arrive in time.",
    409: "What is there now does not allow it.",
    413: "The body is too large.",
    422: "What was asked makes no sense; `field` says where.",
    503: "Not now; ask again.",
}
_WORKER: Final[Document] = {"worker": [], "workerToken": []}
_TASK: Final[Document] = {"taskToken": []}
# An empty one says that nothing is asked for here: of the API if the dispatcher was given no token,
# and of calls about several tasks because each entry of the body has its own.
_SECURITY: Final[Mapping[Proof, list[Document]]] = {
    Proof.NONE: [],
    Proof.WORKER: [_WORKER],
    Proof.SOURCE: [_WORKER],
    Proof.WORKER_OR_INVOCATION: [_WORKER, _TASK],
    Proof.TASK: [_TASK],
    Proof.EACH_TASK: [_TASK, {}],
    Proof.API_TOKEN: [{"apiToken": []}, {}],
    Proof.LOOKING: [{"apiToken": []}, {"viewerToken": []}, {}],
}
_SCHEMES: Final = {
    "worker": {"type": "apiKey", "in": "header", "name": WORKER_HEADER},
    "workerToken": {"type": "http", "scheme": "bearer"},
    "taskToken": {"type": "apiKey", "in": "header", "name": TASK_HEADER},
    "apiToken": {"type": "http", "scheme": "bearer"},
    "viewerToken": {"type": "http", "scheme": "bearer"},
}


def document(title: str, endpoints: Sequence[Endpoint]) -> Document:
    """The OpenAPI 3.1 document of these endpoints."""
    schemas, components = _schemas(endpoints)
    paths: dict[str, Document] = {}
    for each in endpoints:
        path = PARAMETER.sub(r"{\1}", each.path)
        paths.setdefault(path, {})[each.method.lower()] = _operation(each, schemas, components)
    used = {name for each in endpoints for way in _SECURITY[each.proof] for name in way}
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version("penstock")},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {name: _SCHEMES[name] for name in sorted(used)},
        },
    }


def _schemas(
    endpoints: Iterable[Endpoint],
) -> tuple[Mapping[type, Document], dict[str, Document]]:
    types: dict[type, None] = {Problem: None}
    for each in endpoints:
        found = (each.ask, each.params, each.answer)
        types |= {one: None for one in found if one is not None}
    made, components = msgspec.json.schema_components(types, ref_template=_REFERENCE)
    return dict(zip(types, made, strict=True)), dict(components)


def _operation(
    endpoint: Endpoint, schemas: Mapping[type, Document], components: Mapping[str, Document]
) -> Document:
    successes = (200, 207) if endpoint.is_several else (200,)
    answers: Document = {
        str(status): _response(status, endpoint.answer, schemas) for status in successes
    }
    for status in sorted(_problems(endpoint)):
        content = {"application/problem+json": {"schema": schemas[Problem]}}
        answers[str(status)] = {"description": _PHRASES[status], "content": content}
    found: Document = {
        "operationId": endpoint.handler.__name__,
        "summary": endpoint.summary,
        "responses": answers,
    }
    if endpoint.ask is not None:
        found["requestBody"] = {
            "required": not endpoint.may_omit_body,
            "content": {"application/json": {"schema": schemas[endpoint.ask]}},
        }
    if endpoint.params is not None:
        found["parameters"] = _parameters(endpoint, endpoint.params, components)
    if security := _SECURITY[endpoint.proof]:
        found["security"] = security
    return found


def _problems(endpoint: Endpoint) -> set[int]:
    found = {*endpoint.problems, 503}
    if endpoint.is_probe:
        found = set(endpoint.problems)
    if endpoint.ask is not None:
        found |= {400, 408, 413, 422}
    if endpoint.params is not None:
        found.add(422)
    if endpoint.proof is not Proof.NONE:
        found |= {401, 403}
    return found


def _response(status: int, kind: type[Answer] | None, schemas: Mapping[type, Document]) -> Document:
    described: Document = {"description": _PHRASES[status]}
    if kind is None:
        described["content"] = {"text/plain": {"schema": {"type": "string"}}}
    else:
        described["content"] = {"application/json": {"schema": schemas[kind]}}
    return described


def _parameters(
    endpoint: Endpoint, kind: type[Ask], components: Mapping[str, Document]
) -> list[Document]:
    in_path = {name for name, _ in PARAMETER.findall(endpoint.path)}
    schema = components[kind.__name__]
    return [
        {
            "name": name,
            "in": "path" if name in in_path else "query",
            "required": name in in_path,
            "schema": _without_null(described),
        }
        for name, described in schema["properties"].items()
    ]


def _without_null(schema: Document) -> Document:
    """A parameter is there or not; it cannot be null."""
    choices = [each for each in schema.get("anyOf", ()) if each != {"type": "null"}]
    if len(choices) != 1:
        return schema
    rest = {key: value for key, value in schema.items() if key not in ("anyOf", "default")}
    return {**rest, **choices[0]}
