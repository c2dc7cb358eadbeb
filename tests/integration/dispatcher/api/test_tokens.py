"""An attempt's token over its life: with the claim, renewed, expired, reaped, after the end."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from penstock.kernel.errors import SignerUnavailable, TokenRefused
from penstock.protocol.base import TASK_HEADER
from penstock.protocol.work import Assignment, ClaimAnswer
from penstock.tokens.claims import INVOKE_AUDIENCE, TASK_AUDIENCE, Claims, Grants, ReadGrant
from penstock.tokens.claims import read as read_token
from penstock.tokens.scopes import scope_of_location
from penstock.tokens.verifier import JWKS_PATH
from tests.integration.dispatcher.api.conftest import Perform
from tests.integration.dispatcher.api.forging import KNOWN, LIVES_SECONDS
from tests.integration.dispatcher.api.stage import Stage, held, ok, output, place, read, refused
from tests.integration.dispatcher.api.test_proofs import ATTEMPTS, audited

OWN = {"event_id": "1", "dataset": "tidy", "partition_key": "x"}


async def verified(stage: Stage, token: str, *, is_expiry_judged: bool = True) -> Claims:
    return await stage.parts.issuer.verify(
        token, audience=TASK_AUDIENCE, is_expiry_judged=is_expiry_judged
    )


async def running(stage: Stage, *keys: str) -> list[Assignment]:
    await stage.apply(ATTEMPTS)
    await stage.trigger(*(keys or ("p",)))
    # The first look of a reaper after an outage ends nothing.
    await stage.world.tasks.reap()
    return await stage.claim(limit=len(keys) or 1)


async def reaped(stage: Stage) -> None:
    stage.world.later(120)
    assert (await stage.world.tasks.reap(outage_seconds=1000)).reaped


def test_a_claim_brings_a_token_of_its_attempt(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        first, second = await running(stage, "p", "q")
        for task in (first, second):
            claims = await verified(stage, task.token)
            assert (claims.task_id, claims.attempt) == (task.task_id, 1)
            assert claims.exp == int(task.lease_expires_at.timestamp())
            (write,) = claims.grants.write
            assert write.dataset == task.definition["datasets"]["tidy"]
            assert write.prefix == str(scope_of_location(place(task)))
        assert first.token != second.token
        assert not first.mints

    on_stage(story)


def test_heartbeats_bring_the_next_token(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        first, second = await running(stage, "p", "q")
        stage.world.later(10)
        answer = await stage.beat(held(first), held(second, token="nonsense"))
        assert answer.status_code == 207
        good, bad = answer.json()["results"]
        assert (bad["status"], bad["token"], bad["lease_expires_at"]) == (403, "", None)
        before, after = (
            await verified(stage, first.token),
            await verified(stage, good["token"]),
        )
        assert after.exp == before.exp + 10
        assert (after.task_id, after.attempt, after.grants) == (
            first.task_id,
            1,
            before.grants,
        )
        # The next one does what the first did.
        ok(await stage.complete(held(first, token=good["token"], outputs=[output(first)])))

    on_stage(story)


def test_a_lost_answer_of_a_heartbeat_locks_nobody_out(on_stage: Perform) -> None:
    """The worker goes on with the token that it has, which expires; the fence still holds."""

    async def story(stage: Stage) -> None:
        (task,) = await running(stage)
        for _ in range(5):
            stage.world.later(50)
            ok(await stage.beat(held(task)))
        problem = refused(await stage.task_events(held(task), OWN), 403)
        assert problem.type == "token expired"
        (result,) = ok(await stage.beat(held(task)))["results"]
        ok(await stage.task_events(held(task, token=result["token"]), OWN))
        # Also the token of the claim itself still ends it.
        ok(await stage.complete(held(task, outputs=[output(task)])))

    on_stage(story)


def test_an_identical_replay_is_answered_long_after_the_token_has_expired(
    on_stage: Perform,
) -> None:
    async def story(stage: Stage) -> None:
        (task,) = await running(stage)
        end = held(task, outputs=[output(task)])
        first = ok(await stage.complete(end))
        stage.world.later(1800)
        assert ok(await stage.complete(end)) == first
        in_header = {name: value for name, value in end.items() if name != "token"}
        again = await stage.internal.post(
            "/v1/task/complete", json={"tasks": [in_header]}, headers={TASK_HEADER: task.token}
        )
        assert ok(again) == first
        # Without a token the same words are nobody's.
        assert refused(await stage.complete(in_header), 401).type == "token missing"

    on_stage(story)


def test_the_token_of_a_reaped_attempt_stops_at_once_everywhere(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        (zombie,) = await running(stage)
        await reaped(stage)
        # It has not expired by itself: another dispatcher has signed it a moment ago.
        token = await stage.token(zombie.task_id, 1, write={})
        live = held(zombie, token=token)
        assert (await verified(stage, token)).exp > 0
        header = {TASK_HEADER: token}

        async def stopped() -> None:
            assert refused(await stage.beat(live), 409).type == "stale"
            assert refused(await stage.complete(live), 409).type == "stale"
            assert refused(await stage.task_events(live, OWN), 409).type == "stale"
            minting = await stage.internal.post("/v1/task/credentials", headers=header)
            assert refused(minting, 409).type == "stale"

        await stopped()
        stage.world.later(5)
        (successor,) = await stage.claim()
        assert (successor.task_id, successor.attempt) == (zombie.task_id, 2)
        await stopped()
        # With the fence of its successor it is no better, and the other way round neither.
        for mixed in (held(successor, token=token), held(zombie, token=successor.token)):
            refused(await stage.beat(mixed), 403)
            refused(await stage.complete(mixed), 403)
            refused(await stage.task_events(mixed, OWN), 403)
        assert await stage.world.value("SELECT count(*) FROM event WHERE task_id > 0") == 0
        ok(await stage.complete(held(successor, outputs=[output(successor)])))
        notes = await audited(stage.parts, stage)
        assert {each["task_id"] for each in notes} == {zombie.task_id}
        assert {"stale", "former attempt", "another attempt"} <= {each["reason"] for each in notes}

    on_stage(story)


@pytest.mark.parametrize(
    "elsewhere",
    [
        "{root}",
        "{root}/datasets/tidy",
        "{folder}x",
        "{folder}/../other",
        "{folder}/%2e%2e/other",
        "{folder}//x",
        "s3://bucket/elsewhere",
        "{scratch}",
        "{neighbour}",
    ],
)
def test_an_output_lies_in_the_folder_of_its_attempt(on_stage: Perform, elsewhere: str) -> None:
    async def story(stage: Stage) -> None:
        task, other = await running(stage, "p", "q")
        location = elsewhere.format(
            root=task.root,
            folder=place(task),
            scratch=f"{task.root}/scratch/{task.folder}",
            neighbour=place(other),
        )
        bad = held(task, outputs=[output(task, location=location)])
        answer = await stage.complete(bad, held(other, outputs=[output(other)]))
        assert answer.status_code == 207
        first, second = answer.json()["results"]
        assert (first["status"], first["why"], second["status"]) == (409, "outputs", 200)
        assert "does not lie in the folder of this attempt" in first["detail"]
        assert first["state"]["status"] == "running"
        assert await stage.world.value("SELECT count(*) FROM publication") == 1
        (note,) = await audited(stage.parts, stage)
        assert (note["task_id"], note["reason"]) == (task.task_id, "outside of its grants")
        assert note["detail"]["location"] == location
        # The attempt goes on, and may say the right thing: below its folder is in it.
        good = output(task, location=f"{place(task)}/below")
        ok(await stage.complete(held(task, outputs=[good])))

    on_stage(story)


def test_another_datasets_folder_of_the_same_attempt_is_not_its_own(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        await stage.apply(ATTEMPTS.replace("[tidy]", "[tidy, rest]"))
        await stage.trigger("p")
        (task,) = await stage.claim()
        swapped = [output(task, location=place(task, "rest")), output(task, "rest")]
        assert refused(await stage.complete(held(task, outputs=swapped)), 409).type == "outputs"
        ok(await stage.complete(held(task, outputs=[output(task), output(task, "rest")])))

    on_stage(story)


def test_without_a_signer_nothing_is_claimed(on_stage: Perform, monkeypatch: Any) -> None:
    async def story(stage: Stage) -> None:
        await stage.apply(ATTEMPTS)
        await stage.trigger("p")
        task_id = await stage.world.value("SELECT id FROM task")
        issuer = type(stage.parts.issuer)

        async def away(*_: object, **__: object) -> Any:
            raise SignerUnavailable("KMS does not answer.")

        with monkeypatch.context() as patched:
            patched.setattr(issuer, "tokens_for", away)
            for ask in ({"task_id": task_id}, {"operator": "a:clean"}):
                answer = await stage.internal.post(
                    "/internal/task-claim", json=ask, headers=stage.identity()
                )
                assert refused(answer, 503).type == "unavailable"
                assert answer.headers["retry-after"] == "1"
        assert await stage.world.value("SELECT count(*) FROM attempt") == 0
        assert await stage.world.value("SELECT status FROM task") == "queued"
        (task,) = await stage.claim()
        assert task.attempt == 1

    on_stage(story)


def test_without_a_signer_a_heartbeat_extends_the_lease_all_the_same(
    on_stage: Perform, monkeypatch: Any
) -> None:
    async def story(stage: Stage) -> None:
        (task,) = await running(stage)
        stage.world.later(10)

        async def away(*_: object, **__: object) -> Any:
            raise SignerUnavailable("KMS does not answer.")

        with monkeypatch.context() as patched:
            patched.setattr(type(stage.parts.keys), "signer", away)
            (result,) = ok(await stage.beat(held(task)))["results"]
        assert (result["status"], result["token"]) == (200, "")
        assert result["lease_expires_at"] > task.lease_expires_at.isoformat()
        (result,) = ok(await stage.beat(held(task)))["results"]
        assert result["token"]

    on_stage(story)


async def claim_by(stage: Stage, token: str, **ask: Any) -> Any:
    return await stage.internal.post("/internal/task-claim", json=ask, headers={TASK_HEADER: token})


def test_an_invocation_claims_its_task(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        await stage.apply(ATTEMPTS)
        await stage.trigger("p", "q")
        ids = [row["id"] for row in await stage.world.rows("SELECT id FROM task ORDER BY id")]
        token = await stage.parts.issuer.invocation(ids[0], 1)
        for ask in ({"task_id": ids[1]}, {"operator": "a:clean"}, {}):
            problem = refused(await claim_by(stage, token, **ask), 403)
            assert f"task {ids[0]} alone" in problem.title
        (task,) = read(await claim_by(stage, token, task_id=ids[0]), ClaimAnswer).tasks
        assert (task.task_id, task.attempt) == (ids[0], 1)
        worker = await stage.world.value("SELECT worker FROM task WHERE id = %s", ids[0])
        assert worker == "function:a:clean"
        # What it is given proves the attempt, as everybody's does; the invocation does not.
        refused(await stage.beat(held(task, token=token)), 403)
        ok(await stage.beat(held(task)))
        # An invocation that comes twice runs once.
        assert refused(await claim_by(stage, token, task_id=ids[0]), 409).type == "running"
        ok(await stage.complete(held(task, outputs=[output(task)])))
        assert refused(await claim_by(stage, token, task_id=ids[0]), 409).type == "over"
        old = await stage.token(ids[1], 0, aud=INVOKE_AUDIENCE)
        stage.world.later(LIVES_SECONDS + 60)
        assert refused(await claim_by(stage, old, task_id=ids[1]), 403).type == "token expired"
        notes = await audited(stage.parts, stage)
        assert {(each["reason"], each["outcome"]) for each in notes} == {
            ("another task", "refused"),
            ("wrong audience", "refused"),
            ("expired", "refused"),
        }

    on_stage(story)


def test_every_refusal_is_noted_and_no_secret_is(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        task, other = await running(stage, "p", "q")
        for _ in range(3):
            refused(await stage.beat(held(task, token="a.secret.one")), 403)
        refused(await stage.complete(held(task, token=other.token)), 403)
        refused(await stage.task_events({**held(task), "token": ""}, OWN), 401)
        refused(await stage.internal.get("/internal/sources"), 401)
        wrong = {**stage.identity("w"), "X-Penstock-Worker": "v"}
        refused(await stage.internal.get("/internal/sources", headers=wrong), 403)
        found = [
            (each["what"], each["task_id"], each["caller"], each["reason"])
            for each in await audited(stage.parts, stage)
        ]
        who = f"task:{other.task_id}:1"
        assert sorted(found, key=str) == [
            ("GET /internal/sources", None, "", "no identity"),
            ("GET /internal/sources", None, "", "wrong identity"),
            ("POST /v1/task/complete", other.task_id, who, "another attempt"),
            ("POST /v1/task/events", None, "", "missing"),
            ("POST /v1/task/heartbeat", None, "", "malformed"),
        ]
        times = await stage.world.rows("SELECT times FROM audit ORDER BY times DESC")
        assert [each["times"] for each in times] == [3, 1, 1, 1, 1]
        text = str(await stage.world.rows("SELECT * FROM audit"))
        for secret in ("a.secret", task.token, task.lease_token, other.token):
            assert secret not in text

    on_stage(story)


async def told_of(stage: Stage, task: Assignment, token: str) -> list[tuple[str, int, str]]:
    """What becomes of every call of an attempt with this token: its status, and what kind."""
    headers = {TASK_HEADER: token}
    asked = {"task_id": task.task_id, "attempt": 1, "lease_token": task.lease_token}
    said = {
        "credentials": await stage.internal.post("/v1/task/credentials", headers=headers),
        "events": await stage.internal.post(
            "/v1/task/events", json={**asked, "events": [OWN]}, headers=headers
        ),
        "heartbeat": await stage.beat(held(task, token=token)),
        "complete": await stage.complete(held(task, token=token, outputs=[output(task)])),
    }
    return [(name, each.status_code, each.json().get("type", "")) for name, each in said.items()]


def test_who_has_a_signing_key_widens_no_grants(on_stage: Perform) -> None:
    """One of our keys has signed it, for a running attempt, and it grants something else."""

    async def story(stage: Stage) -> None:
        (task,) = await running(stage)
        issued = (await verified(stage, task.token)).grants
        everything = ReadGrant(dataset="x", version="y", prefixes=("file:///",))
        for grants in (
            Grants(write=issued.write),
            msgspec.structs.replace(issued, scratch="file:///"),
            msgspec.structs.replace(issued, read=(everything,)),
        ):
            token = await stage.token(task.task_id, 1, grants=grants)
            assert await told_of(stage, task, token) == [
                ("credentials", 403, "token other grants"),
                ("events", 403, "token other grants"),
                ("heartbeat", 409, "stale"),
                ("complete", 409, "stale"),
            ]
        notes = [note["reason"] for note in await audited(stage.parts, stage)]
        assert notes.count("other grants") == 2
        # The same grants are those of the attempt, whichever dispatcher has signed.
        same = await stage.token(task.task_id, 1, grants=issued)
        assert [status for _, status, _ in await told_of(stage, task, same)] == [409, 200, 200, 200]

    on_stage(story)


def test_an_attempt_of_the_release_before_has_no_grants_that_are_known(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        (task,) = await running(stage)
        for left in (None, "7:of-another-attempt"):
            await stage.world.rows("UPDATE task SET grants = %s", left)
            ok(await stage.beat(held(task)))
        ok(await stage.complete(held(task, outputs=[output(task)])))

    on_stage(story)


def test_a_retired_key_signs_no_more(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        (task,) = await running(stage)
        issued = (await verified(stage, task.token)).grants
        await stage.token(task.task_id, 1)
        await stage.world.rows(
            "UPDATE signing_key SET retired_at = penstock_now() WHERE kid = %s", KNOWN.kid
        )
        before = await stage.token(task.task_id, 1, grants=issued, exp=2**40)
        stage.world.later(61)
        ok(await stage.beat(held(task)))
        after = await stage.token(task.task_id, 1, grants=issued)
        for token in (before, after):
            with pytest.raises(TokenRefused) as wrong:
                await verified(stage, token)
            assert wrong.value.kind == "retired key"

    on_stage(story)


def test_a_revoked_key_proves_nothing_and_interrupts_nobody(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        task, other = await running(stage, "p", "q")
        (signs,) = ok(await stage.public.get("/v1/keys"))["keys"]
        kid = signs["kid"]
        invoked = await stage.parts.issuer.invocation(99, 1)
        answer = ok(await stage.public.post("/v1/keys/revoke", json={"kid": kid}))
        assert (answer["kid"], answer["is_new"]) == (kid, True)
        # What the signature alone proves is over at once.
        assert await told_of(stage, task, task.token) == [
            ("credentials", 403, "token revoked key"),
            ("events", 403, "token revoked key"),
            ("heartbeat", 200, ""),
            ("complete", 200, ""),
        ]
        headers = {TASK_HEADER: invoked}
        claimed = await stage.internal.post(
            "/internal/task-claim", json={"task_id": 99}, headers=headers
        )
        assert "by a revoked key" in refused(claimed, 403).title
        # What runs has a token of another key by its next heartbeat.
        (beaten,) = ok(await stage.beat(held(other)))["results"]
        assert read_token(beaten["token"]).kid != kid
        asked = {"task_id": other.task_id, "attempt": 1, "lease_token": other.lease_token}
        headers = {TASK_HEADER: beaten["token"]}
        said = {**asked, "events": [OWN]}
        ok(await stage.internal.post("/v1/task/events", json=said, headers=headers))
        published = {each["kid"] for each in ok(await stage.internal.get(JWKS_PATH))["keys"]}
        assert kid not in published
        assert published
        # Again is the same, and what nobody knows is told.
        again = ok(await stage.public.post("/v1/keys/revoke", json={"kid": kid}))
        assert (again["revoked_at"], again["is_new"]) == (answer["revoked_at"], False)
        refused(await stage.public.post("/v1/keys/revoke", json={"kid": "nobody"}), 404)
        notes = await audited(stage.parts, stage)
        assert {"revoked key", "revocation", "revoked before"} <= {note["reason"] for note in notes}

    on_stage(story)


def test_many_tokens_in_one_call(on_stage: Perform) -> None:
    """Others are served while a call with many tokens is judged."""

    async def story(stage: Stage) -> None:
        tasks = await running(stage, *(f"p{n}" for n in range(100)))
        entries = [held(each) for each in tasks]
        entries[50]["token"] = entries[51]["token"]
        beat, _ = await asyncio.gather(stage.beat(*entries), stage.internal.get("/healthz"))
        results = beat.json()["results"]
        assert [each["status"] for each in results] == [200] * 50 + [403] + [200] * 49
        assert len({each["token"] for each in results}) == 100

    on_stage(story)
