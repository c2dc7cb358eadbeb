"""schemathesis over both OpenAPI documents: whatever is sent, the answer is as the document says.

What is sent follows the document, or breaks it in one place. The examples are the same in every
run. Nothing may be answered with a 5xx.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from penstock.dispatcher.api.endpoints import document
from penstock.dispatcher.api.routes import INTERNAL, PROBES, PUBLIC, internal_app, public_app
from penstock.dispatcher.api.server import HttpListener, HttpServer
from penstock.protocol.base import TASK_HEADER
from tests.conftest import Background
from tests.integration.dispatcher.api.stage import Stage, held, ok, output, parts_of, staged
from tests.integration.dispatcher.world import Worlds

EXAMPLES_MAX = 10
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
DOCUMENTS = {
    "internal": document("internal", (*INTERNAL, *PROBES)),
    "public": document("public", (*PUBLIC, *PROBES)),
}
SCHEMAS = {name: schemathesis.openapi.from_dict(found) for name, found in DOCUMENTS.items()}


def cases() -> Iterator[Any]:
    """Every operation, and those that can be asked wrongly once more."""
    for name, schema in SCHEMAS.items():
        for found in schema.get_all_operations():
            operation: Any = found
            one = operation.ok()
            has_input = {"requestBody", "parameters"} & set(one.definition.raw)
            for mode in GenerationMode if has_input else (GenerationMode.POSITIVE,):
                yield pytest.param(name, one, mode, id=f"{name} {one.label} {mode.value}")


@dataclass
class Site:
    """Both listeners on real sockets, with something behind them."""

    serving: HttpServer
    headers: dict[str, str]
    session: requests.Session


async def populate(stage: Stage) -> None:
    """Tasks in every state, so that there is something to hit."""
    ok(await stage.apply())
    await stage.trigger(*(f"p{n}" for n in range(8)))
    done, dead, retrying, _ = await stage.claim(limit=4)
    await stage.complete(
        held(done, outputs=[output(done)]),
        held(dead, failure={"reason": "x", "is_retried": False}),
        held(retrying, failure={"reason": "x"}),
    )
    ok(await stage.public.post("/v1/backfills", json={"job": "clean", "keys": ["k"]}))


@pytest.fixture(scope="module")
def site(worlds: Worlds, background: Background) -> Iterator[Site]:
    stack = AsyncExitStack()

    async def open_site() -> Site:
        world = await stack.enter_async_context(worlds.world())
        async with staged(world) as stage:
            await populate(stage)
            (running,) = await stage.claim()
            headers = {**stage.identity(), TASK_HEADER: running.token}
        parts = parts_of(world)
        listeners = [
            HttpListener("internal", internal_app(parts), "127.0.0.1", 0),
            HttpListener("public", public_app(parts), "127.0.0.1", 0),
        ]
        serving = await stack.enter_async_context(HttpServer(listeners))
        return Site(serving, headers, requests.Session())

    opened = background.run(open_site())
    yield opened
    opened.session.close()
    background.run(stack.aclose())


@pytest.mark.parametrize(("listener", "operation", "mode"), list(cases()))
def test_answers_are_as_the_document_says(
    site: Site, listener: str, operation: Any, mode: GenerationMode
) -> None:
    checks = [*CHECKS, negative_data_rejection] if mode.is_negative else CHECKS

    @settings(
        max_examples=EXAMPLES_MAX,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case: Any) -> None:
        answer = case.call(
            base_url=site.serving.url(listener), session=site.session, headers=site.headers
        )
        case.validate_response(answer, checks=checks)

    run()
