"""Keys and the audit over HTTP: the key set for verifiers, and what people ask."""

from __future__ import annotations

import httpx
import pytest

from penstock.dispatcher.api.key_endpoints import JWKS_SECONDS
from penstock.dispatcher.api.routes import internal_app
from penstock.dispatcher.capabilities.signing_keys import JOIN_SECONDS, PUBLISH_SECONDS
from penstock.kernel.errors import TokenRefused
from penstock.protocol.keys import AuditAnswer, KeysAnswer, KeyState, RotateAnswer
from penstock.tokens import HttpKeys, Verifier
from penstock.tokens.claims import INVOKE_AUDIENCE, TASK_AUDIENCE
from tests.integration.dispatcher.api.conftest import Perform
from tests.integration.dispatcher.api.signing import MemoryHolding, StageKeys
from tests.integration.dispatcher.api.stage import Stage, ok, read, refused

JWKS = "/internal/jwks/task"


class Clock:
    """The clock of a verifier somewhere else, which is in time with the world's."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def monotonic(self) -> float:
        return self._stage.world.offset_seconds[0]

    def wall(self) -> float:
        return 1_893_456_000 + self._stage.world.offset_seconds[0]

    async def sleep(self, seconds: float) -> None:
        raise AssertionError(seconds)


def test_a_verifier_somewhere_else_needs_the_key_set_alone(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        transport = httpx.ASGITransport(internal_app(stage.parts))
        verifier = Verifier(
            HttpKeys(f"http://internal{JWKS}", transport=transport),
            issuer="penstock/default",
            audience=TASK_AUDIENCE,
            clock=Clock(stage),
        )
        await stage.apply()
        await stage.trigger("p")
        (task,) = await stage.claim()
        claims = await verifier.verify(task.token)
        assert claims.sub == f"task:{task.task_id}:1"
        # A key that is new is in the set long before it signs.
        ok(await stage.public.post("/v1/keys/rotate"))
        await stage.parts.keys.turn()
        stage.world.later(PUBLISH_SECONDS)
        await stage.parts.keys.turn()
        await stage.trigger("q")
        (other,) = await stage.claim()
        assert (await verifier.verify(other.token)).task_id == other.task_id
        invoked = await stage.parts.issuer.invocation(1, 1)
        with pytest.raises(TokenRefused) as wrong:
            await verifier.verify(invoked)
        assert wrong.value.kind == "wrong audience"

    on_stage(story)


def test_the_key_set_is_public_and_kept_for_less_than_a_key_waits(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        answer = await stage.internal.get(JWKS)
        (key,) = ok(answer)["keys"]
        assert set(key) == {"kty", "crv", "x", "y", "kid", "alg", "use"}
        assert answer.headers["cache-control"] == f"public, max-age={JWKS_SECONDS}"
        assert JWKS_SECONDS < PUBLISH_SECONDS
        assert (await stage.public.get(JWKS)).status_code == 404

    on_stage(story)


def test_keys_are_listed_and_rotated(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        (first,) = read(await stage.public.get("/v1/keys"), KeysAnswer).keys
        assert (first.state, first.is_rotated) == (KeyState.SIGNING, True)
        asked = read(await stage.public.post("/v1/keys/rotate", json={}), RotateAnswer)
        assert asked.is_new
        assert not read(await stage.public.post("/v1/keys/rotate"), RotateAnswer).is_new
        (late,) = read(await stage.public.get("/v1/keys"), KeysAnswer).keys
        assert not late.is_rotated
        await stage.parts.keys.turn()
        new, old = read(await stage.public.get("/v1/keys"), KeysAnswer).keys
        assert (new.state, old.state) == (KeyState.PUBLISHED, KeyState.SIGNING)
        assert new.signs_from == asked.signs_from
        problem = refused(
            await stage.public.post("/v1/keys/rotate", json={"kms_key": "alias/x"}), 422
        )
        assert "signs with keys in files" in problem.title
        refused(await stage.public.post("/v1/keys/rotate", json={"kms_key": "a b"}), 422)
        await stage.parts.audit.turn()
        notes = read(await stage.public.get("/v1/audit?outcome=allowed"), AuditAnswer).notes
        assert sorted((each.what, each.reason) for each in notes) == [
            ("POST /v1/keys/rotate", "rotation"),
            ("POST /v1/keys/rotate", "the same rotation"),
        ]
        refused(await stage.public.get("/v1/audit?outcome=nonsense"), 422)

    on_stage(story)


def test_a_dispatcher_whose_key_does_not_sign_yet_claims_nothing(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        await stage.apply()
        await stage.trigger("p")
        second = StageKeys(stage.world.database, MemoryHolding("second"))
        await second.turn()
        stage.parts.issuer._keys = second  # a dispatcher that has just joined
        answer = await stage.internal.post(
            "/internal/task-claim", json={"operator": "a:clean"}, headers=stage.identity()
        )
        assert "signs tokens from" in refused(answer, 503).title
        assert answer.headers["retry-after"] == "1"
        assert await stage.world.value("SELECT max(attempt) FROM task") == 0
        stage.world.later(JOIN_SECONDS)
        await second.turn()
        (task,) = await stage.claim()
        assert task.attempt == 1
        # The other dispatcher verifies what this one has signed, at its first sight.
        await stage.parts.issuer.verify(task.token, audience=TASK_AUDIENCE, is_expiry_judged=True)
        with pytest.raises(TokenRefused):
            await stage.parts.issuer.verify(
                task.token, audience=INVOKE_AUDIENCE, is_expiry_judged=True
            )

    on_stage(story)
