"""Keys of KMS, which all dispatchers share, by names that may come to mean something else."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from penstock.dispatcher.capabilities.key_store import KmsKeyStore
from penstock.dispatcher.capabilities.signing_keys import (
    KEPT_SECONDS,
    PUBLISH_SECONDS,
    SLACK_SECONDS,
    SigningKeys,
)
from penstock.dispatcher.tasks.model import ClaimedTask, ExtendedLease
from penstock.kernel.aws import aws_client
from penstock.kernel.errors import InvalidInput, TokenRefused
from penstock.tokens.claims import INVOKE_AUDIENCE, TASK_AUDIENCE
from tests.integration.aws_server import AwsServer
from tests.integration.dispatcher.test_capability_keys import (
    issuer_of,
    keys_in,
    signing,
    states,
)
from tests.integration.dispatcher.world import Play, World


def kms_key(server: AwsServer, alias: str = "") -> str:
    client = aws_client("kms", aws=server.aws)
    made = client.create_key(KeySpec="ECC_NIST_P256", KeyUsage="SIGN_VERIFY")["KeyMetadata"]
    if alias:
        with_alias = client.update_alias if alias in _aliases(client) else client.create_alias
        with_alias(AliasName=alias, TargetKeyId=made["KeyId"])
    client.close()
    return str(made["Arn"])


def _aliases(client: Any) -> set[str]:
    return {each["AliasName"] for each in client.list_aliases()["Aliases"]}


def in_kms(world: World, server: AwsServer, name: str) -> SigningKeys:
    return SigningKeys(world.database, KmsKeyStore(name, aws=server.aws))


async def arn_of(world: World, kid: str) -> Any:
    return await world.value("SELECT reference FROM signing_key WHERE kid = %s", kid)


def test_keys_of_kms_are_one_for_all(play: Play, aws_server: AwsServer) -> None:
    async def story(world: World) -> None:
        arn = kms_key(aws_server)
        all_keys = [in_kms(world, aws_server, arn) for _ in range(3)]
        await asyncio.gather(*(each.start() for each in all_keys))
        (kid,) = await states(world)
        assert {await signing(each) for each in all_keys} == {kid}
        assert await arn_of(world, kid) == arn
        one, two = (issuer_of(world, each) for each in all_keys[:2])
        token = await one.invocation(1, 1)
        await two.verify(token, audience=INVOKE_AUDIENCE, is_expiry_judged=True)
        # There is nothing to rotate to: the name means the key that it meant.
        await all_keys[0].rotate()
        for _ in range(2):
            await asyncio.gather(*(each.turn() for each in all_keys))
        assert await states(world) == {kid: "signing"}
        assert all(each.is_rotated for each in (await all_keys[0].listed()).keys)
        for each in all_keys:
            await each.stop()

    play(story)


def test_an_alias_that_is_moved_takes_effect_at_a_rotation(
    play: Play, aws_server: AwsServer
) -> None:
    async def story(world: World) -> None:
        alias = "alias/moved"
        first = kms_key(aws_server, alias)
        keys, other = (in_kms(world, aws_server, alias) for _ in range(2))
        await keys.turn()
        await other.turn()
        old = await signing(keys)
        second = kms_key(aws_server, alias)
        await keys.turn()
        # What it has signed is still of the key that it was found to be.
        issuer = issuer_of(world, keys)
        await issuer.verify(
            await issuer.invocation(1, 1), audience=INVOKE_AUDIENCE, is_expiry_judged=True
        )
        assert await arn_of(world, await signing(keys)) == first
        await keys.rotate()
        await keys.turn()
        await other.turn()
        assert sorted((await states(world)).values()) == ["published", "signing"]
        assert await signing(keys) == old
        world.later(PUBLISH_SECONDS)
        await keys.turn()
        await other.turn()
        assert await arn_of(world, await signing(other)) == second
        assert await signing(keys) == await signing(other)
        assert (await states(world))[old] == "retired"
        # Long after, nobody publishes the old one again.
        world.later(SLACK_SECONDS)
        await keys.turn()
        world.later(KEPT_SECONDS)
        for _ in range(2):
            await keys.turn()
            await other.turn()
        assert old not in await states(world)
        for each in (keys, other):
            await each.stop()

    play(story)


def test_an_alias_that_is_moved_while_some_dispatchers_start_again(
    play: Play, aws_server: AwsServer
) -> None:
    async def story(world: World) -> None:
        alias = "alias/restarted"
        kms_key(aws_server, alias)
        staying = in_kms(world, aws_server, alias)
        await staying.turn()
        old = await signing(staying)
        kms_key(aws_server, alias)
        started = in_kms(world, aws_server, alias)
        await started.start()
        assert await signing(started) == old
        world.later(PUBLISH_SECONDS)
        for _ in range(2):
            await started.turn()
            await staying.turn()
        assert await signing(started) == await signing(staying) != old
        world.later(SLACK_SECONDS)
        await started.turn()
        world.later(KEPT_SECONDS)
        for _ in range(3):
            await started.turn()
            await staying.turn()
        # The one that stayed does not bring back what the alias meant when it started.
        assert await signing(started) == await signing(staying)
        assert old not in await states(world)
        for each in (staying, started):
            await each.stop()

    play(story)


def test_a_rotation_may_name_the_key_of_kms_and_go_back(play: Play, aws_server: AwsServer) -> None:
    async def story(world: World) -> None:
        first, second = kms_key(aws_server), kms_key(aws_server)
        keys = in_kms(world, aws_server, first)
        await keys.turn()
        old = await signing(keys)
        with pytest.raises(InvalidInput, match="KMS has no such key"):
            await keys.rotate(kms_key="alias/nonsense")
        await keys.rotate(kms_key=second)
        await keys.turn()
        assert await signing(keys) == old
        world.later(PUBLISH_SECONDS)
        await keys.turn()
        assert await arn_of(world, await signing(keys)) == second
        assert (await states(world))[old] == "retired"
        # Whoever starts with the old setting signs with the key of the rotation too.
        again = in_kms(world, aws_server, first)
        await again.start()
        assert await signing(again) == await signing(keys)
        await keys.rotate(kms_key=first)
        await keys.turn()
        assert (await states(world))[old] == "published"
        world.later(PUBLISH_SECONDS)
        await keys.turn()
        await again.turn()
        assert await signing(keys) == await signing(again) == old
        for each in (keys, again):
            await each.stop()

    play(story)


def test_a_key_of_kms_that_is_revoked_leaves_nobody_without_a_token(
    play: Play, aws_server: AwsServer
) -> None:
    async def story(world: World) -> None:
        first, second = kms_key(aws_server), kms_key(aws_server)
        keys = in_kms(world, aws_server, first)
        await keys.turn()
        stolen, issuer = await signing(keys), issuer_of(world, keys)
        job = await world.job(heartbeat_ms=3_600_000)
        (task,) = await job.make("one")
        claimed = await world.tasks.claim(task, worker="w", issue=issuer.tokens_for)
        assert isinstance(claimed, ClaimedTask)
        claims = await issuer.verify(claimed.token, audience=TASK_AUDIENCE, is_expiry_judged=True)
        await keys.rotate(kms_key=second)
        await keys.turn()
        world.later(PUBLISH_SECONDS)
        await keys.turn()
        await keys.revoke(stolen)
        with pytest.raises(TokenRefused, match="by a revoked key"):
            await issuer.verify(claimed.token, audience=TASK_AUDIENCE, is_expiry_judged=True)
        # The next heartbeat brings one, however long the life of the old one would be.
        (extended,) = await world.tasks.heartbeat([claimed.fence])
        assert isinstance(extended, ExtendedLease)
        renewed = await issuer.renewed([(extended, claims)])
        await issuer.verify(renewed[task], audience=TASK_AUDIENCE, is_expiry_judged=True)
        with pytest.raises(InvalidInput, match="was revoked and no longer signs"):
            await keys.rotate(kms_key=first)
        await keys.stop()

    play(story)


def test_a_key_of_kms_that_cannot_be_used(
    play: Play, aws_server: AwsServer, tmp_path: Path
) -> None:
    async def story(world: World) -> None:
        with pytest.raises(InvalidInput, match="KMS has no such key"):
            await in_kms(world, aws_server, "alias/none").start()
        with pytest.raises(InvalidInput, match="does not say with which key"):
            in_kms(world, aws_server, "")
        with pytest.raises(InvalidInput, match="signs with keys in files"):
            await keys_in(world, tmp_path).rotate(kms_key="alias/x")

    play(story)
