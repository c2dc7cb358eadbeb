"""What an endpoint is: a row of a table that makes the routes and the OpenAPI document.

A handler is given the parts of the dispatcher and a `Call`, whose body and parameters were decoded
and checked before. It returns an answer, which is sent with status 200, a `Problem`, which is sent
with its own, or a `Reply` for everything else. It raises only what `problems.problem_of` knows;
anything else is a mistake of ours and is answered with 500.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from typing import Any, Final

from penstock.dispatcher.api.parts import Parts
from penstock.dispatcher.wire.base import Answer, Ask
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


class Proof(Enum):
    """What a caller has to show before anything else is looked at."""

    NONE = "none"
    """Nothing."""
    WORKER = "worker"
    """Who it is: see `dispatcher.identity`."""
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
    the handler judges each by `proving.prove_each`, and the database its fence."""
    API_TOKEN = "api token"  # noqa: S105 - the name of a kind of proof
    """The token of the API, if there is one."""
    LOOKING = "looking"
    """The same, or the token of those who may look and nothing else."""


@dataclass(slots=True)
class Call:
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
class Reply:
    """An answer with a status of its own, or one that is not JSON."""

    body: Answer | bytes
    status: int = 200
    content_type: bytes = b"application/json"
    headers: tuple[tuple[bytes, bytes], ...] = ()
    """More headers than every answer has."""


Handler = Callable[[Parts, Call], Awaitable[Answer | Reply]]


@dataclass(frozen=True, slots=True)
class Endpoint:
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
    proof: Proof = Proof.API_TOKEN
    may_omit_body: bool = False
    """Whether no body is an empty one."""
    body_bytes_max: int | None = None
    """Its own bound on the body; None is the one of all."""
    request_seconds_max: float | None = None
    """Its own bound on time; None is the one of all."""
    is_wait: bool = False
    """Whether it waits for something to happen: it takes no place of those that work, has a bound
    of its own, and is cancelled when its caller leaves."""
    is_probe: bool = False
    """Whether it is asked all the time: not counted against the limit, and not logged."""
