"""Verifiers: whose token, for whom, when; and keys that are asked for seldom."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest

from penstock.kernel.clock import Clock
from penstock.kernel.errors import DispatcherUnavailable, TokenRefused
from penstock.testing.virtual import World, simulate
from penstock.tokens.claims import INVOKE_AUDIENCE, TASK_AUDIENCE, encode
from penstock.tokens.signer import PemSigner
from penstock.tokens.verifier import (
    KEYS_SECONDS_MAX,
    KEYS_SECONDS_TRUSTED,
    LIFE_SECONDS_MAX,
    REFRESH_SECONDS_MIN,
    REMEMBERED_MAX,
    RETIRED_SECONDS,
    Jwk,
    KeyCache,
    Verifier,
)
from tests.contract.signer_contract import claims_of_task
from tests.unit.tokens.forging import OTHER, SIGNER

LEEWAY_SECONDS = 5.0


class Source:
    """Keys that tests change, and how often they were asked for."""

    def __init__(self, *signers: PemSigner) -> None:
        self.found: dict[str, Any] = {each.kid: each.jwk for each in signers}
        self.asked = 0
        self.is_away = False
        self.delay: Callable[[], Any] | None = None

    async def keys(self) -> Mapping[str, Jwk]:
        self.asked += 1
        if self.delay is not None:
            await self.delay()
        if self.is_away:
            raise DispatcherUnavailable("nobody is there")
        return dict(self.found)


def verifier_of(source: Source, clock: Clock) -> Verifier:
    return Verifier(source, issuer="penstock/default", audience=TASK_AUDIENCE, clock=clock)


async def token_of(clock: Clock, signer: PemSigner = SIGNER, **changes: Any) -> str:
    """A token that is valid for a minute from now, but for what is changed."""
    now = int(clock.wall())
    times = {"iat": now, "nbf": now, "exp": now + 60}
    return await encode(msgspec.structs.replace(claims_of_task(), **{**times, **changes}), signer)


async def kind_of(verifier: Verifier, token: str, **how: Any) -> str:
    """Why a token is refused; empty if it is taken, `away` if nobody could say."""
    try:
        await verifier.verify(token, **how)
    except TokenRefused as refusal:
        return refusal.kind
    except DispatcherUnavailable:
        return "away"
    return ""


def test_a_right_token_is_taken() -> None:
    async def main(world: World) -> None:
        clock = world.clock()
        token = await token_of(clock)
        claims = await verifier_of(Source(SIGNER), clock).verify(token)
        assert (claims.task_id, claims.attempt) == (7, 2)

    simulate(main, seed=1)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"iss": "penstock/other"}, "wrong issuer"),
        ({"iss": "penstock"}, "wrong issuer"),
        ({"iss": ""}, "wrong issuer"),
        ({"aud": INVOKE_AUDIENCE}, "wrong audience"),
        ({"aud": "penstock:task "}, "wrong audience"),
        ({"aud": ""}, "wrong audience"),
    ],
)
@pytest.mark.parametrize("is_expiry_judged", [True, False])
def test_another_issuer_or_audience(
    changes: dict[str, Any], kind: str, is_expiry_judged: bool
) -> None:
    async def main(world: World) -> None:
        clock = world.clock()
        token = await token_of(clock, **changes)
        verifier = verifier_of(Source(SIGNER), clock)
        assert await kind_of(verifier, token, is_expiry_judged=is_expiry_judged) == kind

    simulate(main, seed=1)


def test_a_token_lives_from_its_first_second_to_its_last() -> None:
    async def main(world: World) -> None:
        clock = world.clock()
        now = int(clock.wall())
        token = await token_of(clock, nbf=now + 100, exp=now + 200)
        verifier = verifier_of(Source(SIGNER), clock)
        seen = []
        for skew, expected in (
            (0.0, "not yet valid"),
            (100 - LEEWAY_SECONDS - 1, "not yet valid"),
            (100 - LEEWAY_SECONDS, ""),
            (199.0, ""),
            (200 + LEEWAY_SECONDS - 1, ""),
            (200 + LEEWAY_SECONDS, "expired"),
            (86_400.0 * 365, "expired"),
        ):
            clock.skew_seconds = skew
            seen.append(await kind_of(verifier, token) == expected)
            assert await kind_of(verifier, token, is_expiry_judged=False) == ""
        assert all(seen), seen

    simulate(main, seed=1)


def test_a_token_of_another_key_or_none() -> None:
    async def main(world: World) -> None:
        clock = world.clock()
        verifier = verifier_of(Source(SIGNER), clock)
        assert await kind_of(verifier, await token_of(clock, OTHER)) == "unknown key"
        assert await kind_of(verifier, "") == "missing"
        assert await kind_of(verifier, "x") == "malformed"
        right = await token_of(clock)
        assert await kind_of(verifier, right[:-4] + "AAAA") == "bad signature"

    simulate(main, seed=1)


def test_a_key_that_is_retired_signs_no_more() -> None:
    async def main(world: World) -> None:
        clock, source = world.clock(), Source(SIGNER)
        retired_at = int(clock.wall()) + 1000
        before = await token_of(clock, iat=retired_at - 5, exp=retired_at + 1100)
        source.found = {SIGNER.kid: {**SIGNER.jwk, "retired_at": retired_at}}
        await clock.sleep(1000 + 2 * RETIRED_SECONDS)
        verifier = verifier_of(source, clock)
        assert await kind_of(verifier, before) == ""
        # Whoever signs learns of it a moment later.
        in_time = await token_of(clock, iat=int(retired_at + RETIRED_SECONDS))
        assert await kind_of(verifier, in_time) == ""
        late = await token_of(clock, iat=int(retired_at + RETIRED_SECONDS) + 1)
        for how in (True, False):
            assert await kind_of(verifier, late, is_expiry_judged=how) == "retired key"
        # The time can be set back by whoever has the key; then it ends, too.
        ends = int(retired_at + RETIRED_SECONDS + LIFE_SECONDS_MAX)
        for exp, kind in ((ends, ""), (ends + 1, "retired key")):
            assert await kind_of(verifier, await token_of(clock, iat=1, nbf=1, exp=exp)) == kind
        source.found = {SIGNER.kid: {**SIGNER.jwk, "retired_at": "soon"}}
        assert await kind_of(verifier_of(source, clock), before) == "retired key"

    simulate(main, seed=1)


# How often keys are asked for


def test_keys_are_asked_for_once_and_when_they_are_old() -> None:
    async def main(world: World) -> None:
        clock, source = world.clock(), Source(SIGNER)
        verifier = verifier_of(source, clock)
        for _ in range(5):
            assert await kind_of(verifier, await token_of(clock)) == ""
        assert source.asked == 1
        await clock.sleep(KEYS_SECONDS_MAX - 1)
        assert await kind_of(verifier, await token_of(clock)) == ""
        assert source.asked == 1
        await clock.sleep(1)
        assert await kind_of(verifier, await token_of(clock)) == ""
        assert source.asked == 2

    simulate(main, seed=1)


def test_a_new_key_is_found_and_a_former_one_forgotten() -> None:
    async def main(world: World) -> None:
        clock, source = world.clock(), Source(SIGNER)
        verifier = verifier_of(source, clock)
        assert await kind_of(verifier, await token_of(clock)) == ""
        source.found = {OTHER.kid: OTHER.jwk}
        await clock.sleep(REFRESH_SECONDS_MIN)
        assert await kind_of(verifier, await token_of(clock, OTHER)) == ""
        assert source.asked == 2
        assert await kind_of(verifier, await token_of(clock)) == "unknown key"
        assert source.asked == 2

    simulate(main, seed=1)


def test_a_signature_is_verified_once_and_everything_else_each_time() -> None:
    async def main(world: World) -> None:
        clock, source = world.clock(), Source(SIGNER)
        verifier = verifier_of(source, clock)
        token = await token_of(clock, exp=int(clock.wall()) + 3_000)
        assert await kind_of(verifier, token) == ""
        # What was remembered is not looked at again, so a text that nobody has signed shows it.
        said = await verifier.verified(token, is_expiry_judged=True)
        verifier.remember("signed here", said)
        assert await verifier.verified("signed here", is_expiry_judged=True) == said
        await clock.sleep(3_000 + 2 * LEEWAY_SECONDS)
        assert await kind_of(verifier, token) == "expired"
        source.found = {OTHER.kid: OTHER.jwk}
        await clock.sleep(REFRESH_SECONDS_MIN)
        assert await kind_of(verifier, await token_of(clock, OTHER)) == ""
        assert await kind_of(verifier, token, is_expiry_judged=False) == "unknown key"
        for number in range(REMEMBERED_MAX):
            verifier.remember(str(number), said)
        assert await kind_of(verifier, "signed here") == "malformed"

    simulate(main, seed=1)


def test_made_up_names_of_keys_do_not_flood_the_source() -> None:
    async def main(world: World) -> None:
        clock, source = world.clock(), Source(SIGNER)
        verifier = verifier_of(source, clock)
        strangers = [PemSigner.new() for _ in range(5)]
        began = clock.monotonic()
        for number in range(400):
            token = await token_of(clock, strangers[number % 5])
            assert await kind_of(verifier, token) == "unknown key"
            await clock.sleep(0.1)
            assert await kind_of(verifier, await token_of(clock)) == ""
        passed = clock.monotonic() - began
        assert source.asked <= 1 + passed / REFRESH_SECONDS_MIN
        assert source.asked >= 3

    simulate(main, seed=1)


def test_many_at_once_ask_once() -> None:
    async def main(world: World) -> None:
        clock, source = world.clock(), Source(SIGNER, OTHER)
        source.delay = lambda: clock.sleep(2)
        verifier = verifier_of(source, clock)
        tokens = [await token_of(clock, each) for each in (SIGNER, OTHER, PemSigner.new())]
        kinds = await asyncio.gather(*(kind_of(verifier, token) for token in tokens * 50))
        assert kinds == ["", "", "unknown key"] * 50
        assert source.asked == 1

    simulate(main, seed=1)


def test_whoever_has_a_key_does_not_wait_for_a_refresh() -> None:
    async def main(world: World) -> None:
        clock, source = world.clock(), Source(SIGNER)
        verifier = verifier_of(source, clock)
        await verifier.verify(await token_of(clock))
        await clock.sleep(KEYS_SECONDS_MAX)
        source.delay = lambda: clock.sleep(2)
        async with asyncio.TaskGroup() as group:
            group.create_task(verifier.verify(await token_of(clock)))
            await clock.sleep(0.1)
            assert source.asked == 2
            began = clock.monotonic()
            await verifier.verify(await token_of(clock))
            assert clock.monotonic() == began
        assert source.asked == 2

    simulate(main, seed=1)


def test_while_the_source_is_away_keys_serve_for_a_while() -> None:
    async def main(world: World) -> None:
        clock, source = world.clock(), Source(SIGNER)
        verifier = verifier_of(source, clock)
        await verifier.verify(await token_of(clock))
        source.is_away = True
        await clock.sleep(KEYS_SECONDS_TRUSTED - 1)
        assert await kind_of(verifier, await token_of(clock)) == ""
        # Whether this one is known nobody can say.
        assert await kind_of(verifier, await token_of(clock, OTHER)) == "away"
        await clock.sleep(1)
        assert await kind_of(verifier, await token_of(clock)) == "away"
        asked = source.asked
        assert await kind_of(verifier, await token_of(clock)) == "away"
        assert source.asked == asked
        source.is_away = False
        await clock.sleep(REFRESH_SECONDS_MIN)
        assert await kind_of(verifier, await token_of(clock)) == ""

    simulate(main, seed=1)


def test_who_gives_up_half_way_leaves_neither_an_open_door_nor_a_lie() -> None:
    async def main(world: World) -> None:
        clock, source = world.clock(), Source(SIGNER)
        source.delay = lambda: clock.sleep(1)
        verifier = verifier_of(source, clock)
        token = await token_of(clock)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(verifier.verify(token), timeout=0.5)
        for _ in range(5):
            assert await kind_of(verifier, token) == "away"
        assert source.asked == 1
        await clock.sleep(REFRESH_SECONDS_MIN)
        assert await kind_of(verifier, token) == ""

    simulate(main, seed=1)


def test_the_waiting_ask_when_the_asking_gives_up_but_not_before_the_floor() -> None:
    async def main(world: World) -> None:
        clock, source = world.clock(), Source(SIGNER)
        source.delay = lambda: clock.sleep(1)
        verifier = verifier_of(source, clock)
        token = await token_of(clock)
        async with asyncio.TaskGroup() as group:
            first = group.create_task(kind_of(verifier, token))
            await clock.sleep(0.1)
            second = group.create_task(kind_of(verifier, token))
            await clock.sleep(0.5)
            first.cancel()
        assert second.result() == "away"
        assert source.asked == 1

    simulate(main, seed=1)


def test_a_key_that_is_none_is_passed_over() -> None:
    async def main(world: World) -> None:
        clock, source = world.clock(), Source(SIGNER)
        source.found["wrong"] = {"kty": "oct", "k": "AAAA"}
        source.found[OTHER.kid] = {**OTHER.jwk, "d": "AAAA"}
        verifier = verifier_of(source, clock)
        assert await kind_of(verifier, await token_of(clock)) == ""
        assert await kind_of(verifier, await token_of(clock, OTHER)) == "unknown key"

    simulate(main, seed=1)


def test_verifiers_may_share_their_keys() -> None:
    async def main(world: World) -> None:
        clock, source = world.clock(), Source(SIGNER)
        cache = KeyCache(source, clock=clock, refresh_seconds_min=1.0)
        verifier = Verifier(cache, issuer="penstock/default", audience="none", clock=clock)
        for audience in (TASK_AUDIENCE, INVOKE_AUDIENCE):
            verifier = Verifier(cache, issuer="penstock/default", audience=audience, clock=clock)
            token = await token_of(clock, aud=audience)
            assert (await verifier.verify(token)).aud == audience
        assert source.asked == 1
        # The floor is the cache's own.
        for asked in (2, 3):
            await clock.sleep(1)
            assert await kind_of(verifier, await token_of(clock, OTHER)) == "unknown key"
            assert source.asked == asked

    simulate(main, seed=1)
