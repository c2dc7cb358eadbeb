"""Endpoints: rows of a table that make the routes and the OpenAPI document.

A handler is given the `ApiContext` and an `ApiCall`, whose body and parameters were decoded and
checked before. It returns an answer (status 200), a `Problem` (its own status), or an
`HttpReply`. It raises only what `problems.problem_of` knows; anything else is a bug and is
answered with 500.

`document` is pure: types become schemas by `msgspec`, which also decodes by them, so what the
document says of a field is what is checked. Every refusal is a `Problem`. The operation's id is
the name of the handler, so handlers keep their names.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from importlib.metadata import version
from typing import Any, Final

import msgspec

from penstock.dispatcher.api.context import ApiContext
from penstock.protocol.base import TASK_HEADER, WORKER_HEADER, Answer, Ask
from penstock.protocol.problem import Problem
from penstock.tokens.claims import Claims

PARAMETER: Final = re.compile(r"\{(\w+)(:path)?\}")
"""A parameter of a path."""


def pattern_of(path: str) -> re.Pattern[str]:
    """What matches the paths of requests whole: the API's, and the console's.

    A parameter `{name}` is one part of a path; `{name:path}` may have slashes.
    """
    pieces: list[str] = []
    after = 0
    for found in PARAMETER.finditer(path):
        pieces.append(re.escape(path[after : found.start()]))
        pieces.append(f"(?P<{found[1]}>{'.+' if found[2] else '[^/]+'})")
        after = found.end()
    return re.compile("".join([*pieces, re.escape(path[after:])]), re.DOTALL)


class RequiredProof(Enum):
    """What a caller has to show before anything else is looked at."""

    NONE = "none"
    """Nothing."""
    WORKER = "worker"
    """Who it is: see `penstock.protocol.identity`."""
    SOURCE = "source"
    """The same, or the token of the process of webhooks: `Call.is_webhook` says so, and the handler
    gives that no more than webhook sources."""
    WORKER_OR_INVOCATION = "worker or invocation"
    """Who it is, or the token that came with the invocation of a function, which is good for its
    own task only: `Call.claims` has it, and the handler compares."""
    TASK = "task"
    """The capability token of an attempt, not expired: `Call.claims` has it, and the handler looks
    whether the attempt is the running one."""
    EACH_TASK = "each task"
    """The capability token of every attempt that the body names, in its entry, also an expired one;
    the handler judges each by `auth.prove_each`, and the database its fence."""
    API_TOKEN = "api token"  # noqa: S105 - the name of a kind of proof
    """The token of the API, if there is one."""
    LOOKING = "looking"
    """The same, or the token of those who may look and nothing else."""
    QUERY = "query"
    """The capability token of an attempt, not expired, or the bearer token of a query of somebody:
    `Call.claims` has either, and its audience says which."""
    QUERY_END = "query end"
    """The same, also an expired one."""
    READING = "reading"
    """As for looking, or a token for reading tables: `Call.tables` has those that it is for."""


@dataclass(slots=True)
class ApiCall:
    """One request, decoded."""

    ask: Any = None
    """The body: of the type that the endpoint says."""
    params: Any = None
    """What stands in the path and the query: of the type that the endpoint says."""
    path: Mapping[str, str] = field(default_factory=dict)
    """The parameters of the path as they stand there; use `params`."""
    worker: str = ""
    """Who calls, if the endpoint wants to know."""
    is_webhook: bool = False
    """Whether it is the process of webhooks, which faces the internet."""
    token: str = field(default="", repr=False)
    """The capability token of the header, as it came; nobody has judged it yet."""
    claims: Claims | None = None
    """What the token of the header says, where the endpoint wants one: it is signed by us."""
    reader: str = ""
    """Who reads tables, if it has shown a token for that."""
    is_viewer: bool = False
    """Whether it has shown the token of viewers."""
    tables: frozenset[str] | None = None
    """The datasets that the caller may read; None is all."""
    is_known: bool = False
    """Whether the caller has shown who it is; others have a few places of their own."""
    is_limited: bool = False
    """Whether it has shown no more than the token of an attempt, or of webhooks: that has places of
    its own too, and takes none of workers."""
    address: str = ""
    """Where the call comes from."""
    what: str = ""
    """The method and path of the endpoint, as the audit names it."""


@dataclass(frozen=True, slots=True)
class HttpReply:
    """An answer with a status of its own, or one that is not JSON."""

    body: Answer | bytes
    status: int = 200
    content_type: bytes = b"application/json"
    headers: tuple[tuple[bytes, bytes], ...] = ()
    """More headers than every answer has."""
    stream: AsyncGenerator[bytes] | None = None
    """What follows `body`, piece by piece; closed when it is sent, or when the caller has left."""


Handler = Callable[[ApiContext, ApiCall], Awaitable[Answer | HttpReply]]


@dataclass(frozen=True, slots=True)
class ApiEndpoint:
    """One method of one path.

    A path has parameters as `{name}`; `{name:path}` is one that may have slashes. Each is a field
    of `params`, whose other fields stand in the query.
    """

    method: str
    path: str
    summary: str
    handler: Handler
    _: KW_ONLY
    answer: type[Answer] | None
    """The type of a success; None is a text."""
    is_several: bool = False
    """Whether a success may be one in part, told one by one: 207."""
    ask: type[Ask] | None = None
    params: type[Ask] | None = None
    problems: tuple[int, ...] = ()
    """Refusals besides those that every endpoint has."""
    proof: RequiredProof = RequiredProof.API_TOKEN
    may_omit_body: bool = False
    """Whether no body is an empty one."""
    body_bytes_max: int | None = None
    """Its own bound on the body; None is the one of all."""
    request_seconds_max: float | None = None
    """Its own bound on time; None is the one of all."""
    is_wait: bool = False
    """Whether it waits for something to happen: it takes no place of those that work, has a bound
    of its own, and is cancelled when its caller leaves."""
    is_stream: bool = False
    """Whether the answer may go on: its place is held until that is sent, and the handler is
    cancelled when its caller leaves."""
    is_probe: bool = False
    """Whether it is asked all the time: not counted against the limit, and not logged."""


Document = dict[str, Any]

_REFERENCE: Final = "#/components/schemas/{name}"
_PHRASES: Final = {
    200: "Success.",
    207: "Partial success: each task has its own result.",
    400: "The body is not JSON.",
    401: "Authentication is missing or invalid.",
    403: "Not allowed for this caller, or a cross-site request.",
    404: "Not found.",
    408: "The body did not arrive in time.",
    409: "Conflict with the current state.",
    413: "The body is too large.",
    422: "Invalid request; `field` says where.",
    429: "Too much is waiting; retry after the seconds of `Retry-After`.",
    503: "Temporarily unavailable; retry.",
}
_WORKER: Final[Document] = {"worker": [], "workerToken": []}
_TASK: Final[Document] = {"taskToken": []}
# An empty one says that nothing is asked for here: of the API if the dispatcher was given no token,
# and of calls about several tasks because each entry of the body has its own.
_SECURITY: Final[Mapping[RequiredProof, list[Document]]] = {
    RequiredProof.NONE: [],
    RequiredProof.WORKER: [_WORKER],
    RequiredProof.SOURCE: [_WORKER],
    RequiredProof.WORKER_OR_INVOCATION: [_WORKER, _TASK],
    RequiredProof.TASK: [_TASK],
    RequiredProof.EACH_TASK: [_TASK, {}],
    RequiredProof.API_TOKEN: [{"apiToken": []}, {}],
    RequiredProof.LOOKING: [{"apiToken": []}, {"viewerToken": []}, {}],
    RequiredProof.READING: [{"apiToken": []}, {"viewerToken": []}, {"readToken": []}, {}],
    RequiredProof.QUERY: [_TASK, {"queryToken": []}],
    RequiredProof.QUERY_END: [_TASK, {"queryToken": []}],
}
_SCHEMES: Final = {
    "worker": {"type": "apiKey", "in": "header", "name": WORKER_HEADER},
    "workerToken": {"type": "http", "scheme": "bearer"},
    "taskToken": {"type": "apiKey", "in": "header", "name": TASK_HEADER},
    "apiToken": {"type": "http", "scheme": "bearer"},
    "viewerToken": {"type": "http", "scheme": "bearer"},
    "readToken": {"type": "http", "scheme": "bearer"},
    "queryToken": {"type": "http", "scheme": "bearer"},
}


def document(title: str, endpoints: Sequence[ApiEndpoint]) -> Document:
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
    endpoints: Iterable[ApiEndpoint],
) -> tuple[Mapping[type, Document], dict[str, Document]]:
    types: dict[type, None] = {Problem: None}
    for each in endpoints:
        found = (each.ask, each.params, each.answer)
        types |= {one: None for one in found if one is not None}
    made, components = msgspec.json.schema_components(types, ref_template=_REFERENCE)
    return dict(zip(types, made, strict=True)), dict(components)


def _operation(
    endpoint: ApiEndpoint, schemas: Mapping[type, Document], components: Mapping[str, Document]
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


def _problems(endpoint: ApiEndpoint) -> set[int]:
    found = {*endpoint.problems, 503}
    if endpoint.is_probe:
        found = set(endpoint.problems)
    if endpoint.ask is not None:
        found |= {400, 408, 413, 422}
    if endpoint.params is not None:
        found.add(422)
    if endpoint.proof is not RequiredProof.NONE:
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
    endpoint: ApiEndpoint, kind: type[Ask], components: Mapping[str, Document]
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
