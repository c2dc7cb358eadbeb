"""The sources as functions of Lambda, set by their environment, against a real dispatcher."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from penstock import functions
from penstock.dispatcher.api.routes import internal_app
from penstock.dispatcher.api.server import HttpListener, HttpServer
from penstock.kernel.errors import DispatcherRefused, DispatcherUnavailable, InvalidInput
from penstock.protocol.identity import Identities
from tests.integration.dispatcher.api.stage import SECRET, Stage, ok, staged
from tests.integration.dispatcher.world import Worlds

SOURCES = """
jobs:
  hourly:
    activation: source
    source: {kind: cron, cron: "0 * * * *"}
    outputs: [ticks]
  orders:
    activation: source
    source: {kind: webhook, path: /orders, auth: {type: bearer, secret: env:SHOP}}
    outputs: [news]
  count: {runtime: process, operator: "a:count", inputs: [ticks, news], outputs: [counts]}
"""
SHOP = "the-secret-of-the-shop"
PROOF = {"authorization": f"Bearer {SHOP}"}
RULE = {"time": "2030-01-01T00:00:00Z", "detail-type": "Scheduled Event"}
Handler = Callable[[dict[str, Any], object], dict[str, Any]]


@dataclass
class Deployed:
    """A dispatcher on a socket, and functions that are called as Lambda calls them."""

    stage: Stage
    environment: pytest.MonkeyPatch
    webhook_token: str = field(default_factory=lambda: Identities(SECRET).webhook().token)

    async def call(self, handler: Handler, event: dict[str, Any]) -> dict[str, Any]:
        # A function has an event loop of its own, and so a thread.
        return await asyncio.to_thread(handler, event, None)

    async def request(self, words: object = None, **fields: Any) -> dict[str, Any]:
        event = {
            "rawPath": "/orders",
            "requestContext": {"http": {"method": "POST"}, "stage": "$default"},
            "headers": {"content-type": "application/json", **PROOF},
            "body": json.dumps(words),
            **fields,
        }
        # It is another function than that of cron, with a token of its own.
        with self.environment.context() as its:
            its.delenv("PENSTOCK_WORKER_SECRET")
            its.setenv("PENSTOCK_WEBHOOK_TOKEN", self.webhook_token)
            return await self.call(functions.webhook, event)

    async def events(self, dataset: str) -> list[str]:
        rows = await self.stage.world.rows(
            "SELECT dedupe FROM event JOIN dataset ON dataset.id = dataset_id"
            " WHERE name = %s ORDER BY seq",
            dataset,
        )
        return [row["dedupe"].removeprefix("source:") for row in rows]


Story = Callable[[Deployed], Coroutine[Any, Any, None]]


@pytest.fixture
def deployed(
    worlds: Worlds, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[[Story], None]:
    """Runs a story with functions that were deployed for a dispatcher of its own."""

    @asynccontextmanager
    async def dispatcher() -> AsyncIterator[Deployed]:
        async with worlds.world() as world, staged(world) as stage:
            ok(await stage.apply(SOURCES))
            listener = HttpListener("internal", internal_app(stage.parts), "127.0.0.1", 0)
            async with HttpServer([listener]) as serving:
                monkeypatch.chdir(tmp_path)
                monkeypatch.setenv("PENSTOCK_DISPATCHERS", serving.url("internal"))
                monkeypatch.setenv("PENSTOCK_WORKER_SECRET", SECRET)
                monkeypatch.setenv("SHOP", SHOP)
                monkeypatch.setenv("AWS_LAMBDA_FUNCTION_NAME", "clock")
                yield Deployed(stage, monkeypatch)

    def run(story: Story) -> None:
        async def main() -> None:
            async with dispatcher() as made:
                await story(made)

        asyncio.run(main())
        assert list(tmp_path.iterdir()) == []

    return run


def test_a_rule_emits_what_is_due_once(deployed: Callable[[Story], None]) -> None:
    async def story(made: Deployed) -> None:
        assert await made.call(functions.cron, RULE) == {"sent": {"hourly": 1}}
        # EventBridge may call twice.
        await made.call(functions.cron, {**RULE, "job": "hourly"})
        assert await made.events("ticks") == ["cron:2030-01-01T00:00:00+00:00"]
        assert await made.stage.route() == 1
        assert len(await made.stage.claim("a:count", limit=9)) == 1
        # Calls that were missed are made up for by the next.
        made.stage.world.later(3 * 3600)
        late = {**RULE, "time": "2030-01-01T03:00:00Z"}
        assert await made.call(functions.cron, late) == {"sent": {"hourly": 3}}
        assert len(await made.events("ticks")) == 4
        with pytest.raises(InvalidInput, match="no cron source 'daily'"):
            await made.call(functions.cron, {**RULE, "job": "daily"})
        with pytest.raises(InvalidInput, match="has no `time`"):
            await made.call(functions.cron, {})

    deployed(story)


def test_a_request_is_an_event_once(deployed: Callable[[Story], None]) -> None:
    async def story(made: Deployed) -> None:
        query = {"rawQueryString": "event_id=x&partition_key=p"}
        answer = await made.request({"id": 1}, **query)
        assert (answer["statusCode"], answer["isBase64Encoded"]) == (202, False)
        again = await made.request({"id": 1}, **query)
        assert again["statusCode"] == 202
        text = base64.b64encode(b'{"id": 2}').decode()
        delivered = {"X-GitHub-Delivery": "y", **PROOF}
        encoded = await made.request(body=text, isBase64Encoded=True, headers=delivered)
        assert encoded["statusCode"] == 202
        assert await made.events("news") == ["x", "y"]
        assert await made.stage.route() == 2
        tasks = await made.stage.claim("a:count", limit=9)
        assert [each.payload["payload"] for each in tasks] == [{"id": 1}, {"id": 2}]
        assert [each.payload.get("partition_key") for each in tasks] == ["p", None]
        assert (await made.request({}, rawPath="/other"))["statusCode"] == 404

    deployed(story)


def test_the_secret_of_a_source_is_asked_for(deployed: Callable[[Story], None]) -> None:
    async def story(made: Deployed) -> None:
        for headers in ({}, {"authorization": "Bearer wrong"}):
            assert (await made.request({"id": 1}, headers=headers))["statusCode"] == 401
        assert await made.events("news") == []
        await made.stage.parts.audit.turn()
        rows = await made.stage.world.rows("SELECT what, reason FROM audit ORDER BY reason")
        assert [tuple(row.values()) for row in rows] == [
            ("webhook orders", "no token"),
            ("webhook orders", "wrong token"),
        ]

    deployed(story)


def test_a_dispatcher_that_does_not_take_it(deployed: Callable[[Story], None]) -> None:
    async def story(made: Deployed) -> None:
        made.environment.setenv("PENSTOCK_WORKER_SECRET", "another secret of the tests")
        with pytest.raises(DispatcherRefused):
            await made.call(functions.cron, RULE)
        made.webhook_token = Identities("another secret of the tests").webhook().token
        assert (await made.request({}))["statusCode"] == 503
        # Nobody listens on the port of nobody.
        made.environment.setenv("PENSTOCK_DISPATCHERS", "http://127.0.0.1:1")
        with pytest.raises(DispatcherUnavailable):
            await made.call(functions.cron, RULE)
        answer = await made.request({})
        assert (answer["statusCode"], int(answer["headers"]["retry-after"]) > 0) == (503, True)
        assert await made.events("ticks") == []

    deployed(story)
