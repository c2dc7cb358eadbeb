"""The keys of dispatchers on a real Postgres: made once, published before they sign, kept."""

from __future__ import annotations

import asyncio
import logging
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from penstock.dispatcher.capabilities.key_store import PemKeyStore
from penstock.dispatcher.capabilities.signing_keys import (
    AWAY_SECONDS,
    CHOICE_SECONDS_MAX,
    JOIN_SECONDS,
    KEPT_SECONDS,
    LIVE_SECONDS,
    PUBLISH_SECONDS,
    SLACK_SECONDS,
    SigningKeys,
)
from penstock.dispatcher.capabilities.tokens import TokenIssuer
from penstock.dispatcher.database.pool import Answer, Connection, Database
from penstock.dispatcher.tasks.model import ClaimedTask, ExtendedLease
from penstock.kernel.clock import SystemClock
from penstock.kernel.errors import (
    DatabaseUnavailable,
    InvalidInput,
    SignerUnavailable,
    TokenRefused,
)
from penstock.tokens.claims import INVOKE_AUDIENCE, TASK_AUDIENCE
from penstock.tokens.signer import SUFFIX, PemSigner
from tests.integration.dispatcher.world import Play, World, done


class Clock(SystemClock):
    """A machine's clock that the test moves, and that believes something else than the database."""

    ahead_seconds = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead_seconds


def keys_in(world: World, folder: Path, *, clock: Clock | None = None) -> SigningKeys:
    return SigningKeys(world.database, PemKeyStore(folder / "keys"), clock=clock)


def issuer_of(world: World, keys: SigningKeys, **fields: Any) -> TokenIssuer:
    said: dict[str, Any] = {"root": "file:///lake", "refresh_seconds_min": 0, **fields}
    return TokenIssuer(world.database, keys, **said)


def files(folder: Path) -> set[str]:
    return {each.stem for each in (folder / "keys").glob(f"*{SUFFIX}")}


async def states(world: World) -> dict[str, str]:
    keys = await SigningKeys(world.database, PemKeyStore(Path("/nowhere"))).listed()
    return {each.kid: each.state.value for each in keys.keys}


async def signing(keys: SigningKeys) -> str:
    return (await keys.signer()).kid


class Killed(BaseException):
    """The process is gone."""


class Dies(Database):
    """Is killed before its nth transaction, or after it with its answer lost."""

    def __init__(
        self, real: Database, *, before: int | None = None, after: int | None = None
    ) -> None:
        self._real, self._before, self._after, self._count = real, before, after, 0

    async def transact(self, work: Callable[[Connection], Any]) -> Answer:
        self._count += 1
        if self._count == self._before:
            raise Killed
        answer: Answer = await self._real.transact(work)
        if self._count == self._after:
            raise Killed
        return answer


def test_the_first_key_of_all_signs_at_once(play: Play, tmp_path: Path) -> None:
    async def story(world: World) -> None:
        keys = keys_in(world, tmp_path)
        await keys.start()
        kid = await signing(keys)
        assert files(tmp_path) == {kid}
        assert await states(world) == {kid: "signing"}
        path = tmp_path / "keys" / f"{kid}{SUFFIX}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        # Started again, it has the same; the machine's clock has no say.
        again = keys_in(world, tmp_path)
        await again.start()
        assert await signing(again) == kid
        assert len(await states(world)) == 1

    play(story)


def test_a_dispatcher_starts_while_postgres_is_away(play: Play, tmp_path: Path) -> None:
    async def story(world: World) -> None:
        unopened = Database(world.dsn, connections_max=10)
        keys = SigningKeys(unopened, PemKeyStore(tmp_path / "keys"))
        await keys.start()
        with pytest.raises(DatabaseUnavailable):
            await keys.signer()

    play(story)


def test_no_private_key_is_in_postgres_or_in_a_log(
    play: Play, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(world: World) -> None:
        keys = keys_in(world, tmp_path)
        await keys.turn()
        await keys.rotate()
        await keys.turn()
        assert len(files(tmp_path)) == 2
        rows = await world.rows("SELECT row_to_json(signing_key)::text AS said FROM signing_key")
        said = caplog.text + "".join(row["said"] for row in rows)
        for kid in files(tmp_path):
            text = (tmp_path / "keys" / f"{kid}{SUFFIX}").read_text()
            assert kid in said
            assert not any(line in said for line in text.splitlines())
        assert '"d"' not in said

    with caplog.at_level(logging.DEBUG):
        play(story)


def test_several_on_one_folder_share_one_key(play: Play, tmp_path: Path) -> None:
    async def story(world: World) -> None:
        all_keys = [keys_in(world, tmp_path) for _ in range(5)]
        await asyncio.gather(*(each.start() for each in all_keys))
        (kid,) = await states(world)
        assert {await signing(each) for each in all_keys} == {kid}
        assert files(tmp_path) == {kid}
        # And they rotate as one.
        await all_keys[0].rotate()
        await asyncio.gather(*(each.turn() for each in all_keys))
        assert len(await states(world)) == len(files(tmp_path)) == 2

    play(story)


def test_several_on_different_folders_verify_each_other(play: Play, tmp_path: Path) -> None:
    async def story(world: World) -> None:
        first, second = keys_in(world, tmp_path / "1"), keys_in(world, tmp_path / "2")
        await asyncio.gather(first.start(), second.start())
        assert sorted((await states(world)).values()) == ["published", "signing"]
        waiting = (
            second
            if files(tmp_path / "1")
            & {kid for kid, state in (await states(world)).items() if state == "signing"}
            else first
        )
        # The one that came second signs when the first must have heard of its key.
        with pytest.raises(SignerUnavailable, match=r"signs tokens from 00:00:15 UTC on"):
            await waiting.signer()
        world.later(JOIN_SECONDS)
        await asyncio.gather(first.turn(), second.turn())
        kids = {await signing(first), await signing(second)}
        assert len(kids) == 2
        assert set((await states(world)).values()) == {"signing"}
        one, two = issuer_of(world, first), issuer_of(world, second)
        for signer, verifier in ((one, two), (two, one)):
            token = await signer.invocation(7, 1)
            claims = await verifier.verify(token, audience=INVOKE_AUDIENCE, is_expiry_judged=True)
            assert claims.task_id == 7

    play(story)


def test_a_dispatcher_on_a_new_folder_signs_at_once_if_no_other_runs(
    play: Play, tmp_path: Path
) -> None:
    async def story(world: World) -> None:
        await keys_in(world, tmp_path / "1").start()
        world.later(LIVE_SECONDS)
        second = keys_in(world, tmp_path / "2")
        await second.start()
        assert files(tmp_path / "2") == {await signing(second)}

    play(story)


def test_a_rotation_publishes_then_signs_then_retires(play: Play, tmp_path: Path) -> None:
    async def story(world: World) -> None:
        keys = keys_in(world, tmp_path)
        await keys.turn()
        old = await signing(keys)
        asked = await keys.rotate()
        assert (asked.rotation, asked.is_new) == (1, True)
        await keys.turn()
        (new,) = set(await states(world)) - {old}
        assert await states(world) == {new: "published", old: "signing"}
        assert set(await keys.published()) == {old, new}
        assert await signing(keys) == old
        world.later(PUBLISH_SECONDS - 1)
        await keys.turn()
        assert await signing(keys) == old
        world.later(1)
        await keys.turn()
        assert await signing(keys) == new
        assert await states(world) == {new: "signing", old: "retired"}
        assert files(tmp_path) == {new}
        assert set(await keys.keys()) == {old, new}

    play(story)


def test_a_rotation_that_is_asked_for_twice_is_one(play: Play, tmp_path: Path) -> None:
    async def story(world: World) -> None:
        keys = keys_in(world, tmp_path)
        await keys.turn()
        assert [(await keys.rotate()).is_new for _ in range(3)] == [True, False, False]
        await keys.turn()
        assert (await keys.rotate()).is_new is False
        for _ in range(3):
            await keys.turn()
        assert len(await states(world)) == 2
        world.later(PUBLISH_SECONDS)
        again = await keys.rotate()
        assert (again.rotation, again.is_new) == (2, True)
        await keys.turn()
        assert sorted((await states(world)).values()) == ["published", "retired", "signing"]

    play(story)


def test_a_holder_that_was_away_rotates_when_it_is_back(play: Play, tmp_path: Path) -> None:
    async def story(world: World) -> None:
        there, away = keys_in(world, tmp_path / "1"), keys_in(world, tmp_path / "2")
        await there.turn()
        world.later(LIVE_SECONDS)
        await away.turn()
        old = await signing(away)
        await there.rotate()
        await there.turn()
        world.later(PUBLISH_SECONDS)
        await there.turn()
        listed = {each.kid: each for each in (await there.listed()).keys}
        assert listed[old].state == "signing"
        assert not listed[old].is_rotated
        back = keys_in(world, tmp_path / "2")
        await back.start()
        assert await signing(back) == old
        world.later(PUBLISH_SECONDS)
        await back.turn()
        assert await signing(back) != old
        assert (await states(world))[old] == "retired"

    play(story)


def test_one_that_is_away_for_long_is_retired_and_begins_anew(play: Play, tmp_path: Path) -> None:
    async def story(world: World) -> None:
        there, away = keys_in(world, tmp_path / "1"), keys_in(world, tmp_path / "2")
        await away.turn()
        old = await signing(away)
        world.later(AWAY_SECONDS + 1)
        await there.turn()
        assert (await states(world))[old] == "retired"
        # A process that has slept meanwhile does not sign with it either.
        back = keys_in(world, tmp_path / "2")
        await back.start()
        assert old not in files(tmp_path / "2")
        world.later(JOIN_SECONDS)
        await back.turn()
        assert await signing(back) != old

    play(story)


@pytest.mark.parametrize("before", range(1, 5))
def test_a_dispatcher_that_dies_while_it_makes_a_key(
    play: Play, tmp_path: Path, before: int
) -> None:
    async def story(world: World) -> None:
        dying = SigningKeys(Dies(world.database, before=before), PemKeyStore(tmp_path / "keys"))
        with pytest.raises(Killed):
            await dying.turn()
        published = await states(world)
        assert set(published) <= files(tmp_path)
        again = keys_in(world, tmp_path)
        await again.start()
        (kid,) = [kid for kid, state in (await states(world)).items() if state == "signing"]
        assert await signing(again) == kid
        # What was published is what signs; a file that was not signs nothing.
        assert published in ({}, {kid: "signing"})
        assert len(files(tmp_path)) <= 2

    play(story)


def test_a_publication_whose_answer_is_lost_is_found(play: Play, tmp_path: Path) -> None:
    async def story(world: World) -> None:
        dying = SigningKeys(Dies(world.database, after=3), PemKeyStore(tmp_path / "keys"))
        with pytest.raises(Killed):
            await dying.turn()
        (kid,) = await states(world)
        again = keys_in(world, tmp_path)
        await again.start()
        assert await signing(again) == kid
        assert files(tmp_path) == {kid}

    play(story)


def test_a_file_that_was_never_published_is_removed_a_day_later(play: Play, tmp_path: Path) -> None:
    async def story(world: World) -> None:
        keys = keys_in(world, tmp_path)
        await keys.turn()
        left, fresh = (PemSigner.make_in(tmp_path / "keys").kid for _ in range(2))
        os.utime(tmp_path / "keys" / f"{left}{SUFFIX}", (1, 1))
        await keys.rotate()
        await keys.turn()
        assert left not in files(tmp_path)
        assert fresh in files(tmp_path)
        # What it may have signed is verified: its row may have been lost.
        assert left not in await states(world)
        assert (await states(world))[fresh] == "retired"
        await keys.turn()
        assert fresh in files(tmp_path)

    play(story)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda path: path.chmod(0o640), "can be read by others"),
        (lambda path: path.write_text("nonsense"), "holds no private key"),
        (lambda path: path.write_bytes(PemSigner.new().to_pem()), "another key than the one"),
        (lambda path: path.parent.chmod(0o755), "is open to others"),
        (lambda path: (path.parent / "holder").write_text(""), "does not hold the name"),
    ],
)
def test_a_file_that_cannot_be_trusted_is_refused(
    play: Play, tmp_path: Path, harm: Callable[[Path], Any], words: str
) -> None:
    async def story(world: World) -> None:
        keys = keys_in(world, tmp_path)
        await keys.turn()
        harm(tmp_path / "keys" / f"{await signing(keys)}{SUFFIX}")
        with pytest.raises(InvalidInput, match=words) as refused:
            await keys_in(world, tmp_path).start()
        assert refused.value.hint
        assert "PRIVATE" not in refused.value.message
        # Who meets it in a claim may ask again: somebody may mend it.
        with pytest.raises(SignerUnavailable, match=words):
            await keys_in(world, tmp_path).signer()
        assert len(await states(world)) == 1

    play(story)


def test_a_file_that_is_gone_is_made_anew_when_nobody_signs_with_it(
    play: Play, tmp_path: Path
) -> None:
    async def story(world: World) -> None:
        keys = keys_in(world, tmp_path)
        await keys.turn()
        gone = await signing(keys)
        (tmp_path / "keys" / f"{gone}{SUFFIX}").unlink()
        with pytest.raises(InvalidInput, match="is not in it, and is in use"):
            await keys_in(world, tmp_path).start()
        world.later(LIVE_SECONDS)
        again = keys_in(world, tmp_path)
        await again.start()
        assert await signing(again) != gone
        await again.turn()
        assert (await states(world))[gone] == "retired"

    play(story)


def test_a_copy_of_a_folder_does_not_fight_with_the_first(play: Play, tmp_path: Path) -> None:
    async def story(world: World) -> None:
        first = keys_in(world, tmp_path / "1")
        await first.turn()
        kid = await signing(first)
        (tmp_path / "2" / "keys").mkdir(parents=True, mode=0o700)
        for name in ("holder", f"{kid}{SUFFIX}"):
            copy = tmp_path / "2" / "keys" / name
            copy.write_bytes((tmp_path / "1" / "keys" / name).read_bytes())
            copy.chmod(0o600)
        second = keys_in(world, tmp_path / "2")
        await second.turn()
        assert await signing(second) == kid
        await first.rotate()
        await first.turn()
        await second.turn()
        world.later(PUBLISH_SECONDS)
        both = await asyncio.gather(first.turn(), second.turn(), return_exceptions=True)
        for _ in range(5):
            both = await asyncio.gather(first.turn(), second.turn(), return_exceptions=True)
        # One of them goes on, and the other says what is wrong.
        assert sorted(isinstance(each, InvalidInput) for each in both) == [False, True]
        assert len(await states(world)) == 3

    play(story)


def test_a_key_stays_as_long_as_an_attempt_runs_that_it_may_have_signed_for(
    play: Play, tmp_path: Path
) -> None:
    async def story(world: World) -> None:
        keys = keys_in(world, tmp_path)
        await keys.turn()
        old = await signing(keys)
        job = await world.job(heartbeat_ms=86_400_000)
        long = await job.claimed("long")
        await keys.rotate()
        await keys.turn()
        world.later(PUBLISH_SECONDS)
        await keys.turn()
        assert (await states(world))[old] == "retired"
        world.later(SLACK_SECONDS - 1)
        late = await job.claimed("late")
        for _ in range(5):
            world.later(KEPT_SECONDS)
            await keys.turn()
            assert old in await states(world)
        await world.tasks.complete(done(long.fence, job.output()))
        world.later(KEPT_SECONDS + SLACK_SECONDS)
        await keys.turn()
        # It began so soon after that its dispatcher may not have known of the retirement.
        assert old in await states(world)
        await world.tasks.complete(done(late.fence, job.output("q")))
        await keys.turn()
        world.later(KEPT_SECONDS - 1)
        await keys.turn()
        # A completion may be told again: for an hour after its attempt was over.
        assert old in await states(world)
        world.later(1)
        await keys.turn()
        assert old not in await states(world)

    play(story)


def test_a_revoked_key_is_replaced_at_once_and_never_comes_back(play: Play, tmp_path: Path) -> None:
    async def story(world: World) -> None:
        mine, theirs = keys_in(world, tmp_path / "a"), keys_in(world, tmp_path / "b")
        await mine.turn()
        await theirs.turn()
        world.later(JOIN_SECONDS)
        await theirs.turn()
        stolen = await signing(theirs)
        path = tmp_path / "b" / "keys" / f"{stolen}{SUFFIX}"
        copy = path.read_bytes()
        assert await mine.revoke("nobody") is None
        answer = await mine.revoke(stolen)
        assert answer is not None
        assert answer.is_new
        # Others are told of it no more, and the dispatcher that held it verifies it still, for
        # whom the lease decides.
        assert stolen not in await mine.published()
        assert stolen in await mine.keys()
        await theirs.turn()
        assert await signing(theirs) != stolen
        assert stolen not in files(tmp_path / "b")
        # Not even if its file is brought back, however long after, nor by a restart.
        world.later(30 * 86_400)
        path.write_bytes(copy)
        path.chmod(0o600)
        again = keys_in(world, tmp_path / "b")
        await again.turn()
        assert await signing(again) != stolen
        assert stolen not in files(tmp_path / "b")
        assert stolen not in await again.published()
        # Nobody here makes another key of KMS: the one that signs is rotated away before.
        await world.rows(
            "INSERT INTO signing_key (kid, signer, holder, reference, jwk, signs_from)"
            " VALUES ('of-kms', 'kms', 'alias/a', 'arn', '{}', penstock_now())"
        )
        with pytest.raises(InvalidInput, match="The key of-kms of KMS signs"):
            await mine.revoke("of-kms")
        await world.rows("UPDATE signing_key SET retired_at = penstock_now() WHERE kid = 'of-kms'")
        assert await mine.revoke("of-kms") is not None
        listed = {each.kid: each for each in (await mine.listed()).keys}
        assert listed[stolen].revoked_at is not None

    play(story)


def test_a_key_that_is_revoked_right_after_a_rotation_leaves_one_that_signs(
    play: Play, tmp_path: Path
) -> None:
    async def story(world: World) -> None:
        keys = keys_in(world, tmp_path)
        await keys.turn()
        stolen = await signing(keys)
        await keys.rotate()
        await keys.turn()
        assert await signing(keys) == stolen
        # The next one is published, and its time has not come.
        both = await asyncio.gather(keys.revoke(stolen), keys.revoke(stolen))
        assert [each.is_new for each in both if each is not None].count(True) == 1
        assert (await signing(keys)) in files(tmp_path) - {stolen}
        assert len(files(tmp_path)) == 1

    play(story)


def test_a_stranger_that_begins_later_keeps_no_key(play: Play, tmp_path: Path) -> None:
    async def story(world: World) -> None:
        keys = keys_in(world, tmp_path)
        await keys.turn()
        old = await signing(keys)
        await keys.rotate()
        await keys.turn()
        world.later(PUBLISH_SECONDS)
        await keys.turn()
        world.later(SLACK_SECONDS + 1)
        job = await world.job(heartbeat_ms=86_400_000)
        await job.claimed()
        await keys.turn()
        world.later(KEPT_SECONDS)
        await keys.turn()
        assert old not in await states(world)

    play(story)


def test_a_choice_is_looked_at_again_before_it_is_too_old(play: Play, tmp_path: Path) -> None:
    async def story(world: World) -> None:
        clock = Clock()
        slow, other = keys_in(world, tmp_path, clock=clock), keys_in(world, tmp_path)
        await slow.turn()
        old = await signing(slow)
        await other.rotate()
        await other.turn()
        world.later(PUBLISH_SECONDS)
        await other.turn()
        assert await signing(slow) == old
        clock.ahead_seconds += CHOICE_SECONDS_MAX + 1
        # In a transaction it looks by the connection that it has.
        async with world.database.transaction() as connection:
            found = await slow.signer(connection=connection)
        assert found.kid == await signing(other) != old

    play(story)


def test_nothing_is_made_in_the_transaction_of_a_claim(play: Play, tmp_path: Path) -> None:
    async def story(world: World) -> None:
        keys = keys_in(world, tmp_path)
        issuer = issuer_of(world, keys)
        job = await world.job()
        (task,) = await job.make("one")
        with pytest.raises(SignerUnavailable, match="no key that signs"):
            await world.tasks.claim(task, worker="w", issue=issuer.tokens_for)
        assert await states(world) == {}
        # The claim was undone: no attempt was spent.
        assert await world.value("SELECT attempt FROM task") == 0
        assert await world.value("SELECT status FROM task") == "queued"
        assert await world.value("SELECT count(*) FROM attempt") == 0
        await keys.turn()
        claimed = await world.tasks.claim(task, worker="w", issue=issuer.tokens_for)
        assert isinstance(claimed, ClaimedTask)
        assert claimed.attempt == 1

    play(story)


def test_tokens_live_by_the_clock_of_the_database(play: Play, tmp_path: Path) -> None:
    async def story(world: World) -> None:
        keys = keys_in(world, tmp_path)
        await keys.turn()
        issuer = issuer_of(world, keys, org="acme")
        job = await world.job(heartbeat_ms=10_000)
        (task,) = await job.make("one")
        claimed = await world.tasks.claim(task, worker="w", issue=issuer.tokens_for)
        assert isinstance(claimed, ClaimedTask)
        assert "token" not in repr(claimed).replace("lease_token", "")
        now = 1_893_456_000
        claims = await issuer.verify(claimed.token, audience=TASK_AUDIENCE, is_expiry_judged=True)
        assert (claims.iss, claims.org, claims.sub) == ("penstock/acme", "acme", f"task:{task}:1")
        assert (claims.iat, claims.nbf, claims.exp) == (now, now, now + 10)
        world.later(5)
        (extended,) = await world.tasks.heartbeat([claimed.fence])
        assert isinstance(extended, ExtendedLease)
        renewed = await issuer.renewed([(extended, claims)])
        later = await issuer.verify(renewed[task], audience=TASK_AUDIENCE, is_expiry_judged=True)
        assert (later.exp, later.grants, later.sub) == (now + 15, claims.grants, claims.sub)
        assert later.jti != claims.jti
        world.later(5)
        for token, audience, kind in (
            (claimed.token, TASK_AUDIENCE, "expired"),
            (renewed[task], INVOKE_AUDIENCE, "wrong audience"),
            (await issuer_of(world, keys).invocation(task, 1), INVOKE_AUDIENCE, "wrong issuer"),
        ):
            with pytest.raises(TokenRefused) as refused:
                await issuer.verify(token, audience=audience, is_expiry_judged=True)
            assert refused.value.kind == kind
        # Where the fence decides, no time is judged.
        await issuer.verify(claimed.token, audience=TASK_AUDIENCE, is_expiry_judged=False)
        world.later(-20)
        with pytest.raises(TokenRefused) as refused:
            await issuer.verify(renewed[task], audience=TASK_AUDIENCE, is_expiry_judged=True)
        assert refused.value.kind == "not yet valid"

    play(story)


class Away:
    """A signer that cannot sign."""

    kid = "k" * 43
    jwk: Mapping[str, str] = MappingProxyType({})

    async def sign(self, message: bytes) -> bytes:
        raise SignerUnavailable("KMS cannot sign now: it is away.", hint="Ask again.")


def test_a_heartbeat_without_a_signer_has_no_next_token(
    play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(world: World) -> None:
        keys = keys_in(world, tmp_path)
        await keys.turn()
        issuer = issuer_of(world, keys)
        job = await world.job()
        (task,) = await job.make("one")
        claimed = await world.tasks.claim(task, worker="w", issue=issuer.tokens_for)
        assert isinstance(claimed, ClaimedTask)
        claims = await issuer.verify(claimed.token, audience=TASK_AUDIENCE, is_expiry_judged=False)
        (extended,) = await world.tasks.heartbeat([claimed.fence])
        assert isinstance(extended, ExtendedLease)

        async def away(**_: Any) -> Away:
            return Away()

        monkeypatch.setattr(keys, "signer", away)
        assert await issuer.renewed([(extended, claims)]) == {}
        (other,) = await job.make("two")
        with pytest.raises(SignerUnavailable, match="it is away"):
            await world.tasks.claim(other, worker="w", issue=issuer.tokens_for)

    play(story)
