"""Every endpoint of both listeners, asked with every proof: which opens what.

An endpoint that is not in `TABLE` fails the first test: whoever adds one says here what it asks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from penstock.dispatcher.api.context import ApiContext
from penstock.dispatcher.api.endpoints import ApiEndpoint, RequiredProof
from penstock.dispatcher.api.routes import INTERNAL, PROBES, PUBLIC
from penstock.protocol.base import TASK_HEADER, WORKER_HEADER
from penstock.protocol.work import Assignment
from penstock.tokens.claims import INVOKE_AUDIENCE, QUERY_AUDIENCE, TASK_AUDIENCE
from penstock.tokens.signer import to_base64url
from tests.integration.dispatcher.api.conftest import Perform
from tests.integration.dispatcher.api.forging import KNOWN, UNKNOWN
from tests.integration.dispatcher.api.stage import Stage, held, ok, output

API = "the token of the API"
API_HEADER = {"Authorization": f"Bearer {API}"}
VIEWER_HEADER = {"Authorization": "Bearer the token of viewers"}
ATTEMPTS = """
jobs:
  feed: {activation: source, source: {kind: manual}, outputs: [raw]}
  clean:
    runtime: process
    operator: a:clean
    inputs: [raw]
    outputs: [tidy]
    retry: {first: 1s}
"""
NONE, WORKER, CLAIM = RequiredProof.NONE, RequiredProof.WORKER, RequiredProof.WORKER_OR_INVOCATION
SOURCE = RequiredProof.SOURCE
TASK, EACH, PEOPLE = RequiredProof.TASK, RequiredProof.EACH_TASK, RequiredProof.API_TOKEN
LOOK, READ = RequiredProof.LOOKING, RequiredProof.READING
QUERY, QUERY_END = RequiredProof.QUERY, RequiredProof.QUERY_END
TABLE = {
    ("internal", "POST /internal/hello"): WORKER,
    ("internal", "POST /internal/wait"): WORKER,
    ("internal", "POST /internal/task-claim"): CLAIM,
    ("internal", "POST /internal/events"): SOURCE,
    ("internal", "GET /internal/sources"): SOURCE,
    ("internal", "POST /internal/webhook-refusals"): SOURCE,
    ("internal", "GET /internal/jwks/task"): NONE,
    ("internal", "POST /v1/task/heartbeat"): EACH,
    ("internal", "POST /v1/task/complete"): EACH,
    ("internal", "POST /v1/task/events"): TASK,
    ("internal", "POST /v1/task/credentials"): TASK,
    ("internal", "POST /v1/task/query"): TASK,
    ("internal", "POST /v1/task/buffer-publish"): TASK,
    ("internal", "POST /internal/query/begin"): QUERY_END,
    ("internal", "POST /internal/query/end"): QUERY_END,
    ("internal", "GET /healthz"): NONE,
    ("internal", "GET /readyz"): NONE,
    ("internal", "GET /openapi.json"): NONE,
    ("public", "GET /healthz"): NONE,
    ("public", "GET /readyz"): NONE,
    ("public", "GET /openapi.json"): LOOK,
    ("public", "GET /metrics"): LOOK,
    ("public", "GET /v1/audit"): LOOK,
    ("public", "GET /v1/alerts"): LOOK,
    ("public", "POST /v1/pause"): PEOPLE,
    ("public", "POST /v1/resume"): PEOPLE,
    ("public", "GET /v1/backfills"): LOOK,
    ("public", "POST /v1/backfills"): PEOPLE,
    ("public", "GET /v1/backfills/{id}"): LOOK,
    ("public", "POST /v1/backfills/{id}/cancel"): PEOPLE,
    ("public", "POST /v1/backfills/{id}/pause"): PEOPLE,
    ("public", "POST /v1/backfills/{id}/resume"): PEOPLE,
    ("public", "GET /v1/buffers"): LOOK,
    ("public", "GET /v1/buffers/{name}/rejected"): LOOK,
    ("public", "POST /v1/buffers/{name}/rejected"): PEOPLE,
    ("public", "GET /v1/dag"): LOOK,
    ("public", "POST /v1/dag"): PEOPLE,
    ("public", "POST /v1/dag/rollback"): PEOPLE,
    ("public", "GET /v1/dag/versions"): LOOK,
    ("public", "GET /v1/datasets"): LOOK,
    ("public", "GET /v1/datasets/{name}"): LOOK,
    ("public", "POST /v1/datasets/{name}/cut-over"): PEOPLE,
    ("public", "POST /v1/datasets/{name}/maintain"): PEOPLE,
    ("public", "GET /v1/datasets/{name}/partitions"): LOOK,
    ("public", "POST /v1/datasets/{name}/refresh"): PEOPLE,
    ("public", "POST /v1/datasets/{name}/rebuild-table"): PEOPLE,
    ("public", "POST /v1/datasets/{name}/purge"): PEOPLE,
    ("public", "GET /v1/datasets/{name}/changes"): LOOK,
    ("public", "GET /v1/datasets/{name}/snapshot"): LOOK,
    ("public", "GET /v1/datasets/{name}/snapshots"): LOOK,
    ("public", "GET /v1/read-tokens"): LOOK,
    ("public", "POST /v1/read-tokens"): PEOPLE,
    ("public", "POST /v1/read-tokens/remove"): PEOPLE,
    ("public", "POST /v1/datasets/{name}/sweep"): PEOPLE,
    ("public", "POST /v1/jobs/{name}/pause"): PEOPLE,
    ("public", "POST /v1/jobs/{name}/resume"): PEOPLE,
    ("public", "GET /v1/keys"): LOOK,
    ("public", "POST /v1/keys/revoke"): PEOPLE,
    ("public", "POST /v1/keys/rotate"): PEOPLE,
    ("public", "GET /v1/operators"): LOOK,
    ("public", "PUT /v1/operators/{name:path}"): PEOPLE,
    ("public", "GET /v1/outbox"): LOOK,
    ("public", "POST /v1/outbox/retry"): PEOPLE,
    ("public", "GET /v1/pressure"): LOOK,
    ("public", "POST /v1/query"): READ,
    ("public", "GET /v1/queries"): LOOK,
    ("public", "GET /v1/status"): LOOK,
    ("public", "POST /v1/sweep"): PEOPLE,
    ("public", "GET /v1/tasks"): LOOK,
    ("public", "GET /v1/tasks/{id}"): LOOK,
    ("public", "POST /v1/tasks/cancel"): PEOPLE,
    ("public", "POST /v1/tasks/replay"): PEOPLE,
    ("public", "POST /v1/trigger"): PEOPLE,
    ("public", "POST /v1/triggers"): PEOPLE,
}
OWN = {
    "a token of another task": "no credentials",
    "a token of a former attempt": "stale",
    "a token of a next attempt": "stale",
}
ENDPOINTS = {
    (listener, f"{each.method} {each.path}"): each
    for listener, table in (("internal", INTERNAL), ("public", PUBLIC))
    for each in (*table, *PROBES)
}


@dataclass(frozen=True)
class Shown:
    """What a caller shows; `opens` are the proofs that it is."""

    name: str
    headers: Mapping[str, str]
    opens: frozenset[RequiredProof] = frozenset()
    status: int = 403
    """Of those who ask for a token and do not take this one."""


@dataclass(frozen=True)
class Scene:
    """A task in its second attempt, and another task beside it."""

    stage: Stage
    former: Assignment
    mine: Assignment
    other: Assignment

    async def shown(self) -> list[Shown]:
        """Every proof, good and bad."""
        token = self.stage.token
        mine, task = self.mine, self.mine.task_id
        header, payload, signature = mine.token.split(".")
        issued = await self.stage.parts.issuer.verify(
            mine.token, audience=TASK_AUDIENCE, is_expiry_judged=False
        )
        grants = issued.grants
        nothing = to_base64url(json.dumps({"alg": "none", "typ": "JWT"}).encode())
        symmetric = to_base64url(json.dumps({"alg": "HS256", "kid": KNOWN.kid}).encode())
        flipped = ("A" if signature[0] != "A" else "B") + signature[1:]
        tokens: dict[str, str] = {
            "nonsense": "nonsense",
            "three parts of nonsense": "a.b.c",
            "truncated": mine.token[:-9],
            "without a signature": f"{header}.{payload}.",
            "of no algorithm": f"{nothing}.{payload}.",
            "of a symmetric algorithm": f"{symmetric}.{payload}.{signature}",
            "huge": "x" * 40_000,
            "with another signature": f"{header}.{payload}.{flipped}",
            "of another task": self.other.token,
            "of a former attempt": self.former.token,
            "of a next attempt": await token(task, mine.attempt + 1),
            "signed by an unknown key": await token(task, mine.attempt, signer=UNKNOWN),
            "for another audience": await token(task, mine.attempt, aud="penstock:other"),
            "of another issuer": await token(task, mine.attempt, iss="penstock/other"),
            "of an invocation of another task": await token(
                self.other.task_id, 0, aud=INVOKE_AUDIENCE
            ),
            "of an expired invocation": await token(task, 0, aud=INVOKE_AUDIENCE, exp=1),
        }
        ways = {
            "of another dispatcher": await token(task, mine.attempt, grants=grants),
            "of this attempt": mine.token,
        }
        expired = await token(task, mine.attempt, grants=grants, exp=1)
        invocation = await token(task, 0, aud=INVOKE_AUDIENCE)
        query = await token(0, 0, aud=QUERY_AUDIENCE)
        queries = {"Authorization": f"Bearer {query}"}
        spent = {"Authorization": f"Bearer {await token(0, 0, aud=QUERY_AUDIENCE, exp=1)}"}
        worker = self.stage.identity("w")
        webhook = {
            **worker,
            "Authorization": f"Bearer {self.stage.parts.identities.webhook().token}",
        }
        return [
            Shown("nothing", {}, status=401),
            Shown("a worker", worker, frozenset({WORKER, SOURCE, CLAIM}), status=401),
            Shown("the token of webhooks", webhook, frozenset({SOURCE}), status=401),
            Shown("another worker's token", {**worker, WORKER_HEADER: "v"}, status=401),
            Shown("a worker's name", {WORKER_HEADER: "w"}, status=401),
            Shown("the token of the API", API_HEADER, frozenset({PEOPLE, LOOK, READ}), status=401),
            Shown("a viewer", VIEWER_HEADER, frozenset({LOOK, READ}), status=401),
            Shown("a token as a bearer", {"Authorization": f"Bearer {mine.token}"}, status=401),
            *(Shown(f"a token {name}", {TASK_HEADER: text}) for name, text in tokens.items()),
            *(
                Shown(
                    f"a token {name}",
                    {TASK_HEADER: text},
                    frozenset({TASK, EACH, QUERY, QUERY_END}),
                )
                for name, text in ways.items()
            ),
            Shown("an expired token", {TASK_HEADER: expired}, frozenset({EACH, QUERY_END})),
            Shown("a token of a query", queries, frozenset({QUERY, QUERY_END}), status=401),
            Shown("it as that of an attempt", {TASK_HEADER: query}),
            Shown("an expired one", spent, frozenset({QUERY_END}), status=401),
            Shown("an invocation", {TASK_HEADER: invocation}, frozenset({CLAIM})),
        ]


async def scene(stage: Stage) -> Scene:
    ok(await stage.public.post("/v1/dag", json={"source": ATTEMPTS}, headers=API_HEADER))
    for key in ("p", "q"):
        asked = {"job": "feed", "partition_key": key, "event_id": key}
        ok(await stage.public.post("/v1/trigger", json=asked, headers=API_HEADER))
    await stage.route()
    former, other = await stage.claim(limit=2)
    ok(await stage.complete(held(former, failure={"reason": "Again."})))
    stage.world.later(5)
    (mine,) = await stage.claim()
    assert (mine.task_id, mine.attempt) == (former.task_id, 2)
    return Scene(stage, former, mine, other)


def body_of(made: Scene, endpoint: ApiEndpoint) -> Any:
    """What is asked of an endpoint; where it does not matter, nothing that makes sense."""
    fence = {name: value for name, value in held(made.mine).items() if name != "token"}
    return {
        "/internal/hello": {"runtimes": []},
        "/internal/wait": {"listener": "one", "operators": []},
        "/internal/events": {"events": [{"event_id": "x", "dataset": "nothing"}]},
        "/internal/task-claim": {"task_id": made.mine.task_id},
        "/v1/task/heartbeat": {"tasks": [fence]},
        "/v1/task/complete": {"tasks": [{**fence, "outputs": [{"dataset": "0", "location": "l"}]}]},
        "/v1/task/events": {**fence, "events": [{"event_id": "x", "dataset": "raw"}]},
        "/v1/task/credentials": {},
        "/v1/task/query": {"sql": "SELECT 1"},
        "/v1/task/buffer-publish": {"dataset": "tidy", "batch": "x", "rows": [{}]},
        "/v1/query": {"sql": "SELECT 1"},
        "/internal/query/begin": {"sql": "SELECT 1"},
        "/internal/query/end": {"ticket": "x" * 32, "outcome": "completed"},
    }.get(endpoint.path, {})


async def ask(made: Scene, listener: str, endpoint: ApiEndpoint, headers: Any) -> httpx.Response:
    side = made.stage.internal if listener == "internal" else made.stage.public
    path = endpoint.path.replace("{id}", "1").replace("{name}", "a").replace("{name:path}", "a")
    body = body_of(made, endpoint)
    if endpoint.path == "/v1/task/complete":
        # A location that the token does not grant: whoever is let through ends nothing by it.
        body["tasks"][0]["outputs"] = [output(made.mine, location="file:///elsewhere")]
    return await side.request(endpoint.method, path, json=body, headers=headers)


def test_the_table_has_every_endpoint() -> None:
    documents = {("internal", "GET /openapi.json"), ("public", "GET /openapi.json")}
    assert set(TABLE) == set(ENDPOINTS) | documents
    for name, endpoint in ENDPOINTS.items():
        assert TABLE[name] is endpoint.proof, name


def _is_about_itself(
    endpoint: ApiEndpoint, name: str, answer: httpx.Response, *, is_let_in: bool
) -> bool:
    """Whether a call names no attempt, or is refused whoever is let in; and it was as it should."""
    if endpoint.path == "/v1/task/credentials" and name in OWN:
        # It is about the token's own attempt, and one that does not run has nothing.
        assert answer.status_code == 409, answer.text
        assert answer.json()["type"] == OWN[name], answer.text
        return True
    if endpoint.path == "/v1/task/buffer-publish" and (is_let_in or name in OWN):
        # A job publishes into what it names, and this one names nothing; see test_buffers.
        assert answer.status_code == 403, answer.text
        assert answer.json()["type"] == "not granted", answer.text
        return True
    if endpoint.path == "/internal/query/begin" and "expired" in name:
        # It is let in to be noted as refused, and is.
        assert answer.status_code in (401, 403), answer.text
        assert answer.json()["type"] in ("token expired", "token wrong audience"), answer.text
        return True
    return False


@pytest.mark.parametrize("proof", list(RequiredProof))
def test_every_proof_at_every_endpoint(on_stage: Perform, proof: RequiredProof) -> None:
    async def story(stage: Stage) -> None:
        made = await scene(stage)
        lease = await leases(stage)
        stage.world.later(1)
        for (listener, name), endpoint in ENDPOINTS.items():
            if TABLE[listener, name] is not proof:
                continue
            for shown in await made.shown():
                answer = await ask(made, listener, endpoint, shown.headers)
                is_let_in = proof in shown.opens
                if _is_about_itself(endpoint, shown.name, answer, is_let_in=is_let_in):
                    continue
                is_about_itself = proof is not READ and "/query" in endpoint.path
                if is_about_itself and shown.name in OWN:
                    # So are these; the other task runs, and here is no query service.
                    is_other = OWN[shown.name] == "no credentials"
                    kind = "no query service" if is_other else OWN[shown.name]
                    is_begun = is_other and endpoint.path.startswith("/internal/")
                    assert is_begun == (answer.status_code == 200), answer.text
                    assert is_begun or answer.json()["type"] == kind, answer.text
                    continue
                is_open = proof is NONE or proof in shown.opens
                said = f"{name} with {shown.name}: {answer.status_code} {answer.text[:300]}"
                assert is_open == (answer.status_code not in (401, 403)), said
                assert answer.status_code < 500, said
                if proof is PEOPLE and shown.name == "a viewer":
                    assert answer.status_code == 403, said
                    assert "viewer token is read-only" in answer.json()["title"]
                if not is_open and proof in (TASK, EACH):
                    assert answer.status_code == shown.status, said
                if not is_open:
                    assert made.mine.token not in answer.text
                    assert answer.json().get("state") is None, said
                    assert await leases(stage) == lease, said
                lease = await leases(stage)
        assert await stage.world.value("SELECT count(*) FROM publication") == 0
        assert await stage.world.value("SELECT count(*) FROM event WHERE task_id > 0") == 0
        running = await stage.world.rows("SELECT id, attempt FROM task WHERE status = 'running'")
        assert len(running) == 2

    on_stage(story, api_token=API, viewer_token="the token of viewers")


@pytest.mark.parametrize("path", ["heartbeat", "complete"])
def test_every_token_in_an_entry_is_the_answer_of_that_entry(on_stage: Perform, path: str) -> None:
    """As in the header; and the entry beside it is carried out, whatever is shown for this one."""

    async def story(stage: Stage) -> None:
        made = await scene(stage)
        good = held(made.other)
        if path == "complete":
            # Said again and again: the first time ends it, and the others are told the same.
            good["failure"] = {"reason": "It broke.", "is_retried": False}
        for shown in await made.shown():
            entry = {**held(made.mine), "token": shown.headers.get(TASK_HEADER)}
            if path == "complete":
                entry["outputs"] = [output(made.mine, location="file:///elsewhere")]
            answer = await stage.internal.post(f"/v1/task/{path}", json={"tasks": [entry, good]})
            first, second = answer.json()["results"]
            assert second["status"] == 200, answer.text
            if EACH in shown.opens:
                assert (first["status"], first["why"]) in ((200, ""), (409, "outputs")), shown.name
            else:
                assert answer.status_code == 207
                expected = 403 if TASK_HEADER in shown.headers else 401
                assert (first["status"], first["state"]) == (expected, None), shown.name
                assert first["why"].startswith("token "), shown.name

    on_stage(story, api_token=API)


def test_a_heartbeat_that_was_under_way_is_no_attack(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        await stage.apply(ATTEMPTS)
        await stage.trigger("done", "failed", "reaped")
        # The first look of a reaper after an outage ends nothing.
        await stage.world.tasks.reap()
        done, failed, reaped = await stage.claim(limit=3)
        every = [held(each) for each in (done, failed, reaped)]
        ends = [held(done, outputs=[output(done)]), held(failed, failure={"reason": "broken"})]
        ok(await stage.complete(*ends))
        # What a worker has ended by itself a moment ago is refused, and not worth a note.
        answer = await stage.beat(*every)
        assert [each["status"] for each in answer.json()["results"]] == [409, 409, 200]
        assert await audited(stage.parts, stage) == []
        # Another lease token is not that of its holder.
        await stage.beat({**every[0], "lease_token": "guessed"})
        # Neither is what else an attempt says after its end, or one that was taken away.
        await stage.task_events(every[0], {"event_id": "1", "dataset": "tidy", "cursor": 1})
        stage.world.later(61)
        assert (await stage.world.tasks.reap(outage_seconds=1000)).reaped
        await stage.beat(every[2])
        # Nor one that comes much later.
        await stage.beat(every[1])
        noted = await audited(stage.parts, stage)
        assert {(each["what"], each["task_id"], each["reason"]) for each in noted} == {
            ("POST /v1/task/heartbeat", done.task_id, "over"),
            ("POST /v1/task/events", done.task_id, "over"),
            ("POST /v1/task/heartbeat", reaped.task_id, "stale"),
            ("POST /v1/task/heartbeat", failed.task_id, "stale"),
        }

    on_stage(story)


async def leases(stage: Stage) -> list[Any]:
    rows = await stage.world.rows("SELECT id, lease_expires_at FROM task ORDER BY id")
    return [tuple(row.values()) for row in rows]


async def audited(parts: ApiContext, stage: Stage) -> list[dict[str, Any]]:
    """What the audit says, the latest last."""
    await parts.audit.turn()
    return await stage.world.rows(
        "SELECT what, outcome, task_id, attempt, caller, reason, detail FROM audit ORDER BY id"
    )
