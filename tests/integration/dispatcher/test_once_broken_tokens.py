"""What a breaker of the tokens has found once, so that it is found no more."""

from __future__ import annotations

import asyncio
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from psycopg.types.json import Jsonb

from penstock.datasets.layout import place_of
from penstock.dispatcher.api.routes import public_app
from penstock.dispatcher.capabilities.audit import ADDRESS_MINUTE_MAX
from penstock.dispatcher.capabilities.signing_keys import (
    AWAY_SECONDS_MIN,
    JOIN_SECONDS,
    SigningKeys,
)
from penstock.dispatcher.capabilities.tokens import KMS_CLAIMS_MAX, TokenIssuer
from penstock.dispatcher.database.pool import Connection, Database
from penstock.dispatcher.tasks.lifecycle import BATCH_MAX
from penstock.dispatcher.tasks.model import ExtendedLease, Fence
from penstock.kernel.errors import SignerUnavailable
from penstock.protocol.base import TASK_HEADER
from penstock.protocol.work import ClaimAnswer
from penstock.testing.virtual import simulate
from penstock.tokens.claims import TASK_AUDIENCE, Claims, decode, public_key
from penstock.tokens.signer import PemSigner, Signer
from penstock.tokens.verifier import KEYS_MAX
from tests.integration.dispatcher.api.stage import (
    Stage,
    held,
    ok,
    output,
    parts_of,
    perform,
    place,
    read,
    refused,
)
from tests.integration.dispatcher.test_capability_keys import files, issuer_of, keys_in, states
from tests.integration.dispatcher.test_deployment import chain
from tests.integration.dispatcher.world import Play, World, Worlds
from tests.unit.dispatcher.capabilities.test_grants import claimed


async def publish_strangers(world: World, count: int, *, seen_ago_seconds: float = 0) -> None:
    """Keys of dispatchers that came and went, all later than those that are there."""
    await world.rows(
        "INSERT INTO signing_key"
        " (kid, signer, holder, reference, jwk, created_at, signs_from, seen_at)"
        " SELECT 'pod' || n, 'pem', 'pod' || n, 'x', %s, penstock_now() - interval '1 h',"
        " penstock_now() + interval '1 s', penstock_now() - %s * interval '1 s'"
        " FROM generate_series(1, %s) AS n",
        Jsonb(dict(PemSigner.new().jwk)),
        seen_ago_seconds,
        count,
    )


def test_keys_of_many_strangers_push_out_none_that_is_needed(worlds: Worlds) -> None:
    async def story(stage: Stage) -> None:
        ok(await stage.apply())
        await stage.trigger("p")
        (task,) = await stage.claim()
        await publish_strangers(stage.world, KEYS_MAX, seen_ago_seconds=60)
        other = parts_of(stage.world)
        claims = await other.issuer.verify(
            task.token, audience=TASK_AUDIENCE, is_expiry_judged=False
        )
        assert claims.task_id == task.task_id
        kid = (await stage.parts.keys.signer()).kid
        found = await other.keys.published()
        assert len(found) == KEYS_MAX
        assert kid in found
        # Whoever verifies here knows all of them.
        assert len(await other.keys.keys()) == KEYS_MAX + 1

    perform(worlds, story)


def test_a_dispatcher_that_came_and_went_leaves_its_key_for_minutes(
    play: Play, tmp_path: Path
) -> None:
    async def story(world: World) -> None:
        stays, goes = keys_in(world, tmp_path / "1"), keys_in(world, tmp_path / "2")
        await stays.turn()
        for _ in range(100):
            world.later(60)
            await stays.turn()
        await goes.turn()
        (brief,) = files(tmp_path / "2")
        (long,) = files(tmp_path / "1")
        world.later(AWAY_SECONDS_MIN - 1)
        third = keys_in(world, tmp_path / "3")
        await third.turn()
        assert (await states(world))[brief] == "signing"
        world.later(2)
        await third.turn()
        # The one that was there for long may be away for long.
        assert (await states(world))[brief] == "retired"
        assert (await states(world))[long] == "signing"

    play(story)


def test_a_key_whose_row_was_lost_is_published_again(play: Play, tmp_path: Path) -> None:
    async def story(world: World) -> None:
        keys = keys_in(world, tmp_path)
        await keys.turn()
        lost = (await keys.signer()).kid
        token = await issuer_of(world, keys).invocation(7, 1)
        await world.rows("DELETE FROM signing_key")
        await keys.turn()
        world.later(JOIN_SECONDS)
        await keys.turn()
        new = (await keys.signer()).kid
        assert await states(world) == {lost: "retired", new: "signing"}
        claims = await issuer_of(world, keys).verify(
            token, audience="penstock:invoke", is_expiry_judged=True
        )
        assert claims.task_id == 7
        # It stays as it is, also for others on the folder, who find nothing to do.
        await keys_in(world, tmp_path).turn()
        assert await states(world) == {lost: "retired", new: "signing"}
        assert files(tmp_path) == {lost, new}

    play(story)


def test_made_up_tasks_take_no_room_in_the_audit(worlds: Worlds) -> None:
    async def story(stage: Stage) -> None:
        ok(await stage.apply())
        await stage.trigger("p")
        (task,) = await stage.claim()
        for call in range(3):
            made_up = [
                {"task_id": 10_000 + 1000 * call + n, "attempt": 1, "lease_token": "x"}
                for n in range(1000)
            ]
            await stage.beat(*made_up)
        elsewhere = output(task, location="file:///lake/datasets/other/x")
        refused(await stage.complete(held(task, outputs=[elsewhere])), 409)
        while await stage.parts.audit.turn() == 0.0:
            pass
        rows = await stage.world.rows("SELECT * FROM audit ORDER BY id")
        assert [(row["task_id"], row["reason"], row["times"]) for row in rows] == [
            (task.task_id, "outside of its grants", 1),
            (None, "missing", 3),
        ]
        assert rows[1]["detail"]["entries"] == 1000
        assert len(rows[1]["detail"]["asked"]) == 10

    perform(worlds, story)


def test_who_has_no_proof_takes_no_room_from_who_has(worlds: Worlds) -> None:
    async def story(stage: Stage) -> None:
        audit = stage.parts.audit
        for address in range(100):
            for n in range(100):
                audit.note(what="x", outcome="refused", address=f"10.0.0.{address}", reason=f"{n}")
        for n in range(ADDRESS_MINUTE_MAX + 1):
            audit.note(what="x", outcome="refused", address="10.1.0.1", reason=f"{n}")
        audit.note(what="x", outcome="refused", caller="task:7:1", task_id=7, reason="stale")
        audit.note(what="x", outcome="allowed", caller="task:7:1", task_id=7, reason="minted")
        while await audit.turn() == 0.0:
            pass
        (kept,) = await stage.world.rows(
            "SELECT count(*) FILTER (WHERE task_id = 7) AS of_task, count(*) AS all FROM audit"
        )
        assert kept == {"of_task": 2, "all": 1000 + 2 + 1}

    perform(worlds, story)


def test_one_address_does_not_take_the_room_of_others(worlds: Worlds) -> None:
    async def story(stage: Stage) -> None:
        audit = stage.parts.audit
        for n in range(10_000):
            audit.note(what="x", outcome="refused", address="10.0.0.1", reason=f"{n}")
        audit.note(what="x", outcome="refused", address="10.0.0.2", reason="no identity")
        await audit.turn()
        found = await stage.world.rows(
            "SELECT address, count(*) AS rows FROM audit GROUP BY 1 ORDER BY 1"
        )
        assert [(row["address"], row["rows"]) for row in found] == [
            ("", 1),
            ("10.0.0.1", ADDRESS_MINUTE_MAX),
            ("10.0.0.2", 1),
        ]

    perform(worlds, story)


def test_what_is_published_has_one_spelling(worlds: Worlds) -> None:
    async def story(stage: Stage) -> None:
        ok(await stage.apply())
        await stage.trigger("p", "q")
        one, two = await stage.claim(limit=2)
        other = "datasets/other/g/p/1-1-" + "a" * 24
        for task, tail in ((one, ""), (two, f"/{other}/")):
            odd = place(task).replace("/datasets/", "/%64atasets/") + tail
            ok(await stage.complete(held(task, outputs=[output(task, location=odd)])))
        found = await stage.world.rows(
            "SELECT location, place FROM publication WHERE location IS NOT NULL ORDER BY task_id"
        )
        assert [(row["location"], row["place"]) for row in found] == [
            (place(one), place_of(place(one))),
            (f"{place(two)}/{other}", place_of(place(two))),
        ]

    perform(worlds, story)


def test_an_invocation_begins_its_own_attempt_alone(worlds: Worlds) -> None:
    async def story(stage: Stage) -> None:
        ok(await stage.apply())
        await stage.trigger("p")
        task_id = await stage.world.value("SELECT id FROM task")

        async def claim(token: str) -> httpx.Response:
            return await stage.internal.post(
                "/internal/task-claim", json={"task_id": task_id}, headers={TASK_HEADER: token}
            )

        first, second = [await stage.parts.issuer.invocation(task_id, each) for each in (1, 2)]
        # Not yet.
        assert refused(await claim(second), 409).type == "stale"
        (task,) = read(await claim(first), ClaimAnswer).tasks
        failed = held(task, failure={"reason": "no"})
        ok(await stage.complete(failed))
        stage.world.later(60)
        # It runs on, and does not become the next attempt.
        assert refused(await claim(first), 409).type == "stale"
        assert await stage.world.value("SELECT status FROM task") == "retrying"
        (task,) = read(await claim(second), ClaimAnswer).tasks
        assert task.attempt == 2
        await stage.parts.audit.turn()
        noted = await stage.world.rows("SELECT caller, reason FROM audit ORDER BY caller")
        assert [(row["caller"], row["reason"]) for row in noted] == [
            (f"invocation:{task_id}:1", "stale"),
            (f"invocation:{task_id}:2", "stale"),
        ]

    perform(worlds, story)


class FewSignatures:
    """A signer that fails, or never answers, for some of what it is asked."""

    def __init__(self, *, fails: int = 0, hangs: int = 0) -> None:
        self._real = PemSigner.new()
        self.kid, self.jwk = self._real.kid, self._real.jwk
        self.fails, self.hangs, self.asked = fails, hangs, 0

    async def sign(self, message: bytes) -> bytes:
        self.asked += 1
        if self.asked == self.fails:
            raise SignerUnavailable("KMS cannot sign now: ThrottlingException.")
        if self.asked == self.hangs:
            await asyncio.Event().wait()
        return await self._real.sign(message)


class FewKeys:
    def __init__(self, signer: Signer, *, is_remote: bool = False) -> None:
        self._signer, self.is_remote = signer, is_remote
        self.revoked_until = -math.inf

    async def signer(self, **_: Any) -> Signer:
        return self._signer


def few(signer: Signer, **fields: Any) -> TokenIssuer:
    keys = cast("SigningKeys", FewKeys(signer, **fields))
    return TokenIssuer(cast("Database", None), keys, root="s3://lake/x")


def extended(task_id: int, *, ends: int, exp: int = 160) -> tuple[ExtendedLease, Claims]:
    """A lease until `ends` of an attempt whose token is of 100 until `exp`."""
    claims = Claims(
        iss="i", aud="a", sub="s", iat=100, nbf=100, exp=exp, jti="", org="", task_id=task_id,
        attempt=1,
    )  # fmt: skip
    return ExtendedLease(task_id, 1, datetime.fromtimestamp(ends, UTC), cancel_asked=False), claims


def test_one_signature_that_fails_costs_one_token() -> None:
    signer = FewSignatures(fails=25)
    leases = [extended(n, ends=180) for n in range(1, 51)]
    assert len(asyncio.run(few(signer).renewed(leases))) == 49


def test_one_signature_that_hangs_costs_one_token() -> None:
    async def main() -> None:
        signer = FewSignatures(hangs=5)
        leases = [extended(n, ends=180) for n in range(1, 51)]
        assert len(await few(signer).renewed(leases)) == 49
        # A claim is undone: it holds locks.
        nobody = cast("Connection", None)
        with pytest.raises(SignerUnavailable, match="1 tokens were not signed within"):
            await few(FewSignatures(hangs=1)).tokens_for([claimed()], connection=nobody)

    simulate(main(), seed=1)


def test_with_kms_a_token_is_renewed_when_half_of_its_life_is_over() -> None:
    async def main() -> None:
        signer = FewSignatures()
        issuer = few(signer, is_remote=True)
        leases = [extended(1, ends=160), extended(2, ends=180), extended(3, ends=190)]
        assert set(await issuer.renewed(leases)) == {3}
        assert signer.asked == 1
        # With a key in a file each heartbeat has one.
        assert set(await few(signer).renewed(leases)) == {1, 2, 3}

    asyncio.run(main())


def test_a_renewed_token_lives_as_long_as_the_one_before() -> None:
    signer = FewSignatures()
    (token,) = asyncio.run(few(signer).renewed([extended(1, ends=200)])).values()
    after = decode(token, {signer.kid: public_key(signer.jwk)})
    assert (after.iat, after.nbf, after.exp) == (140, 100, 200)


def test_a_claim_is_of_as_many_as_can_be_signed(worlds: Worlds) -> None:
    assert few(FewSignatures()).claims_max == BATCH_MAX
    assert few(FewSignatures(), is_remote=True).claims_max == KMS_CLAIMS_MAX

    async def story(stage: Stage) -> None:
        ok(await stage.apply())
        await stage.trigger("p", "q", "r")
        found = await stage.world.tasks.claim_next("a:clean", worker="w", limit=3, tasks_max=2)
        assert len(found) == 2

    perform(worlds, story)


def test_no_lease_token_is_in_a_repr(worlds: Worlds) -> None:
    async def story(stage: Stage) -> None:
        ok(await stage.apply())
        await stage.trigger("p")
        (found,) = await stage.world.tasks.claim_next("a:clean", worker="w")
        assert found.lease_token not in repr(found)
        assert "secret" not in repr(Fence(1, 1, "secret"))

    perform(worlds, story)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:7070", 200),
        ("localhost", 200),
        ("LOCALHOST:7070", 200),
        ("[::1]:7070", 200),
        ("evil.example", 403),
        ("evil.example:7070", 403),
        ("127.0.0.1.evil.example", 403),
        ("127.0.0.1@evil.example", 403),
        ("[", 403),
        ("", 403),
    ],
)
def test_a_name_that_leads_here_is_another_site(worlds: Worlds, host: str, status: int) -> None:
    async def story(stage: Stage) -> None:
        answer = await stage.public.get("/v1/keys", headers={"Host": host})
        assert answer.status_code == status
        await stage.parts.audit.turn()
        reasons = await stage.world.rows("SELECT reason FROM audit")
        assert [row["reason"] for row in reasons] == ([] if status == 200 else ["another site"])
        # Who has a token may come by any name.
        app = public_app(parts_of(stage.world, api_token="right"))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://any") as client:
            ok(await client.get("/v1/keys", headers={"Authorization": "Bearer right"}))

    perform(worlds, story)


def test_a_job_has_not_more_outputs_than_a_token_can_name(worlds: Worlds) -> None:
    def dag(count: int) -> str:
        names = ", ".join(f"out_{n}" for n in range(count))
        wide = f"{{runtime: process, operator: 'a:w', inputs: [tidy], outputs: [{names}]}}"
        return chain(extra=f"  wide: {wide}")

    async def story(stage: Stage) -> None:
        problem = refused(await stage.apply(dag(80)), 422)
        assert "The job wide has 80 outputs, and the token of a task has room" in problem.title
        ok(await stage.apply(dag(30)))

    perform(worlds, story)
