"""The catalog's protocol: errors, pages, who may read what, and that nothing can be written."""

from __future__ import annotations

import base64
import json
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from penstock.dispatcher.catalog.scan_planner import ScanAsk, encoded
from penstock.kernel.clock import SystemClock
from penstock.kernel.entropy import seeded_entropy
from penstock.store.memory import MemoryBucket, MemoryStore
from tests.integration.dispatcher.api.conftest import Perform
from tests.integration.dispatcher.api.stage import Stage
from tests.integration.dispatcher.readers import columns, completed, facts
from tests.integration.dispatcher.world import Job, World

API_TOKEN, VIEWER_TOKEN = "the token of the API", "the token of viewers"
BASE = "/iceberg/v1/namespaces"
CLOCK = SystemClock()


async def dataset(world: World, name: str, *, of: str = "bigint") -> Job:
    """A dataset with a column, and one partition, which is empty."""
    job = await world.job(name)
    said = facts(files=0, of=columns("x", x=of))
    held = await job.claimed(name)
    await completed(world, held, job.output("a", f"s3://b/{name}", facts=said))
    return job


def a_store() -> MemoryStore:
    return MemoryStore(MemoryBucket(CLOCK), clock=CLOCK)


def error(answer: httpx.Response) -> tuple[int, str, str]:
    said = answer.json()["error"]
    assert said["code"] == answer.status_code
    return answer.status_code, said["type"], said["message"]


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def test_what_is_not_there_is_told_with_the_protocols_types(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        ask = stage.public
        await dataset(stage.world, "good")
        await dataset(stage.world, "odd", of="void")
        await stage.world.job("empty")
        listing = f"{BASE}/penstock/tables"
        listed = [(await ask.get(listing)).json()["identifiers"]]
        assert error(await ask.get(f"{BASE}/other")) == (
            404,
            "NoSuchNamespaceException",
            "There is no namespace 'other'; the only one is 'penstock'.",
        )
        for name, why in (
            ("none", "There is no table 'none'."),
            ("empty", "The dataset 'empty' is no table yet"),
            ("odd", "The dataset 'odd' cannot be read as a table: The column 'x' is or has a void"),
        ):
            status, kind, said = error(await ask.get(f"{BASE}/penstock/tables/{name}"))
            assert (status, kind) == (404, "NoSuchTableException")
            assert said.startswith(why)
            assert (await ask.head(f"{BASE}/penstock/tables/{name}")).status_code == 404
        listed.append((await ask.get(listing)).json()["identifiers"])
        assert listed == [[{"namespace": ["penstock"], "name": "good"}]] * 2
        table = f"{BASE}/penstock/tables/good"
        found = await ask.head(table)
        assert (found.status_code, found.content) == (204, b"")
        assert (await ask.head(f"{BASE}/penstock")).status_code == 204
        assert error(await ask.get("/iceberg/v1/elsewhere"))[:2] == (404, "NoSuchEndpointException")
        for body, why in (
            ({"snapshot-id": 5}, "has no snapshot 5, or no longer keeps it"),
            ({"snapshot-id": "x"}, "`snapshot-id`"),
            (
                {"filter": {"type": "eq", "term": "nowhere", "value": 1}},
                "The table has no column 'nowhere'",
            ),
        ):
            status, kind, said = error(await ask.post(f"{table}/plan", json=body))
            assert (status, kind) == (400, "BadRequestException")
            assert why in said
        gone = encoded(ScanAsk(snapshot=5, schema=0))
        for task in ("bm9uZQ==", "no task", gone):
            made = await ask.post(f"{table}/tasks", json={"plan-task": task})
            assert error(made)[:2] == (404, "NoSuchPlanTaskException")
        # What a later version says besides is passed over.
        assert (await ask.post(f"{table}/metrics", json={"report-type": "new"})).status_code == 204
        assert (await ask.get("/iceberg/v1/config?warehouse=w&later=1")).status_code == 200

    on_stage(story, store=a_store())


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", BASE),
        ("DELETE", f"{BASE}/penstock"),
        ("POST", f"{BASE}/penstock/tables"),
        ("POST", f"{BASE}/penstock/tables/good"),
        ("DELETE", f"{BASE}/penstock/tables/good"),
        ("POST", "/iceberg/v1/transactions/commit"),
        ("POST", f"{BASE}/penstock/views"),
    ],
)
def test_nothing_is_written(on_stage: Perform, method: str, path: str) -> None:
    async def story(stage: Stage) -> None:
        answer = await stage.public.request(method, path, json={})
        assert error(answer) == (
            406,
            "UnsupportedOperationException",
            "This catalog is read-only: only jobs write the tables.",
        )

    on_stage(story)


def test_who_asks_for_a_token_by_oauth_is_told_how_to_have_one(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        answer = await stage.public.post("/iceberg/v1/oauth/tokens", content=b"grant_type=x")
        code, _, said = error(answer)
        assert code == 406
        assert "Configure `token`, not `credential`: `penstock token create` makes one." in said

    on_stage(story)


def test_names_come_page_by_page_and_refs_alone_if_asked(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        ask = stage.public
        await dataset(stage.world, "c")
        await dataset(stage.world, "a")
        job = await dataset(stage.world, "b")
        found: list[str] = []
        token: Any = ""
        while token is not None:
            params = {"pageToken": token, "pageSize": 2}
            page = (await ask.get(f"{BASE}/penstock/tables", params=params)).json()
            found += [each["name"] for each in page["identifiers"]]
            token = page.get("next-page-token")
        assert found == ["a", "b", "c"]
        whole = (await ask.get(f"{BASE}/penstock/tables", params={"pageSize": 2})).json()
        assert [each["name"] for each in whole["identifiers"]] == ["a", "b", "c"]
        assert whole["next-page-token"] is None
        held = await job.claimed("again")
        first = (await ask.get(f"{BASE}/penstock/tables/b")).json()["metadata"]
        stage.world.later(5)
        said = facts(files=0, of=columns("x", "y"))
        await completed(stage.world, held, job.output("a", "s3://b/again", facts=said))
        table = f"{BASE}/penstock/tables/b"
        second = (await ask.get(f"{table}?snapshots=refs")).json()["metadata"]
        assert second["current-snapshot-id"] > first["current-snapshot-id"]
        assert [each["snapshot-id"] for each in second["snapshots"]] == [
            second["refs"]["main"]["snapshot-id"]
        ]
        names = [each["name"] for each in second["schemas"][-1]["fields"]]
        assert names == ["x", "y", "partition_key"]

    on_stage(story, store=a_store())


def test_a_token_for_reading_opens_its_datasets_and_nothing_else(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        ask, world = stage.public, stage.world
        await dataset(world, "a")
        await dataset(world, "b")
        operator = bearer(API_TOKEN)
        body = {"name": "bi", "datasets": ["a"], "days": 1}

        async def remove() -> httpx.Response:
            away = "/v1/read-tokens/remove"
            return await ask.post(away, json={"name": "bi"}, headers=operator)

        made = await ask.post("/v1/read-tokens", json=body, headers=operator)
        assert made.status_code == 200
        token = made.json()["token"]
        again = await ask.post("/v1/read-tokens", json=body, headers=operator)
        assert again.status_code == 409
        tables = f"{BASE}/penstock/tables"
        listed = (await ask.get(tables, headers=bearer(token))).json()["identifiers"]
        assert [each["name"] for each in listed] == ["a"]
        assert (await ask.get(f"{tables}/a", headers=bearer(token))).status_code == 200
        assert (await ask.post(f"{tables}/a/metrics", headers=bearer(token))).status_code == 204
        planned = await ask.post(f"{tables}/b/plan", json={}, headers=operator)
        snapshot = int(planned.json()["plan-id"])
        other = await world.value("SELECT id::text FROM dataset WHERE name = 'b'")
        task = {"plan-task": encoded(ScanAsk(snapshot=snapshot, schema=0, table=other))}
        for name in ("b", "none"):
            for method, path in (
                ("GET", ""),
                ("HEAD", ""),
                ("GET", "/credentials"),
                ("POST", "/plan"),
                ("POST", "/tasks"),
                ("DELETE", "/plan/1"),
                ("POST", "/metrics"),
            ):
                said = task if path == "/tasks" else {}
                place = f"{tables}/{name}{path}"
                answer = await ask.request(method, place, json=said, headers=bearer(token))
                assert answer.status_code == 403, (method, path)
                assert method == "HEAD" or error(answer)[1] == "ForbiddenException"
        # A plan task of another table is none of this one, and opens nothing.
        stray = await ask.post(f"{tables}/a/tasks", json=task, headers=bearer(token))
        assert error(stray)[:2] == (404, "NoSuchPlanTaskException")
        listed = await ask.get(f"{tables}?pageToken=a&pageSize=5", headers=bearer(token))
        assert listed.json()["identifiers"] == []
        assert (await ask.get("/v1/status", headers=bearer(token))).status_code == 401
        assert (await ask.get(tables, headers=bearer(VIEWER_TOKEN))).status_code == 200
        for wrong in ("", "read.made-up", "other"):
            refused = error(await ask.get(tables, headers=bearer(wrong)))
            assert refused[:2] == (401, "NotAuthorizedException")
        (told,) = (await ask.get("/v1/read-tokens", headers=operator)).json()["tokens"]
        assert (told["name"], told["datasets"], told["is_over"]) == ("bi", ["a"], False)
        world.later(86_500)
        (told,) = (await ask.get("/v1/read-tokens", headers=operator)).json()["tokens"]
        assert told["is_over"]
        assert (await remove()).status_code == 200
        assert (await ask.get(tables, headers=bearer(token))).status_code == 401
        assert (await remove()).status_code == 404

    on_stage(story, api_token=API_TOKEN, viewer_token=VIEWER_TOKEN, store=a_store())


def test_nothing_that_is_sent_is_a_mistake_of_the_dispatcher(on_stage: Perform) -> None:
    """Bodies that are nearly right, and some that are not: each has an answer of the protocol."""
    random = seeded_entropy(23)

    def value() -> Any:
        return random.choice(
            [1, -1, 0.5, "a", "x", "partition_key", None, True, [], {}, 2**70, "\x00", "é", "2026"]
        )

    def term() -> Any:
        named = [{"type": "reference", "name": value()}, {"type": "transform", "term": value()}]
        return random.choice([value(), "x", "partition_key", *named])

    def wanted(depth: int = 0) -> Any:
        kinds = ["and", "or", "not", "eq", "in", "lt", "starts-with", "is-null", "is-nan", "other"]
        said: dict[str, Any] = {"type": random.choice([*kinds, value()])}
        for name in ("left", "right", "child"):
            is_deep = depth < 3 and random.random() < 0.6
            said[name] = wanted(depth + 1) if is_deep else term()
        said |= {"term": term(), "value": value(), "values": random.choice([value(), [value()]])}
        return {name: said[name] for name in said if random.random() < 0.85}

    async def story(stage: Stage) -> None:
        await dataset(stage.world, "a")
        table = f"{BASE}/penstock/tables/a"
        for _ in range(150):
            body: Any = {"filter": wanted(), "snapshot-id": random.choice([None, value()])}
            body = {name: body[name] for name in body if random.random() < 0.8}
            answer = await stage.public.post(f"{table}/plan", json=body)
            assert answer.status_code in (200, 400), (body, answer.text)
            task = base64.urlsafe_b64encode(json.dumps(random.choice([value(), body])).encode())
            ask = {"plan-task": random.choice([value(), task.decode()])}
            answer = await stage.public.post(f"{table}/tasks", json=ask)
            assert answer.status_code in (400, 404), (ask, answer.text)
            path = quote(str(value()))
            answer = await stage.public.get(f"{BASE}/{path}/tables/{path}?pageSize={path}")
            assert answer.status_code in (200, 400, 404), (path, answer.text)

    on_stage(story, store=a_store())


def test_no_bytes_are_a_mistake_of_the_dispatcher(on_stage: Perform) -> None:
    """Whatever path, query, headers and body are: each answer is what the protocol says."""
    random = seeded_entropy(24)
    bodies = [
        b"",
        b"{}",
        b"[]",
        b"null",
        b'"x"',
        b"{",
        b"\xff\xfe\x00",
        b"\x00" * 100,
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"report-type": "scan-report", "metrics": {"a": {"unit": "count", "value": 1e999}}}',
        b'{"report-type": 5, "snapshot-id": "x", "filter": {"type": []}}',
        b'{"filter": {"type": "eq", "term": "x", "value": "\\ud800"}}',
        b'{"snapshot-id": 99999999999999999999, "case-sensitive": 1, "select": [null]}',
        b'{"plan-task": "\\u0000"}',
    ]
    words = ["refs", "all", "REFS", "", "\x00", "\u20ac", "1", "-1", "9" * 40, "%", "a" * 2000]
    kinds = [
        None,
        "application/json",
        "text/plain",
        "application/json; charset=utf-16",
        "\x7f",
        "x",
    ]
    names = ["snapshots", "planId", "referenced-by", "warehouse", "parent", "pageToken", "pageSize"]

    def mixed(body: bytes) -> bytes:
        if random.random() < 0.4:
            at = int(random.random() * len(body))
            noise = bytes(int(random.random() * 256) for _ in range(random.choice([0, 1, 9])))
            body = body[:at] + noise + body[at + random.choice([0, 1, 3]) :]
        return body

    async def story(stage: Stage) -> None:
        await dataset(stage.world, "a")
        table = f"{BASE}/penstock/tables/a"
        paths = [
            *(table, f"{table}/metrics", f"{table}/credentials", f"{table}/plan", f"{table}/tasks"),
            *(f"{table}/plan/1", f"{BASE}/penstock/tables", f"{BASE}/penstock", BASE),
            "/iceberg/v1/config",
        ]
        seen = set()
        for _ in range(400):
            method = random.choice(["GET", "HEAD", "POST", "DELETE", "PUT"])
            pairs = [f"{random.choice(names)}={quote(random.choice(words))}" for _ in range(2)]
            query = "&".join([*pairs, random.choice(["", "%ff", "=&=", "snapshots"])])
            place = f"{random.choice(paths)}?{query if random.random() < 0.7 else ''}"
            kind = random.choice(kinds)
            headers = {} if kind is None else {"content-type": kind}
            body = mixed(random.choice(bodies))
            answer = await stage.public.request(method, place, content=body, headers=headers)
            told = (method, place, body[:80], kind, answer.status_code, answer.text[:200])
            seen.add(answer.status_code)
            assert answer.status_code in (200, 204, 400, 404, 406, 413, 415), told
            if method == "HEAD" or answer.status_code == 204:
                assert answer.content == b"", told
            elif answer.status_code == 200:
                assert isinstance(answer.json(), dict), told
            else:
                _status, kind_of, said = error(answer)
                assert kind_of.endswith("Exception"), told
                assert said, told
        assert {200, 204, 400, 406} <= seen

    on_stage(story, store=a_store())
