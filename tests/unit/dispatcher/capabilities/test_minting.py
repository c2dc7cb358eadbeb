"""Minting: what a token grants, less if that is asked for, and never more."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pytest

from penstock.dispatcher.capabilities.credentials import (
    MINTS_MAX,
    READER_MINTS_MAX,
    SHARED_SECONDS,
    WINDOW_SECONDS,
    CredentialMinter,
    MintedStore,
    RoleSession,
    make_minter,
)
from penstock.kernel.aws import Aws
from penstock.kernel.clock import SystemClock
from penstock.kernel.errors import (
    CredentialsRefused,
    CredentialsUnavailable,
    InvalidInput,
    TokenRefused,
)
from penstock.testing.virtual import World, simulate
from penstock.tokens.claims import Claims, Grants, ReadGrant, WriteGrant
from penstock.tokens.scopes import Root
from tests.iam import Policy

ROLE = "arn:aws:iam::123456789012:role/tasks"
IN = "s3://lake/root/datasets/trips/1/a/6-1-x/"
OUT = "s3://lake/root/datasets/tidy/1/a/7-2-x/"
SCRATCH = "s3://lake/root/scratch/7-2-x/"


@dataclass
class Sessions:
    """STS, as far as anybody here knows."""

    asked: list[dict[str, str]] = field(default_factory=list)
    failure: Exception | None = None

    async def assume(self, *, role: str, name: str, policy: str) -> RoleSession:
        self.asked.append({"role": role, "name": name, "policy": policy})
        if self.failure is not None:
            raise self.failure
        return RoleSession(
            access_key=f"AKIA{len(self.asked)}",
            secret_key="very secret",
            session_token="also secret",
            expires_at=datetime(2026, 1, 1, tzinfo=UTC),
        )

    def close(self) -> None:
        self.asked.append({"closed": "yes"})


def minter(sessions: Sessions, *, root: str = "s3://lake/root", **fields: Any) -> CredentialMinter:
    store = MintedStore(root=Root.parse(root), region="eu-west-1", endpoint="", role=ROLE)
    return CredentialMinter(store, sessions, **fields)


def claims(*, task_id: int = 7, attempt: int = 2, read: Sequence[str] = (IN,)) -> Claims:
    return Claims(
        iss="penstock/default",
        aud="penstock:task",
        sub=f"task:{task_id}:{attempt}",
        iat=1,
        nbf=1,
        exp=2,
        jti="j",
        org="default",
        task_id=task_id,
        attempt=attempt,
        grants=Grants(
            read=(ReadGrant(dataset="d", version="v", prefixes=tuple(read)),),
            write=(WriteGrant(dataset="e", version="v", prefix=OUT),),
            scratch=SCRATCH,
        ),
    )


def test_a_session_is_for_what_the_token_grants() -> None:
    sessions = Sessions()
    minted = asyncio.run(minter(sessions).mint(claims()))
    assert (minted.read, minted.write) == ((IN, SCRATCH), (OUT, SCRATCH))
    assert (minted.region, minted.endpoint) == ("eu-west-1", "")
    assert minted.expires_at == datetime(2026, 1, 1, tzinfo=UTC)
    (asked,) = sessions.asked
    assert (asked["role"], asked["name"]) == (ROLE, "penstock-7-2")
    policy = Policy(asked["policy"])
    assert policy.allows("s3:GetObject", f"arn:aws:s3:::{IN[5:]}x")
    assert policy.allows("s3:PutObject", f"arn:aws:s3:::{OUT[5:]}x")
    assert not policy.allows("s3:PutObject", f"arn:aws:s3:::{IN[5:]}x")


def test_no_repr_has_the_secrets() -> None:
    minted = asyncio.run(minter(Sessions()).mint(claims()))
    assert "secret" not in repr(minted)
    session = RoleSession(
        access_key="a", secret_key="secret", session_token="secret", expires_at=minted.expires_at
    )
    assert "secret" not in repr(session)


def test_fewer_folders_and_deeper_ones_may_be_asked_for() -> None:
    sessions = Sessions()
    asked = minter(sessions).mint(claims(), read=[f"{IN}deeper/", f"{IN}deeper/"], write=[])
    minted = asyncio.run(asked)
    assert (minted.read, minted.write) == ((f"{IN}deeper/",), ())
    policy = Policy(sessions.asked[0]["policy"])
    assert policy.allows("s3:GetObject", f"arn:aws:s3:::{IN[5:]}deeper/x")
    assert not policy.allows("s3:GetObject", f"arn:aws:s3:::{IN[5:]}x")
    assert not policy.allows("s3:PutObject", f"arn:aws:s3:::{OUT[5:]}x")


@pytest.mark.parametrize(
    ("verb", "wider"),
    [
        ("read", "s3://lake/root/datasets/trips/1/a/"),
        ("read", "s3://lake/root/datasets/trips/1/a/6-1-xy/"),
        ("read", "s3://lake2/root/datasets/trips/1/a/6-1-x/"),
        ("read", OUT),
        ("write", IN),
        ("write", "s3://lake/root/scratch/"),
        ("write", "s3://lake/root/scratch/7-3-x/"),
    ],
)
def test_more_than_the_token_grants_is_refused(verb: str, wider: str) -> None:
    sessions = Sessions()
    with pytest.raises(TokenRefused, match=f"does not grant to {verb}") as no:
        asyncio.run(minter(sessions).mint(claims(), **{verb: [SCRATCH, wider]}))
    assert no.value.kind == "not granted"
    assert sessions.asked == []


@pytest.mark.parametrize("text", [f"{IN}../", IN[:-1], f"{IN}*/", "file:///x/", "s3://lake/", ""])
def test_what_is_no_folder_is_refused(text: str) -> None:
    sessions = Sessions()
    with pytest.raises(InvalidInput, match="is no scope"):
        asyncio.run(minter(sessions).mint(claims(), read=[text]))
    assert sessions.asked == []


def test_nothing_is_asked_for_nothing() -> None:
    sessions = Sessions()
    with pytest.raises(CredentialsRefused, match="no folder"):
        asyncio.run(minter(sessions).mint(claims(), read=[], write=[]))
    assert sessions.asked == []


@pytest.mark.parametrize("granted", ["s3://lake2/root/x/", "s3://lake/other/x/", "file:///x/", "x"])
def test_what_is_not_below_the_store_is_not_minted_whatever_a_token_says(granted: str) -> None:
    sessions = Sessions()
    with pytest.raises(CredentialsRefused):
        asyncio.run(minter(sessions).mint(claims(read=[IN, granted])))
    assert sessions.asked == []


def test_a_store_that_is_a_whole_bucket_mints() -> None:
    minted = asyncio.run(minter(Sessions(), root="s3://lake").mint(claims()))
    assert minted.read == (IN, SCRATCH)


def test_too_many_folders_are_refused_before_anybody_is_asked() -> None:
    sessions = Sessions()
    many = [f"s3://lake/root/datasets/trips/1/{number}/{'x' * 60}/" for number in range(30)]
    with pytest.raises(CredentialsRefused, match="31 folders") as no:
        asyncio.run(minter(sessions).mint(claims(read=many), write=[]))
    assert no.value.kind == "too many folders"
    assert sessions.asked == []


def test_the_same_attempt_that_asks_again_soon_is_given_the_same() -> None:
    async def story(world: World) -> None:
        sessions, clock = Sessions(), world.clock()
        mints = minter(sessions, clock=clock)
        first = await mints.mint(claims())
        assert await mints.mint(claims()) is first
        for other in (
            mints.mint(claims(attempt=3)),
            mints.mint(claims(task_id=8)),
            mints.mint(claims(), write=[]),
            mints.mint(claims(), read=[SCRATCH]),
        ):
            assert (await other).access_key != first.access_key
        assert len(sessions.asked) == 5
        await clock.sleep(SHARED_SECONDS + 1)
        assert (await mints.mint(claims())).access_key == "AKIA6"

    simulate(story, seed=1)


def test_an_attempt_is_not_minted_more_than_so_much_in_a_minute() -> None:
    async def story(world: World) -> None:
        sessions, clock = Sessions(), world.clock()
        mints = minter(sessions, clock=clock)
        for number in range(MINTS_MAX):
            await mints.mint(claims(), read=[f"{IN}{number}/"])
        with pytest.raises(CredentialsUnavailable, match="limit of 32"):
            await mints.mint(claims(), read=[f"{IN}x/"])
        # What was had can be had again, others have their own, and a minute later so has it.
        await mints.mint(claims(), read=[f"{IN}0/"])
        await mints.mint(claims(task_id=8))
        await mints.mint(claims(attempt=3))
        assert len(sessions.asked) == MINTS_MAX + 2
        await clock.sleep(WINDOW_SECONDS)
        await mints.mint(claims(), read=[f"{IN}x/"])

    simulate(story, seed=1)


def test_a_reader_has_a_quota_of_its_own() -> None:
    async def story(world: World) -> None:
        sessions, clock = Sessions(), world.clock()
        mints = minter(sessions, clock=clock)

        async def read(number: int, *, who: str = "reader-a") -> None:
            minted = await mints.mint_reading(f"s3://lake/root/datasets/d{number}/", who=who)
            assert minted.write == ()

        # As an engine that looks at the columns of all tables.
        for number in range(READER_MINTS_MAX):
            await read(number)
        with pytest.raises(CredentialsUnavailable, match="This reader has reached the limit"):
            await read(READER_MINTS_MAX)
        # What was had can be had again, and neither another reader nor an attempt is less for it.
        await read(0)
        await read(0, who="reader-b")
        await mints.mint(claims())
        assert len(sessions.asked) == READER_MINTS_MAX + 2
        await clock.sleep(WINDOW_SECONDS)
        await read(READER_MINTS_MAX)

    simulate(story, seed=1)


def test_what_is_counted_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.dispatcher.capabilities.credentials._ASKING_MAX", 3)

    async def story() -> None:
        mints = minter(Sessions())
        for task_id in range(1, 9):
            await mints.mint(claims(task_id=task_id))
        assert list(mints._asking) == ["6-2", "7-2", "8-2"]

    asyncio.run(story())


def test_what_failed_is_not_shared() -> None:
    async def story() -> None:
        sessions = Sessions(failure=CredentialsUnavailable("away"))
        mints = minter(sessions)
        with pytest.raises(CredentialsUnavailable):
            await mints.mint(claims())
        sessions.failure = None
        assert (await mints.mint(claims())).access_key == "AKIA2"

    asyncio.run(story())


def test_what_is_shared_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.dispatcher.capabilities.credentials._SHARED_MAX", 3)

    async def story() -> None:
        sessions = Sessions()
        mints = minter(sessions)
        for task_id in (1, 2, 3, 4):
            await mints.mint(claims(task_id=task_id))
        assert len(mints._shared) == 3
        await mints.mint(claims(task_id=4))
        assert len(sessions.asked) == 4
        await mints.mint(claims(task_id=1))
        assert len(sessions.asked) == 5
        mints.close()
        assert not mints._shared

    asyncio.run(story())


def made(store_url: str, role: str = ROLE, **environment: str) -> CredentialMinter:
    return make_minter(
        store_url=store_url, role=role, sts=Aws(), environment=environment, clock=SystemClock()
    )


@pytest.mark.parametrize(
    ("store_url", "role", "why"),
    [
        ("file:///data", ROLE, "S3 stores"),
        ("memory://x", ROLE, "S3 stores"),
        ("s3://lake", "", "no role"),
    ],
)
def test_installations_that_mint_nothing_say_why(store_url: str, role: str, why: str) -> None:
    nothing = made(store_url, role)
    assert not nothing.mints
    with pytest.raises(CredentialsRefused, match=why) as no:
        asyncio.run(nothing.mint(claims()))
    assert no.value.hint
    nothing.close()


def test_a_minter_by_itself_refuses() -> None:
    with pytest.raises(CredentialsRefused):
        asyncio.run(CredentialMinter().mint(claims()))


@pytest.mark.parametrize(
    "role", ["tasks", "arn:aws:iam::1:user/x", "arn:aws:s3:::b", "aws:iam::1:role/x", "role/x"]
)
def test_a_role_that_is_none_is_found_at_the_start(role: str) -> None:
    with pytest.raises(InvalidInput, match="not the ARN of a role"):
        made("s3://lake", role)


@pytest.mark.parametrize(
    ("url", "region", "endpoint", "sts_region", "sts_endpoint"),
    [
        ("s3://lake/root?region=eu-west-1", "eu-west-1", "", "eu-west-1", None),
        (
            "s3://lake?endpoint=http://127.0.0.1:8333&region=here",
            *("here", "http://127.0.0.1:8333", "here", "http://127.0.0.1:8333"),
        ),
        (
            "s3://lake?endpoint=https://s3.example:9000&style=virtual",
            *("us-east-1", "https://s3.example:9000", "us-east-1", "https://s3.example:9000"),
        ),
    ],
)
def test_where_the_store_is_and_which_sts_is_asked(
    url: str, region: str, endpoint: str, sts_region: str, sts_endpoint: str | None
) -> None:
    found = made(url)
    assert found.mints
    assert found._store is not None
    assert (found._store.region, found._store.endpoint) == (region, endpoint)
    sts = getattr(found._sessions, "_aws")  # noqa: B009 - a part of what the protocol does not have
    assert (sts.region, sts.endpoint) == (sts_region, sts_endpoint)
    found.close()
