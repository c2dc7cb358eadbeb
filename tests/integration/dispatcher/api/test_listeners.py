"""Which side answers what, who may ask, and what is told when the database is away."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from penstock.dispatcher.api.context import ApiContext
from penstock.dispatcher.api.routes import INTERNAL, PUBLIC, internal_app, public_app
from penstock.dispatcher.api.server import HttpListener, HttpServer
from penstock.dispatcher.database.pool import Database
from penstock.kernel.errors import DatabaseUnavailable, InvalidInput
from penstock.protocol.base import WORKER_HEADER
from tests.integration.dispatcher.api.conftest import Perform
from tests.integration.dispatcher.api.stage import Stage, held, ok, parts_of, refused
from tests.integration.dispatcher.world import World, Worlds


def test_nothing_internal_is_on_the_public_listener(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        paths = [each.path for each in INTERNAL]
        guesses = ["/internal", "/internal/", "/internal/jwks/task", "/v1/task", "/v1/task/"]
        for path in (*paths, *guesses, "/v1/task/credentials", "//internal/hello"):
            for method in ("GET", "POST", "PUT"):
                answer = await stage.public.request(method, path, json={}, headers=stage.identity())
                assert refused(answer, 404).type == "unknown", path

    on_stage(story)


def test_nothing_public_is_on_the_internal_listener(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        for each in PUBLIC:
            path = each.path.replace("{id}", "1").replace("{name}", "a").replace("{name:path}", "a")
            refused(await stage.internal.request(each.method, path, json={}), 404)

    on_stage(story)


def test_a_path_of_the_other_listener_says_which(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        mixed = refused(await stage.internal.get("/v1/status"), 404)
        assert "public listener" in mixed.title
        assert "7070" in mixed.detail
        for path in ("/internal/hello", "/v1/task/complete"):
            mixed = refused(await stage.public.post(path, json={}), 404)
            assert "internal listener" in mixed.title
            assert "7071" in mixed.detail
        for side in (stage.public, stage.internal):
            assert "/openapi.json" in refused(await side.get("/nope"), 404).detail

    on_stage(story)


def test_no_words_of_a_library_are_told(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        asked = {"job": "feed", "partition_key": ""}
        problem = refused(await stage.public.post("/v1/trigger", json=asked), 422)
        assert problem.title == "`partition_key` has to have 1 character at least."
        problem = refused(await stage.public.get("/v1/tasks?status=nope"), 422)
        assert problem.title.startswith("`status` has to be one of queued, running, ")
        problem = refused(await stage.public.get("/v1/tasks?limit=many"), 422)
        assert problem.title == "`limit` has to be a whole number, not a text."
        problem = refused(await stage.public.post("/v1/dag", json=[]), 422)
        assert problem.title == "The body has to be an object, not a list."

    on_stage(story)


def test_the_token_of_the_public_side(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        for each in PUBLIC:
            path = each.path.replace("{id}", "1").replace("{name}", "a").replace("{name:path}", "a")
            answer = await stage.public.request(each.method, path, json={})
            assert refused(answer, 401).type == "unauthorized", path
        refused(await stage.public.get("/openapi.json"), 401)
        ok(await stage.public.get("/healthz"))
        ok(await stage.public.get("/readyz"))
        good = {"Authorization": "Bearer the token"}
        ok(await stage.public.get("/v1/status", headers=good))
        ok(await stage.public.get("/openapi.json", headers=good))
        # A worker's proof opens the internal side only, and the token the public one only.
        refused(await stage.public.get("/v1/status", headers=stage.identity()), 401)
        refused(await stage.internal.get("/internal/sources", headers=good), 401)

    on_stage(story, api_token="the token")


class Away(Database):
    """A database that does not answer."""

    async def transact(self, work: Any) -> Any:
        raise DatabaseUnavailable("Postgres does not answer: it is away")


def away(world: World) -> ApiContext:
    return parts_of(World(world.dsn, Away(world.dsn, connections_max=10), world.tasks))


def test_without_a_database(worlds: Worlds) -> None:
    async def main() -> None:
        async with worlds.world() as world:
            parts = away(world)
            who = parts.identities.identity("w")
            proof = {WORKER_HEADER: who.name, "Authorization": f"Bearer {who.token}"}
            for app in (internal_app(parts), public_app(parts)):
                transport = httpx.ASGITransport(app)
                async with httpx.AsyncClient(
                    transport=transport, base_url="http://localhost"
                ) as client:
                    ok(await client.get("/healthz"))
                    assert refused(await client.get("/readyz"), 503).type == "unavailable"
                    if app.name == "public":
                        answer = await client.get("/v1/status")
                    else:
                        answer = await client.get("/internal/sources", headers=proof)
                    assert refused(answer, 503).type == "unavailable"
                    assert answer.headers["retry-after"] == "1"

    asyncio.run(main())


def test_a_database_that_hangs_is_not_ready(worlds: Worlds) -> None:
    class Hangs(Database):
        async def transact(self, work: Any) -> Any:
            raise TimeoutError

    async def main() -> None:
        async with worlds.world() as world:
            parts = parts_of(World(world.dsn, Hangs(world.dsn, connections_max=10), world.tasks))
            transport = httpx.ASGITransport(public_app(parts))
            async with httpx.AsyncClient(
                transport=transport, base_url="http://localhost"
            ) as client:
                refused(await client.get("/readyz"), 503)

    asyncio.run(main())


def test_the_listeners_on_real_sockets(worlds: Worlds) -> None:
    async def main() -> None:
        async with worlds.world() as world:
            parts = parts_of(world)
            listeners = [
                HttpListener("internal", internal_app(parts), "127.0.0.1", 0),
                HttpListener("public", public_app(parts), "127.0.0.1", 0),
            ]
            serving = HttpServer(listeners)
            async with serving, httpx.AsyncClient() as client:
                assert serving.port("internal") != serving.port("public") != 0
                public, internal = serving.url("public"), serving.url("internal")
                ok(await client.get(f"{public}/readyz"))
                assert (await client.head(f"{public}/healthz")).status_code == 200
                refused(await client.get(f"{public}/internal/sources"), 404)
                refused(await client.get(f"{internal}/internal/sources"), 401)
                document = ok(await client.get(f"{internal}/openapi.json"))
                assert "/v1/task/complete" in document["paths"]
                taken = HttpServer(
                    [HttpListener("other", listeners[0].app, "127.0.0.1", serving.port("public"))]
                )
                with pytest.raises(InvalidInput, match="The other listener cannot have") as raised:
                    await taken.start()
                assert "Choose another port" in raised.value.hint
                await taken.stop()
                large = {"source": "x" * 9 * 2**20}
                refused(await client.post(f"{public}/v1/dag", json=large), 413)
            with pytest.raises(httpx.ConnectError):
                async with httpx.AsyncClient() as client:
                    await client.get(f"{public}/healthz")
            await serving.stop()

    asyncio.run(main())


def test_stopping_lets_a_request_end(worlds: Worlds) -> None:
    async def main() -> None:
        begun, gate = asyncio.Event(), asyncio.Event()

        class Slow(Database):
            async def transact(self, work: Any) -> Any:
                begun.set()
                await gate.wait()
                raise DatabaseUnavailable("It was slow.")

        async with worlds.world() as world:
            parts = parts_of(World(world.dsn, Slow(world.dsn, connections_max=10), world.tasks))
            serving = HttpServer([HttpListener("public", public_app(parts), "127.0.0.1", 0)])
            await serving.start()
            async with httpx.AsyncClient() as client, asyncio.TaskGroup() as group:
                asked = group.create_task(client.get(f"{serving.url('public')}/v1/datasets"))
                await begun.wait()
                stopping = group.create_task(serving.stop())
                gate.set()
            refused(asked.result(), 503)
            assert stopping.done()

    asyncio.run(main())


@contextlib.contextmanager
def standing(port: int, said: bytes, *, count: int) -> Iterator[list[socket.socket]]:
    """So many connections that have said this, and stand open."""
    with contextlib.ExitStack() as stack:
        found = []
        for _ in range(count):
            found.append(stack.enter_context(socket.create_connection(("127.0.0.1", port))))
            found[-1].sendall(said)
            found[-1].setblocking(False)
        yield found


def is_open(connection: socket.socket) -> bool:
    """Whether nothing was answered and nobody has closed it."""
    try:
        connection.recv(1)
    except BlockingIOError:
        return True
    return False


HALF = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{"


def test_half_sent_requests_do_not_stop_heartbeats(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        ok(await stage.apply())
        await stage.trigger("2030-01-01")
        (task,) = await stage.claim()
        listeners = [
            HttpListener("internal", internal_app(stage.parts), "127.0.0.1", 0),
            HttpListener("public", public_app(stage.parts), "127.0.0.1", 0),
        ]
        async with contextlib.AsyncExitStack() as stack:
            serving = await stack.enter_async_context(HttpServer(listeners))
            client = await stack.enter_async_context(httpx.AsyncClient(timeout=60))
            stood: list[socket.socket] = []
            for side, path in (("internal", b"/v1/task/heartbeat"), ("public", b"/v1/trigger")):
                half = standing(serving.port(side), HALF % path, count=300)
                stood += stack.enter_context(half)
                # When this is answered, all that came before it were heard.
                ok(await client.get(f"{serving.url(side)}/healthz"))
            beat = {"tasks": [held(task)]}
            to = f"{serving.url('internal')}/v1/task/heartbeat"
            ok(await client.post(to, json=beat, headers=stage.identity()))
            # An older function has no identity but the token in its entry.
            ok(await client.post(to, json=beat))
            ok(await client.get(f"{serving.url('public')}/v1/status"))
            assert all(is_open(each) for each in stood)

    on_stage(story)
